"""Runs a chat template in a process of its own, because it is untrusted code, within bounds that the kernel enforces.

The process is started without waiting, so that it is ready by the time that a model is loaded. It answers one
conversation after another, and is started again if a bound ended it. The process gets only what is
sent to it: it shares no memory, open files or environment variables, except `KEPT_VARIABLES`.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphcore.errors import ThreadLimitError
from graphcore.threads import naming_limit
from graphcore.tokenizer.template_worker import LENGTH, TEXT, UNREADABLE, receive

PATIENCE = 10  # seconds of waiting for each second of processor time, on a machine that runs other processes, too
KEPT_VARIABLES = ("TZ", "TZDIR", "LD_LIBRARY_PATH")  # environment variables: a template may ask for the date
PACKAGES = ("graphcore", "jinja2", "markupsafe")
_PROGRAM = (
    "import sys; paths, bounds = sys.argv[1:-3], sys.argv[-3:]; sys.path += paths; "
    "from graphcore.tokenizer.template_worker import serve; serve(float(bounds[0]), int(bounds[1]), int(bounds[2]))"
)


@dataclass(frozen=True)
class Bounds:
    """Limits of a template.

    Attributes:
        seconds: float, processor time for compiling it, and for each conversation.
        nbytes: int, address space of its process, including Python's own.
        room: int, characters of text beyond those of the messages.
    """

    seconds: float = 2.0
    nbytes: int = 256 << 20
    room: int = 1 << 20


class NoTextError(Exception):
    """A template gives no text; the message is the reason, in words that follow "the chat template"."""


class TemplateProcess:
    """The process of one template; it ends with this object.

    Args:
        template: Jinja source.

    Raises:
        NoTextError: the machine cannot start a process.
        ThreadLimitError: a limit of processes is reached.
    """

    def __init__(self, template: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._channel, theirs = socket.socketpair()
        frame = _frame(template.encode("utf-8", "surrogatepass"))
        self._channel.setblocking(False)
        self._unsent = frame[self._channel.send(frame) :]  # the part that a socket holds is compiled meanwhile
        with theirs:
            try:
                self._process = _start(theirs, bounds)
            except ThreadLimitError:
                self._channel.close()
                raise
            except OSError as error:
                self._channel.close()
                raise NoTextError(f"could not be started in a process of its own ({error.strerror})") from error
        self._end = weakref.finalize(self, _end, self._process, self._channel, self._owner)

    @property
    def is_usable(self) -> bool:
        """Whether this process can use it: it has not ended, and this process itself started it, not a parent."""
        return self._end.alive and self._owner == os.getpid()

    def render(self, inputs: Mapping[str, object]) -> str:
        """Return the text of a conversation.

        Args:
            inputs: the template's inputs, of the types that JSON has.

        Raises:
            NoTextError: the template is invalid, rejects the inputs, fails, or was ended at a bound.
            TypeError: an input has a type that JSON lacks.
            ValueError: an input contains itself.
        """
        request = json.dumps(inputs, ensure_ascii=False).encode("utf-8", "surrogatepass")
        with self._lock:
            try:
                answer = self._ask(request)
            except BaseException:  # an interrupt, too: an answer left unread would be taken for the next one
                self._end()
                raise
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == TEXT:
            return text
        raise NoTextError(f"cannot be read: {text}" if kind == UNREADABLE else f"refuses these messages: {text}")

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
            raise NoTextError(f"gave no answer for {PATIENCE * self._bounds.seconds:g} s") from error
        except (OSError, ValueError) as error:
            raise NoTextError(self._why_it_ended()) from error

    def _why_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        if self._process.returncode == -signal.SIGPROF:
            return f"takes more than {self._bounds.seconds:g} s"
        if self._process.returncode is None:
            return "gave an invalid answer"
        return f"ended its process (status {self._process.returncode}); it takes too much memory, or is nested too deep"


def _start(channel: socket.socket, bounds: Bounds) -> subprocess.Popen[bytes]:
    """Start the process, which reads from and writes to the channel, and return it."""
    found = [importlib.util.find_spec(name) for name in PACKAGES]
    folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin)
    limits = (str(bounds.seconds), str(bounds.nbytes), str(bounds.room))
    with naming_limit("the process that renders chat templates"):
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *folders, *limits],
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
