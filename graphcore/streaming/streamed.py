"""The policy that moves weights: groups stream through slots in a ring, in the order in which programs use them.

    compute   | 1    | 2    | 3    | ... | k    | 1    |
    slot A    | 1    |    3        | ...                      group i's slot is i mod n: modules are bound to it once
    slot B       2      |    4     |                          the next token's first groups come during this one's tail

Whatever order groups are asked for in, what `acquire` returns for is there; only another order than the ring's has to
wait for it.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphcore.streaming.filler import Filler, Ticket
from graphcore.streaming.jobs import Job
from graphcore.streaming.timeline import Event, Timeline


@dataclass
class Streamed:
    """Fills each group's slot before it is used.

    Attributes:
        jobs: that fill each streamed group's slot, in the order of use. Groups that are not named here do not move.
        num_slots: group number i of those has slot i modulo this.
        reads_ahead: fill the slots of the groups that come next while one computes; else each when it is asked for.
    """

    jobs: Mapping[int, Sequence[Job]]
    num_slots: int
    reads_ahead: bool
    filler: Filler
    timeline: Timeline
    _ahead: deque[Ticket] = field(default_factory=deque)
    _last_of_slot: dict[int, Ticket] = field(default_factory=dict)
    _begun: list[Ticket] = field(default_factory=list)  # all that a thread may still be at
    _current: Ticket | None = None
    _computing_since: float = 0.0

    def __post_init__(self) -> None:
        self._order = list(self.jobs)
        self._position = {group: position for position, group in enumerate(self._order)}

    def acquire(self, group: int) -> None:
        """Return when the group's slot holds its bytes.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more.
        """
        if group not in self._position:
            self._computing_since = time.perf_counter()
            return
        try:
            self._acquire(group)
        except BaseException:  # Ctrl-C too, anywhere in there
            self.reset()
            raise

    def release(self, group: int) -> None:
        """Let the group's slot be filled with what comes next."""
        is_streamed = self._current is not None and self._current.group == group
        if is_streamed or group not in self._position:
            self.timeline.add(Event("compute", group, self._computing_since, time.perf_counter()))
        if is_streamed:
            self._leave()

    def reset(self) -> None:
        """Forget what has been read ahead; no thread is at it any more when this returns.

        If that is interrupted, nothing counts as read ahead, and so the next `acquire` resets again.
        """
        self._leave()
        self._ahead.clear()
        self.filler.cancel(self._begun)
        self._begun.clear()
        self._last_of_slot.clear()

    def _acquire(self, group: int) -> None:
        self._leave()
        began = time.perf_counter()
        ticket = self._next(group)
        self.filler.wait(ticket)
        self._computing_since = time.perf_counter()
        if self._computing_since - began > 0:
            self.timeline.add(Event("stall", group, began, self._computing_since))
        self._current = ticket
        if self.reads_ahead:
            self._read_ahead(self._position[group])

    def _leave(self) -> None:
        """Give back the group that was computed with, if that did not happen: an exception may have come between."""
        if self._current is not None:
            self.filler.release(self._current)
            self._current = None

    def _next(self, group: int) -> Ticket:
        """Return the ticket of a group, begun now if it was not foreseen."""
        if self._ahead and self._ahead[0].group == group:
            return self._ahead.popleft()
        self.reset()
        return self._begin(self._position[group])

    def _begin(self, position: int) -> Ticket:
        group, slot = self._order[position], position % self.num_slots
        ticket = self.filler.begin(group, self.jobs[group], self._last_of_slot.get(slot))
        self._last_of_slot[slot] = ticket
        self._begun = [*(earlier for earlier in self._begun if earlier.left), ticket]
        return ticket

    def _read_ahead(self, position: int) -> None:
        """Begin as many groups after this one as there are slots; the last of them waits for this one's."""
        while len(self._ahead) < self.num_slots:
            following = (position + len(self._ahead) + 1) % len(self._order)
            self._ahead.append(self._begin(following))
