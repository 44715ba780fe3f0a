"""Request queue, and the worker thread that runs it.

    submit  -->  waiting  -->  running: passes, one after another  -->  ended
                                  |
    run_alone  --> jobs  ------ between two passes

The thread starts with the first request and ends when it has been idle for LINGER seconds, so an unused engine has no
thread. Callers that wait can be interrupted at any time. A pass whose requests have all ended or been abandoned is
aborted between two layer groups.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from graphcore.engine.batching.interface import Batching, NoBatching
from graphcore.engine.masks import MaskThreads, mask_owner, overdue_error
from graphcore.engine.output import closed_error, flush_wakeups, forked_error, one_wakeup_per_loop
from graphcore.engine.request import Request, RequestStatus
from graphcore.errors import BusyError
from graphcore.processors import refuse_forked
from graphcore.progress import Progress
from graphcore.streaming.scheduler import StoppedError
from graphcore.threads import ENGINE_THREADS, EngineThread, is_interpreter_ending, refuse_many_threads, start_thread

LINGER = 2.0  # seconds that the thread waits for more work before it ends
GLANCE = 0.1  # seconds between two looks at whether the interpreter is ending, while the thread waits


class Served(Protocol):
    """The queue for its worker thread, which holds the lock of `changes` in all calls but that of `end_overdue`."""

    def end_overdue(self) -> None:
        """End abandoned requests, those whose deadline has passed, and those whose mask takes too long."""

    def next_work(self) -> Callable[[], None] | None:
        """Return the next work to do; None if there is none."""

    def end_thread(self, is_late: bool) -> bool:
        """Return whether the idle thread is to end; `is_late` if it has been idle for more than LINGER seconds."""


@torch.inference_mode()  # once for all passes: entering it takes 20 us after a step, 1 % of a small one
def compute_for(owner: "weakref.ref[Served]", changes: threading.Condition) -> None:
    """Run the work of a queue until there has been none for LINGER seconds.

    While the thread waits it holds no reference to the queue, so that an unreferenced engine is freed at once.
    """
    idle_since = time.monotonic()
    while True:
        scheduler = owner()
        if scheduler is None:
            return
        scheduler.end_overdue()
        del scheduler
        with changes:
            scheduler = owner()
            if scheduler is None:
                return
            work = scheduler.next_work()
            if work is None:
                if scheduler.end_thread(time.monotonic() - idle_since > LINGER):
                    return
                del scheduler
                changes.wait(GLANCE)
                continue
            del scheduler
        work()
        del work
        idle_since = time.monotonic()


Answer = TypeVar("Answer")


class RequestQueue:
    """The queue of an engine's requests, and the worker thread that runs them.

    Args:
        batching: scheduler of requests into passes.
        most_waiting: requests that may wait; more are refused.
        enter_thread: function that the thread calls before it computes.
        on_progress: callback of the stages "prefill" and "generate", called by the thread.
        check_usable: function that raises if no further pass can run; called after a pass that failed.

    Attributes:
        changes: condition whose lock guards the queue; no pass or job begins while it is held.
        is_closed: True once no request is taken any more.
        mask_threads: threads that compute the masks of its requests.
        failure: error that keeps passes from running since one has failed; None while the engine can go on.
    """

    def __init__(
        self,
        batching: Batching,
        most_waiting: int,
        enter_thread: Callable[[], None],
        on_progress: Progress,
        check_usable: Callable[[], None],
    ) -> None:
        self.batching, self._most_waiting = batching, most_waiting
        self._enter_thread, self._on_progress = enter_thread, on_progress
        self._check_usable = check_usable
        self.mask_threads = MaskThreads()
        self._is_broken = False  # whether the caches could not be cleaned up after a failed pass
        self.failure: BaseException | None = None
        self.changes = threading.Condition(threading.RLock())
        self._waiting: deque[Request] = deque()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any], bool]] = deque()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._was_job = False
        self._glanced = 0.0  # time.monotonic() of the last look at whether the interpreter is ending
        self._holder: int | None = None  # the thread that is inside `holding_back`
        self._is_computing = False  # whether the worker thread runs a pass or a job
        self._closing_error: BaseException | None = None  # what calls raise once the queue is closed
        self._began = 0.0  # time.monotonic() of the beginning of the newest pass or job
        self.is_closed = False

    def check_open(self) -> None:
        """Check that the engine is open and, after a failure, that passes can run again: a disk may have come back.

        Raises:
            ConfigError: the engine is closed.
            Exception: a pass has failed, and no other can run; the error says why.
        """
        if self.is_closed and self._closing_error is not None:
            raise self._closing_error
        self.check_not_closed()
        failure = self.failure
        if failure is not None:
            if self._is_broken:
                raise failure
            self._check_usable()
            self.failure = None

    def check_not_closed(self) -> None:
        """Check that the engine is not closed; it may have failed.

        Raises:
            ConfigError: the engine is closed.
        """
        if self.is_closed:
            raise closed_error()

    def submit(self, requests: Sequence[Request], name: str, waits: bool) -> None:
        """Put requests at the end of the queue.

        Args:
            name: the called method's name, for messages.
            waits: True to wait while the queue is full, False to refuse.

        Raises:
            BusyError: the queue is full, or the call is inside `on_progress` or a mask.
            ConfigError: the engine is closed.
            GraphError: this process was forked from the one that loaded the model, and computes with several threads.
            ThreadLimitError: the system does not start the engine's thread; the request does not wait.
        """
        self._enter(name)
        with self.changes:
            self.check_open()
            if not waits and len(self._waiting) + len(requests) > self._most_waiting:
                raise BusyError(
                    f"{len(self._waiting)} requests wait already, and batching.max_waiting={self._most_waiting}; "
                    "submit later, or set more"
                )
            for request in requests:
                request.output.before_waiting = self._refuse_waiting
                self.changes.wait_for(lambda: self.is_closed or len(self._waiting) < self._most_waiting)
                self.check_open()
                self._start()  # first: if the system starts no thread, nothing waits that a later one would run
                if request.mask is not None:
                    request.mask.begin()
                self._waiting.append(request)

    def run_alone(self, name: str, work: Callable[[], Answer], *, lends: bool = True) -> Answer:
        """Run a function that uses the caches, between two passes, and return its result.

        Args:
            lends: True to lend the whole KV cache to the function; it is restored for the requests afterwards.

        Raises:
            BusyError: the call is inside `on_progress` or a mask.
            ConfigError: the engine is closed.
            GraphError: as for `submit`.
        """
        self._enter(name)
        answer: Future[Answer] = Future()
        with self.changes:
            self.check_open()
            self._start()
            self._jobs.append((work, answer, lends))
        try:
            return answer.result()
        except BaseException:  # Ctrl-C too
            answer.cancel()
            raise

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Begin no pass and no job inside the block."""
        with self.changes:
            before, self._holder = self._holder, threading.get_ident()
            try:
                yield
            finally:
                self._holder = before

    @contextmanager
    def while_idle(self) -> Iterator[None]:
        """Wait until no request and no job runs, and begin none inside the block.

        Raises:
            BusyError: it is the worker thread, or the call is inside `holding_back`, which the wait would end.
        """
        self.refuse_inside("while_idle")
        self._leave_parent()
        if self._holder == threading.get_ident():
            raise BusyError("while_idle() waits for requests, which do not run inside holding_back(); call it before")
        with self.changes:
            self.changes.wait_for(lambda: not self._is_computing or not self._lives())
            with self.holding_back():
                yield

    def status(self) -> list[RequestStatus]:
        """Return the progress of each request that has not ended, running ones first."""
        self._leave_parent()
        with self.changes:
            each = (*self.batching.running, *self._waiting)
        return [one.status(*self.batching.page_counts(one)) for one in each if not one.has_ended]

    @property
    def pass_seconds(self) -> float:
        """Seconds since the running pass or job began; 0 while there is no work. No lock is taken: it may be held."""
        return time.monotonic() - self._began if self._is_computing else 0.0

    def close(self, end_waits: Callable[[], None] = lambda: None, failure: BaseException | None = None) -> None:
        """Refuse further requests, end all others with an error, and wait until the thread has ended.

        Args:
            end_waits: function that lets the thread's waits for a disk that gives no answer end soon.
            failure: error that later calls raise; None says that the engine is closed.

        Raises:
            BusyError: the call is inside `on_progress` or a mask.
        """
        self.refuse_inside("close")
        self._closing_error = failure
        self.stop()
        end_waits()
        thread = self._thread
        if thread is not None:
            thread.join()
        if self._waiting or self._jobs:  # a thread that died has left them
            self._end_waiting(closed_error())
        self.mask_threads.close()
        self.batching = NoBatching()  # handles that callers keep must not keep the model's memory

    def stop(self) -> None:
        """Refuse further requests and let the thread end after its current work."""
        self._leave_parent()
        with self.changes:
            self.is_closed = True
            self.changes.notify_all()

    def _enter(self, name: str) -> None:
        """Check that a call may put something into the queue."""
        refuse_forked(torch.get_num_threads())
        self.refuse_inside(name)
        self._leave_parent()

    def _leave_parent(self) -> None:
        """In a forked process, drop the parent's thread, its lock and its requests."""
        if self._process != os.getpid():  # the parent's thread is not here, and its requests are the parent's
            self._process, self._thread, self._is_computing = os.getpid(), None, False
            self.changes = threading.Condition(threading.RLock())
            self._end_all(forked_error())

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is one that the queue's end waits for: it must not wait for that."""
        return self._computes_here or self._holder == threading.get_ident()

    @property
    def _computes_here(self) -> bool:
        return threading.current_thread() is self._thread or mask_owner() is self.mask_threads

    def refuse_inside(self, name: str) -> None:
        """Check that a method may wait for the queue's thread.

        Raises:
            BusyError: the call is inside `on_progress` or a mask.
        """
        if self._computes_here:
            raise BusyError(
                f"{name}() was called inside a function that the engine calls while it computes (on_progress or a "
                "mask), and would wait for itself for ever; call it from another thread, or load a second engine"
            )

    def _refuse_waiting(self) -> None:
        """Check that the calling thread may wait for an answer.

        Raises:
            BusyError: it is the worker thread, or the call is inside `holding_back`.
        """
        self.refuse_inside("result")
        if self._holder == threading.get_ident():
            raise BusyError("requests do not run inside holding_back(); wait for the answer after the block")

    def _lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        """Wake the thread, or start one; the lock is held."""
        if not self._lives():
            refuse_many_threads(torch.get_num_threads(), ENGINE_THREADS)
            work = partial(compute_for, weakref.ref(self), self.changes)
            self._thread = start_thread(work, "graphcore", daemon=False, kind=EngineThread)
        self.changes.notify_all()

    def next_work(self) -> Callable[[], None] | None:
        """Return the thread's next work; None if there is none. The lock is held."""
        was_computing = self._is_computing
        try:
            work = self._next_work()
        except BaseException as error:  # noqa: BLE001  # rows could not be freed: the thread lives on, to end requests
            work = partial(self._fail_pass, error)
        self._began = time.monotonic()  # before the flag, for `pass_seconds`
        self._is_computing = work is not None
        if was_computing and work is None:
            self.changes.notify_all()
        return work

    def _next_work(self) -> Callable[[], None] | None:
        if self.is_closed or self._is_broken or self._sees_the_end():
            has_any = bool(self._waiting or self._jobs or any(not one.has_ended for one in self.batching.running))
            return self._end_all if has_any else None
        self._drop_ended()
        has_requests = bool(self._waiting or self.batching.running)
        self._was_job = bool(self._jobs) and not (self._was_job and has_requests)  # jobs and passes take turns
        if self._was_job:
            return self._run_job
        return self._run_pass if has_requests else None

    def end_thread(self, is_late: bool) -> bool:
        """Return whether the idle thread is to end, and then drop the reference to it. The lock is held.

        Args:
            is_late: True if the thread has been idle for more than LINGER seconds.
        """
        ends = is_late or self.is_closed or is_interpreter_ending()
        if ends:
            self._thread = None
        return ends

    def _sees_the_end(self) -> bool:
        """Return whether the interpreter is ending; it is looked at once in GLANCE seconds."""
        now = time.monotonic()
        if now - self._glanced < GLANCE:
            return False
        self._glanced = now
        return is_interpreter_ending()

    def _run_job(self) -> None:
        with self.changes:
            work, answer, lends = self._jobs.popleft()
        if not answer.set_running_or_notify_cancel():
            return
        try:
            self._enter_thread()
            give_back = self.batching.lend_cache() if lends else lambda: None
            try:
                with torch.inference_mode(mode=False):
                    found = work()
            finally:
                give_back()
        except BaseException as error:  # noqa: BLE001  # it is raised for the caller of `run_alone`
            answer.set_exception(error)
        else:
            answer.set_result(found)

    def _run_pass(self) -> None:
        batching = self.batching
        try:
            with self.changes:
                admitted = batching.admit(tuple(self._waiting))
                for _ in range(admitted):
                    self._waiting.popleft()
                if admitted:  # there is room in the queue
                    self.changes.notify_all()
            running = [request for request in batching.running if not request.has_ended]
            for request in running:
                request.batch = max(request.batch, len(running))
            self._enter_thread()
            with one_wakeup_per_loop:
                batching.run(self._report, self._is_given_up)
            batching.leave()
        except StoppedError:
            if self.is_closed:
                batching.fail(closed_error())
            batching.give_up()
        except BaseException as error:  # noqa: BLE001  # it is raised for the readers of the requests
            self._fail_pass(error)

    def _report(self, stage: str, group: int | None, done: int, total: int) -> None:
        """Call `on_progress` after waking the tasks that wait for tokens: it may wait for one of them."""
        flush_wakeups()
        self._on_progress(stage, group, done, total)

    def _fail_pass(self, error: BaseException) -> None:
        """End what ran with the error of a pass and, if no other pass can run, all that waits, too."""
        failure = self.failure = self._lasting_failure()  # before readers get the error, and ask
        try:
            self.batching.fail(error)
        except BaseException as further:  # noqa: BLE001  # the caches cannot be cleaned up: a CUDA error comes again
            failure = self.failure = further
            self._is_broken = True
            for request in self.batching.running:
                request.fail(error)
        if failure is not None:
            self._end_waiting(failure)

    def notice_failure(self) -> None:
        """Set `failure`, and end what waits with it, if no pass can run although none has failed: a rank is gone."""
        if self.is_closed or self.failure is not None:
            return
        self.failure = self._lasting_failure()
        if self.failure is not None:
            self._end_waiting(self.failure)

    def _lasting_failure(self) -> BaseException | None:
        """Return after a failed pass the error that keeps others from running; None if they can."""
        if self.is_closed:  # no other follows, and the check reads from a disk that may give no answer
            return closed_error()
        try:
            self._check_usable()
        except BaseException as error:  # noqa: BLE001  # raised for callers by `check_open`
            return error
        return None

    def _is_given_up(self) -> bool:
        """Return whether to abort the running pass: no request needs it any more, or the engine is closed."""
        if self.is_closed or is_interpreter_ending():
            return True
        return all(request.has_ended or request.is_unwanted for request in self.batching.running)

    def end_overdue(self) -> None:
        """End abandoned requests, those whose deadline has passed, and those whose mask takes too long.

        The lock is not held, because callbacks at an end may need a lock of the caller.
        """
        now = time.perf_counter()
        with self.changes:
            requests = (*self._waiting, *self.batching.running)
        for request in requests:
            if request.is_unwanted:
                request.end("interrupted")
            elif request.deadline is not None and now > request.deadline:
                request.end("deadline")
            elif request.mask is not None and request.mask.is_overdue:
                request.fail(overdue_error())

    def _drop_ended(self) -> None:
        """Remove requests that have ended."""
        if any(request.has_ended for request in self._waiting):
            for request in self._waiting:
                if request.has_ended and request.mask is not None:
                    request.mask.abandon()
            self._waiting = deque(request for request in self._waiting if not request.has_ended)
            self.changes.notify_all()
        self.batching.leave()

    def _end_all(self, error: BaseException | None = None) -> None:
        """End all requests and jobs with an error, outside the lock: callbacks may need a lock of the caller."""
        error = error or (self.failure if self._is_broken and self.failure else closed_error())
        self._end_waiting(error)
        if self._is_broken:
            for request in self.batching.running:
                request.fail(error)
        else:
            self.batching.fail(error)

    def _end_waiting(self, error: BaseException) -> None:
        """End requests and jobs that have not begun with an error."""
        with self.changes:
            waiting, self._waiting = self._waiting, deque()
            jobs, self._jobs = self._jobs, deque()
        for request in waiting:
            request.fail(error)
        for _, answer, _ in jobs:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
