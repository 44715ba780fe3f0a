"""Runs what strangers send in a process of its own, within bounds that the kernel enforces: its death is an answer.

A chat template is untrusted code (template_sandbox.py); a grammar goes through native code that ends its process if it
recurses too deep (grammar_sandbox.py). The process is started without waiting, so that it is ready by the time that a
model is loaded. It answers one request after another, and its owner starts another one if a bound ended it. The process
gets only what is sent to it: it shares no memory, open files or environment variables, except `KEPT_VARIABLES`.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from graphcore.errors import ThreadLimitError
from graphcore.threads import naming_limit
from graphcore.tokenizer.bounded_worker import LENGTH, PACKAGES, receive

PATIENCE = 10  # seconds of waiting for each second of processor time, on a machine that runs other processes, too
KEPT_VARIABLES = ("TZ", "TZDIR", "LD_LIBRARY_PATH")  # environment variables: a template may ask for the date
_PROGRAM = (
    "import sys; job, *paths, seconds, nbytes, room = sys.argv[1:]; sys.path += paths; "
    "from graphcore.tokenizer.bounded_worker import serve; serve(job, float(seconds), int(nbytes), int(room))"
)


@dataclass(frozen=True)
class Bounds:
    """Limits of a process.

    Attributes:
        seconds: float, processor time for what it begins with, and for each request.
        nbytes: int, address space of the process, including Python's own.
        room: int, characters of an answer beyond those of its request.
    """

    seconds: float = 2.0
    nbytes: int = 256 << 20
    room: int = 1 << 20


class NoAnswerError(Exception):
    """A process gives no answer; the message is the reason, in words that follow "the chat template" or its like."""


class BoundedProcess:
    """A process that answers requests of one kind; it ends with this object.

    Args:
        job: what it does, a key of `PACKAGES`.
        beginning: what the requests have in common, such as a template; read before the first of them.

    Raises:
        NoAnswerError: the machine cannot start a process.
        ThreadLimitError: a limit of processes is reached.
    """

    def __init__(self, job: str, beginning: bytes, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._channel, theirs = socket.socketpair()
        frame = _frame(beginning)
        self._channel.setblocking(False)
        self._unsent = frame[self._channel.send(frame) :]  # the part that a socket holds is read meanwhile
        with theirs:
            try:
                self._process = _start(theirs, job, bounds)
            except ThreadLimitError:
                self._channel.close()
                raise
            except OSError as error:
                self._channel.close()
                raise NoAnswerError(f"could not be started in a process of its own ({error.strerror})") from error
        self._end = weakref.finalize(self, _end, self._process, self._channel, self._owner)

    @property
    def is_usable(self) -> bool:
        """Whether this process can use it: it has not ended, and this process itself started it, not a parent."""
        # It may also end while it waits, such as by the kernel for lack of memory.
        return self._end.alive and self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes) -> tuple[bytes, str]:
        """Return the kind of the answer to a request, TEXT, UNREADABLE or REFUSED, and its text or the reason.

        Raises:
            NoAnswerError: a bound ended the process, or it died.
        """
        with self._lock:
            try:
                answer = self._ask(request)
            except BaseException:  # an interrupt, too: an answer left unread would be taken for the next one
                self._end()
                raise
        return answer[:1], answer[1:].decode("utf-8", "surrogatepass")

    def _ask(self, request: bytes) -> bytes:
        waits_until = time.monotonic() + PATIENCE * self._bounds.seconds
        most = 4 * (self._bounds.room + len(request)) + 1  # bytes of UTF-8

        def read(count: int) -> bytes:
            self._channel.settimeout(max(waits_until - time.monotonic(), 0.001))
            received = self._channel.recv(count)
            if not received:
                raise ConnectionResetError
            return received

        try:
            self._channel.settimeout(PATIENCE * self._bounds.seconds)
            self._channel.sendall(self._unsent + _frame(request), socket.MSG_NOSIGNAL)
            self._unsent = b""
            return receive(read, most)
        except TimeoutError as error:
            raise NoAnswerError(f"gave no answer for {PATIENCE * self._bounds.seconds:g} s") from error
        except (OSError, ValueError) as error:
            raise NoAnswerError(self._why_it_ended()) from error

    def _why_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        if self._process.returncode == -signal.SIGPROF:
            return f"takes more than {self._bounds.seconds:g} s"
        if self._process.returncode is None:
            return "gave an invalid answer"
        return (
            f"ended its process ({_status(self._process.returncode)}); it takes too much memory, or is nested too deep"
        )


def _status(code: int) -> str:
    """Return how a process ended: the name of a signal, or its exit status."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"status {code}"


def _start(channel: socket.socket, job: str, bounds: Bounds) -> subprocess.Popen[bytes]:
    """Start the process, which reads from and writes to the channel, and return it."""
    found = [importlib.util.find_spec(name) for name in PACKAGES[job]]
    folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin)
    limits = (str(bounds.seconds), str(bounds.nbytes), str(bounds.room))
    with naming_limit("a process with bounds, for templates and grammars"):
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, job, *folders, *limits],
            stdin=channel.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
            cwd="/",
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the other
        )


def _frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def _end(process: subprocess.Popen[bytes], channel: socket.socket, owner: int) -> None:
    channel.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
