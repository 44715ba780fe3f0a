"""The first signal interrupts; further ones do so only if the process has not ended for long."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

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


PATIENT = """
import ctypes, os, subprocess, time
from graphcore.tasks.termination import PatientProcess
process = PatientProcess()
process.patience = 1
process.begin()
readable, writable = os.pipe()
forked = os.fork()
if forked == 0:
    os.write(writable, b"!")  # the handlers are those of a child now
    time.sleep(60)
os.read(readable, 1)
compiler = subprocess.Popen(["sleep", "60"])
print(forked, compiler.pid, flush=True)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for ever, in native code
"""


def test_a_patient_process_ends_at_the_second_signal_and_its_children_at_the_first() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    children = [int(word) for word in process.stdout.readline().split()]
    for child in children:
        os.kill(child, signal.SIGTERM)
        wait_for(partial(has_ended, child))
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    assert process.communicate()[1] == "graphcore: interrupted\n"


def has_ended(process: int) -> bool:
    """Return whether a process has ended whose parent has not asked how."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)
