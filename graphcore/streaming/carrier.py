"""What a ring needs of whatever moves the bytes: threads on the CPU, a copy stream on a GPU.

The ring (`Streamed`) decides which group comes when, and into which slot. A carrier moves it there, and sees to it that
nothing is read before it is there or overwritten while it is read.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Work_contra = TypeVar("Work_contra", contravariant=True)


class Filling(Protocol):
    """One filling of one slot."""

    @property
    def group(self) -> int:
        """Whose bytes."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to give up."""


FillingT = TypeVar("FillingT", bound=Filling)


class Carrier(Protocol[Work_contra, FillingT]):
    """Fills slots; from one thread's point of view."""

    def begin(self, group: int, work: Work_contra, after: FillingT | None, /) -> FillingT:
        """Start filling a group's slot as soon as that may be; return at once.

        Args:
            work: what is to be done.
            after: the filling of the same slot before this one, if it may not have been released yet.
        """

    def wait(self, filling: FillingT, /) -> None:
        """Make the slot hold its bytes before anything that is computed after this call."""

    def release(self, filling: FillingT, /) -> None:
        """Say that what has been asked to compute so far is the last to read the slot."""

    def cancel(self, fillings: Sequence[FillingT], /) -> None:
        """Give up fillings, after which any slot may be filled with anything, even without an `after`."""
