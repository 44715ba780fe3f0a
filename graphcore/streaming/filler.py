"""Threads that fill slots: each takes a job, reads into a buffer of its own, waits for the slot, and writes.

    jobs  1  read | write                              several reads are in flight, and reading goes on while
          2  read       | write                        a slot is still in use: as many buffers ahead as there
          3    read        | (slot in use) | write     are threads

Jobs are taken in the order in which their tickets (ticket.py) were begun, so a thread that waits for a slot never keeps
an earlier ticket from being done.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.errors import GraphcoreError, StreamingError
from graphcore.streaming.jobs import Job, read_job, read_straight
from graphcore.streaming.pages import shared_pages
from graphcore.streaming.ticket import Ticket
from graphcore.streaming.timeline import Event, Lane, Timeline

LIVELINESS_SECONDS = 0.2  # between two looks whether the threads that are waited for still live


@dataclass
class Filler:
    """The threads, and what they are to do.

    Attributes:
        files: open, by path; jobs read from them.
        buffer_nbytes: of each thread's buffer; larger jobs share one buffer of `large_nbytes`.
        lane: what its events are: "copy", or "read" where the slots are not yet a device's.
    """

    files: Mapping[Path, ByteSource]
    num_threads: int
    buffer_nbytes: int
    large_nbytes: int
    timeline: Timeline
    lane: Lane = "copy"
    _queue: deque[tuple[Ticket, Job]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _large_lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)
    _at: dict[int, Ticket] = field(default_factory=dict)  # what each thread is at, by its number
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._started = threading.Barrier(self.num_threads + 1)
        self._large = shared_pages(self.large_nbytes)
        threads = torch.get_num_threads()
        for number in range(self.num_threads):
            name = f"graphcore-fill-{number}"
            self._threads.append(threading.Thread(target=self._work, args=(number,), name=name, daemon=True))
            self._threads[-1].start()
        self._started.wait()
        torch.set_num_threads(threads)  # a thread's own number becomes the default of those that are yet to be

    def begin(self, group: int, jobs: Sequence[Job], after: Ticket | None) -> Ticket:
        """Start filling a group's slot; return at once.

        Args:
            after: whose release the slot waits for; None if it is free.

        Raises:
            StreamingError: nothing can be filled any more.
        """
        self._check_alive()
        while after is not None and after.is_cancelled:
            after = after.after  # for which the one that was given up has not waited
        ticket = Ticket(group, after, len(jobs), len(jobs))
        with self._changed:
            self._queue.extend((ticket, job) for job in jobs)
            self._changed.notify_all()
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Return when the slot holds the group's bytes.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: a thread has died, or something that no file can be blamed for has failed.
        """
        assert not ticket.is_cancelled, f"group {ticket.group} was given up"
        with self._changed:
            while not ticket.is_over:
                self._check_alive()
                self._changed.wait(LIVELINESS_SECONDS)
        if isinstance(ticket.fault, GraphcoreError):
            raise ticket.fault
        if ticket.fault is not None:
            what = f"{type(ticket.fault).__name__}: {ticket.fault}"
            raise StreamingError(f"weights of group {ticket.group} could not be read: {what}") from ticket.fault

    def release(self, ticket: Ticket, drained: Callable[[], None] | None = None) -> None:
        """Say that nobody reads the ticket's slot any more, or only a copy.

        Args:
            drained: returns when that copy is done; called by a thread that is about to overwrite the slot.
        """
        with self._changed:
            ticket.drained = drained
            ticket.is_released = True
            self._changed.notify_all()

    def cancel(self, tickets: Collection[Ticket]) -> None:
        """Return when no thread is at these tickets' jobs any more; their slots hold nothing of use."""
        with self._changed:
            for ticket in tickets:
                ticket.is_cancelled = ticket.is_released = True
            self._queue = deque(item for item in self._queue if not item[0].is_cancelled)
            self._changed.notify_all()
            # A thread that died at a job will never leave it.
            while any(at in tickets and self._threads[number].is_alive() for number, at in self._at.items()):
                self._changed.wait(LIVELINESS_SECONDS)

    def close(self) -> None:
        """End the threads and return when they have ended; nothing can be begun after."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @torch.inference_mode()  # as whoever allocated the slots was, or they could not be written to
    def _work(self, number: int) -> None:
        torch.set_num_threads(1)  # casts and folds: a team of its own for each of these threads would crowd out compute
        self._started.wait()
        buffer = shared_pages(self.buffer_nbytes)
        while (item := self._take(number)) is not None:
            ticket, job = item
            fault: BaseException | None = None
            try:
                self._do(ticket, job, buffer, number)
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits for the ticket
                fault = error
            self._end(number, ticket, fault)

    def _check_alive(self) -> None:
        """Return if the threads work."""
        if self._is_closed:
            raise StreamingError("this engine is closed and reads no more weights; load it again")
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead:
            raise StreamingError(f"thread {dead[0]}, which reads weights, has died; load the model again")

    def _take(self, number: int) -> tuple[Ticket, Job] | None:
        """Return the next job, or None when there will be none."""
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            ticket, job = self._queue.popleft()
            self._at[number] = ticket
            return ticket, job

    def _do(self, ticket: Ticket, job: Job, buffer: Tensor, number: int) -> None:
        if job.room <= buffer.nbytes:
            self._fill(ticket, job, buffer, number)
            return
        # Whoever has the buffer that all share must not wait for a slot: the slot may be waiting for an earlier ticket,
        # and that one for the buffer.
        if self._await_slot(ticket):
            with self._large_lock:
                self._fill(ticket, job, self._large, number)

    def _fill(self, ticket: Ticket, job: Job, buffer: Tensor, number: int) -> None:
        began = time.perf_counter()
        read_job(job, self.files, buffer)
        read_at = time.perf_counter()
        if job.reads:
            self.timeline.add(Event(self.lane, ticket.group, began, read_at, job.nbytes, number))
        if not self._await_slot(ticket):
            return
        began = time.perf_counter()
        read_straight(job, self.files)
        for piece, places in job.pieces:
            parts = [buffer[at : at + span.nbytes] for at, span in zip(places, piece.spans, strict=True)]
            piece.write(parts, 1)
        nbytes = 0 if job.reads else job.nbytes
        self.timeline.add(Event(self.lane, ticket.group, began, time.perf_counter(), nbytes, number))
        if self._is_last(ticket):
            for file in self.files.values():
                file.check_unchanged()

    def _await_slot(self, ticket: Ticket) -> bool:
        """Return True when the slot may be written to, False if it never needs to be."""
        with self._changed:
            while not ticket.may_write and not ticket.is_cancelled and not self._is_closed:
                self._changed.wait()
            if ticket.is_cancelled or self._is_closed:
                return False  # whoever has the slot next waits in its place
            after = ticket.after
        if after is not None and after.drained is not None:
            after.drained()  # before `after` goes, so that no other thread overtakes this one
        with self._changed:
            ticket.after = None  # or every ticket would keep all before it alive
            return not ticket.is_cancelled and not self._is_closed

    def _is_last(self, ticket: Ticket) -> bool:
        """Count a job's pieces as written; return whether they were the last."""
        with self._changed:
            ticket.unwritten -= 1
            return ticket.unwritten == 0

    def _end(self, number: int, ticket: Ticket, fault: BaseException | None) -> None:
        with self._changed:
            del self._at[number]
            ticket.left -= 1
            ticket.fault = ticket.fault or fault
            self._changed.notify_all()
