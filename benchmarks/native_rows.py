"""Times a native decode step of 1 to 16 tokens on the CPU: one token of each sequence, or all of one sequence.

`python -m benchmarks.native_rows MODEL [key=value ...]`, with a checkpoint as in `model.checkpoint`. A program of one
row and one of sixteen are timed; the second runs only the rows that have a token. Each line gives the fastest step, and
the median over rounds relative to one token. Several tokens of one sequence are timed if its caches have room.
"""

import argparse
import statistics
import time

import torch

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.program import Program
from graphcore.kernels.cpu.instructions import MOST_ROWS

COUNTS = (1, 2, 4, 8, 16)
CACHED = 128  # tokens that each sequence's cache holds


def step_seconds(program: Program, rows: int, steps: int, is_one_sequence: bool) -> float:
    """Return the seconds of the fastest of some greedy steps of that many tokens."""
    if is_one_sequence:
        program.state.put_runs([[5 + row for row in range(rows)]], [CACHED])
    else:
        program.state.put_rows([[5 + row] for row in range(rows)], [CACHED + row for row in range(rows)])
    best = float("inf")
    for _ in range(steps):
        start = time.perf_counter()
        for step in program.steps:
            step.replay()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    sizes = ["context_length=512", f"batch_size={MOST_ROWS}", *given.overrides]
    with Engine.load(given.model, dtype="bf16", device="cpu", graph="captured", overrides=sizes) as engine:
        assert isinstance(engine.runner, ProgramRunner), "graphcore's own programs are timed"
        with torch.inference_mode():
            for row in range(MOST_ROWS):
                engine.runner.reserve(row, CACHED, CACHED + MOST_ROWS + given.steps)
            one, many = (engine.runner.builder.decode(width, is_greedy=True) for width in (1, MOST_ROWS))
            together = [(count, True) for count in COUNTS if 1 < count <= many.state.most_together]
            cases = [(0, False), *((count, False) for count in COUNTS), *together]  # 0: the program of one row
            found: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
            for _ in range(given.rounds):
                for (count, is_one_sequence), seconds in found.items():
                    program = many if count else one
                    seconds.append(step_seconds(program, count or 1, given.steps, is_one_sequence))
    single = found[0, False]
    for (count, is_one_sequence), seconds in found.items():
        rows, best, median = count or 1, min(seconds), statistics.median(seconds)
        ratios = rows * min(single) / best, rows * statistics.median(single) / median
        name = f"{count} of {MOST_ROWS} rows" if count else "a program of one row"
        name += ", one sequence" if is_one_sequence else ""
        print(
            f"{name}: {1e3 * best:.2f} ms, {rows / best:.1f} tokens/s, {ratios[0]:.2f} (median {ratios[1]:.2f}) x one"
        )


if __name__ == "__main__":
    main()
