"""The process that runs what strangers send: it reads a beginning and then requests, and writes answers.

    template -> conversation -> answer -> conversation -> answer ...    (template_sandbox.py)
    tokens   -> grammar      -> answer -> grammar      -> answer ...    (grammar_sandbox.py)

The kernel enforces the bounds, so they hold even inside a single multiplication: a timer of processor time that ends
the process (ITIMER_PROF; nothing here catches its signal), and a limit of the address space, at which Python raises
MemoryError and native code aborts. This module imports only what the job needs and the standard library, because it is
started at every load of a model.
"""

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator

LENGTH = struct.Struct("<Q")  # precedes everything that is sent: the number of bytes that follow
TEXT, UNREADABLE, REFUSED = b"t", b"u", b"r"  # an answer's first byte: the text follows, or the reason
PACKAGES = {"template": ("graphcore", "jinja2", "markupsafe"), "grammar": ("graphcore", "llguidance")}
"""What each job imports."""


def serve(job: str, seconds: float, nbytes: int, room: int) -> None:
    """Answer until the other side closes.

    Args:
        job: a key of `PACKAGES`.
        seconds: processor time for the beginning, and for each request.
        nbytes: limit of the address space; a grammar's stack comes on top.
        room: number of characters that an answer may have beyond its request's.
    """
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if job == "template":
        from graphcore.tokenizer.template_sandbox import template_answers as answers_to

        most = nbytes  # code in Python could raise its own limit
    else:
        from graphcore.tokenizer.grammar_sandbox import grammar_answers as answers_to
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, most))
    beginning = receive(_read)
    with _processor_time(seconds):
        answer = answers_to(beginning, room)
    while True:
        request = receive(_read)
        with _processor_time(seconds):
            kind, text = answer(request)
        encoded = kind + text.encode("utf-8", "surrogatepass")
        _write(LENGTH.pack(len(encoded)) + encoded)


def receive(read: Callable[[int], bytes], most: int | None = None) -> bytes:
    """Return what the other side sent as one message.

    Args:
        read: function that returns at least one byte, and at most as many as it is asked for.
        most: largest number of bytes to accept; None for any number.

    Raises:
        ValueError: the other side announced more bytes.
    """
    (length,) = LENGTH.unpack(_exactly(read, LENGTH.size))
    if most is not None and length > most:
        raise ValueError(f"{length} bytes were announced where {most} are expected at most")
    return _exactly(read, length)


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        received += read(min(count - len(received), 1 << 20))
    return bytes(received)


def _read(most: int) -> bytes:
    received = os.read(0, most)
    if not received:
        sys.exit()  # the other side is gone
    return received


def _write(answer: bytes) -> None:
    while answer:
        answer = answer[os.write(0, answer) :]


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """End this process if the block takes more processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
