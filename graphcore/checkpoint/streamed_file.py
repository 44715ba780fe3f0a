"""Files of a checkpoint that stay open for the life of an engine and are read again for every token.

Reads are direct (O_DIRECT) if asked for and supported by the file system: from the disk into the caller's memory,
without the page cache, with offsets, sizes and addresses that are multiples of `ALIGNMENT`. Other reads are buffered
and need no alignment.

Streaming reads through the `ByteSource` interface, so that tests can use sources that fail on purpose.
"""

import errno
import fcntl
import mmap
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from graphcore.checkpoint.file_bytes import explained, file_identity
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.errors import CheckpointError, StreamingError

ALIGNMENT = 4096  # bytes; a multiple of usual logical block sizes. A file system that needs more refuses: see `trial`.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # errors that mean no O_DIRECT, at open or at the first read


class ByteSource(Protocol):
    """The interface of a source of bytes 0 .. size - 1, which several threads may read at the same time."""

    @property
    def path(self) -> Path:
        """Path of the file, for messages."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def alignment(self) -> int:
        """Alignment in bytes of the offsets, sizes and addresses of direct reads."""

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache, and therefore must be aligned."""

    @property
    def why_buffered(self) -> str:
        """Reason why reads are not direct; empty if they are."""

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        """Read bytes into memory.

        Args:
            space: memory, uint8, contiguous, on the CPU, at least `nbytes` long.
            offset: offset of the first byte.
            nbytes: number of bytes to read; fewer are read if the source ends before.

        Returns:
            The number of bytes read: min(nbytes, size - offset).

        Raises:
            CheckpointError: the bytes cannot be read.
        """

    def check_unchanged(self) -> None:
        """Check that the bytes have not changed.

        Raises:
            CheckpointError: the bytes have changed.
        """

    def close(self) -> None:
        """Close the source. No thread may be reading, or read afterwards."""


class StreamedFile:
    """A `ByteSource` that reads a file.

    A model's bytes must not change between two tokens. So the file's identity is compared with the one from when its
    header was read: at `open`, and at every call of `check_unchanged`.

    Args:
        path: path of the file, for messages and to check that it still leads to the same file.
        descriptor: descriptor of the open file; `close` closes it.
        identity: identity of the file when its header was read.
        why_buffered: reason why reads are not direct; empty if they are.
    """

    def __init__(self, path: Path, descriptor: int, identity: FileIdentity, why_buffered: str) -> None:
        self.path = path
        self.size = identity.size
        self.alignment = ALIGNMENT
        self.is_direct = not why_buffered
        self.why_buffered = why_buffered
        self._descriptor = descriptor
        self._identity = identity

    @classmethod
    def open(cls, path: Path, identity: FileIdentity, direct: bool) -> Self:
        """Open a file, for direct reads if they are asked for and possible.

        Args:
            identity: identity of the file when its header was read, from `Checkpoint.files`.
            direct: True to ask for direct reads.

        Raises:
            CheckpointNotFoundError: the path does not exist.
            CheckpointError: the file cannot be read, or has changed since its header was read.
        """
        file_identity(path)  # refuses a pipe, whose opening could block forever
        with explained(path):
            descriptor, why_buffered = _opened(path, direct)
        found = cls(path, descriptor, identity, why_buffered)
        try:
            found.check_unchanged()
        except CheckpointError:
            found.close()
            raise
        return found

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        """Read bytes into memory, without holding Python's global lock. Direct reads must be aligned.

        Args:
            space: memory, uint8, contiguous, on the CPU, at least `nbytes` long.
            offset: offset of the first byte.
            nbytes: number of bytes to read; fewer are read if the file ends before.

        Returns:
            The number of bytes read: min(nbytes, size - offset).

        Raises:
            CheckpointError: the file has shrunk, or the disk cannot read it.
            StreamingError: the file has been closed with its engine.
        """
        if self._descriptor < 0:  # another thread may close an engine at any time
            raise StreamingError(f"{self.path}: this engine is closed and reads no more weights; load it again")
        places = (space.data_ptr(), offset, nbytes)
        assert not self.is_direct or not any(place % self.alignment for place in places), f"not aligned: {places}"
        expected = min(nbytes, self.size - offset)
        memory = space[:nbytes].numpy().data
        done = 0
        while done < expected:
            count = self._read_once(memory[done:], offset + done)
            done += count
            if not count:
                raise CheckpointError(
                    f"{self.path}: bytes {offset} to {offset + expected} are needed, the file now ends at "
                    f"{os.fstat(self._descriptor).st_size}; it shrank while it was being read, fetch it again"
                )
        return expected

    def _read_once(self, memory: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [memory], offset)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read at byte {offset}: {error.strerror}; check the disk, or fetch it again"
            ) from error

    def check_unchanged(self) -> None:
        """Check that the open file, and the file now at its path, are the one whose header was read.

        Raises:
            CheckpointError: the file was written to, cut off, replaced or deleted.
        """
        # The path comes first: to delete or replace a file also changes the open file's number of links.
        try:
            change = self._identity.change_to(FileIdentity.of(self.path.stat()))
        except OSError as error:
            change = "it was deleted" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
        change = change or self._identity.change_to(FileIdentity.of(os.fstat(self._descriptor)))
        if change:
            raise CheckpointError(f"{self.path}: changed while it was being read: {change}; load the model again")

    def close(self) -> None:
        """Close the file. No thread may be reading, because the system may reuse the descriptor for another file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def _opened(path: Path, direct: bool) -> tuple[int, str]:
    """Open a file and return its descriptor, and why its reads are not direct; empty if they are."""
    if not direct:
        return os.open(path, os.O_RDONLY), "buffered reads were asked for"
    if sys.platform != "linux":
        return os.open(path, os.O_RDONLY), f"{sys.platform} has no O_DIRECT"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return os.open(path, os.O_RDONLY), f"its file system does not open files with O_DIRECT: {error.strerror}"
    try:
        return descriptor, trial(descriptor, memoryview(mmap.mmap(-1, ALIGNMENT)))
    except OSError:
        os.close(descriptor)
        raise


def trial(descriptor: int, space: memoryview) -> str:
    """Test a direct read at the start of a file opened with O_DIRECT; if it is refused, switch to buffered reads.

    Returns:
        The reason why reads are buffered; empty if they are direct.
    """
    try:
        os.preadv(descriptor, [space], 0)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        return f"its file system does not read {ALIGNMENT} bytes with O_DIRECT: {error.strerror}"
    return ""
