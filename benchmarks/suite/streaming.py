"""Streamed decode: against resident to the bit, and against the rate of page-locked memory."""

import time
from dataclasses import dataclass

import torch

from graphcore.streaming.report import StreamingReport
from graphcore.tasks.measuring.timed_runs import time_repeats
from graphcore.tasks.report.stream_watch import Interval, StreamWatch
from suite.bench import Bench, Loaded
from suite.log import Measurement
from suite.profiling import profile_steps
from suite.timing import decode_work, own, prompts_of


@dataclass(frozen=True)
class StreamedTime:
    """Decode steps of one sequence while weights move.

    Attributes:
        rates: tokens/s of each repeat.
        report: of all repeats together; None where nothing moved.
    """

    rates: list[float]
    report: StreamingReport | None

    @property
    def wall_gb(self) -> float:
        """GB/s over all the time, pauses of the link included."""
        return (self.report.wall_link or 0.0) / 1e9 if self.report else 0.0


def llama(bench: Bench) -> None:
    room = f"context_length={bench.sizes.prompt + 64}"
    bench.fit("llama3_8b", "random:bf16", ("off", "on"))
    with bench.engine("llama3_8b", "random:bf16", room) as loaded:
        resident = answers(loaded)
        weights = loaded.engine.plan.weight_nbytes
    on_total = stream_row(bench, "on", (room, "streaming=on"), resident)
    # Half the weights, and what streaming needs besides them: slots, cache, activations.
    budget = weights // 2 + on_total
    stream_row(bench, "auto, budget of half the weights", (room, "streaming=auto", budget_of(budget)), resident)


def budget_of(nbytes: int) -> str:
    return f"streaming.memory_budget={nbytes}"


def answers(loaded: Loaded) -> dict[str, object]:
    """Return what must not change when weights move: logits of a prompt and greedy tokens."""
    rows = prompts_of(loaded.engine, 1, 32)
    tokens = loaded.engine.generate(rows, max_new_tokens=16, ignore_eos=True, temperature=0)[0].token_ids
    return {"logits": loaded.engine.logits(rows), "tokens": tokens}


def is_same(found: dict[str, object], expected: dict[str, object]) -> bool:
    one, other = found["logits"], expected["logits"]
    assert isinstance(one, torch.Tensor), "logits are a tensor"
    assert isinstance(other, torch.Tensor), "logits are a tensor"
    return torch.equal(one, other) and found["tokens"] == expected["tokens"]


def stream_row(bench: Bench, name: str, overrides: tuple[str, ...], resident: dict[str, object]) -> int:
    """Measure one way of streaming; return the bytes of its plan."""
    h2d = bench.ceiling("h2d")
    with bench.engine("llama3_8b", "random:bf16", *overrides) as loaded:
        equal = is_same(answers(loaded), resident)
        check = Measurement(f"Llama-3.1-8B bf16, streaming={name}: resident's bits", "equal", [float(equal)])
        bench.log.add(check.aim("logits and tokens are the same bits", equal))
        timed = time_streamed(bench, loaded)
        row = streamed_row(loaded, f"Llama-3.1-8B bf16, streaming={name}: decode", timed)
        row.of_ceiling("h2d", h2d, timed.wall_gb)
        if name == "on":
            row.aim("92 % of h2d", (row.share or 0) >= 0.92)
            bench.ceilings["streaming=on"] = row.median
        else:
            ratio = row.median / bench.ceilings["streaming=on"]
            row.note = f"{ratio:.2f} x streaming=on"
            row.aim("1.8 x streaming=on", ratio >= 1.8)
        bench.log.add(row)
        add_profile(bench, loaded, row)
        return loaded.engine.plan.total_nbytes


def time_streamed(bench: Bench, loaded: Loaded, batch: int = 1) -> StreamedTime:
    """Time streamed decode steps after one round that is not timed."""
    sizes = bench.sizes
    watch = StreamWatch.begin(loaded.engine)
    work = decode_work(loaded.engine, batch, sizes.prompt, sizes.streamed_new)
    work.fill()
    work.decode()
    began = time.perf_counter()
    seconds = time_repeats(work.decode, sizes.repeats, bench.device)
    interval = Interval(began, time.perf_counter(), sizes.repeats * sizes.streamed_new)
    report = watch.report(interval, None, watch.device())
    return StreamedTime([batch * sizes.streamed_new / each for each in seconds], report)


def streamed_row(loaded: Loaded, name: str, timed: StreamedTime) -> Measurement:
    """Return the row of a streamed decode, without ceiling and target."""
    report = timed.report
    details: dict[str, object] = {"ran": loaded.ran()}
    if report is not None:
        details |= {
            "bytes_per_token": report.nbytes_per_pass,
            "busy_gb_per_second": (report.busy_link or 0.0) / 1e9,
            "overlap": report.overlap,
            "stall_seconds": report.stall_seconds,
            "device_peak_bytes": report.device.peak_nbytes,
        }
    return Measurement(name, "tokens/s", timed.rates, timed.wall_gb, settings=loaded.settings, details=details)


def add_profile(bench: Bench, loaded: Loaded, row: Measurement, batch: int = 1) -> None:
    """Profile a few steps and write the row down again."""
    steps = decode_work(loaded.engine, batch, bench.sizes.prompt, 2)
    found = profile_steps(steps.decode, steps.new_tokens, bench.device, own(loaded.engine), batch)
    row.profile = found.line()
    row.details["profile"] = found.record()
    bench.log.add(row)
