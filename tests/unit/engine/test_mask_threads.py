"""Threads of masks: masks that never return end their requests, and neither exhaust the threads nor outlive a close."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from support.tiny_models import TinyModel

from graphcore import Engine
from graphcore.engine import masks
from graphcore.engine.masks import MaskThreads, NextTokens
from graphcore.errors import BusyError, ConfigError

SECONDS = 60.0
PROMPT = [5, 17, 3]
NOTHING = NextTokens()


class Stuck:
    """Work that returns when it is let go.

    Attributes:
        begun: semaphore with a permit for each thread that has begun it.
    """

    def __init__(self) -> None:
        self._is_free, self.begun = threading.Event(), threading.Semaphore(0)

    def __call__(self) -> NextTokens:
        self.begun.release()
        self._is_free.wait(2 * SECONDS)
        return NOTHING

    def of_answer(self, _: Sequence[int]) -> None:
        """Be a mask."""
        self()

    def let_go(self) -> None:
        """Let all threads return."""
        self._is_free.set()


def submitted(threads: MaskThreads, work: Stuck, count: int) -> list[Future[NextTokens]]:
    """Return the results of stuck work, each of which has a thread."""
    futures = [threads.submit(work, is_first=True) for _ in range(count)]
    assert all(work.begun.acquire(timeout=SECONDS) for _ in range(count))
    return futures


def num_threads() -> int:
    return sum(thread.name == "graphcore-mask" for thread in threading.enumerate())


def test_a_mask_that_is_submitted_after_close_has_a_result() -> None:
    threads = MaskThreads()
    threads.close()
    with pytest.raises(ConfigError, match="closed"):
        threads.submit(lambda: NOTHING, is_first=True).result(SECONDS)


def test_work_that_waits_gets_the_threads_of_masks_that_are_given_up() -> None:
    threads, work = MaskThreads(), Stuck()
    stuck = submitted(threads, work, masks.MOST_THREADS)
    waiting = threads.submit(lambda: NOTHING, is_first=True)
    assert not waiting.done(), "all threads are taken"
    threads.abandon(stuck[0])
    threads.abandon(stuck[0])  # a second time says nothing new
    assert waiting.result(SECONDS) == NOTHING
    work.let_go()
    threads.close()


def test_masks_that_never_return_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_THREADS", 3)
    monkeypatch.setattr(masks, "MOST_LOST", 4)
    before, threads, work = num_threads(), MaskThreads(), Stuck()
    returned = threading.Semaphore(0)
    for _ in range(4):
        (future,) = submitted(threads, work, 1)
        threads.abandon(future)
        future.add_done_callback(lambda _: returned.release())  # called after that of `abandon`
    with pytest.raises(BusyError, match="4 masks of ended requests have not returned"):
        threads.submit(lambda: NOTHING, is_first=True)
    assert num_threads() - before <= 7
    work.let_go()
    assert all(returned.acquire(timeout=SECONDS) for _ in range(4))
    assert threads.submit(lambda: NOTHING, is_first=True).result(SECONDS) == NOTHING
    threads.close()


def test_work_for_which_no_thread_is_left_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_THREADS", 2)
    monkeypatch.setattr(masks, "MOST_LOST", 1)
    threads, work = MaskThreads(), Stuck()
    stuck = submitted(threads, work, 2)
    waiting = [threads.submit(work, is_first=True) for _ in range(3)]
    threads.abandon(stuck[0])  # the third and last thread takes the first that waits
    assert work.begun.acquire(timeout=SECONDS)
    threads.abandon(stuck[1])
    threads.abandon(waiting[1])  # its request has ended; nobody waits for it
    threads.abandon(waiting[0])
    with pytest.raises(BusyError, match="3 masks"):
        waiting[2].result(SECONDS)
    work.let_go()
    threads.close()


def test_a_mask_that_does_not_return_ends_its_request_and_no_other(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MOST_THREADS", 2)
    work = Stuck()
    sizes = ["context_length=64", "batching.max_sequences=2"]
    with Engine.load(tiny_model("llama3").folder, dtype="fp32", device="cpu", overrides=sizes) as engine:
        hung = [engine.submit(PROMPT, 3, mask=work.of_answer) for _ in range(3)]  # one waits for a row, and a thread
        assert all(work.begun.acquire(timeout=SECONDS) for _ in range(2))
        monkeypatch.setattr(masks, "LONGEST_MASK", 0.0)
        for handle in hung:
            with pytest.raises(ConfigError, match="mask has not returned for 0 s"):
                handle.result(SECONDS)
        monkeypatch.setattr(masks, "LONGEST_MASK", SECONDS)
        answer = engine.submit(PROMPT, 3, mask=lambda ids: None, ignore_eos=True).result(SECONDS)
        assert len(answer.token_ids) == 3
    work.let_go()
