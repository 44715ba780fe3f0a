"""Compares the rate at which a decode step reads its weights with plain reads of the same bytes, in turns.

`python -m benchmarks.read_rate MODEL [key=value ...]`, with a checkpoint as in `model.checkpoint`. A reader of the C++
kernels sums each matrix's bytes, in the order of the step, on as many threads. A step does more than read, so the ratio
says how much of its time is reading.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.kernels.backend import NativeBackend
from graphcore.kernels.bandwidth import LINE_NBYTES, native_sum
from graphcore.kernels.cpu.library import open_library
from graphcore.nn.linear import Linear

CACHED = 128  # tokens in the cache


def matrices(runner: ProgramRunner) -> list[Tensor]:
    """Return the bytes of the matrices that a step reads whole, in its order, in whole cache lines."""
    decoder = runner.builder.decoder
    found = [one.weight for part in (decoder.layers, decoder.head) for one in part.modules() if isinstance(one, Linear)]
    flat = [weight.view(torch.uint8).flatten() for weight in found]
    return [one[: one.numel() // LINE_NBYTES * LINE_NBYTES] for one in flat]


def main() -> None:
    """Print both rates and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--turns", type=int, default=60)
    given = parser.parse_args()
    settings = ["context_length=512", "batch_size=1", *given.overrides]
    with Engine.load(given.model, dtype="bf16", device="cpu", graph="captured", overrides=settings) as engine:
        runner = engine.runner
        assert isinstance(runner, ProgramRunner), "graphcore's own programs are timed"
        backend = runner.builder.backend
        assert isinstance(backend, NativeBackend), "a step in C++ is timed"
        open_library(backend.library).graphcore_share_threads(None, None)  # the reader runs on the step's own threads
        weights = matrices(runner)
        nbytes = sum(weight.numel() for weight in weights)
        with torch.inference_mode():
            runner.reserve(0, CACHED, CACHED + given.turns)
            program = runner.builder.decode(1, is_greedy=True)
            program.state.put_rows([[5]], [CACHED])
            steps, reads = [], []
            for _ in range(given.turns):
                began = time.perf_counter()
                for step in program.steps:
                    step.replay()
                middle = time.perf_counter()
                for weight in weights:
                    native_sum(weight, backend)
                steps.append(middle - began)
                reads.append(time.perf_counter() - middle)
    ratio = statistics.median(read / step for step, read in zip(steps, reads, strict=True))
    rates = [nbytes / statistics.median(times) / 1e9 for times in (steps, reads)]
    print(f"{nbytes / 1e6:.0f} MB: a step reads {rates[0]:.1f} GB/s, the reader {rates[1]:.1f} GB/s; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
