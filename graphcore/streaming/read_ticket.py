"""The ticket of one filling of one slot, shared by the threads that fill it (thread_filler.py) and the caller.

begun -> jobs done -> full -> released by its reader, possibly while a copy still reads it -> drained
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class ReadTicket:
    """One filling of a group's slot.

    Attributes:
        after: ticket of the slot's previous filling, which must be released before this one writes; None if none.
        unwritten: number of jobs whose bytes are not in the slot yet.
        left: number of jobs that have not ended.
        fault: exception that a job raised; None if none did.
        drained: function that blocks until the last copy from the released slot is done; None if there is none.
    """

    group: int
    after: "ReadTicket | None"
    unwritten: int
    left: int
    is_released: bool = False
    is_cancelled: bool = False
    fault: BaseException | None = None
    drained: Callable[[], None] | None = None

    @property
    def may_write(self) -> bool:
        """Whether the previous filling of the slot has been released."""
        return self.after is None or self.after.is_released

    @property
    def is_over(self) -> bool:
        """Whether the filling has succeeded or failed, so that there is nothing to wait for."""
        return self.fault is not None or (self.left == 0 and self.unwritten == 0)

    @property
    def is_full(self) -> bool:
        """Whether the slot holds the group's bytes."""
        return self.is_over and self.fault is None

    @property
    def is_done(self) -> bool:
        """Whether all jobs have ended, so that no thread works on the filling."""
        return self.left == 0
