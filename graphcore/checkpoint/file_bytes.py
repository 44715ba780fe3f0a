"""Reads of regular files, whole or by span, with errors of the operating system turned into checkpoint errors.

Reads use `readinto` rather than a memory mapping: a mapped file that shrinks kills the process with SIGBUS, while a
short read can be reported as an error.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.errors import CheckpointError, CheckpointNotFoundError, GraphcoreError, quoted

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class FileSpan:
    """A run of bytes of a file: offset .. offset + nbytes - 1."""

    file: Path
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the span."""
        return self.offset + self.nbytes


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of the operating system about `path` into checkpoint errors.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        CheckpointError: the path cannot be read.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{path}: no such file or folder; check the path, or fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder.

    Raises:
        CheckpointNotFoundError: the path does not exist.
    """
    return stat.S_ISDIR(_status(path).st_mode)


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes; raises as `file_identity` does."""
    return file_identity(path).size


def file_identity(path: Path) -> FileIdentity:
    """Return the identity of the regular file that lies at `path` now.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        CheckpointError: the path is a folder, a pipe or a device, from which a read could block forever.
    """
    status = _status(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file; name a checkpoint file or its folder")
    return FileIdentity.of(status)


def _status(path: Path) -> os.stat_result:
    try:
        with explained(path):
            return path.stat()
    except GraphcoreError:
        raise
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise CheckpointError(f"{quoted(str(path))}: is not a path: {error}") from error


def file_names(folder: Path) -> list[str]:
    """Return the names of the regular files in `folder`, sorted, without hidden ones (macOS writes ._x beside x)."""
    with explained(folder):
        return sorted(entry.name for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Yield `path` opened for buffered reading; OS errors while it is open become checkpoint errors."""
    with explained(path), path.open("rb", buffering=1 << 16) as stream:
        yield stream


def read_front(path: Path, nbytes: int) -> bytes:
    """Return the first `nbytes` of a regular file, or all of it if it is shorter."""
    file_size(path)
    with opened(path) as stream:
        return stream.read(nbytes)


def read_whole(path: Path) -> bytes:
    """Return all bytes of a regular file; raises as `file_identity` does."""
    file_size(path)
    with opened(path) as stream:
        return stream.read()


def read_span(span: FileSpan, identity: FileIdentity, tensor: str) -> "torch.Tensor":
    """Read the bytes of a span and return them as uint8 [nbytes], in their own memory.

    Args:
        identity: identity of the file when its header was read.
        tensor: name of the tensor, for messages.

    Raises:
        CheckpointNotFoundError: the file is gone.
        CheckpointError: the file ends before the span does, or has changed.
    """
    import torch  # headers are checked without it

    raw = torch.empty(span.nbytes, dtype=torch.uint8, device="cpu")
    space = raw.numpy().data
    done = 0
    with explained(span.file), span.file.open("rb", buffering=0) as stream:
        stream.seek(span.offset)
        while done < span.nbytes:
            count = stream.readinto(space[done:])
            if not count:
                raise CheckpointError(
                    f"{span.file}: tensor {quoted(tensor)} needs bytes {span.offset} to {span.end}, "
                    f"the file now ends at {span.offset + done}; it shrank since it was opened, fetch it again"
                )
            done += count
        # After the read, so that a write before or during it has already changed the file's time.
        change = identity.change_to(FileIdentity.of(os.fstat(stream.fileno())))
    if change:
        raise CheckpointError(
            f"{span.file}: changed since it was opened, found at tensor {quoted(tensor)}: {change}; open it again"
        )
    return raw
