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

from graphcore.checkpoint.quoted import quoted
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
    """Return the size of a regular file in bytes.

    Raises:
        CheckpointError: it is a folder, a pipe or a device, on which a read could wait for ever.
    """
    status = _status(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file; name a checkpoint file or its folder")
    return status.st_size


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


def read_span(path: Path, offset: int, nbytes: int, tensor: str) -> torch.Tensor:
    """Return `nbytes` from `offset` of a file as uint8 [nbytes], in memory of its own.

    Raises:
        CheckpointError: the file ends before the span does.
    """
    span = torch.empty(nbytes, dtype=torch.uint8)
    space = span.numpy().data
    done = 0
    with explained(path), path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while done < nbytes:
            count = stream.readinto(space[done:])
            if not count:
                raise CheckpointError(
                    f"{path}: tensor {quoted(tensor)} needs bytes {offset} to {offset + nbytes}, "
                    f"the file now ends at {offset + done}; it shrank since it was opened, fetch it again"
                )
            done += count
    return span
