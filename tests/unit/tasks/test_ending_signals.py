"""The first signal interrupts; further ones do so only if the process has not ended for long."""

import signal

import pytest

from graphcore.tasks.termination import PATIENCE, Terminated, Termination


def test_a_second_signal_does_not_disturb_the_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("graphcore.tasks.termination.time.monotonic", lambda: now[0])
    termination = Termination(terminals=[])
    with pytest.raises(Terminated) as caught:
        termination.handle(signal.SIGTERM, None)
    assert (caught.value.number, termination.status(otherwise=0)) == (signal.SIGTERM, 143)
    termination.handle(signal.SIGTERM, None)
    termination.handle(signal.SIGHUP, None)
    now[0] += PATIENCE + 1  # the first one was lost, in a destructor for example
    with pytest.raises(Terminated):
        termination.handle(signal.SIGHUP, None)
    assert termination.status(otherwise=1) == 143


def test_without_a_signal_the_status_stays() -> None:
    assert Termination(terminals=[]).status(otherwise=1) == 1
