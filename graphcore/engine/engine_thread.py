"""The thread that computes for an engine, and how it ends.

It ends when there was nothing to do for a while, when its engine is closed or collected, and when the interpreter ends;
a later request starts another one.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

LINGER = 2.0  # seconds that the thread waits for more work before it ends
GLANCE = 0.1  # seconds between two looks at whether the interpreter is ending, while the thread waits


class Served(Protocol):
    """What the thread works for; all but `end_overdue` is called while the lock of `changes` is held."""

    def end_overdue(self) -> None:
        """End what nobody wants any more."""

    def next_work(self) -> Callable[[], None] | None:
        """Return what is to be done next; None if there is nothing."""

    def end_thread(self, is_late: bool) -> bool:
        """Return whether the thread, which has nothing to do, is to end; `is_late` if that has been so for a while."""


class EngineThread(threading.Thread):
    """A thread that computes for an engine."""


def is_interpreter_ending() -> bool:
    """Return whether the main thread has ended, and no other thread is left that the interpreter waits for."""
    if threading.main_thread().is_alive():
        return False
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return all(isinstance(thread, EngineThread) or thread.daemon for thread in others)


def compute_for(owner: "weakref.ref[Served]", changes: threading.Condition) -> None:
    """Do what there is to do, until there was nothing for a while.

    While the thread waits it holds no scheduler, so that an engine nobody uses any more is freed at once.
    """
    idle_since = time.monotonic()
    while True:
        scheduler = owner()
        if scheduler is None:
            return
        scheduler.end_overdue()
        del scheduler
        with changes:
            scheduler = owner()
            if scheduler is None:
                return
            work = scheduler.next_work()
            if work is None:
                if scheduler.end_thread(time.monotonic() - idle_since > LINGER):
                    return
                del scheduler
                changes.wait(GLANCE)
                continue
            del scheduler
        work()
        del work
        idle_since = time.monotonic()
