"""Brings experts to a device with memory of its own: copies in its copy lane, ordered by marks, not by the host.

Held      store ------------------------------ copies --> slot
Staged    file  --threads--> host slot ------- copies --> slot      a host slot is filled again when its copies are done

A copy waits for what was enqueued to compute before it was begun, because the slot's last reader is among that; what
computes waits for the mark behind the copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcore.streaming.device_watch import LateEvent
from graphcore.streaming.filler import Filler
from graphcore.streaming.jobs import Job
from graphcore.streaming.lanes import Lanes, Mark, device_faults
from graphcore.streaming.ticket import Ticket
from graphcore.streaming.timeline import Timeline


@dataclass(frozen=True)
class Copies:
    """What brings one expert into its slot.

    Attributes:
        targets: on the device, a tensor for each projection.
        sources: the same bytes in RAM; None where they are yet to be read.
        jobs: that read the expert into tensors like the targets, in RAM.
    """

    targets: Sequence[Tensor]
    sources: Sequence[Tensor] | None = None
    jobs: Callable[[Sequence[Tensor]], Sequence[Job]] | None = None


@dataclass(eq=False)
class Copying:
    """One filling of a slot.

    Attributes:
        there: behind the copies, in the copy lane; None until they are enqueued.
        ticket: of what is read into `host` first.
        left: 1 until what computes waits for the copies.
    """

    group: int
    work: Copies
    there: Mark | None = None
    ticket: Ticket | None = None
    host: Sequence[Tensor] = ()
    left: int = 1
    fault: BaseException | None = None


@dataclass
class ExpertCopies:
    """Copies experts; a carrier of `ExpertCache`.

    Attributes:
        filler: of host slots; None where all experts wait in RAM.
        host: slots in RAM, one expert in each: a tensor for each projection.
    """

    lanes: Lanes
    timeline: Timeline
    filler: Filler | None = None
    host: Sequence[Sequence[Tensor]] = ()
    _begun: int = 0
    _last: dict[int, Ticket] = field(default_factory=dict)

    def begin(self, group: int, work: Sequence[Copies], _after: None, /) -> Copying:
        """Start filling a slot; what is read from files is copied when it is waited for."""
        (one,) = work
        copying = Copying(group, one)
        if one.sources is not None:
            self._enqueue(copying, one.sources)
            return copying
        assert self.filler is not None, "threads read what does not wait in RAM"
        assert one.jobs is not None, "what does not wait in RAM is read"
        number = self._begun % len(self.host)
        self._begun += 1
        copying.host = [slot.view(target.dtype).view(target.shape) for slot, target in self._fitting(number, one)]
        # Kept across cancellations: copies that have been enqueued still read the host slot.
        copying.ticket = self.filler.begin(group, one.jobs(copying.host), self._last.get(number))
        self._last[number] = copying.ticket
        return copying

    def wait(self, copying: Copying, /) -> None:
        """Have the compute lane wait for the copies; the host waits only for files.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more, or the device has failed.
        """
        if copying.ticket is not None and copying.there is None:
            assert self.filler is not None, "whoever gave the ticket"
            self.filler.wait(copying.ticket)
            there = self._enqueue(copying, copying.host)
            self.filler.release(copying.ticket, there.wait)
        assert copying.there is not None, "copies are enqueued when their bytes are there"
        with device_faults(copying.group):
            copying.there.hold("compute")
        copying.left = 0

    def cancel(self, copyings: Sequence[Copying], /) -> None:
        """Give up fillings; copies that are enqueued run, and later ones into their slots come behind them."""
        tickets = [one.ticket for one in copyings if one.ticket is not None and one.there is None]
        if self.filler is not None:
            self.filler.cancel(tickets)

    def close(self) -> None:
        """End the threads."""
        if self.filler is not None:
            self.filler.close()

    def _fitting(self, number: int, work: Copies) -> list[tuple[Tensor, Tensor]]:
        """Return a host slot's first bytes for each of the targets."""
        raw = self.host[number]
        return [(one[: target.nbytes], target) for one, target in zip(raw, work.targets, strict=True)]

    def _enqueue(self, copying: Copying, sources: Sequence[Tensor]) -> Mark:
        with device_faults(copying.group):
            self.lanes.mark("compute", is_timed=False).hold("copy")
            began = self.lanes.mark("copy")
            for source, target in zip(sources, copying.work.targets, strict=True):
                self.lanes.copy(_raw(source), _raw(target))
            copying.there = self.lanes.mark("copy")
        nbytes = sum(target.nbytes for target in copying.work.targets)
        self.timeline.add_late(LateEvent("copy", copying.group, began, copying.there, nbytes))
        return copying.there


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
