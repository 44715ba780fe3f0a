"""The filler for a device that copies while it computes. Marks in the device's queues order the work, not the host.

    copy      | wait: slot free | ==== 3 ==== *there |
    compute   ... ##1## *free   | wait: there | ##3## *free

    in RAM     ---------------------------------- copies --> slot
    files      --threads--> host slot ----------- copies --> slot     a host slot is refilled after its copies
    expanded   ---------------------- copies --> buffer --> slot      all in the copy queue, so one buffer is enough

A copy into a slot is enqueued after the slot's last reader has been enqueued, because the mark to wait for exists only
then. Copies are enqueued in the order in which they were begun.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcore.streaming.device.queues import Mark, Queues, device_faults
from graphcore.streaming.device.timing import LateEvent
from graphcore.streaming.fill_jobs import FillJob
from graphcore.streaming.read_ticket import ReadTicket
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline


@dataclass(frozen=True)
class Expansion:
    """Work of a device that fills a slot from bytes that have arrived in a buffer on the device.

    Attributes:
        run: function that enqueues the work in the device's current queue; it allocates nothing there.
        slot: tensor that the work writes.
    """

    run: Callable[[], None]
    slot: Tensor


@dataclass(frozen=True)
class Transfer:
    """The work that brings one group or expert into its slot.

    Attributes:
        targets: tensors on the device: the slot's bytes, or one tensor for each projection of an expert; with an
            expansion, the buffer that it reads.
        sources: the same bytes in RAM; None if they must first be read from files.
        jobs: function from tensors in RAM, shaped like the targets, to the jobs that read the bytes into them.
        expansion: what fills the slot from the targets; None if they are the slot's bytes.
    """

    targets: Sequence[Tensor]
    sources: Sequence[Tensor] | None = None
    jobs: Callable[[Sequence[Tensor]], Sequence[FillJob]] | None = None
    expansion: Expansion | None = None


@dataclass(eq=False)
class DeviceCopy:
    """One filling of a slot on the device.

    Attributes:
        sources: tensors in RAM: the stored bytes, or the host slot that they are read into.
        ticket: ticket of the read; None if nothing has to be read.
        after: previous filling of the same slot; None if the slot's last reader was already enqueued.
        readers: mark in the compute queue behind that reader; None if there is an `after`.
        there: mark in the copy queue behind the copies and the expansion; None until they are enqueued.
        free: mark in the compute queue behind the slot's last reader; None until the slot is released.
        is_full: True once the compute queue waits for the copies.
    """

    group: int
    work: Transfer
    sources: Sequence[Tensor]
    ticket: ReadTicket | None
    after: "DeviceCopy | None"
    readers: Mark | None
    there: Mark | None = None
    free: Mark | None = None
    is_full: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the copies have been enqueued; they can no longer be cancelled."""
        return self.there is not None

    @property
    def may_start(self) -> bool:
        """Whether the slot's last reader has been enqueued, so that a copy can be ordered behind it."""
        return self.after is None or self.after.free is not None

    @property
    def is_ready(self) -> bool:
        """Whether the copies can be enqueued without waiting for anything."""
        return self.may_start and (self.ticket is None or self.ticket.is_full)


@dataclass
class HostSlots:
    """A ring of slots in RAM: threads fill them in turn, and copies to a device start from them.

    Attributes:
        slots: memory for the tensors of one filling, by slot; uint8, as long as the longest tensor there.
    """

    filler: ThreadFiller
    slots: Sequence[Sequence[Tensor]]
    _begun: int = 0
    _last: dict[int, ReadTicket] = field(default_factory=dict)

    def begin(self, group: int, work: Transfer) -> tuple[ReadTicket, Sequence[Tensor]]:
        """Start reading into the next slot. Return the read's ticket and the tensors that will hold the bytes."""
        assert work.jobs is not None, "what does not lie in RAM is read"
        number = self._begun % len(self.slots)
        self._begun += 1
        views = tensors_like(work.targets, self.slots[number])
        # Kept across cancellations: copies that are already enqueued still read the slot.
        self._last[number] = self.filler.begin(group, work.jobs(views), self._last.get(number))
        return self._last[number], views


def tensors_like(targets: Sequence[Tensor], memory: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors with the targets' shapes and dtypes, each at the start of its own uint8 memory."""
    pairs = zip(memory, targets, strict=True)
    return [raw[: target.nbytes].view(target.dtype).view(target.shape) for raw, target in pairs]


@dataclass
class DeviceFiller:
    """A filler that copies groups or experts into slots on a device.

    An error that the device raises becomes a StreamingError that names the group.

    Attributes:
        host: slots in RAM that threads read files into; None if all weights already lie in RAM.
    """

    queues: Queues
    timeline: Timeline
    host: HostSlots | None = None
    _waiting: deque[DeviceCopy] = field(default_factory=deque)

    def begin(self, group: int, work: Transfer, after: DeviceCopy | None, /) -> DeviceCopy:
        """Start filling a slot; the copies may be enqueued later."""
        readers: Mark | None = None
        if after is None:
            with device_faults(group):
                readers = self.queues.mark("compute", is_timed=False)
        ticket, sources = None, work.sources
        if sources is None:
            assert self.host is not None, "threads read what does not lie in RAM"
            ticket, sources = self.host.begin(group, work)
        copying = DeviceCopy(group, work, sources, ticket, after, readers)
        self._waiting.append(copying)
        self._start_ready()
        return copying

    def wait(self, copying: DeviceCopy, /) -> None:
        """Make the compute queue wait for the copies. The host waits only until they can be enqueued."""
        while copying.there is None:
            first = self._waiting[0]
            assert first.may_start, f"group {copying.group} was asked for while its slot's last use goes on"
            self._start(first)
        with device_faults(copying.group):
            copying.there.hold("compute")
        copying.is_full = True
        self._start_ready()

    def release(self, copying: DeviceCopy, /) -> None:
        """Allow the slot to be refilled after all compute work that is enqueued so far."""
        with device_faults(copying.group):
            copying.free = self.queues.mark("compute", is_timed=False)
        self._start_ready()

    def cancel(self, copyings: Sequence[DeviceCopy], /) -> None:
        """Cancel fillings. Copies that are already enqueued still run; later copies into their slots run after them."""
        if not copyings:
            return
        given_up = [copying for copying in copyings if copying.there is None]
        self._waiting = deque(copying for copying in self._waiting if copying not in given_up)
        if self.host is not None:
            self.host.filler.cancel([copying.ticket for copying in given_up if copying.ticket is not None])
        with device_faults(None):
            now = self.queues.mark("compute", is_timed=False)
        for copying in copyings:
            copying.free = now
        self._start_ready()

    def end_waits(self) -> None:
        """Let waits for a disk that gives no answer end soon."""
        if self.host is not None:
            self.host.filler.end_waits()

    def close(self) -> None:
        """Stop the reading threads."""
        if self.host is not None:
            self.host.filler.close()

    @property
    def is_reading(self) -> bool:
        """Whether a thread may still be in a read."""
        return self.host is not None and self.host.filler.is_reading

    def _start_ready(self) -> None:
        """Enqueue all copies that can be enqueued without waiting."""
        while self._waiting and self._waiting[0].is_ready:
            self._start(self._waiting[0])

    def _start(self, copying: DeviceCopy) -> None:
        """Wait for the bytes of the first filling in line and enqueue its copies. After a failure it stays first."""
        if copying.ticket is not None:
            assert self.host is not None, "whoever gave the ticket"
            self.host.filler.wait(copying.ticket)
        readers = copying.readers if copying.after is None else copying.after.free
        assert readers is not None, "the slot's last reader has been enqueued"
        work = copying.work
        with device_faults(copying.group):
            readers.hold("copy")
            began = self.queues.mark("copy")
            for source, target in zip(copying.sources, work.targets, strict=True):
                self.queues.copy(flat(source), flat(target))
            if work.expansion is not None:
                self.queues.run(work.expansion.run, work.expansion.slot)
            there = self.queues.mark("copy")
        self._waiting.popleft()
        copying.there, copying.after, copying.readers = (
            there,
            None,
            None,
        )  # else each filling would keep all earlier ones alive
        if copying.ticket is not None and self.host is not None:
            self.host.filler.release(copying.ticket, there.wait)
        nbytes = sum(target.nbytes for target in work.targets)
        self.timeline.add_late(LateEvent("copy", copying.group, began, there, nbytes))


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes, uint8."""
    return tensor.view(-1).view(torch.uint8)
