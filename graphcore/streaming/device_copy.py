"""The carrier for a device that copies while it computes: one copy for each filling, ordered by marks, not by the host.

    copy      | wait: slot free | ==== 3 ==== *there |
    compute   ... ##1## *free   | wait: there | ##3## *free

A copy into a slot is enqueued once the slot's last reader has been enqueued, because only then is there a mark to wait
for. Copies are enqueued in the order in which they were begun.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from torch import Tensor

from graphcore.streaming.device_watch import LateEvent
from graphcore.streaming.lanes import Lanes, Mark, device_faults
from graphcore.streaming.staging import LoadT, Store
from graphcore.streaming.timeline import Timeline


@dataclass(eq=False)
class Copying(Generic[LoadT]):
    """One filling of a slot on the device.

    Attributes:
        slot: uint8, at least as long as the group.
        after: the filling of the same slot before this one; None when there is nothing to wait for.
        load: where the bytes come from.
        there: behind the copy, in the copy lane; None until it is enqueued.
        free: behind the slot's last reader, in the compute lane; None until it is released.
    """

    group: int
    slot: Tensor
    after: "Copying[LoadT] | None"
    load: LoadT
    there: Mark | None = None
    free: Mark | None = None

    @property
    def is_done(self) -> bool:
        """Whether the copy has been enqueued, which cannot be taken back."""
        return self.there is not None

    @property
    def may_start(self) -> bool:
        """Whether the slot's last reader is known."""
        return self.after is None or self.after.free is not None


@dataclass
class DeviceCopy(Generic[LoadT]):
    """Copies groups into slots of a device; work is the slot.

    What a device raises when it has failed comes out as a StreamingError that names the group.
    """

    lanes: Lanes
    store: Store[LoadT]
    timeline: Timeline
    _waiting: deque[Copying[LoadT]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.lanes.mark("compute").hold("copy")  # the slots' memory may have had another use until now

    def begin(self, group: int, slot: Tensor, after: Copying[LoadT] | None, /) -> Copying[LoadT]:
        """Start filling a slot; the copy may be enqueued later."""
        copying = Copying(group, slot, after, self.store.begin(group))
        self._waiting.append(copying)
        self._start_ready()
        return copying

    def wait(self, copying: Copying[LoadT], /) -> None:
        """Have the compute lane wait for the copy; the host waits only until it can be enqueued.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more, or the device has failed.
        """
        while copying.there is None:
            first = self._waiting[0]
            assert first.may_start, f"group {copying.group} was asked for while its slot's last use goes on"
            self._start(first)
        with device_faults(copying.group):
            copying.there.hold("compute")
        self._start_ready()

    def release(self, copying: Copying[LoadT], /) -> None:
        """Let the slot be filled again behind what has been enqueued to compute so far."""
        with device_faults(copying.group):
            copying.free = self.lanes.mark("compute", is_timed=False)
        self._start_ready()

    def cancel(self, copyings: Sequence[Copying[LoadT]], /) -> None:
        """Give up fillings, and have every copy from now on wait for what has been enqueued to compute so far."""
        given_up = [copying for copying in copyings if copying.there is None]
        self._waiting = deque(copying for copying in self._waiting if copying not in given_up)
        self.store.cancel([copying.load for copying in given_up])
        with device_faults(None):
            now = self.lanes.mark("compute", is_timed=False)
            now.hold("copy")
        for copying in copyings:
            copying.free = now
        self._start_ready()

    def _start_ready(self) -> None:
        """Enqueue what can be without waiting for anything."""
        while self._waiting and self._waiting[0].may_start and self._waiting[0].load.is_there:
            self._start(self._waiting[0])

    def _start(self, copying: Copying[LoadT]) -> None:
        """Enqueue the copy of the first in line, when its bytes are there; if that fails, it stays the first."""
        source = copying.load.bytes()
        with device_faults(copying.group):
            if copying.after is not None and copying.after.free is not None:
                copying.after.free.hold("copy")
            began = self.lanes.mark("copy")
            self.lanes.copy(source, copying.slot[: source.nbytes])
            there = self.lanes.mark("copy")
        self._waiting.popleft()
        copying.there, copying.after = there, None  # or every filling would keep all before it alive
        copying.load.release(there.wait)
        self.timeline.add_late(LateEvent("copy", copying.group, began, there, source.nbytes))
