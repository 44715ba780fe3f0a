"""Ctrl-C in the middle of a wait is a KeyboardInterrupt, whatever the condition's lock is doing then."""

import threading

import pytest

from graphcore.engine.output import interrupts_are_raised


class Interrupted(threading.Condition):
    """A condition that Ctrl-C stops after its wait, before it has its lock again."""

    def wait(self, timeout: float | None = None) -> bool:
        self.release()
        raise KeyboardInterrupt


def test_an_interrupt_before_the_lock_is_held_again_is_raised() -> None:
    condition = Interrupted()
    with pytest.raises(RuntimeError, match="un-acquired lock"), condition:  # what CPython raises
        condition.wait()
    with pytest.raises(KeyboardInterrupt), interrupts_are_raised(), condition:
        condition.wait()
    assert condition.acquire(blocking=False), "nobody holds the lock"


def test_other_errors_are_raised_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="of its own"), interrupts_are_raised():
        raise RuntimeError("an error of its own")
