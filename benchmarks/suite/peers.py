"""graphcore beside transformers: the same shape, prompt and number of tokens, in alternating runs on one card.

gpt-fast is not run: it has no package, and its published figures are of other cards (docs/gpu_suite.md cites them).
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.tasks.measuring.timed_runs import time_repeats
from suite.bench import Bench
from suite.log import Measurement
from suite.timing import time_prefill

WORKER = Path(__file__).with_name("transformers_peer.py")
Answer = dict[str, Any]
Ask = Callable[[int, int], Answer]


def llama(bench: Bench) -> None:
    compare(bench, "llama3_8b", "Llama-3.1-8B bf16", ["random:bf16", "random:q4_k"])


def gpt_oss(bench: Bench) -> None:
    compare(bench, "gpt_oss", "gpt-oss-20b", ["random:bf16"])


def compare(bench: Bench, model: str, title: str, checkpoints: list[str]) -> None:
    """Time every checkpoint of graphcore's against transformers in bf16, run by run."""
    sizes = bench.sizes
    context = sizes.prompt + sizes.new + 8
    with worker(bench, model, context) as (ready, ask):
        ask(sizes.prompt, sizes.new)  # compiles
        ask(sizes.prompt, sizes.new)
        for checkpoint in checkpoints:
            with bench.engine(model, checkpoint, f"context_length={context}") as loaded:
                ours, theirs = alternate(bench, loaded.engine, ask)
            name = f"{title} ({checkpoint.partition(':')[2]})"
            settings, version = loaded.settings, ready["transformers"]
            bench.log.add(Measurement(f"{name}: graphcore decode beside it", "tokens/s", ours, settings=settings))
            peer = Measurement(f"{name}: transformers {version} decode, static cache, compiled", "tokens/s", theirs)
            peer.gb_per_second = ready["weight_bytes"] * peer.median / 1e9
            bench.log.add(peer.of_ceiling("copy", bench.ceiling("copy"), peer.gb_per_second))
            ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
            row = Measurement(f"{name}: graphcore over transformers, decode", "x", [ratio])
            bench.log.add(row.aim("1.3 x", ratio >= 1.3))


def alternate(bench: Bench, engine: Engine, ask: Ask) -> tuple[list[float], list[float]]:
    """Return both engines' decode tokens/s, run by run in turns."""
    sizes = bench.sizes
    prompt = [(7 * index) % 400 + 100 for index in range(sizes.prompt)]

    def seconds(tokens: int) -> float:
        run = lambda: engine.generate([prompt], max_new_tokens=tokens, ignore_eos=True)  # noqa: E731
        return time_repeats(run, 1, bench.device)[0]

    seconds(sizes.new + 1)
    first = statistics.median(seconds(1) for _ in range(3))
    ours, theirs = [], []
    for _ in range(sizes.repeats):
        ours.append(sizes.new / max(seconds(sizes.new + 1) - first, 1e-9))
        theirs.append(ask(sizes.prompt, sizes.new)["decode"])
    time_prefill(engine, sizes.prompt, 1)
    return ours, theirs


@contextmanager
def worker(bench: Bench, model: str, context: int) -> Iterator[tuple[Answer, Ask]]:
    """Start transformers on the model's shape; yield what it says and a way to ask it for a run.

    Raises:
        RuntimeError: it died; its message is in the suite's log.
    """
    config = compose_settings(bench.settings(model, "random:")).model.random_config
    command = [sys.executable, "-P", str(WORKER), str(bench.device), str(context)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        lines, answers = process.stdin, process.stdout
        assert lines is not None, "it has a pipe"
        assert answers is not None, "it has a pipe"

        def answer() -> Answer:
            line = answers.readline()
            if not line:
                raise RuntimeError("transformers died; its message is in suite.log")
            found: Answer = json.loads(line)
            return found

        def ask(prompt_tokens: int, new_tokens: int) -> Answer:
            print(prompt_tokens, new_tokens, file=lines, flush=True)
            return answer()

        try:
            print(
                json.dumps({key: value for key, value in config.items() if value is not None}), file=lines, flush=True
            )
            yield answer(), ask
        finally:
            lines.close()
