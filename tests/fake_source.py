"""Bytes that a streamed checkpoint is read from, made up, slow or broken on purpose."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource


def nothing(offset: int, nbytes: int) -> None:
    """Let a read through."""


class FakeSource:
    """A `ByteSource` over bytes in memory.

    Args:
        path: what it claims to be.
        content: [size] uint8.
        on_read: called in the reading thread before each read, with its offset and size; may wait or raise.
        lacking: bytes by which each read falls short.
        is_direct: reads must be aligned.
    """

    def __init__(
        self,
        path: Path,
        content: Tensor,
        on_read: Callable[[int, int], None] = nothing,
        lacking: int = 0,
        is_direct: bool = True,
    ) -> None:
        self.path = path
        self.content = content
        self.size = content.nbytes
        self.alignment = 4096
        self.is_direct = is_direct
        self.why_buffered = "it is none"
        self.on_read = on_read
        self.lacking = lacking
        self.reads: list[tuple[int, int]] = []
        self.checks = 0
        self.change: Exception | None = None
        self.is_closed = False

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        assert not self.is_closed, "read after it was closed"
        alignment = self.alignment if self.is_direct else 1
        assert offset % alignment == 0, f"offset {offset} is not aligned"
        assert nbytes % alignment == 0, f"{nbytes} bytes are not aligned"
        assert space.data_ptr() % alignment == 0, "memory is not aligned"
        self.reads.append((offset, nbytes))
        self.on_read(offset, nbytes)
        count = min(nbytes, self.size - offset) - self.lacking
        space[:count] = self.content[offset : offset + count]
        return count

    def check_unchanged(self) -> None:
        self.checks += 1
        if self.change is not None:
            raise self.change

    def close(self) -> None:
        self.is_closed = True


class Wrapped:
    """Another `ByteSource`, with something that happens before each of its reads.

    Args:
        on_read: called in the reading thread with the number of the read, from 0; may wait or raise.
        lacking: bytes by which each read falls short.
    """

    def __init__(
        self, inner: ByteSource, on_read: Callable[[int], None] = lambda number: None, lacking: int = 0
    ) -> None:
        self.inner = inner
        self.on_read = on_read
        self.lacking = lacking
        self.count = 0
        self.path, self.size, self.alignment = inner.path, inner.size, inner.alignment
        self.is_direct, self.why_buffered = inner.is_direct, inner.why_buffered

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        number = self.count
        self.count += 1
        self.on_read(number)
        return self.inner.read_into(space, offset, nbytes) - self.lacking

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()


def numbered_bytes(nbytes: int, seed: int = 0) -> Tensor:
    """Return random bytes, uint8 [nbytes]."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
