"""One filling of one slot, as threads (filler.py) and whoever waits for them see it.

begun -> jobs done -> full -> released by its reader, perhaps while a copy still reads it -> drained
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Ticket:
    """One filling of a group's slot.

    Attributes:
        after: the filling of the same slot before this one, which must be released before it is overwritten.
        unwritten: jobs whose pieces are not in the slot.
        left: jobs that are not done.
        drained: returns when the slot, though released, is no longer read; None if it is not.
    """

    group: int
    after: "Ticket | None"
    unwritten: int
    left: int
    is_released: bool = False
    is_cancelled: bool = False
    fault: BaseException | None = None
    drained: Callable[[], None] | None = None

    @property
    def may_write(self) -> bool:
        """Whether nobody reads the slot any more."""
        return self.after is None or self.after.is_released

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.fault is not None or (self.left == 0 and self.unwritten == 0)

    @property
    def is_full(self) -> bool:
        """Whether the slot holds the group's bytes."""
        return self.is_over and self.fault is None

    @property
    def is_done(self) -> bool:
        """Whether no thread is at it, or will be."""
        return self.left == 0
