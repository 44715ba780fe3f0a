"""Where copies to a device start from: groups that lie in RAM for good, or that come and go in a small ring there.

Held      store ------------------------------ copy --> slot
Staged    file or store --threads--> host slot - copy --> slot      a host slot is filled again when its copy is done
Partly    a store of which some groups are Held, because they could be locked, and the others Staged
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from graphcore.streaming.filler import Filler
from graphcore.streaming.jobs import Job
from graphcore.streaming.ticket import Ticket


class Load(Protocol):
    """A group's bytes in RAM, or on their way there."""

    @property
    def is_there(self) -> bool:
        """Whether a copy can start now."""

    def bytes(self) -> Tensor:
        """Return the bytes, [nbytes] uint8, when they are there.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more.
        """

    def release(self, drained: Callable[[], None]) -> None:
        """Say that a copy of the bytes has been enqueued; `drained` returns when it is done, on any thread."""


LoadT = TypeVar("LoadT", bound=Load)


class Store(Protocol[LoadT]):
    """The tier below a device."""

    def begin(self, group: int) -> LoadT:
        """Start bringing a group's bytes to where copies start; return at once."""

    def cancel(self, loads: Sequence[LoadT]) -> None:
        """Give up loads that nothing was copied from."""


@dataclass(frozen=True, eq=False)
class HeldLoad:
    """Bytes that stay."""

    raw: Tensor

    @property
    def is_there(self) -> bool:
        """They are."""
        return True

    def bytes(self) -> Tensor:
        """Return them."""
        return self.raw

    def release(self, drained: Callable[[], None]) -> None:
        """They stay."""


@dataclass(frozen=True)
class Held:
    """Every group's bytes in RAM.

    Attributes:
        groups: [nbytes] uint8 of each.
    """

    groups: Mapping[int, Tensor]

    def begin(self, group: int) -> HeldLoad:
        """Return a group's bytes."""
        return HeldLoad(self.groups[group])

    def cancel(self, loads: Sequence[HeldLoad]) -> None:
        """There is nothing to give up."""


@dataclass(frozen=True, eq=False)
class StagedLoad:
    """Bytes in a host slot."""

    filler: Filler
    ticket: Ticket
    slot: Tensor

    @property
    def is_there(self) -> bool:
        """Whether the host slot is full."""
        return self.ticket.is_full

    def bytes(self) -> Tensor:
        """Return them when the host slot is full."""
        self.filler.wait(self.ticket)
        return self.slot

    def release(self, drained: Callable[[], None]) -> None:
        """Let the host slot be filled again once `drained` has returned."""
        self.filler.release(self.ticket, drained)


@dataclass
class Staged:
    """Host slots that threads fill, in a ring of their own.

    Attributes:
        jobs: that fill each group's host slot, in the order of use.
        slots: [nbytes] uint8 of each group; group number i of `jobs` has host slot i modulo `num_slots`.
    """

    jobs: Mapping[int, Sequence[Job]]
    slots: Mapping[int, Tensor]
    num_slots: int
    filler: Filler
    _last_of_slot: dict[int, Ticket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slot = {group: position % self.num_slots for position, group in enumerate(self.jobs)}

    def begin(self, group: int) -> StagedLoad:
        """Start filling a group's host slot."""
        slot = self._slot[group]
        # Kept across cancellations: a copy that has been enqueued still reads the slot.
        ticket = self.filler.begin(group, self.jobs[group], self._last_of_slot.get(slot))
        self._last_of_slot[slot] = ticket
        return StagedLoad(self.filler, ticket, self.slots[group])

    def cancel(self, loads: Sequence[StagedLoad]) -> None:
        """Return when no thread is at these loads any more."""
        self.filler.cancel([load.ticket for load in loads])


@dataclass(frozen=True)
class Partly:
    """Groups of which some lie in RAM for copies to start from, and the others go through host slots.

    Attributes:
        held: the first.
        staged: the others.
    """

    held: Held
    staged: Staged

    def begin(self, group: int) -> HeldLoad | StagedLoad:
        """Start bringing a group's bytes to where copies start; return at once."""
        return self.held.begin(group) if group in self.held.groups else self.staged.begin(group)

    def cancel(self, loads: Sequence[HeldLoad | StagedLoad]) -> None:
        """Return when no thread is at these loads any more."""
        self.staged.cancel([load for load in loads if isinstance(load, StagedLoad)])
