"""The interface of fillers, which move bytes into slots: threads, or a device's copy queue.

The policy for groups (streamed.py) and the cache of experts (experts/cache.py) decide what is moved, when, and into
which slot. A filler moves it, and makes sure that no slot is read before it is full or overwritten while it is read.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Work_contra = TypeVar("Work_contra", contravariant=True)


class SlotFill(Protocol):
    """One filling of one slot."""

    @property
    def group(self) -> int:
        """Number of the group whose bytes fill the slot."""

    @property
    def is_done(self) -> bool:
        """Whether no work is left that could be cancelled."""

    @property
    def is_full(self) -> bool:
        """Whether all later compute work finds the bytes in the slot."""


SlotFillT = TypeVar("SlotFillT", bound=SlotFill)


class Filler(Protocol[Work_contra, SlotFillT]):
    """An object that fills slots; one thread calls it."""

    def begin(self, group: int, work: Work_contra, after: SlotFillT | None, /) -> SlotFillT:
        """Start filling a slot as soon as it is free, and return at once.

        Args:
            group: number of the group that the bytes belong to, for messages and the timeline.
            work: work that fills the slot.
            after: previous filling of the same slot if it may still be unreleased; None if the only remaining readers
                of the slot are already enqueued.
        """

    def wait(self, filling: SlotFillT, /) -> None:
        """Ensure that all compute work after this call finds the bytes in the slot.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more, or a device has failed.
        """

    def release(self, filling: SlotFillT, /) -> None:
        """Allow the slot to be refilled after the compute work so far, which is the last to read it."""

    def cancel(self, fillings: Sequence[SlotFillT], /) -> None:
        """Cancel fillings. Afterwards their slots may be filled again, even without an `after`."""

    def end_waits(self) -> None:
        """Let waits for a disk that gives no answer end soon, with a StreamingError: the engine is being closed."""

    def close(self) -> None:
        """Stop the filler's threads; no filling can begin afterwards."""

    @property
    def is_reading(self) -> bool:
        """Whether a thread may still be in a read of a file; after `close`, only one that does not return."""
