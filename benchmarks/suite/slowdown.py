"""How much slower than resident ternary models of 7B to 70B are when they stream.

An earlier specification of layer streaming (its section 5.3, "Throughput Impact") expected, with copies overlapped:
7B less than 5 %, 13B about 10 %, 30B about 25 %, 70B about 50 %. Its section 5.2 streams four layers at a time.
"""

from suite.bench import Bench
from suite.fenced import TERNARY
from suite.log import Measurement
from suite.streaming import streamed_row, time_streamed
from suite.timing import time_prefill

EXPECTED = {"llama2_7b": "< 5 %", "llama2_13b": "about 10 %", "llama_30b": "about 25 %", "llama2_70b": "about 50 %"}
GROUPS_OF_FOUR = ("streaming=on", "streaming.layer_group_size=4")


def small(bench: Bench) -> None:
    for model in ("llama2_7b", "llama2_13b"):
        slowdown_rows(bench, model)


def middle(bench: Bench) -> None:
    slowdown_rows(bench, "llama_30b")


def large(bench: Bench) -> None:
    slowdown_rows(bench, "llama2_70b")


def slowdown_rows(bench: Bench, model: str) -> None:
    """Measure decode and prefill resident, streamed four layers at a time, and streamed as 14 GiB ask for."""
    budget = 8_000_000 if bench.is_dry else bench.sizes.fence
    ways = {
        "resident": ("streaming=off",),
        "on, four layers a group": GROUPS_OF_FOUR,
        "auto, 14 GiB": ("streaming=auto", f"streaming.memory_budget={budget}"),
    }
    bench.fit(model, "random:i2_s", ("off", "on"), *TERNARY)
    decode: dict[str, float] = {}
    prefill: dict[str, float] = {}
    for way, settings in ways.items():
        decode[way], prefill[way] = one_way(bench, model, way, settings)
    for way in list(ways)[1:]:
        for phase, rates in (("decode", decode), ("prefill", prefill)):
            slower = 100 * (1 - rates[way] / rates["resident"])
            row = Measurement(f"{model} i2_s, {way}: {phase} slower than resident", "%", [slower])
            row.note = f"expected {EXPECTED[model]} by the specification's section 5.3"
            bench.log.add(row)


def one_way(bench: Bench, model: str, way: str, settings: tuple[str, ...]) -> tuple[float, float]:
    """Measure one way; return tokens/s of decode and of prefill."""
    tokens = min(512, bench.sizes.long_prompt)
    room = f"context_length={max(tokens, bench.sizes.prompt) + 64}"
    with bench.engine(model, "random:i2_s", *TERNARY, room, *settings) as loaded:
        timed = time_streamed(bench, loaded)
        row = streamed_row(loaded, f"{model} i2_s, {way}: decode", timed)
        bench.log.add(row)
        seconds = time_prefill(loaded.engine, tokens, 3)
        rates = [tokens / each for each in seconds]
        first = Measurement(f"{model} i2_s, {way}: prefill of {tokens}", "tokens/s", rates, settings=loaded.settings)
        bench.log.add(first)
        return row.median, first.median
