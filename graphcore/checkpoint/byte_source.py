"""What reads a streamed checkpoint's bytes: a file, or in a test something that fails on purpose."""

from pathlib import Path
from typing import Protocol

from torch import Tensor


class ByteSource(Protocol):
    """Bytes 0 .. size - 1, read by several threads at a time."""

    @property
    def path(self) -> Path:
        """What errors name."""

    @property
    def size(self) -> int:
        """In bytes."""

    @property
    def alignment(self) -> int:
        """Of offsets, sizes and addresses that a direct read takes, in bytes."""

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache, and so must be aligned."""

    @property
    def why_buffered(self) -> str:
        """Why reads are not direct; empty if they are."""

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        """Fill `space` with bytes from `offset` on.

        Args:
            space: uint8, at least `nbytes` long, contiguous, on the CPU.
            offset: of the first byte.
            nbytes: how many are asked for. Only what lies before `size` comes.

        Returns:
            How many bytes came: min(nbytes, size - offset).

        Raises:
            CheckpointError: they cannot be read.
        """

    def check_unchanged(self) -> None:
        """Do nothing.

        Raises:
            CheckpointError: the bytes are not those of the model any more.
        """

    def close(self) -> None:
        """Let go of the file. No thread may be reading; none reads afterwards."""
