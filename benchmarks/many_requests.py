"""Measures concurrent requests, through `Engine.submit`, on the CPU.

`python -m benchmarks.many_requests speed MODEL [key=value ...]`
    tokens/s of 1, 8 and 16 sequences (--counts) that decode together after prompts of 128 tokens, alternating, and the
    share of time outside the decode programs: the queue, inputs, sampling, and text.
`python -m benchmarks.many_requests gap MODEL [key=value ...]`
    the longest time between two tokens of a request while a long prompt runs beside it, and the slowest pass.
`python -m benchmarks.many_requests storm MODEL [key=value ...]`
    thousands of requests of random lengths, some cancelled or failed; each output is compared with that of the request
    run alone, and the process's memory is printed meanwhile. With --shared N, prompts begin with up to N tokens of one
    of four texts. At the end every page, snapshot and file must have been released.
"""

import argparse
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
from graphcore.engine.batching import continuous as passes
from graphcore.engine.batching.admission import CacheAdmission
from graphcore.errors import GraphcoreError
from graphcore.kvcache.page_allocator import SwappedSequence
from graphcore.kvcache.swap_file import SwapFile
from graphcore.tasks.measuring.process_memory import resident_nbytes

PROMPT = 128


class Clock:
    """Sums the seconds of all programs that passes run.

    Attributes:
        passes: seconds of each pass's programs.
    """

    def __init__(self) -> None:
        self.passes: list[float] = []
        run: Callable[..., None] = vars(passes)["run_together"]

        def timed(*arguments: object) -> None:
            began = time.perf_counter()
            run(*arguments)
            self.passes.append(time.perf_counter() - began)

        setattr(passes, "run_together", timed)  # noqa: B010  # the module imports it, so mypy knows no such attribute


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


def admission_of(engine: Engine) -> CacheAdmission:
    """Return the cache admission of an idle engine, without finished sequences."""
    engine._queue.run_alone("storm", lambda: None)  # returns after finished sequences are removed
    found = engine.batching
    assert isinstance(found, passes.ContinuousBatching), "a storm is for graphcore's own programs"
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
    parser.add_argument("what", choices=("speed", "gap", "storm"))
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 16], help="speed: numbers of sequences")
    parser.add_argument("--new", type=int, default=128, help="speed: new tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=4000, help="gap: tokens of the long prompt")
    parser.add_argument("--count", type=int, default=10_000, help="storm: number of requests")
    parser.add_argument("--shared", type=int, default=0, help="storm: most tokens that prompts share")
    parser.add_argument(
        "--sampled", action="store_true", help="sample with temperature, top-k and top-p instead of greedy"
    )
    given = parser.parse_args()
    context = given.tokens + 200 if given.what == "gap" else 512
    most = max(given.counts) if given.what == "speed" else 16
    sizes = [f"batching.max_sequences={most}", f"context_length={context}", *given.overrides]
    try:
        with Engine.load(given.model, dtype="bf16", device="cpu", overrides=sizes) as engine:
            if given.what == "speed":
                cuts = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
                speed(engine, given.counts, given.rounds, given.new, cuts if given.sampled else {})
            elif given.what == "gap":
                gap(engine, given.rounds, given.tokens)
            else:
                storm(engine, given.count, given.shared)
    except GraphcoreError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
