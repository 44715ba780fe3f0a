"""The process that a chat template runs in: it reads the template and conversations, and writes answers.

    template -> conversation -> answer -> conversation -> answer ...

The kernel enforces the bounds, so they hold even inside a single multiplication: a timer of processor time that ends
the process (ITIMER_PROF; nothing here catches its signal), and a limit of the address space, at which Python raises
MemoryError. This module imports only jinja2 and the standard library, because it is started at every load of a model.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator

LENGTH = struct.Struct("<Q")  # precedes everything that is sent: the number of bytes that follow
TEXT, UNREADABLE, REFUSED = b"t", b"u", b"r"  # an answer's first byte: the text follows, or the reason


def serve(seconds: float, nbytes: int, room: int) -> None:
    """Answer until the other side closes.

    Args:
        seconds: processor time for compiling, and for each conversation.
        nbytes: limit of the address space.
        room: number of characters that a template may add to the messages'.
    """
    from graphcore.tokenizer.template_sandbox import compile_template, render_template

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    text = receive(_read).decode("utf-8", "surrogatepass")
    with _processor_time(seconds):
        template, reason = compile_template(text)
    while True:
        request = receive(_read)
        kind, answer = UNREADABLE, reason
        if template is not None:
            with _processor_time(seconds):
                rendered, refusal = render_template(template, json.loads(request), room + len(request))
            kind, answer = (REFUSED, refusal) if rendered is None else (TEXT, rendered)
        encoded = kind + answer.encode("utf-8", "surrogatepass")
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
