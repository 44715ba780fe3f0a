"""The order of a queue's work, who is refused, and what ends whom: over a batching that computes nothing."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from support.engine_fakes import SteppedQueue

from graphcore.engine import queue as queue_module
from graphcore.engine.batching.interface import Batching
from graphcore.engine.queue import RequestQueue
from graphcore.engine.request import Request
from graphcore.errors import BusyError, ConfigError
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.scheduler import StoppedError
from graphcore.tokenizer.text_stream import StopStrings

SECONDS = 20.0


class FakeBatching(Batching):
    """A batching of two rows that gives each request token 7 in each pass, and records its calls.

    Attributes:
        in_pass: function that is called inside each pass with `is_stopped`; it may raise.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.log: list[str] = []
        self.in_pass: Callable[[Callable[[], bool]], None] = lambda is_stopped: None

    @property
    def running(self) -> Sequence[Request]:
        return self.requests

    def admit(self, waiting: Sequence[Request]) -> int:
        taken = waiting[: 2 - len(self.requests)]
        for row, request in enumerate(taken, len(self.requests)):
            request.begin(row, 0)
        self.requests += taken
        return len(taken)

    def resume(self, requests: Sequence[Request], cached: int) -> None:
        raise NotImplementedError

    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        self.log.append("pass of " + " ".join(str(request.prompt_ids[0]) for request in self.requests))
        on_progress("generate", None, 0, 1)
        self.in_pass(is_stopped)
        for request in self.requests:
            request.take(7, None, 100)

    def leave(self) -> None:
        self.requests = [request for request in self.requests if not request.has_ended]

    def fail(self, error: BaseException) -> None:
        self.log.append(f"fail: {error}")
        for request in self.requests:
            request.fail(error)
        self.leave()

    def give_up(self) -> None:
        self.log.append("give up")
        for request in self.requests:
            request.end("interrupted")
        self.leave()

    def lend_cache(self) -> Callable[[], None]:
        self.log.append("lend")
        return lambda: self.log.append("give back")


def request_of(name: int, tokens: int = 2, **settings: Any) -> Request:
    return Request([name], tokens, frozenset(), None, StopStrings([]), **settings)


def stepped(most_waiting: int = 100) -> tuple[SteppedQueue, FakeBatching]:
    batching = FakeBatching()
    return SteppedQueue(batching, most_waiting, lambda: None, ignore_progress, lambda: None), batching


def put(queue: SteppedQueue, *requests: Request) -> None:
    for request in requests:
        queue.submit([request], "submit", waits=False)


def put_job(queue: SteppedQueue, work: Callable[[], object], *, lends: bool = False) -> Future[Any]:
    """Put a job into a queue, as `run_alone` does before it waits."""
    answer: Future[Any] = Future()
    queue._jobs.append((work, answer, lends))
    return answer


def finish(queue: SteppedQueue) -> None:
    """Do all work that there is."""
    while queue.step():
        continue


def test_requests_run_in_the_order_in_which_they_came_as_soon_as_rows_are_free() -> None:
    queue, batching = stepped()
    requests = [request_of(1, 1), request_of(2, 3), request_of(3, 1), request_of(4, 1)]
    put(queue, *requests)
    finish(queue)
    assert batching.log == ["pass of 1 2", "pass of 2 3", "pass of 2 4"]
    assert [request.finish_reason for request in requests] == ["length"] * 4
    assert not queue.step()


def test_jobs_and_passes_take_turns_and_jobs_alone_do_not_wait() -> None:
    queue, batching = stepped()
    put(queue, request_of(1, 2))
    for name in "abcd":
        put_job(queue, lambda name=name: batching.log.append(name))  # type: ignore[misc]
    finish(queue)
    assert batching.log == ["a", "pass of 1", "b", "pass of 1", "c", "d"]


def refusal(queue: SteppedQueue, *requests: Request) -> str:
    """Return the error of a call that is refused at once, and does not wait for room."""
    found = list[str]()

    def submit() -> None:
        with pytest.raises(BusyError) as caught:
            queue.submit(requests, "submit", waits=False)
        found.append(str(caught.value))

    caller = threading.Thread(target=submit, daemon=True)
    caller.start()
    caller.join(SECONDS)
    (message,) = found
    return message


def test_a_full_queue_refuses_all_answers_of_a_call_and_keeps_the_others() -> None:
    queue, batching = stepped(most_waiting=2)
    put(queue, request_of(1))
    assert "1 requests wait already, and batching.max_waiting=2" in refusal(queue, request_of(2), request_of(3))
    put(queue, request_of(4))
    assert "2 requests wait already" in refusal(queue, request_of(5))
    finish(queue)
    assert batching.log == ["pass of 1 4"] * 2


def test_a_caller_that_waits_for_room_goes_on_when_requests_have_begun() -> None:
    queue, _ = stepped(most_waiting=1)
    requests = [request_of(name, 1) for name in range(1, 5)]
    caller = threading.Thread(target=lambda: queue.submit(requests, "generate", waits=True), daemon=True)
    caller.start()
    latest = time.monotonic() + SECONDS
    while caller.is_alive() or queue._waiting:
        assert time.monotonic() < latest
        queue.step()
        assert len(queue._waiting) <= 1
    caller.join(SECONDS)
    finish(queue)
    assert [request.finish_reason for request in requests] == ["length"] * 4


@pytest.mark.parametrize("end", ["cancelled", "abandoned", "late"])
def test_a_request_that_ends_while_it_waits_never_runs_and_makes_room(end: str) -> None:
    queue, batching = stepped(most_waiting=3)
    put(queue, request_of(1, 3), request_of(2, 3))
    queue.step()
    one = request_of(3, 3, deadline=time.perf_counter() - 1.0 if end == "late" else None)
    put(queue, one, request_of(4, 1), request_of(5, 1))
    if end == "cancelled":
        one.end("interrupted")
    elif end == "abandoned":
        one.output.readers.are_gone = True
    queue.step()
    put(queue, request_of(6, 1))  # in the place of the third
    finish(queue)
    assert not any("3" in line for line in batching.log)
    assert batching.log[-2:] == ["pass of 4 5", "pass of 6"]
    assert one.finish_reason == ("deadline" if end == "late" else "interrupted")
    assert one.token_ids == []


def test_a_deadline_ends_a_running_request_and_keeps_its_tokens() -> None:
    queue, _ = stepped()
    late, other = request_of(1, 4, deadline=time.perf_counter() + SECONDS), request_of(2, 4)
    put(queue, late, other)
    queue.step()
    late.deadline = time.perf_counter() - 1e-3
    finish(queue)
    assert (late.finish_reason, late.token_ids) == ("deadline", [7])
    assert (other.finish_reason, len(other.token_ids)) == ("length", 4)


def test_an_error_ends_those_that_run_and_the_others_come_next() -> None:
    queue, batching = stepped()
    requests = [request_of(name) for name in (1, 2, 3)]
    put(queue, *requests)

    def fail(is_stopped: Callable[[], bool]) -> None:
        batching.in_pass = lambda is_stopped: None
        raise ZeroDivisionError("in a pass")

    batching.in_pass = fail
    finish(queue)
    assert batching.log == ["pass of 1 2", "fail: in a pass", "pass of 3", "pass of 3"]
    assert [request.finish_reason for request in requests] == ["error", "error", "length"]
    with pytest.raises(ZeroDivisionError):
        requests[0].output.wait_to_end(SECONDS)


def test_a_pass_is_given_up_when_nobody_wants_it_any_more() -> None:
    queue, batching = stepped()
    requests, asked = [request_of(1, 5), request_of(2, 5)], list[bool]()
    put(queue, *requests, request_of(3, 1))

    def end_one_by_one(is_stopped: Callable[[], bool]) -> None:
        asked.append(is_stopped())
        requests[0].end("interrupted")
        asked.append(is_stopped())
        requests[1].output.readers.are_gone = True
        asked.append(is_stopped())
        batching.in_pass = lambda is_stopped: None
        raise StoppedError

    batching.in_pass = end_one_by_one
    finish(queue)
    assert asked == [False, False, True]
    assert batching.log == ["pass of 1 2", "give up", "pass of 3"]


def test_closing_aborts_the_pass_and_ends_everybody_with_the_reason() -> None:
    queue, batching = stepped()
    requests = [request_of(name) for name in (1, 2, 3)]
    put(queue, *requests)
    job = put_job(queue, lambda: 1)

    def close(is_stopped: Callable[[], bool]) -> None:
        queue.stop()
        assert is_stopped()
        raise StoppedError

    batching.in_pass = close
    queue._was_job = True
    finish(queue)
    assert batching.log[:3] == ["pass of 1 2", "fail: this engine is closed; load it again", "give up"]
    for request in requests:
        with pytest.raises(ConfigError, match="closed"):
            request.output.wait_to_end(SECONDS)
    with pytest.raises(ConfigError, match="closed"):
        job.result(SECONDS)
    with pytest.raises(ConfigError, match="closed"):
        put(queue, request_of(4))
    with pytest.raises(ConfigError, match="closed"):
        queue.run_alone("logits", lambda: 1)
    assert not queue.step()


def test_a_job_has_the_cache_lent_only_if_it_asks_and_gives_it_back_whatever_happens() -> None:
    queue, batching = stepped()

    def fail() -> None:
        batching.log.append("fails")
        raise ZeroDivisionError

    found = put_job(queue, lambda: batching.log.append("without"))
    failed, given_up = put_job(queue, fail, lends=True), put_job(queue, lambda: batching.log.append("never"))
    given_up.cancel()
    last = put_job(queue, lambda: 5)
    finish(queue)
    assert batching.log == ["without", "lend", "fails", "give back"]
    assert found.result(0) is None
    assert last.result(0) == 5
    with pytest.raises(ZeroDivisionError):
        failed.result(0)


def test_the_status_has_running_requests_first_and_no_ended_ones() -> None:
    queue, _ = stepped()
    requests = [request_of(name, 5) for name in range(4)]
    put(queue, *requests)
    queue.step()
    requests[0].end("interrupted")
    requests[2].end("interrupted")
    assert [(one.is_running, one.new_tokens) for one in queue.status()] == [(True, 1), (False, 0)]


def test_a_request_knows_with_how_many_it_ran_at_most() -> None:
    queue, _ = stepped()
    first, second = request_of(1, 4), request_of(2, 2)
    put(queue, first)
    queue.step()
    assert first.batch == 1
    put(queue, second)
    finish(queue)
    assert (first.batch, second.batch) == (2, 2)


def threaded(on_progress: Progress = ignore_progress) -> RequestQueue:
    return RequestQueue(FakeBatching(), 100, lambda: None, on_progress, lambda: None)


def test_calls_inside_the_thread_and_waits_inside_a_block_that_holds_it_back_are_refused() -> None:
    found: list[str] = []

    def call(*_: object) -> None:
        for name in ("submit", "run_alone", "close"):
            with pytest.raises(BusyError, match=rf"{name}\(\) was called inside"):
                {
                    "submit": lambda: queue.submit([request_of(9)], "submit", waits=True),
                    "run_alone": lambda: queue.run_alone("run_alone", lambda: None),
                    "close": queue.close,
                }[name]()
            found.append(name)

    queue, request = threaded(call), request_of(1, 1)
    with queue.holding_back():
        queue.submit([request], "submit", waits=False)
        with pytest.raises(BusyError, match="holding_back"):
            request.output.wait_to_end(SECONDS)
    request.output.wait_to_end(SECONDS)
    assert found == ["submit", "run_alone", "close"]
    queue.close()


def test_work_while_idle_waits_for_the_pass_in_which_the_last_request_ended() -> None:
    ends, seen = threading.Event(), list[list[Request]]()

    class EndsLate(FakeBatching):
        def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
            super().run(on_progress, is_stopped)
            ends.wait(SECONDS)

    queue, request = RequestQueue(EndsLate(), 100, lambda: None, ignore_progress, lambda: None), request_of(1, 1)

    def look() -> None:
        with queue.while_idle():
            seen.append(list(queue.batching.running))

    queue.submit([request], "submit", waits=False)
    request.output.wait_to_end(SECONDS)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(0.05)
    assert seen == []
    ends.set()
    thread.join(SECONDS)
    assert seen == [[]]
    queue.close()


def test_a_queue_that_a_failure_has_closed_says_closed_to_who_only_looks() -> None:
    queue = RequestQueue(FakeBatching(), 100, lambda: None, ignore_progress, lambda: None)
    queue.close(failure=OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        queue.check_open()
    with pytest.raises(ConfigError, match="closed"):  # /status and /metrics, while the model is loaded again
        queue.check_not_closed()


def assert_fails_and_goes_on(queue: RequestQueue, failing: Request) -> None:
    """Check that a request ends with the error of a lost row, and that a later one runs."""
    with pytest.raises(ValueError, match="a row is lost"):
        failing.output.wait_to_end(SECONDS)
    later = request_of(3, 1)
    queue.submit([later], "submit", waits=False)
    later.output.wait_to_end(SECONDS)
    queue.close()


def test_an_error_after_a_pass_is_the_requests_error_and_the_thread_goes_on() -> None:
    errors = [ValueError("a row is lost")]

    class LeavesBadly(FakeBatching):
        def leave(self) -> None:
            if errors and any(request.has_ended for request in self.requests):
                raise errors.pop()
            super().leave()

    queue = RequestQueue(LeavesBadly(), 100, lambda: None, ignore_progress, lambda: None)
    ends, goes_on = request_of(1, 1), request_of(2, 3)
    with queue.holding_back():
        queue.submit([ends, goes_on], "submit", waits=False)
    ends.output.wait_to_end(SECONDS)
    assert_fails_and_goes_on(queue, goes_on)


def test_an_error_between_two_passes_is_the_requests_error_and_the_thread_goes_on() -> None:
    """A request is cancelled while the thread waits for the lock, which it holds when it frees rows between passes."""
    errors, in_pass, goes_on = [ValueError("a row is lost")], threading.Event(), threading.Event()

    class LeavesBadly(FakeBatching):
        def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
            super().run(on_progress, is_stopped)
            in_pass.set()
            goes_on.wait(SECONDS)

        def leave(self) -> None:
            if errors and cancelled.has_ended:
                raise errors.pop()
            super().leave()

    class CancelsBetween(RequestQueue):
        def end_overdue(self) -> None:
            super().end_overdue()
            if in_pass.is_set():  # after a pass, before the next work is chosen
                cancelled.end("interrupted")

    queue = CancelsBetween(LeavesBadly(), 100, lambda: None, ignore_progress, lambda: None)
    cancelled, other = request_of(1, 50), request_of(2, 50)
    with queue.holding_back():
        queue.submit([cancelled, other], "submit", waits=False)
    goes_on.set()
    assert_fails_and_goes_on(queue, other)


def test_waiting_for_idleness_inside_a_block_that_holds_back_is_refused() -> None:
    queue = threaded()
    with queue.holding_back(), pytest.raises(BusyError, match="while_idle"), queue.while_idle():
        pass
    queue.close()


def test_an_idle_thread_ends_and_the_next_request_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "LINGER", 0.0)
    monkeypatch.setattr(queue_module, "GLANCE", 0.001)
    queue = threaded()
    for _ in range(2):
        request = request_of(1)
        queue.submit([request], "submit", waits=False)
        thread = queue._thread
        request.output.wait_to_end(SECONDS)
        assert thread is not None
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert queue._thread is None
    assert queue.run_alone("logits", lambda: 3) == 3


def test_a_queue_that_nobody_refers_to_is_freed_and_its_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "GLANCE", 0.001)
    queue = threaded()
    assert queue.run_alone("logits", lambda: 3) == 3
    thread, reference = queue._thread, weakref.ref(queue)
    del queue
    gc.collect()
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert reference() is None


def test_close_waits_for_the_thread() -> None:
    entered, go_on = threading.Event(), threading.Event()
    queue = threaded()

    def work() -> int:
        entered.set()
        assert go_on.wait(SECONDS)
        return 4

    answers: list[int] = []
    caller = threading.Thread(target=lambda: answers.append(queue.run_alone("logits", work)))
    caller.start()
    assert entered.wait(SECONDS)
    thread = queue._thread
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not queue.is_closed:
        continue
    assert closing.is_alive()
    go_on.set()
    closing.join(SECONDS)
    caller.join(SECONDS)
    assert thread is not None
    assert not thread.is_alive()
    assert answers == [4]  # what has begun ends as it would
