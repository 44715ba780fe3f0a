"""Threads that fill slots: each takes a job, reads into its own buffer, waits for the slot, and writes.

    jobs  1  read | write                              several reads are in flight, and reading goes on while
          2  read       | write                        a slot is still in use: as many buffers ahead as there
          3    read        | (slot in use) | write     are threads

Jobs are taken in the order in which their tickets (read_ticket.py) were begun, so a thread that waits for a slot never
blocks an earlier ticket.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.errors import GraphcoreError, StreamingError
from graphcore.host_pages import shared_pages
from graphcore.streaming.fill_jobs import ROOM, FillJob, read_job, read_straight
from graphcore.streaming.read_ticket import ReadTicket
from graphcore.streaming.timeline import Event, Lane, Timeline
from graphcore.threads import is_interpreter_ending, start_threads
from graphcore.weights.conversion import CONVERSION_NBYTES

THREADS = 4  # number of threads, and so of reads in flight; the disks measured reach full speed with two to four
LIVELINESS_SECONDS = 0.2  # interval between checks that the threads are alive
# Seconds without an answer after which a disk is given up while an engine is being closed. Otherwise nothing limits a
# wait for it: a disk of a network may come back.
PATIENCE = 5.0


@dataclass
class ThreadFiller:
    """A filler whose threads read files or copy memory into slots.

    Attributes:
        files: open files that jobs read from, by path.
        buffer_nbytes: bytes of each thread's buffer. Larger jobs share one buffer of `large_nbytes`.
        lane: lane of the filler's events: "copy", or "read" if the slots are host slots for a device.
    """

    files: Mapping[Path, ByteSource]
    num_threads: int
    buffer_nbytes: int
    large_nbytes: int
    timeline: Timeline
    lane: Lane = "copy"
    _queue: deque[tuple[ReadTicket, FillJob]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _large_lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)
    _at: dict[int, ReadTicket] = field(default_factory=dict)  # the ticket that each thread works on, by its number
    _moved: float = field(default_factory=time.monotonic)  # when a thread last began or ended a job
    _ending_since: float | None = None  # when waits were told to end
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._started = threading.Barrier(self.num_threads + 1)
        self._large = shared_pages(self.large_nbytes)
        threads = torch.get_num_threads()
        numbers = range(self.num_threads)
        self._threads = start_threads({f"graphcore-fill-{number}": partial(self._work, number) for number in numbers})
        self._started.wait()
        torch.set_num_threads(threads)  # `_work` sets it, which changes the default for new threads

    def begin(self, group: int, jobs: Sequence[FillJob], after: ReadTicket | None) -> ReadTicket:
        """Start filling a group's slot; return at once.

        Args:
            after: ticket whose release the slot waits for; None if the slot is free.

        Raises:
            StreamingError: the filler is closed, or a thread has died.
        """
        self.check_alive()
        while after is not None and after.is_cancelled:
            after = after.after  # the cancelled ticket may not have waited for it
        ticket = ReadTicket(group, after, len(jobs), len(jobs))
        with self._changed:
            self._queue.extend((ticket, job) for job in jobs)
            self._changed.notify_all()
        return ticket

    def wait(self, ticket: ReadTicket) -> None:
        """Block until the slot holds the group's bytes.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: a thread has died, or failed for a reason other than a file; or the disk gives no answer
                while the engine is being closed.
        """
        assert not ticket.is_cancelled, f"group {ticket.group} was given up"
        with self._changed:
            while not ticket.is_over:
                self.check_alive()
                self._refuse_hung()
                self._changed.wait(LIVELINESS_SECONDS)
        if isinstance(ticket.fault, GraphcoreError):
            raise ticket.fault
        if ticket.fault is not None:
            what = f"{type(ticket.fault).__name__}: {ticket.fault}"
            raise StreamingError(f"weights of group {ticket.group} could not be read: {what}") from ticket.fault

    def release(self, ticket: ReadTicket, drained: Callable[[], None] | None = None) -> None:
        """Allow the ticket's slot to be refilled, at once or after a copy that still reads it.

        Args:
            drained: function that blocks until that copy is done, called by a thread before it overwrites the slot;
                None if there is no such copy.
        """
        with self._changed:
            ticket.drained = drained
            ticket.is_released = True
            self._changed.notify_all()

    def cancel(self, tickets: Collection[ReadTicket]) -> None:
        """Cancel tickets and block until no thread works on them. The contents of their slots are undefined.

        Raises:
            StreamingError: the disk gives no answer while the engine is being closed; a thread may still write.
        """
        with self._changed:
            for ticket in tickets:
                ticket.is_cancelled = ticket.is_released = True
            self._queue = deque(item for item in self._queue if not item[0].is_cancelled)
            self._changed.notify_all()
            # A thread that died during a job never finishes it.
            while any(at in tickets and self._threads[number].is_alive() for number, at in self._at.items()):
                self._refuse_hung()
                self._changed.wait(LIVELINESS_SECONDS)

    def end_waits(self) -> None:
        """Let waits fail from now on if the disk gives no answer for `PATIENCE` seconds: the engine is being closed."""
        with self._changed:
            self._ending_since = self._ending_since or time.monotonic()
            self._changed.notify_all()

    def _refuse_hung(self) -> None:
        """Check that the disk answers, if the engine is being closed or the interpreter ends. The lock is held."""
        if self._ending_since is None:
            if not is_interpreter_ending():
                return
            self._ending_since = time.monotonic()
        if self._at and time.monotonic() - max(self._moved, self._ending_since) > PATIENCE:
            groups = sorted({ticket.group for ticket in self._at.values()})
            raise StreamingError(
                f"the disk has not answered for {PATIENCE:g} s while groups {groups} are read and the engine is "
                "being closed; check the disk"
            )

    def close(self) -> None:
        """Stop the threads and wait `PATIENCE` seconds for the end of their reads; no filling can begin afterwards.

        A thread whose read does not return is left behind (`is_reading`). It is a daemon thread, and keeps alive what
        its read writes to, its buffer and its job's slot, until the read returns.
        """
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._queue.clear()
            self._changed.notify_all()
        end = time.monotonic() + (0.0 if was_closed else PATIENCE)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    @property
    def is_reading(self) -> bool:
        """Whether a thread may still be in a read: the files have to stay open, and slots have to stay in memory."""
        return any(thread.is_alive() for thread in self._threads)

    @torch.inference_mode()  # the slots were allocated in this mode and can only be written in it
    def _work(self, number: int) -> None:
        torch.set_num_threads(1)  # a pool for the casts and folds of each of these threads would slow down compute
        self._started.wait()
        buffer = shared_pages(self.buffer_nbytes)
        while (item := self._take(number)) is not None:
            ticket, job = item
            fault: BaseException | None = None
            try:
                self._do(ticket, job, buffer, number)
            except BaseException as error:  # noqa: BLE001  # raised again in `wait`
                fault = error
            self._end(number, ticket, fault)

    def check_alive(self) -> None:
        """Check that weights can be read.

        Raises:
            StreamingError: the filler is closed, or a thread has died.
        """
        if self._is_closed:
            raise StreamingError("this engine is closed and reads no more weights; load it again")
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead:
            raise StreamingError(f"thread {dead[0]}, which reads weights, has died; load the model again")

    def _take(self, number: int) -> tuple[ReadTicket, FillJob] | None:
        """Block until a job is queued and return it with its ticket; None if the filler is closed."""
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            ticket, job = self._queue.popleft()
            self._at[number], self._moved = ticket, time.monotonic()
            return ticket, job

    def _do(self, ticket: ReadTicket, job: FillJob, buffer: Tensor, number: int) -> None:
        if job.room <= buffer.nbytes:
            self._fill(ticket, job, buffer, number)
            return
        # A thread that holds the shared buffer must not wait for a slot: the slot may be waiting for an earlier ticket,
        # and that ticket for the buffer.
        if self._await_slot(ticket):
            with self._large_lock:
                self._fill(ticket, job, self._large, number)

    def _fill(self, ticket: ReadTicket, job: FillJob, buffer: Tensor, number: int) -> None:
        began = time.perf_counter()
        read_job(job, self.files, buffer)
        read_at = time.perf_counter()
        if job.reads:
            self.timeline.add(Event(self.lane, ticket.group, began, read_at, job.nbytes, number))
        if not self._await_slot(ticket):
            return
        began = time.perf_counter()
        read_straight(job, self.files)
        for conversion, places in job.conversions:
            parts = [buffer[at : at + span.nbytes] for at, span in zip(places, conversion.spans, strict=True)]
            conversion.write(parts, 1)
        nbytes = 0 if job.reads else job.nbytes
        self.timeline.add(Event(self.lane, ticket.group, began, time.perf_counter(), nbytes, number))
        if self._is_last(ticket):
            for file in self.files.values():
                file.check_unchanged()

    def _await_slot(self, ticket: ReadTicket) -> bool:
        """Wait for the slot. Return True when it may be written, False if the ticket or the filler was cancelled."""
        with self._changed:
            while not ticket.may_write and not ticket.is_cancelled and not self._is_closed:
                self._changed.wait()
            if ticket.is_cancelled or self._is_closed:
                return False  # the slot's next ticket waits instead
            after = ticket.after
        if after is not None and after.drained is not None:
            after.drained()  # before `after` is cleared, so that no other thread writes too early
        with self._changed:
            ticket.after = None  # else each ticket would keep all earlier ones alive
            return not ticket.is_cancelled and not self._is_closed

    def _is_last(self, ticket: ReadTicket) -> bool:
        """Count a job as written; return whether it was the ticket's last."""
        with self._changed:
            ticket.unwritten -= 1
            return ticket.unwritten == 0

    def _end(self, number: int, ticket: ReadTicket, fault: BaseException | None) -> None:
        with self._changed:
            del self._at[number]
            self._moved = time.monotonic()
            ticket.left -= 1
            ticket.fault = ticket.fault or fault
            self._changed.notify_all()


def filler_for(
    jobs: Mapping[int, Sequence[FillJob]],
    files: Mapping[Path, ByteSource],
    timeline: Timeline,
    lane: Lane = "copy",
    most_nbytes: int = CONVERSION_NBYTES,
) -> ThreadFiller:
    """Return a filler whose buffers are large enough for the jobs.

    Args:
        lane: lane as for `ThreadFiller`.
        most_nbytes: most bytes of a job of rows, as for `jobs_of`; each thread's buffer holds one.
    """
    room = max((job.room for each in jobs.values() for job in each), default=0)
    own = most_nbytes + ROOM
    return ThreadFiller(files, THREADS, own if room else 0, room if room > own else 0, timeline, lane)
