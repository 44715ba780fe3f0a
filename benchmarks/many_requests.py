"""Measures concurrent requests, through `Engine.submit`, on the CPU.

`python -m benchmarks.many_requests speed MODEL [key=value ...]`
    tokens/s of 1, 8 and 16 sequences (--counts) that decode together after prompts of 128 tokens, alternating, and the
    share of time outside the decode programs: the queue, inputs, sampling, and text.
`python -m benchmarks.many_requests alone MODEL [key=value ...]`
    the time of a decode step of one request, beside that of its program in a bare loop, with the same inputs.
`python -m benchmarks.many_requests gap MODEL [key=value ...]`
    the longest time between two tokens of a request while a long prompt runs beside it, and the slowest pass.
`python -m benchmarks.many_requests clients MODEL [key=value ...]`
    tokens/s of 8 sequences (--counts) whose tokens asyncio tasks of this process read one by one, beside those of the
    same sequences when nobody reads before the end; and the longest time in which the event loop did not run, while
    they decode and while a grammar of 3,000 alternatives is compiled beside them.
`python -m benchmarks.many_requests storm MODEL [key=value ...]`
    thousands of requests of random lengths, some cancelled or failed; each output is compared with that of the request
    run alone, and the process's memory is printed meanwhile. With --shared N, prompts begin with up to N tokens of one
    of four texts. At the end every page, snapshot and file must have been released.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from graphcore import Engine
from graphcore.engine import program_runner
from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.errors import GraphcoreError
from graphcore.kvcache.page_allocator import SwappedSequence
from graphcore.kvcache.swap_file import SwapFile
from graphcore.streaming.scheduler import run_together
from graphcore.tasks.measuring.process_memory import resident_nbytes

PROMPT = 128


class Clock:
    """Sums the seconds of all programs that passes run.

    Attributes:
        passes: seconds of each pass's programs.
    """

    def __init__(self) -> None:
        self.passes: list[float] = []
        run: Callable[..., None] = vars(program_runner)["run_together"]

        def timed(*arguments: object) -> None:
            began = time.perf_counter()
            run(*arguments)
            self.passes.append(time.perf_counter() - began)

        setattr(program_runner, "run_together", timed)  # noqa: B010  # the module imports it, so mypy knows no such attribute


def prompts_of(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts that differ by position and seed."""
    generator = random.Random(count + 1000 * seed)
    return [[generator.randrange(vocab) for _ in range(length)] for _ in range(count)]


def stamp(times: list[float], _stage: str, group: str | None, *_: object) -> None:
    """Note the time of each pass; a pass that moves weights reports its groups, too."""
    if group is None:
        times.append(time.perf_counter())


def speed(engine: Engine, counts: Sequence[int], rounds: int, new: int, sampling: dict[str, Any]) -> None:
    """Print tokens/s of several sequences while all of them decode."""
    clock, found = Clock(), dict[int, list[tuple[float, float]]]()
    vocab = engine.config.vocab_size
    for _ in range(rounds):
        for count in counts:
            times: list[float] = []
            with engine.holding_back():
                prompts = prompts_of(count, PROMPT, vocab)
                handles = [engine.submit(ids, new, ignore_eos=True, **sampling) for ids in prompts]
            engine._on_progress = partial(stamp, times)
            for handle in handles:
                handle.result()
            steps = new - 2 - count  # those in which every sequence decodes and none ends
            seconds = times[-3] - times[-3 - steps]
            inside = sum(clock.passes[-2 - steps : -2])
            found.setdefault(count, []).append((count * steps / seconds, 1 - inside / seconds))
    one = statistics.median(rate for rate, _ in found[counts[0]]) / counts[0]
    for count, values in found.items():
        rates = sorted(rate for rate, _ in values)
        rate, host = statistics.median(rates), statistics.median(share for _, share in values)
        spread = f"{rates[0]:.1f} to {rates[-1]:.1f}"
        print(f"{count} sequences: {rate:.1f} tokens/s ({spread}), {rate / one:.2f} x one, host {100 * host:.1f} %")


def bare_step(engine: Engine, prompt: list[int], new: int) -> float:
    """Return the seconds of a step of the decode program alone, after a prompt, in the engine's thread."""
    runner, begin, end = engine.runner, len(prompt), len(prompt) + new
    assert isinstance(runner, program_runner.ProgramRunner), "graphcore's own programs"

    @torch.inference_mode()
    def steps() -> float:
        runner.extend([prompt], [0])
        runner.reserve(0, begin, end)
        began = time.perf_counter()
        for position in range(begin, end):
            ((program, _),) = runner.programs.step({0: ([position], position)})
            run_together([program], runner.policy)
            program.state.chosen.tolist()
        return (time.perf_counter() - began) / new

    return engine._queue.run_alone("alone", steps)


def alone(engine: Engine, rounds: int, new: int) -> None:
    """Print the time of a step of one request, beside the program's own, alternating."""
    (prompt,) = prompts_of(1, PROMPT, engine.config.vocab_size)
    bare, whole = list[float](), list[float]()
    for at in range(rounds + 1):
        alone_seconds = bare_step(engine, prompt, new)
        answer = engine.submit(prompt, new, ignore_eos=True).result()
        if at:  # the first round warms up
            bare.append(alone_seconds)
            whole.append(answer.timings.decode_seconds / (new - 1))
    ratios = sorted(one / other for one, other in zip(bare, whole, strict=True))
    print(
        f"program {1e3 * statistics.median(bare):.3f} ms a step, request {1e3 * statistics.median(whole):.3f} ms; "
        f"{statistics.median(ratios):.3f} of the program's speed ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def gap(engine: Engine, rounds: int, tokens: int) -> None:
    """Print the longest gap between two tokens beside a long prompt."""
    clock, vocab = Clock(), engine.config.vocab_size
    for seed in range(rounds):  # a prompt in the prefix cache would not run again
        stamps: list[float] = []
        short = engine.submit(prompts_of(1, 16, vocab)[0], 4000, ignore_eos=True)
        for at in range(10):
            short.event(at)
        before = len(clock.passes)
        long = engine.submit(prompts_of(1, tokens, vocab, seed)[0], 1, ignore_eos=True)
        long_events, at = long.has_ended, 10
        while not long_events:
            short.event(at)
            stamps.append(time.perf_counter())
            at, long_events = at + 1, long.has_ended
        short.cancel()
        longest, slowest = max(end - begin for begin, end in pairwise(stamps)), max(clock.passes[before:])
        print(f"longest gap {1e3 * longest:.1f} ms, slowest pass {1e3 * slowest:.1f} ms, {longest / slowest:.2f}")


async def longest_stall(running: asyncio.Event) -> float:
    """Return the longest time, in seconds, by which the event loop woke this task late, until the event is set."""
    worst = 0.0
    while not running.is_set():
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - began - 0.001)
    return worst


async def read_all(engine: Engine, prompts: Sequence[list[int]], new: int, *, compiles: bool) -> tuple[float, float]:
    """Return the seconds that tasks needed to read all answers, and the event loop's longest stall meanwhile."""

    async def read(ids: list[int]) -> None:
        async for _ in engine.submit(ids, new, ignore_eos=True):
            pass

    done = asyncio.Event()
    watch = asyncio.create_task(longest_stall(done))
    began = time.perf_counter()
    answers = [asyncio.create_task(read(ids)) for ids in prompts]
    while compiles and not all(answer.done() for answer in answers):
        words = [f"alternative {random.random()} {at}" for at in range(3000)]
        await engine.submit(prompts[0], 2, mask=engine.grammar(choice=words))
    await asyncio.gather(*answers)
    seconds = time.perf_counter() - began
    done.set()
    return seconds, await watch


def clients(engine: Engine, count: int, rounds: int, new: int) -> None:
    """Print the share of the engine's own tokens/s that asyncio readers get, and the event loop's stalls."""
    shares, stalls, with_grammar = list[float](), list[float](), list[float]()
    for seed in range(rounds):
        prompts = prompts_of(count, PROMPT, engine.config.vocab_size, seed)
        engine.generate(prompts, 1)  # from now on the prompts are in the prefix cache
        began = time.perf_counter()
        engine.generate(prompts, new, ignore_eos=True)
        alone = time.perf_counter() - began
        seconds, stall = asyncio.run(read_all(engine, prompts, new, compiles=False))
        shares.append(alone / seconds)
        stalls.append(stall)
        with_grammar.append(asyncio.run(read_all(engine, prompts, new, compiles=True))[1])
    spread = f"{min(shares):.3f} to {max(shares):.3f}"
    print(f"{count} clients: {statistics.median(shares):.3f} of the engine's own tokens/s ({spread})")
    for name, values in (("", stalls), (", a grammar compiles", with_grammar)):
        print(
            f"longest stall of the event loop{name}: {1e3 * statistics.median(values):.1f} ms, {1e3 * max(values):.1f}"
        )


def admission_of(engine: Engine) -> CacheAdmission:
    """Return the cache admission of an idle engine, without finished sequences."""
    engine._queue.run_alone("storm", lambda: None)  # returns after finished sequences are removed
    found = engine.batching
    assert isinstance(found, ContinuousBatching), "a storm is for graphcore's own programs"
    return found._admission


def forget(engine: Engine) -> None:
    """Empty an idle engine's prefix cache."""
    with torch.inference_mode():
        admission_of(engine).clear_prefix_cache()


def nameless_files() -> int:
    """Return how many files without a name this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("(deleted)" in str(link.readlink()) for link in links)


def check_all_given_back(engine: Engine, files_before: int) -> None:
    """Check that an idle engine with an emptied prefix cache holds no page, snapshot or open file."""
    admission = admission_of(engine)
    held = sum(table.num_pages - table.num_free for table in admission.pages.tables)
    assert not admission.requests, "a sequence has not left"
    assert not admission._swapped, "a request is swapped out"
    forget(engine)
    free = [(table.num_free, table.num_pages) for table in admission.pages.tables]
    assert all(count == whole for count, whole in free), f"pages are lost: {free}"
    snapshots = admission.pages.snapshot_rows(engine.runner.sizes.batch_size)
    kept = admission._prefixes._free_snapshots
    assert sorted(kept) == list(snapshots), f"snapshots are lost: {kept} of {snapshots}"
    assert nameless_files() == files_before, "a file is open"
    print(f"given back: {[whole for _, whole in free]} pages ({held} were kept), {len(kept)} snapshots, all files")


def storm(engine: Engine, count: int, shared: int) -> None:
    """Run many requests and compare each output with the request's output when run alone, in empty caches."""
    vocab = engine.config.vocab_size
    generator = random.Random(0)
    prompts = [prompts_of(1, generator.randint(1, 40), vocab)[0] for _ in range(64)]
    texts = prompts_of(4, shared, vocab, seed=1)
    prompts = [[*generator.choice(texts)[: generator.randint(0, shared)], *ids] for ids in prompts]
    lengths = [generator.randint(1, 24) for _ in prompts]
    alone: list[tuple[int, ...]] = []
    for ids, most in zip(prompts, lengths, strict=True):
        forget(engine)
        alone.append(engine.generate(ids, most, ignore_eos=True)[0].token_ids)
    forget(engine)
    files_before, found, swapped = nameless_files(), list[int](), list[int]()
    write = SwapFile.write.__func__  # type: ignore[attr-defined]

    def noted(cls: type[SwapFile], kept: SwappedSequence, folder: Path) -> SwapFile:
        swapped.append(kept.tokens)
        return write(cls, kept, folder)  # type: ignore[no-any-return]

    setattr(SwapFile, "write", classmethod(noted))  # noqa: B010  # mypy knows no other type of the method

    def fail(_: Sequence[int]) -> None:
        raise ZeroDivisionError

    def one(number: int) -> None:
        which, fate = random.Random(number).randrange(len(prompts)), number % 10
        handle = engine.submit(prompts[which], lengths[which], ignore_eos=True, mask=fail if fate == 9 else None)
        if fate == 8:
            handle.cancel()
        try:
            answer = handle.result().token_ids
        except ZeroDivisionError:
            assert fate == 9, "a request failed that had no mask"
            return
        assert answer == (alone[which][: len(answer)] if fate == 8 else alone[which]), f"request {number}"
        found.append(handle.cached)

    step = max(1, count // 10)
    with ThreadPoolExecutor(32) as pool:
        for begin in range(0, count, step):
            for done in [pool.submit(one, number) for number in range(begin, min(begin + step, count))]:
                done.result()
            print(f"{min(begin + step, count)} requests: {resident_nbytes('VmRSS') / 2**20:.1f} MiB", flush=True)
    hits = sum(map(bool, found))
    print(f"{hits} prompts began in the cache, {sum(found)} tokens; {len(swapped)} times one was swapped out")
    check_all_given_back(engine, files_before)


def main() -> None:
    """Load the model and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "alone", "gap", "clients", "storm"))
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1, 8, 16], help="speed, clients: numbers of sequences"
    )
    parser.add_argument("--new", type=int, default=128, help="speed, alone, clients: new tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=4000, help="gap: tokens of the long prompt")
    parser.add_argument("--count", type=int, default=10_000, help="storm: number of requests")
    parser.add_argument("--shared", type=int, default=0, help="storm: most tokens that prompts share")
    parser.add_argument(
        "--sampled", action="store_true", help="sample with temperature, top-k and top-p instead of greedy"
    )
    given = parser.parse_args()
    context = given.tokens + 200 if given.what == "gap" else 512
    most = max(given.counts) + (given.what == "clients") if given.what in ("speed", "clients") else 16
    sizes = [f"batching.max_sequences={most}", f"context_length={context}", *given.overrides]
    try:
        with Engine.load(given.model, dtype="bf16", device="cpu", overrides=sizes) as engine:
            if given.what == "speed":
                cuts = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
                speed(engine, given.counts, given.rounds, given.new, cuts if given.sampled else {})
            elif given.what == "alone":
                alone(engine, given.rounds, given.new)
            elif given.what == "clients":
                clients(engine, max(given.counts), given.rounds, given.new)
            elif given.what == "gap":
                gap(engine, given.rounds, given.tokens)
            else:
                storm(engine, given.count, given.shared)
    except GraphcoreError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
