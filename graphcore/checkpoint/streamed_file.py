"""A checkpoint's file that stays open for the life of an engine and is read again for every token.

Reads are direct (O_DIRECT) where the file system can: from the disk into the caller's memory, past the page cache, at
offsets, sizes and addresses that are multiples of `ALIGNMENT`. Else they are buffered, and take any.
"""

import errno
import fcntl
import mmap
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from graphcore.checkpoint.file_bytes import explained, file_identity
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.errors import CheckpointError, StreamingError

ALIGNMENT = 4096  # bytes; a multiple of every disk's logical block. A file system that wants more refuses: see `trial`.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of O_DIRECT, at open or at the first read


class StreamedFile:
    """The `ByteSource` that is a file.

    A model's bytes must not change between two tokens. So the file is compared with what it was when its header was
    read: at `open`, and whenever `check_unchanged` is called.

    Args:
        path: for messages, and to see whether the name still means this file.
        descriptor: of the open file; closed by `close`.
        identity: of the file when its header was read.
        why_buffered: why reads are not direct; empty if they are.
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
            identity: of the file when its header was read: `Checkpoint.files[path]`.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CheckpointError: it cannot be read, or is not the file whose header was read.
        """
        file_identity(path)  # opening a pipe could wait for ever
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
        """Fill `space` with bytes from `offset` on, without holding Python's lock.

        Args:
            space: uint8, at least `nbytes` long, contiguous, on the CPU; aligned if reads are direct.
            offset: of the first byte; aligned if reads are direct.
            nbytes: how many are asked for; aligned if reads are direct. Only what lies before the file's end comes.

        Returns:
            How many bytes came: min(nbytes, size - offset).

        Raises:
            CheckpointError: the file ends earlier than it did, or the disk cannot read it.
            StreamingError: the file was closed, with the engine that reads it.
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
        """Compare the open file, and the file that has its name now, with the one whose header was read.

        Raises:
            CheckpointError: it was written to, cut off, replaced or deleted.
        """
        change = self._identity.change_to(FileIdentity.of(os.fstat(self._descriptor)))
        if not change:
            try:
                change = self._identity.change_to(FileIdentity.of(self.path.stat()))
            except OSError as error:
                change = "it was deleted" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
        if change:
            raise CheckpointError(f"{self.path}: changed while it was being read: {change}; load the model again")

    def close(self) -> None:
        """Close the file. No thread may be reading: the number of a closed file is soon another file's."""
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
    """Return a descriptor, and why its reads are not direct."""
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
    """Read once from the start of a file opened with O_DIRECT; if that is refused, make its reads buffered.

    Returns:
        Why reads are buffered now; empty if they are direct.
    """
    try:
        os.preadv(descriptor, [space], 0)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        return f"its file system does not read {ALIGNMENT} bytes with O_DIRECT: {error.strerror}"
    return ""
