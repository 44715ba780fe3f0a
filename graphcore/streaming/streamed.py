"""The policy that moves weights: groups stream through slots in a ring, in the order in which programs use them.

    compute   | 1    | 2    | 3    | ... | k    | 1    |
    slot A    | 1    |    3        | ...                      group i's slot is i mod n: modules are bound to it once
    slot B       2      |    4     |                          the next token's first groups come during this one's tail

Whatever order groups are asked for in, what `acquire` returns for is there; only another order than the ring's has to
wait for it. Which group comes when is decided here; how it comes, and who waits for whom, is the carrier's.
"""

from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from graphcore.errors import StreamingError
from graphcore.streaming.carrier import Carrier, FillingT
from graphcore.streaming.timeline import Stopwatch, Watch

Work = TypeVar("Work")


@dataclass
class Streamed(Generic[Work, FillingT]):
    """Has each group's slot filled before it is used.

    Attributes:
        work: what fills each streamed group's slot, in the order of use. Groups that are not named here do not move.
        num_slots: group number i of those has slot i modulo this.
        reads_ahead: fill the slots of the groups that come next while one computes; else each when it is asked for.
        carrier: fills slots.
        watch: times stalls and computing.
    """

    work: Mapping[int, Work]
    num_slots: int
    reads_ahead: bool
    carrier: Carrier[Work, FillingT]
    watch: Watch
    _ahead: deque[FillingT] = field(default_factory=deque)
    _last_of_slot: dict[int, FillingT] = field(default_factory=dict)
    _begun: list[FillingT] = field(default_factory=list)  # all that may still be on their way
    _current: FillingT | None = None
    _computing: Stopwatch | None = None
    _skipped: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._order = list(self.work)
        self._position = {group: position for position, group in enumerate(self._order)}

    def acquire(self, group: int) -> None:
        """Make the group's slot hold its bytes before anything that is computed after this call.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more.
        """
        if group not in self._position:
            self._computing = self.watch.start("compute", group)
            return
        try:
            self._acquire(group)
        except BaseException:  # Ctrl-C too, anywhere in there
            with suppress(StreamingError):  # of a device that has failed already, in the same words
                self.reset()
            raise

    def release(self, group: int) -> None:
        """Let the group's slot be filled with what comes next."""
        is_streamed = self._current is not None and self._current.group == group
        if self._computing is not None and (is_streamed or group not in self._position):
            self._computing.stop()
            self._computing = None
        if is_streamed:
            self._leave()

    def skip(self, groups: Collection[int]) -> None:
        """Do not read these groups ahead: the passes from now on leave them out."""
        self._skipped = frozenset(groups)

    def reset(self) -> None:
        """Forget what has been read ahead; no thread is at it any more when this returns.

        If that is interrupted, nothing counts as read ahead, and so the next `acquire` resets again.
        """
        self._leave()
        self._ahead.clear()
        self.carrier.cancel(self._begun)
        self._begun.clear()
        self._last_of_slot.clear()

    def _acquire(self, group: int) -> None:
        self._leave()
        stall = self.watch.start("stall", group)
        filling = self._next(group)
        self.carrier.wait(filling)
        self._computing = stall.then("compute", group)
        self._current = filling
        if self.reads_ahead:
            self._read_ahead(self._position[group])

    def _leave(self) -> None:
        """Give back the group that was computed with, if that did not happen: an exception may have come between."""
        if self._current is not None:
            self.carrier.release(self._current)
            self._current = None

    def _next(self, group: int) -> FillingT:
        """Return the filling of a group, begun now if it was not foreseen."""
        if self._ahead and self._ahead[0].group == group:
            return self._ahead.popleft()
        self.reset()
        return self._begin(self._position[group])

    def _begin(self, position: int) -> FillingT:
        group, slot = self._order[position], position % self.num_slots
        filling = self.carrier.begin(group, self.work[group], self._last_of_slot.get(slot))
        self._last_of_slot[slot] = filling
        self._begun = [*(earlier for earlier in self._begun if not earlier.is_done), filling]
        return filling

    def _read_ahead(self, position: int) -> None:
        """Begin as many groups after this one as there are slots; the last of them waits for this one's."""
        last = self._position[self._ahead[-1].group] if self._ahead else position
        while len(self._ahead) < self.num_slots:
            last = self._following(last)
            self._ahead.append(self._begin(last))

    def _following(self, position: int) -> int:
        """Return the next group's position in the ring, past those that are left out; one at least is not."""
        ring = (place % len(self._order) for place in range(position + 1, position + 1 + len(self._order)))
        return next((place for place in ring if self._order[place] not in self._skipped), position)
