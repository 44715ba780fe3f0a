"""Pieces of weights that are their file's very bytes, which remember when they were written."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from support.fake_sources import FakeSource
from torch import Tensor

from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline

FILE = Path("model.safetensors")
FILL_THREADS = "graphcore-fill"


@dataclass(frozen=True)
class ByteConversion:
    """Bytes on their way from spans to a place.

    Attributes:
        out: uint8, as long as all spans together.
        on_write: called in the writing thread, before.
    """

    weight: str
    spans: tuple[FileSpan, ...]
    out: Tensor
    on_write: Callable[[], None] = lambda: None
    plain_place: None = None

    @property
    def nbytes(self) -> int:
        return self.out.nbytes

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        assert threads == 1, "a reading thread packs alone"
        self.on_write()
        self.out.copy_(torch.cat([part.clone() for part in parts]))


def conversion(begin: int, nbytes: int, file: Path = FILE, out: Tensor | None = None) -> ByteConversion:
    place = torch.zeros(nbytes, dtype=torch.uint8) if out is None else out
    return ByteConversion("weight", (FileSpan(file, begin, nbytes),), place)


def filler_of(
    source: FakeSource, num_threads: int = 3, buffer_nbytes: int = 1 << 20, large_nbytes: int = 0
) -> ThreadFiller:
    return ThreadFiller({source.path: source}, num_threads, buffer_nbytes, large_nbytes, Timeline())


def live_threads(filler: ThreadFiller) -> list[threading.Thread]:
    """Return the threads of a filler that run; engines that tests of other files share have theirs."""
    return [thread for thread in filler._threads if thread.is_alive()]
