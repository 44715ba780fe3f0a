"""The process that a chat template runs in: reads it and conversations from standard input, answers there.

    template -> conversation -> answer -> conversation -> answer ...

The kernel holds the bounds, so they hold inside a single multiplication, too: a timer of processor time that ends the
process (ITIMER_PROF; nothing here catches its signal), and a limit of the address space, at which Python raises
MemoryError. It imports jinja2 and the standard library only, because it is started beside every load of a model.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator

LENGTH = struct.Struct("<Q")  # before everything that is sent: how many bytes follow
TEXT, UNREADABLE, REFUSED = b"t", b"u", b"r"  # an answer's first byte: what follows is the text, or the reason


def serve(seconds: float, nbytes: int, room: int) -> None:
    """Answer until the other side closes.

    Args:
        seconds: processor time that compiling may take, and each conversation.
        nbytes: of address space, in all.
        room: characters that a template may add to what messages hold.
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
    """Return what was sent as one piece.

    Args:
        read: returns at least one byte, and at most as many as it is asked for.
        most: bytes that are taken; None takes any number.

    Raises:
        ValueError: more was announced.
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
    """End this process if what runs inside takes longer."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
