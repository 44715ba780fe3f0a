"""SIGTERM and SIGHUP end a command as Ctrl-C does: what was made so far is written, and child processes are ended.

Containers, schedulers and closed terminals send them. Only the command line installs handlers; the Python interface
leaves signals to its program.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from graphcore.threads import start_thread

ENDING = (signal.SIGTERM, signal.SIGHUP)
PATIENCE = 10.0  # seconds for ending, in which further signals change nothing
OF_SIGNALS = 128  # added to the signal's number, this is the exit status of a process that a signal ended


class Terminated(KeyboardInterrupt):
    """Raised when a signal asks the process to end; a KeyboardInterrupt, so that it stops whatever Ctrl-C stops.

    Attributes:
        number: int, the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Termination:
    """The first signal that asked the process to end, and the handler of such signals.

    Attributes:
        number: int, the signal's number; None if there was none.
        terminals: numbers of the output streams that are terminals.
    """

    number: int | None = None
    terminals: list[int] = field(default_factory=lambda: [file for file in (1, 2) if os.isatty(file)])
    _since: float = 0.0

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Raise Terminated in the main thread, unless it is ending already."""
        for file in self.terminals:
            if not os.isatty(file):  # the terminal is gone; later output must not raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), file)
        now = time.monotonic()
        if self.number is not None and now - self._since < PATIENCE:
            return
        self.number, self._since = self.number or number, now
        raise Terminated(number)

    def status(self, otherwise: int) -> int:
        """Return the exit status that stands for the signal; `otherwise` if there was none."""
        return otherwise if self.number is None else OF_SIGNALS + self.number


@contextmanager
def ended_by_signals() -> Iterator[Termination]:
    """Raise Terminated in the main thread at SIGTERM and SIGHUP inside the block.

    Signals that are ignored, as SIGHUP under nohup, or that have a handler of the program's own, are left alone.
    """
    termination = Termination()
    taken = [number for number in ENDING if is_main_thread() and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, termination.handle)
    try:
        yield termination
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer Ctrl-C and the signals that end a command until the block has ended, such as the writing of a result."""
    waiting: list[int] = []
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING) if callable(signal.getsignal(number))
    }
    taken = handlers if is_main_thread() else {}
    for number in taken:
        signal.signal(number, lambda received, _frame: waiting.append(received))
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
    if waiting:
        signal.raise_signal(waiting[0])


class PatientProcess:
    """A process that signals end at once, or after the first of them, also while its main thread waits in native code.

    Signals are not blocked, and so end the processes that this one starts, such as compilers.

    Attributes:
        patience: number of signals, of Ctrl-C, SIGTERM and SIGHUP, that change nothing.
    """

    def __init__(self) -> None:
        self.patience = 0
        self._taken = [number for number in (signal.SIGINT, *ENDING) if signal.getsignal(number) is not signal.SIG_IGN]

    def begin(self) -> None:
        """Take the signals from now on; the main thread calls it."""
        arriving, arrived = socket.socketpair()
        arriving.setblocking(False)
        start_thread(partial(self._take, arrived), "graphcore-signals")  # first: without it, nothing would take signals
        for number in self._taken:
            signal.signal(number, _do_nothing)
        signal.set_wakeup_fd(arriving.detach(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave)

    def _take(self, arrived: socket.socket) -> None:
        """Read numbers of signals, which Python writes even while its main thread runs no Python."""
        while number := ord(arrived.recv(1)):
            if number in self._taken:
                if not self.patience:
                    break
                self.patience -= 1
        os.write(2, b"graphcore: interrupted\n")
        os._exit(OF_SIGNALS + number)

    def _leave(self) -> None:
        """Let signals end a process that was forked from this one."""
        signal.set_wakeup_fd(-1)
        for number in self._taken:
            signal.signal(number, signal.SIG_DFL)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the thread of `PatientProcess` reads the signal from Python's wakeup file descriptor."""


def is_main_thread() -> bool:
    """Return whether this is the thread that signals interrupt; Python sets their handlers in no other."""
    return threading.current_thread() is threading.main_thread()
