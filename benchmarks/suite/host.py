"""What the host costs: time for each token, capture, and a second load of the same model."""

import time

import torch

from graphcore.graph.gpu.sampling import RowSettings
from graphcore.graph.program import Program
from graphcore.streaming.scheduler import run_program
from graphcore.tasks.measuring.timed_runs import synchronize, time_repeats
from suite.bench import Bench, Loaded
from suite.decode import room_of
from suite.log import Measurement
from suite.timing import own, prompts_of, time_decode

LAUNCHES = 64


def run(bench: Bench) -> None:
    sizes = bench.sizes
    for number in ("first", "second"):  # in this process; the second finds every kernel compiled
        with bench.engine("llama3_8b", "random:bf16", room_of(bench)) as loaded:
            capture_row(bench, loaded, number)
            if number == "second":
                launch_row(bench, loaded)
    with bench.engine("llama3_8b", "random:bf16", room_of(bench), "model.num_hidden_layers=1") as loaded:
        timed = time_decode(loaded.engine, 1, sizes.prompt, sizes.new, sizes.repeats)
        microseconds = [each * 1e6 for each in timed.step_seconds]
        row = Measurement("a token of one layer, device and host", "us", microseconds, settings=loaded.settings)
        row.note = "an upper bound of the host's time for a token: a captured step costs it the same at any depth"
        bench.log.add(row)


def capture_row(bench: Bench, loaded: Loaded, number: str) -> None:
    """Time what the first generation takes longer than the third, with what warming up took."""
    rows = prompts_of(loaded.engine, 1, bench.sizes.prompt)

    def generate() -> None:
        loaded.engine.generate(rows, max_new_tokens=8, ignore_eos=True, temperature=0)

    first, _, third = time_repeats(generate, 3, bench.device)
    seconds = loaded.warm_seconds + max(0.0, first - third)
    row = Measurement(f"compile and capture, {number} engine of a process", "s", [seconds], settings=loaded.settings)
    row.details |= {"ran": loaded.ran(), "first_generation_seconds": first, "later_generation_seconds": third}
    bench.log.add(row.aim("under 15 s", seconds < 15))
    bench.log.add(Measurement(f"load of 8B bf16, {number} engine of a process", "s", [loaded.load_seconds]))


def begin_steps(program: Program, steps: int) -> None:
    """Let one sequence have that many tokens to make: no token ends it, and no limit of an earlier run."""
    program.state.put_rows([[1]], [0])
    if program.choice is not None:
        program.choice.choosing.put(0, RowSettings(left=steps))


def tokens_made(program: Program) -> int:
    """Return how far the sequence of a program has come; a row that has ended stays where it is."""
    return int(program.state.span.starts[0])


def launch_row(bench: Bench, loaded: Loaded) -> None:
    """Time how long the host takes to ask for steps that it does not wait for."""
    runner, launches = own(loaded.engine), min(LAUNCHES, bench.sizes.new)
    with torch.inference_mode():
        program = runner.program("decode", 1, is_greedy=True)
        runner.reserve(0, 0, launches)
        found = []
        for _ in range(bench.sizes.repeats):
            begin_steps(program, launches)
            synchronize(bench.device)
            began = time.perf_counter()
            for _ in range(launches):
                run_program(program, runner.policy)
            found.append((time.perf_counter() - began) / launches * 1e6)
        synchronize(bench.device)
        made = tokens_made(program)
    if made != launches:
        raise RuntimeError(f"{launches} steps were asked for and {made} tokens made: the others had nothing to do")
    row = Measurement("host time for a resident decode step", "us", found, settings=loaded.settings)
    row.note = "from asking for a step to asking for the next; reading tokens back is in the decode rows"
    bench.log.add(row.aim("under 100 us", row.median < 100))
