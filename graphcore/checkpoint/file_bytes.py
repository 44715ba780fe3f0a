"""Regular files, opened and read whole or in part, with the operating system's refusals as checkpoint errors.

Reads go through `readinto` and never through a lasting mapping: a file that shrinks under a mapping kills the process
with SIGBUS, while a short read is an error that can be told.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.span import Span
from graphcore.errors import CheckpointError, CheckpointNotFoundError, GraphcoreError


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the operating system says about `path` into a checkpoint error.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointError: it cannot be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: no such file or folder; check the path, or fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder.

    Raises:
        CheckpointNotFoundError: nothing is there.
    """
    return stat.S_ISDIR(_status(path).st_mode)


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes; raises as `file_identity` does."""
    return file_identity(path).size


def file_identity(path: Path) -> FileIdentity:
    """Return which regular file lies at `path` now.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointError: it is a folder, a pipe or a device, on which a read could wait for ever.
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
    """Return the names of the regular files in `folder`, sorted."""
    with explained(folder):
        return sorted(entry.name for entry in folder.iterdir() if entry.is_file())


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Yield `path` opened for buffered reading; errors while it is open are explained too."""
    with explained(path), path.open("rb", buffering=1 << 16) as stream:
        yield stream


def read_front(path: Path, nbytes: int) -> bytes:
    """Return the first `nbytes` of a regular file, or all of it if it is shorter."""
    file_size(path)
    with opened(path) as stream:
        return stream.read(nbytes)


def read_span(span: Span, identity: FileIdentity, tensor: str) -> torch.Tensor:
    """Return the bytes of a span as uint8 [nbytes], in memory of its own.

    Args:
        identity: of the span's file, from when its header was read.
        tensor: what the bytes are of, for messages.

    Raises:
        CheckpointNotFoundError: the file is gone.
        CheckpointError: the file ends before the span does, or is another one by now.
    """
    raw = torch.empty(span.nbytes, dtype=torch.uint8)
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
        # After the read: what was written before or during it has its time by now.
        change = identity.change_to(FileIdentity.of(os.fstat(stream.fileno())))
    if change:
        raise CheckpointError(
            f"{span.file}: changed since it was opened, found at tensor {quoted(tensor)}: {change}; open it again"
        )
    return raw
