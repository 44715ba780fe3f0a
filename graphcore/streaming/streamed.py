"""The policy that moves weights: groups stream through slots in a ring, in the order in which programs use them.

    compute   | 1    | 2    | 3    | ... | k    | 1    |
    slot A    | 1    |    3        | ...                      group i has slot i mod n: modules are bound to it once
    slot B       2      |    4     |                          the next pass's first groups are read during the last ones

Groups may be acquired in any order, but a group that is not the next in the ring was not read ahead, and `acquire`
waits for its bytes. This module decides which group is moved when. The filler moves the bytes and does the waiting.
"""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Generic

from graphcore.errors import StreamingError
from graphcore.streaming.filler import SlotFillT
from graphcore.streaming.policy import Activity, Policy, Ring, SlotUse, Work
from graphcore.streaming.timeline import Stopwatch


class Streamed(Policy, Generic[Work, SlotFillT]):
    """A policy that fills each group's slot before the group is used, and reads the next groups ahead.

    Attributes:
        ring: groups that move, with their slots and filler.
    """

    def __init__(self, ring: Ring[Work, SlotFillT]) -> None:
        self.ring = ring
        self._ahead: deque[SlotFillT] = deque()
        self._last_of_slot: dict[int, SlotFillT] = {}
        self._begun: list[SlotFillT] = []  # fillings that may still be running
        self._current: SlotFillT | None = None
        self._computing: Stopwatch | None = None
        self._computing_group: int | None = None
        self._skipped: frozenset[int] = frozenset()
        self._order = list(ring.work)
        self._position = {group: position for position, group in enumerate(self._order)}

    def acquire(self, group: int) -> None:
        """Ensure that all compute work after this call finds the group's bytes in its slot.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more, or the device has failed.
        """
        if group not in self._position:
            self._computing = self.ring.watch.start("compute", group)
            self._computing_group = group
            return
        try:
            self._acquire(group)
        except BaseException:  # Ctrl-C too, at any point inside
            with suppress(StreamingError):  # a device that has failed would raise the same error again
                self.reset()
            raise

    def release(self, group: int) -> None:
        """Allow the group's slot to be refilled with a later group."""
        is_streamed = self._current is not None and self._current.group == group
        if self._computing is not None and (is_streamed or group not in self._position):
            self._computing.stop()
            self._computing = self._computing_group = None
        if is_streamed:
            self._leave()

    def skip(self, groups: Collection[int]) -> None:
        """Stop reading these groups ahead: all later passes leave them out."""
        self._skipped = frozenset(groups)

    def reset(self) -> None:
        """Discard groups that were read ahead; no thread works on them any more when this returns.

        After an interruption no group counts as read ahead, so the next `acquire` resets again.
        """
        self._leave()
        self._ahead.clear()
        self.ring.filler.cancel(self._begun)
        self._begun.clear()
        self._last_of_slot.clear()

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Record the time of a draft model in the timeline."""
        draft = self.ring.watch.start("draft", 0)
        try:
            yield
        finally:
            draft.stop()

    def activity(self) -> Activity:
        """Return a snapshot of the slots and of the group that computes. Thread-safe: each attribute is read once."""
        current, newest = self._current, dict(self._last_of_slot)
        slots = [self._use_of(newest.get(slot)) for slot in range(self.ring.num_slots)]
        if current is not None:  # its slot's next filling may have been begun, which waits for it
            slots[self._position[current.group] % self.ring.num_slots] = SlotUse(current.group, "computing")
        return Activity(slots, self._computing_group)

    @staticmethod
    def _use_of(filling: SlotFillT | None) -> SlotUse:
        if filling is None:
            return SlotUse(None, "free")
        return SlotUse(filling.group, "ready" if filling.is_full else "reading")

    def _acquire(self, group: int) -> None:
        self._leave()
        self._computing_group = None
        stall = self.ring.watch.start("stall", group)
        filling = self._next(group)
        self.ring.filler.wait(filling)
        self._computing = stall.then("compute", group)
        self._current, self._computing_group = filling, group
        if self.ring.reads_ahead:
            self._read_ahead(self._position[group])

    def _leave(self) -> None:
        """Release the current group, if an exception has prevented its release."""
        if self._current is not None:
            self.ring.filler.release(self._current)
            self._current = None

    def _next(self, group: int) -> SlotFillT:
        """Return the filling of a group; begin it now if the group was not read ahead."""
        if self._ahead and self._ahead[0].group == group:
            return self._ahead.popleft()
        self.reset()
        return self._begin(self._position[group])

    def _begin(self, position: int) -> SlotFillT:
        group, slot = self._order[position], position % self.ring.num_slots
        filling = self.ring.filler.begin(group, self.ring.work[group], self._last_of_slot.get(slot))
        self._last_of_slot[slot] = filling
        self._begun = [*(earlier for earlier in self._begun if not earlier.is_done), filling]
        return filling

    def _read_ahead(self, position: int) -> None:
        """Begin to fill as many groups after this one as there are slots; the last waits for this group's slot."""
        last = self._position[self._ahead[-1].group] if self._ahead else position
        while len(self._ahead) < self.ring.num_slots:
            last = self._following(last)
            self._ahead.append(self._begin(last))

    def _following(self, position: int) -> int:
        """Return the position in the ring of the next group that is not skipped."""
        ring = (place % len(self._order) for place in range(position + 1, position + 1 + len(self._order)))
        return next((place for place in ring if self._order[place] not in self._skipped), position)
