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
`python -m benchmarks.many_requests storm MODEL [key=value ...] --mixed --count N --seed S`
    the same with requests of all kinds (`STORM_KINDS`), in a KV cache for about a quarter of what runs at once: whole
    answers are compared, with their log probabilities. A part of the swap files cannot be written or read. Every
    difference is printed, and there must be none; `--dtype` chooses the compute dtype.
"""

import argparse
import asyncio
import json
import random
import statistics
import string
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphcore import Engine
from graphcore.engine import program_runner
from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.masks import Mask
from graphcore.engine.output import Generation, Timings
from graphcore.engine.request_handle import RequestHandle
from graphcore.errors import BusyError, GraphcoreError
from graphcore.kvcache.page_allocator import SwappedSequence
from graphcore.kvcache.swap_file import SwapFile
from graphcore.streaming.scheduler import run_together
from graphcore.tasks.measuring.process_memory import resident_nbytes

PROMPT = 128
SECONDS = 300.0  # a request of a storm that takes longer hangs


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
        answer = engine.submit(prompt, new, ignore_eos=True, temperature=0).result()
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
        short = engine.submit(prompts_of(1, 16, vocab)[0], 4000, ignore_eos=True, temperature=0)
        for at in range(10):
            short.event(at)
        before = len(clock.passes)
        long = engine.submit(prompts_of(1, tokens, vocab, seed)[0], 1, ignore_eos=True, temperature=0)
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
        async for _ in engine.submit(ids, new, ignore_eos=True, temperature=0):
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
        engine.generate(prompts, new, ignore_eos=True, temperature=0)
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


@contextmanager
def swaps_noted(*, fails: bool) -> Iterator[list[int]]:
    """Note the tokens of each sequence that is swapped out inside the block.

    Args:
        fails: True if each fifth file cannot be written, and each seventh that was cannot be read.
    """
    swapped, reads = list[int](), list[int]()
    write, read = SwapFile.write.__func__, SwapFile.read  # type: ignore[attr-defined]

    def noted_write(cls: type[SwapFile], kept: SwappedSequence, folder: Path) -> SwapFile:
        swapped.append(kept.tokens)
        if fails and len(swapped) % 5 == 0:
            raise OSError(28, "no space left on device")
        return write(cls, kept, folder)  # type: ignore[no-any-return]

    def noted_read(file: SwapFile) -> SwappedSequence:
        reads.append(file.tokens)
        if fails and len(reads) % 7 == 0:
            raise OSError(5, "input/output error")
        return read(file)

    setattr(SwapFile, "write", classmethod(noted_write))  # noqa: B010  # mypy knows no other type of the methods
    setattr(SwapFile, "read", noted_read)  # noqa: B010
    try:
        yield swapped
    finally:
        setattr(SwapFile, "write", classmethod(write))  # noqa: B010
        setattr(SwapFile, "read", read)  # noqa: B010


def run_from_threads(one: Callable[[int], None], count: int, threads: int = 32) -> None:
    """Call a function with each number from many threads, and print the process's memory after each tenth."""
    step = max(100, -(-count // 10))
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, count, step):
            for done in [pool.submit(one, number) for number in range(begin, min(begin + step, count))]:
                done.result()
            print(f"{min(begin + step, count)} requests: {resident_nbytes('VmRSS') / 2**20:.1f} MiB", flush=True)


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
        alone.append(engine.generate(ids, most, ignore_eos=True, temperature=0)[0].token_ids)
    forget(engine)
    files_before, found = nameless_files(), list[int]()

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

    with swaps_noted(fails=False) as swapped:
        run_from_threads(one, count)
    hits = sum(map(bool, found))
    print(f"{hits} prompts began in the cache, {sum(found)} tokens; {len(swapped)} times one was swapped out")
    check_all_given_back(engine, files_before)


@dataclass(frozen=True)
class ThirdOfTokens:
    """A mask that allows a third of all tokens, which depends on a seed and on the tokens so far.

    Attributes:
        fails_after: number of tokens after which it raises an error; -1 for none.
    """

    seed: int
    vocab: int
    fails_after: int = -1

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        if len(token_ids) == self.fails_after:
            raise ZeroDivisionError
        return (torch.arange(self.vocab) * 7 + self.seed + sum(token_ids)) % 3 == 0


@dataclass(frozen=True)
class GrammarText:
    """A grammar as `Engine.grammar` takes it: the name of an argument, and its value as JSON."""

    form: str
    value: str


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes", "yell"]}}}
GRAMMARS = (
    GrammarText("json_schema", json.dumps({**SCHEMA, "required": ["a", "b"], "additionalProperties": False})),
    GrammarText("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})),
    GrammarText("regex", json.dumps("[a-c]{2,9}xyz[0-9]*")),
    GrammarText("choice", json.dumps(["alpha", "alphabet", "beta"])),
)


@dataclass(frozen=True)
class Asked:
    """A request of a storm: its prompt, and arguments of `Engine.submit` that can be hashed."""

    prompt: tuple[int, ...]
    settings: tuple[tuple[str, Any], ...]

    def submit(self, engine: Engine, **more: Any) -> RequestHandle:
        """Submit it, with other values of some arguments."""
        settings = {**dict(self.settings), **more}
        mask: GrammarText | Mask | None = settings.pop("mask", None)
        if isinstance(mask, GrammarText):
            mask = engine.grammar(**{mask.form: json.loads(mask.value)})
        settings["logit_bias"] = dict(settings.get("logit_bias", ()))
        return engine.submit(list(self.prompt), mask=mask, **settings)


NO_TIMINGS = Timings(0.0, 0.0, 0.0, 0, 0, 0)


@dataclass
class MixedStorm:
    """Requests of all kinds beside each other, and then what each is answered alone.

    Attributes:
        counts: requests by kind, and by what else happened to them.
        differences: what differs, in words.
    """

    engine: Engine
    seed: int
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    nearest: float = 0.0  # largest error of a log probability in a chat
    _checks: list[Callable[[], None]] = field(default_factory=list)
    _alone: dict[object, Any] = field(default_factory=dict)
    _saved: list[tuple[Path, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vocab = self.engine.config.vocab_size
        self.texts = prompts_of(4, 72, self.vocab, self.seed)

    def run(self, count: int) -> None:
        """Run so many requests from many threads, then each alone, and note what differs."""
        files = nameless_files()
        with swaps_noted(fails=True) as swapped:
            run_from_threads(self.one, count, threads=12)  # few wait, so that pages are still there for the next turn
            while self.engine.status():  # those that nobody reads
                time.sleep(0.01)
        self.counts["swapped out"] = len(swapped)
        check_all_given_back(self.engine, files)
        for check in self._checks:
            check()
        check_all_given_back(self.engine, files)

    def one(self, number: int) -> None:
        """Run a request; each third is one of the twelve before it again, if these are still there."""
        which, again = number - number // 3, random.Random(f"again {self.seed} {number}").randrange(12)
        which = which if number % 3 else max(0, which - again)
        name = list(STORM_KINDS)[which % len(STORM_KINDS)]
        settings, run = STORM_KINDS[name]
        draw = random.Random(f"{self.seed} {which}")
        self.counts[name] += 1
        try:
            run(self, self.drawn(draw, settings(draw, self.vocab)), f"request {number}, {name}")
        except Exception as error:
            error.add_note(f"request {number} of seed {self.seed}, {name}")
            raise

    def drawn(self, draw: random.Random, settings: Mapping[str, Any]) -> Asked:
        """Return a request whose prompt begins like others, at most 112 tokens, or repeats itself."""
        text, cut = draw.choice(self.texts), draw.choice((0, 1, 15, 16, 17, 32, 48, draw.randint(1, 72)))
        own = [draw.randrange(self.vocab) for _ in range(draw.randint(1, 40))]
        if draw.random() < 0.3:
            own = (own[: draw.randint(2, 5)] * 20)[: len(own)]
        elif draw.random() < 0.1:
            cut, own = max(cut, 1), []  # a prompt that others begin with
        more = {"max_new_tokens": draw.randint(1, 30), "ignore_eos": draw.random() < 0.7, "logprobs": True}
        return Asked((*text[:cut], *own), tuple(sorted({**more, **settings}.items())))

    def whole(self, asked: Asked, name: str) -> None:
        """Run a request to its end."""
        handle = asked.submit(self.engine)
        self._note(asked, name, handle.results(SECONDS), is_whole=True)
        self.counts["begun in the cache"] += handle.cached > 0

    def begun(self, asked: Asked, name: str) -> None:
        """Cancel a request at once, or after some tokens."""
        handle, draw = asked.submit(self.engine), random.Random(name)
        if draw.random() < 0.7:
            handle.event(draw.randint(0, 6))
        handle.cancel()
        self._note(asked, name, handle.results(SECONDS), is_whole=False)

    def late(self, asked: Asked, name: str) -> None:
        """Give a request less time than it may need."""
        answers = asked.submit(self.engine, deadline=random.Random(name).choice((0.005, 0.05, 0.5))).results(SECONDS)
        self.counts["ended by a deadline"] += answers[0].finish_reason == "deadline"
        self._note(asked, name, answers, is_whole=False)

    def failing(self, asked: Asked, name: str) -> None:
        """Run a request whose mask fails."""
        try:
            asked.submit(self.engine).results(SECONDS)
        except ZeroDivisionError:
            return
        self.differences.append(f"{name}: no error")

    def dropped(self, asked: Asked, _: str) -> None:
        """Submit a request whose answer nobody reads."""
        asked.submit(self.engine).event(0)

    def chat(self, asked: Asked, name: str) -> None:
        """Run turns that go on from each other's answers, and then a plain request behind them."""
        history, draw, settings = asked.prompt[:40], random.Random(name), dict(asked.settings)
        for turn in range(draw.randint(1, 3)):
            one = Asked(history, tuple({**settings, "max_new_tokens": draw.randint(8, 24)}.items()))
            try:
                answer = one.submit(self.engine, reuse_cache=True).result(SECONDS)
            except OSError:  # its file cannot be read, and its tokens cannot run again with the same bits
                self.counts["chats whose file was lost"] += 1
                return
            self._checks.append(partial(self._check_turn, one, answer, f"{name}, turn {turn}"))
            more = tuple(draw.randrange(self.vocab) for _ in range(draw.choice((0, 1, 2, 9))))
            plain = Asked((*history, *answer.token_ids, *more), asked.settings)
            self.whole(plain, f"{name}, behind turn {turn}")
            history = (*plain.prompt, *((3,) if not more else ()))[:90]

    def saved(self, asked: Asked, name: str) -> None:
        """Save a prompt, load it or another one, and run a request behind it."""
        draw, file = random.Random(name), self.folder / f"{name}.cache"
        prompt = (*asked.prompt[:90], *self.texts[0][:16])
        try:
            self.engine.save_cache(list(prompt), file)
            self._saved.append((file, prompt))
        except BusyError:
            self.counts["prompts not saved, pages were needed"] += 1
        file, prompt = draw.choice(self._saved or [(file, ())])
        if prompt:
            try:
                self.engine.load_cache(file)
            except BusyError:
                self.counts["prompts not loaded, pages were needed"] += 1
        self.whole(Asked((*prompt, *asked.prompt)[:112], asked.settings), name)

    def embedding(self, asked: Asked, name: str) -> None:
        """Ask for an embedding."""
        found = self.engine.submit_embeddings(list(asked.prompt))[0].embedding(timeout=SECONDS)
        self._checks.append(partial(self._check_tensor, asked.prompt, self._embedding, found, name))

    def logits(self, asked: Asked, name: str) -> None:
        """Ask for the logits of a whole text, which lends the caches."""
        found = self._logits(asked.prompt)
        self._checks.append(partial(self._check_tensor, asked.prompt, self._logits, found, name))

    def _embedding(self, prompt: Sequence[int]) -> Tensor:
        return self.engine.embed(list(prompt))[0]

    def _logits(self, prompt: Sequence[int]) -> Tensor:
        found = self.engine.logits([list(prompt)])
        assert isinstance(found, Tensor), "no more than logits were asked for"
        return found[0]

    def _note(self, asked: Asked, name: str, answers: Sequence[Generation], *, is_whole: bool) -> None:
        for at, answer in enumerate(answers):
            self._checks.append(partial(self._check, asked, at, answer, name, is_whole=is_whole))

    def _once_alone(self, key: object, run: Callable[[], Any]) -> Any:
        """Return what a request is answered when nothing runs beside it and nothing is cached."""
        if key not in self._alone:
            forget(self.engine)
            self._alone[key] = run()
        return self._alone[key]

    def _check(self, asked: Asked, at: int, found: Generation, name: str, *, is_whole: bool) -> None:
        """Compare an answer, or the beginning of one, with that of the request alone, without draft tokens."""
        settings = dict(asked.settings)
        more = {"n": 1, "seed": settings.get("seed", 0) + at, "speculation": "off", "deadline": None}
        alone: Generation = self._once_alone((asked, at), lambda: asked.submit(self.engine, **more).result(SECONDS))
        if not is_whole and found.finish_reason in ("interrupted", "deadline"):
            length = len(found.token_ids)
            equal = found.token_ids == alone.token_ids[:length]
            equal &= found.logprobs is None or found.logprobs == (alone.logprobs or ())[:length]
            equal &= found.top_logprobs is None or found.top_logprobs == (alone.top_logprobs or ())[:length]
        else:
            equal = replace(found, timings=NO_TIMINGS) == replace(alone, timings=NO_TIMINGS)
        self._judge(name, found, alone, asked, is_equal=equal)

    def _check_turn(self, asked: Asked, found: Generation, name: str) -> None:
        """Compare a turn's log probabilities with those of its text in one pass: they differ by rounding."""
        text = (*asked.prompt, *found.token_ids)
        logits = self._once_alone(text, partial(self._logits, text))[len(asked.prompt) - 1 : -1].log_softmax(-1)
        expected = logits[range(len(found.token_ids)), list(found.token_ids)]
        error = float((torch.tensor(found.logprobs) - expected).abs().max())
        self.nearest = max(self.nearest, error)
        most = 0.01 if self.engine.choices.dtype == torch.float32 else 0.5
        self._judge(name, found, error, asked, is_equal=error < most)

    def _check_tensor(
        self, prompt: Sequence[int], run: Callable[[Sequence[int]], Tensor], found: Tensor, name: str
    ) -> None:
        alone = self._once_alone((run.__name__, prompt), partial(run, prompt))
        self._judge(name, found, alone, prompt, is_equal=torch.equal(found, alone))

    def _judge(self, name: str, found: object, alone: object, asked: object, *, is_equal: bool) -> None:
        self.counts["compared"] += 1
        if not is_equal:
            self.differences.append(f"{name}: {asked}\n  beside others: {found}\n  alone: {alone}")


StormKind = tuple[Callable[[random.Random, int], Mapping[str, Any]], Callable[[MixedStorm, Asked, str], None]]
"""Function that draws arguments of `Engine.submit`, given the vocabulary's size, and what happens to the request."""


def any_settings(draw: random.Random, vocab: int) -> Mapping[str, Any]:
    """Return the arguments of one of the kinds that run to their end."""
    kinds = [settings for settings, run in STORM_KINDS.values() if run is MixedStorm.whole]
    return draw.choice(kinds)(draw, vocab)


def drawn_cuts(draw: random.Random, _: int) -> Mapping[str, Any]:
    """Return arguments for sampling with a seed."""
    cuts = {"top_k": draw.choice((0, 20)), "top_p": draw.choice((1.0, 0.9)), "min_p": draw.choice((0.0, 0.02))}
    return {"temperature": draw.choice((0.7, 1.3)), "seed": draw.randrange(1 << 40), **cuts}


def any_cuts(draw: random.Random, vocab: int) -> Mapping[str, Any]:
    """Return arguments for sampling, or for the likeliest tokens."""
    return draw.choice((drawn_cuts, lambda *_: {}))(draw, vocab)


def drawn_tokens(draw: random.Random, vocab: int, count: int) -> tuple[int, ...]:
    """Return distinct tokens."""
    return tuple(draw.sample(range(vocab), count))


def drawn_failure(draw: random.Random, vocab: int) -> Mapping[str, Any]:
    """Return arguments of one answer or three with a mask that fails in one of the first steps."""
    mask = ThirdOfTokens(0, vocab, draw.randint(0, 3))
    return {"mask": mask, "max_new_tokens": 9, "ignore_eos": True, "n": draw.choice((1, 3))}


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
STORM_KINDS: Mapping[str, StormKind] = {
    "greedy": (lambda draw, vocab: {}, MixedStorm.whole),
    "likeliest": (lambda draw, vocab: {"logprobs": False}, MixedStorm.whole),
    "sampled": (drawn_cuts, MixedStorm.whole),
    "penalised": (lambda draw, vocab: {**PENALTIES, **any_cuts(draw, vocab)}, MixedStorm.whole),
    "biased": (
        lambda draw, vocab: {"logit_bias": tuple((token, 4.0) for token in drawn_tokens(draw, vocab, 5))},
        MixedStorm.whole,
    ),
    "top logprobs": (lambda draw, vocab: {"top_logprobs": draw.randint(1, 20)}, MixedStorm.whole),
    "prompt logprobs": (lambda draw, vocab: {"prompt_logprobs": draw.randint(0, 20)}, MixedStorm.whole),
    "stop tokens": (
        lambda draw, vocab: {"stop_token_ids": drawn_tokens(draw, vocab, 16), "min_tokens": draw.choice((0, 4))},
        MixedStorm.whole,
    ),
    "stop texts": (
        lambda draw, vocab: {"stop": tuple(draw.sample(string.ascii_letters, 12)), **drawn_cuts(draw, vocab)},
        MixedStorm.whole,
    ),
    "mask": (
        lambda draw, vocab: {"mask": ThirdOfTokens(draw.randrange(100), vocab), **any_cuts(draw, vocab)},
        MixedStorm.whole,
    ),
    "grammar": (lambda draw, vocab: {"mask": draw.choice(GRAMMARS), **any_cuts(draw, vocab)}, MixedStorm.whole),
    "several answers": (lambda draw, vocab: {"n": draw.randint(2, 4), **drawn_cuts(draw, vocab)}, MixedStorm.whole),
    "to the end of the context": (lambda draw, vocab: {"max_new_tokens": -1}, MixedStorm.whole),
    "cancelled": (any_settings, MixedStorm.begun),
    "deadline": (any_settings, MixedStorm.late),
    "dropped": (any_settings, MixedStorm.dropped),
    "failed": (drawn_failure, MixedStorm.failing),
    "chat": (any_cuts, MixedStorm.chat),
    "saved cache": (any_cuts, MixedStorm.saved),
    "embedding": (lambda draw, vocab: {}, MixedStorm.embedding),
    "logits": (lambda draw, vocab: {}, MixedStorm.logits),
}
MIXED_SIZES = ("batching.max_sequences=10", "context_length=128", "prefill_chunk=16", "batching.cache_tokens=144")


def mixed_storm(model: str | Path, count: int, seed: int, dtype: str, overrides: Sequence[str] = ()) -> MixedStorm:
    """Run a mixed storm with an engine of its own, and check that it leaves no thread behind."""
    before = set(threading.enumerate())
    sizes = dict(one.split("=", 1) for one in (*MIXED_SIZES, *overrides))  # those that are given come last
    given = [f"{key}={value}" for key, value in sizes.items()]
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.load(model, dtype=dtype, device="cpu", overrides=given) as engine,
    ):
        found = MixedStorm(engine, seed, Path(folder))
        found.run(count)
    ends = time.monotonic() + SECONDS
    while left := [thread for thread in threading.enumerate() if thread not in before]:
        assert time.monotonic() < ends, f"threads are left: {left}"
        time.sleep(0.01)
    return found


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
    parser.add_argument("--mixed", action="store_true", help="storm: requests of all kinds")
    parser.add_argument("--seed", type=int, default=0, help="storm --mixed: seed of the requests")
    parser.add_argument("--dtype", default="bf16", help="compute dtype")
    given = parser.parse_args()
    if given.what == "storm" and given.mixed:
        found = mixed_storm(given.model, given.count, given.seed, given.dtype, given.overrides)
        print(", ".join(f"{name} {count}" for name, count in sorted(found.counts.items())))
        print(f"largest error of a log probability in a chat: {found.nearest:.2g}")
        print(*found.differences, f"{len(found.differences)} differences", sep="\n")
        raise SystemExit(bool(found.differences))
    context = given.tokens + 200 if given.what == "gap" else 512
    most = max(given.counts) + (given.what == "clients") if given.what in ("speed", "clients") else 16
    sizes = [f"batching.max_sequences={most}", f"context_length={context}", *given.overrides]
    try:
        with Engine.load(given.model, dtype=given.dtype, device="cpu", overrides=sizes) as engine:
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
