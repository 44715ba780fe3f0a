"""Requests that come, wait, run, are swapped out, end and fail in any order get the tokens that each gets alone."""

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.engine_fakes import (
    MODELS,
    VOCAB,
    DraftPrograms,
    FallibleDrafter,
    FallibleModel,
    FreeSteps,
    HashRunner,
    Moving,
    SteppedQueue,
    do_nothing,
)

from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.batching.host_decode_loop import HostDecodeLoop
from graphcore.engine.masks import AnswerMask, MaskThreads, NextTokens
from graphcore.engine.request import Request
from graphcore.engine.speculation.draft_steps import DraftSteps
from graphcore.engine.speculation.drafter import Drafter
from graphcore.engine.speculation.prompt_lookup import LookupSpeculation
from graphcore.engine.speculation.self_speculation import SelfSpeculation
from graphcore.engine.speculation.speculation import Speculation
from graphcore.kvcache.swap_file import SwapFile
from graphcore.progress import ignore_progress
from graphcore.streaming.policy import Resident
from graphcore.tokenizer.text_stream import StopStrings

BITS = st.integers(0, 1)
END = 3  # token that ends answers of requests that do not ignore it
ERROR_RATES = (None, 0.0, 0.3, 1.0)  # of draft tokens; None drafts none
NO_FOLDER = Path("/dev/null/swapped")
PROMPTS = st.builds(lambda shared, own: [7] * shared + own, st.integers(0, 24), st.lists(BITS, min_size=1, max_size=8))


class BrokenMaskError(Exception):
    """An error in a caller's mask."""


class SteppedMasks(MaskThreads):
    """Mask threads without threads: every second mask is there at once, the others after the next step of the machine.

    The draws of a run must not depend on how fast a thread is, or hypothesis calls the test flaky.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[Future[NextTokens], Callable[[], NextTokens]]] = []
        self._submitted = 0

    def submit(self, work: Callable[[], NextTokens], is_first: bool) -> Future[NextTokens]:
        future: Future[NextTokens] = Future()
        self._submitted += 1
        if self._submitted % 2:
            self.compute(future, work)
        else:
            self.late.append((future, work))
        return future

    def compute(self, future: Future[NextTokens], work: Callable[[], NextTokens]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BrokenMaskError as error:
                future.set_exception(error)

    def compute_late(self, count: int) -> None:
        """Compute the first `count` of what is late."""
        late, self.late = self.late[:count], self.late[count:]
        for future, work in late:
            self.compute(future, work)


@dataclass(eq=False)
class Asked:
    """A request, and what the test did to it.

    Attributes:
        is_hurt: True if it may end early: it was cancelled, is late, or ran in a pass that failed.
    """

    request: Request
    is_hurt: bool = False


class Schedule(RuleBasedStateMachine):
    """A queue over `HashRunner`, with three rows and a little more than one context of pages."""

    name = "full"

    @initialize(
        tokens=st.sampled_from([32, 36, 44, 96]),
        chunk=st.sampled_from([8, 6]),
        has_kinds=st.sampled_from([False, False, True]),
        error_rate=st.sampled_from(ERROR_RATES),
        has_model=st.booleans(),
    )
    def load(self, tokens: int, chunk: int, has_kinds: bool, error_rate: float | None, has_model: bool) -> None:
        """Load a model. Pages have four positions, so that chunks of six end inside of them."""
        self.has_kinds, self.has_model = has_kinds, has_model
        self.runner: Any = HashRunner(self.name, tokens, chunk=chunk, has_kinds=has_kinds)
        self.folder = Path(tempfile.gettempdir())
        self.admission = CacheAdmission.of(self.runner, self.folder)
        speculation = None if error_rate is None else self.speculation(error_rate)
        batching = ContinuousBatching(self.runner, HostDecodeLoop(self.runner, speculation), self.admission)
        self.queue = SteppedQueue(batching, 100, lambda: None, ignore_progress, lambda: None)
        self.asked: list[Asked] = []
        self.masks = SteppedMasks()

    def speculation(self, error_rate: float) -> Speculation:
        """Return a speculation whose draft tokens are wrong at that rate, and whose steps cost the same for any.

        A draft model's steps write keys of their own into the caches.
        """

        def answer_of(request: Request) -> list[int]:
            tokens: list[int] = self.runner.alone(request.prompt_ids, 32, frozenset())[0]
            return tokens

        def drafter_of(request: Request) -> Drafter:
            return FallibleDrafter(request.prompt_ids, answer_of(request), error_rate, VOCAB)

        most = self.runner.most_together - 1
        if self.has_model:
            programs: Any = DraftPrograms(self.runner)
            model = FallibleModel(self.runner, DraftSteps(self.runner, programs), answer_of, error_rate)
            return SelfSpeculation(FreeSteps(), most, model, FreeSteps(0.0))
        return LookupSpeculation(FreeSteps(), most, drafter_of)

    def submit(self, prompt: Sequence[int], max_new_tokens: int, **given: Any) -> Asked:
        ends = frozenset({END}) if len(prompt) % 2 else frozenset[int]()
        asked = Asked(Request(tuple(prompt), max_new_tokens, ends, None, StopStrings([]), **given))
        self.queue.submit([asked.request], "submit", waits=False)
        self.asked.append(asked)
        return asked

    @rule(count=st.integers(1, 6), seed=st.integers(0, 1000), passes=st.integers(0, 30))
    def ask(self, count: int, seed: int, passes: int) -> None:
        """Ask several times: prompts begin alike, and answers together need more pages than there are."""
        generator = random.Random(seed)
        for _ in range(count):
            own = [generator.randrange(2) for _ in range(generator.choice((1, 2, 3, 7)))]
            prompt = [*[7] * generator.choice((0, 4, 9, 17, 24)), *own]
            self.submit(prompt, generator.randint(1, 30), reuses_cache=generator.random() < 0.3)
        self.run(passes)

    @precondition(lambda self: any(one.request.finish_reason in ("length", "interrupted") for one in self.asked))
    @rule(more=st.lists(BITS, min_size=1, max_size=4), reuses=st.booleans(), data=st.data())
    def go_on(self, more: list[int], reuses: bool, data: st.DataObject) -> None:
        """Ask again with the answer of an ended request, as a chat does."""
        ended = [one.request for one in self.asked if one.request.finish_reason in ("length", "interrupted")]
        ids = [*data.draw(st.sampled_from(ended)).ids, *more]
        if len(ids) <= self.runner.sizes.context:
            self.submit(ids, 6, reuses_cache=reuses)

    @rule(shared=st.integers(4, 7), seed=st.integers(0, 1000))
    def talk(self, shared: int, seed: int) -> None:
        """Take turns of a chat beside two requests that begin alike for less than a chunk, of which one goes on."""
        generator = random.Random(seed)
        self.run_all()
        for most in (generator.randint(1, 4), 20):
            own = [generator.randrange(8, VOCAB) for _ in range(generator.randint(3, 6))]
            self.submit([*[7] * shared, *own], most)
        ids: list[int] = []
        for _ in range(5):
            ids += [generator.randrange(8, VOCAB) for _ in range(generator.randint(1, 3))]
            self.lend_the_cache()  # rows without a sequence have other states after it
            turn = self.submit(ids, generator.randint(1, 4), reuses_cache=True).request
            while not turn.has_ended:
                self.step()
            self.run(generator.randint(0, 4))
            ids = turn.ids

    @rule(prompt=PROMPTS, last=st.integers(0, 3))
    def ask_with_a_mask_that_fails(self, prompt: list[int], last: int) -> None:
        def mask(ids: Sequence[int]) -> None:
            if len(ids) == last:
                raise BrokenMaskError

        self.submit(prompt, 10, mask=AnswerMask(mask, VOCAB, self.masks)).is_hurt = True

    @rule(prompt=PROMPTS, seconds=st.sampled_from([-1.0, 1000.0]))
    def ask_with_a_deadline(self, prompt: list[int], seconds: float) -> None:
        self.submit(prompt, 5, deadline=time.perf_counter() + seconds).is_hurt = seconds < 0

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.alive))
        one.is_hurt = True
        one.request.end("interrupted")

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.alive))
        one.is_hurt = True
        one.request.output.readers.are_gone = True

    @rule(passes=st.integers(1, 12))
    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.step()

    def run_all(self) -> None:
        for _ in range(2000):
            if not self.step():
                break
        assert not self.alive

    @rule()
    def lend_the_cache(self) -> None:
        """A job between two passes fills all rows with its own sequences."""
        pages = self.runner.pages

        @torch.inference_mode()
        def work() -> None:
            for row in range(self.runner.sizes.batch_size):
                pages.reserve(row, 24, 32)
            for table in pages.tables:
                for held in table.rows:
                    for cache in table.caches:
                        cache.k[[*held.values()]] = cache.v[[*held.values()]] = 0.5
            for cache in pages.states:
                cache.recurrent[: self.runner.sizes.batch_size] = 0.5

        self.in_a_job(work)

    @rule(is_full=st.booleans())
    def fill_the_disk(self, is_full: bool) -> None:
        self.admission._folder = NO_FOLDER if is_full else self.folder

    @precondition(lambda self: self.admission._swapped)
    @rule()
    def lose_the_files(self) -> None:
        """Only requests that run again with the same bits survive it."""
        for request, stored in self.admission._swapped.items():
            if isinstance(stored, SwapFile):
                os.truncate(stored._file.fileno(), 0)
                if not request.is_bit_exact:
                    next(one for one in self.asked if one.request is request).is_hurt = True

    @precondition(lambda self: self.queue.batching.running)
    @rule()
    def break_a_pass(self) -> None:
        """All that run get the error, and the next ones nothing of what the pass has left."""

        def fail() -> None:
            raise ZeroDivisionError("in a pass")

        self.step_with(fail)
        for one in self.asked:
            one.is_hurt = one.is_hurt or one.request.finish_reason == "error"

    @precondition(lambda self: self.queue.batching.running)
    @rule()
    def abort_a_pass(self) -> None:
        """All that run are abandoned while a pass over moving weights runs."""

        def abandon() -> None:
            for request in self.queue.batching.running:
                request.output.readers.are_gone = True

        self.runner.policy = Moving()
        self.step_with(abandon)
        self.runner.policy = Resident()
        for one in self.asked:
            one.is_hurt = one.is_hurt or one.request.output.readers.are_gone

    def step_with(self, after_program: Callable[[], None]) -> None:
        self.runner.after_program = after_program
        self.queue.step()
        self.runner.after_program = do_nothing

    @property
    def alive(self) -> list[Asked]:
        return [one for one in self.asked if not one.request.has_ended]

    def in_a_job(self, work: Callable[[], None]) -> None:
        answer: Future[None] = Future()
        self.queue._jobs.append((work, answer, True))
        while not answer.done():
            self.step()
        answer.result()

    def step(self) -> bool:
        """Do some work; the oldest request that runs goes on in every pass."""
        running = [one for one in self.queue.batching.running if not one.has_ended and not one.is_unwanted]
        oldest = running[0] if running and running[0].cache_row is not None else None
        before = (oldest.num_computed, len(oldest.token_ids)) if oldest else None
        was_masked = oldest is None or oldest.mask is None or oldest.mask.future.done()
        passes = self.runner.num_passes
        num_late = len(self.masks.late)
        has_worked = self.queue.step()
        self.masks.compute_late(num_late)
        if oldest is not None and not oldest.has_ended and self.runner.num_passes > passes:
            assert oldest.cache_row is not None
            assert (oldest.num_computed, len(oldest.token_ids)) != before or not was_masked
        return has_worked or num_late > 0

    @invariant()
    def rows_and_pages_are_counted(self) -> None:
        running = self.queue.batching.running
        rows = [one.cache_row for one in running if one.cache_row is not None]
        assert len(rows) == len(set(rows)) <= self.runner.sizes.batch_size
        order = [one.request for one in self.asked]
        assert [order.index(one) for one in running] == sorted(order.index(one) for one in running)
        waiting = [order.index(one) for one in self.queue._waiting]
        assert waiting == sorted(waiting)
        tree = self.admission._prefixes
        nodes = list(tree._root.below())
        tables = range(len(self.runner.pages.tables))
        self.runner.check_counts([{page for node in nodes if (page := node.pages[at]) is not None} for at in tables])
        for index, holders in enumerate(tree._nodes):
            held = {page: len(some) for page, some in holders.items()}
            assert held == count_of([node.pages[index] for node in nodes])
        with_snapshot = {node: node.snapshot for node in nodes if node.snapshot is not None}
        assert with_snapshot.keys() == set(tree._with_snapshot)
        snapshots = self.runner.pages.snapshot_rows(self.runner.sizes.batch_size)
        assert sorted([*with_snapshot.values(), *tree._free_snapshots]) == list(snapshots)
        assert all(node.children or node.snapshot is not None or any(node.pages) for node in nodes), "an empty leaf"
        for row in set(range(self.runner.sizes.batch_size)).difference(rows):
            assert not any(table.rows[row] for table in self.runner.pages.tables), "a row without a request has pages"
        assert set(self.admission._swapped) == {one for one in running if one.cache_row is None}
        has_row = [one.cache_row is not None for one in running if not one.has_ended]
        assert has_row == sorted(has_row, reverse=True), "a later request has a row, and an earlier one has none"

    def teardown(self) -> None:
        """Let everything end, and compare each answer with the one that its request has alone."""
        self.admission._folder = self.folder
        self.run_all()
        for one in self.asked:
            request = one.request
            tokens, reason = self.runner.alone(request.prompt_ids, request.max_new_tokens, request.end_ids)
            if not (self.has_kinds and request.reuses_cache):
                assert request.token_ids == tokens[: len(request.token_ids)]
            if not one.is_hurt:
                request.output.wait_to_end(0.0)
                assert request.finish_reason in ("length", "context", "end")
                if not (self.has_kinds and request.reuses_cache):
                    assert (request.token_ids, request.finish_reason) == (tokens, reason)
        assert not self.queue.batching.running
        assert not self.queue._waiting
        self.admission.clear_prefix_cache()
        assert all(table.num_free == table.num_pages for table in self.runner.pages.tables)


def count_of(pages: Sequence[int | None]) -> dict[int, int]:
    found: dict[int, int] = {}
    for page in pages:
        if page is not None:
            found[page] = found.get(page, 0) + 1
    return found


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_every_answer_is_that_of_the_request_alone(name: str, examples: int) -> None:
    machine = type("Machine", (Schedule,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
