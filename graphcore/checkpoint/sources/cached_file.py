"""A cache of downloaded files, each of which is either complete or absent.

    <entry>/.lock          lock between processes and threads, held during all writes; its time is that of the last use
    <entry>/.new-xxxx/     temporary folder for a new file; deleted later if the process died
    <entry>/source.json    record, written before the file: its name, bytes, sha256, mtime
    <entry>/model.gguf     the file, renamed to this when it is complete and on disk

A file is valid only if its size and time match source.json, or if the time differs, its size and hash. So readers need
no lock: until a new file is in its place, none is valid.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from graphcore.errors import CheckpointError

RECORD_NAME = "source.json"
LOCK_NAME = ".lock"


@dataclass(frozen=True)
class Record:
    """The contents of source.json: source, name, bytes, hash and mtime of the file in the same folder."""

    source: str
    file: str
    nbytes: int
    sha256: str
    mtime_ns: int


@contextlib.contextmanager
def locked_entry(entry: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an entry's lock, which excludes other processes and threads; create the folder if it does not exist.

    Args:
        entry: folder of the entry.
        on_wait: callback, called once before waiting if the lock is not free.

    Raises:
        CheckpointError: the folder cannot be written, or the disk is full, at any time while the lock is held.
    """
    from filelock import FileLock, Timeout  # 13 ms, which a start without a download need not take

    with writable(entry):
        entry.mkdir(parents=True, exist_ok=True)
        lock = FileLock(entry / LOCK_NAME)
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            on_wait()
            held = lock.acquire()
        with held:
            yield


@contextlib.contextmanager
def writable(folder: Path, setting: str = "cache_dir") -> Iterator[None]:
    """Turn errors of the file system into checkpoint errors that say what to do.

    Args:
        folder: folder that is read and written.
        setting: name of the setting that chooses the folder.

    Raises:
        CheckpointError: the disk is full, or a file cannot be read or written.
    """
    try:
        yield
    except CheckpointError:  # some are OSErrors too, and already say what to do
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{folder}: the disk is full; free some space or set another {setting}") from error
        raise CheckpointError(
            f"{error.filename or folder}: {error.strerror or error}; check {setting} and its permissions"
        ) from error


def find_whole(entry: Path) -> tuple[Path, Record] | None:
    """Return the entry's file and record if the file matches the record; else None. No lock is needed."""
    try:
        record = Record(**json.loads((entry / RECORD_NAME).read_text("utf-8")))
        path = entry / Path(record.file).name
        is_whole = path.stat().st_size == record.nbytes
        if is_whole and path.stat().st_mtime_ns != record.mtime_ns:
            is_whole = file_sha256(path) == record.sha256
    except (OSError, ValueError, TypeError, RecursionError):  # absent, incomplete, or written by something else
        return None
    return (path, record) if is_whole else None


def keep(made: Path, entry: Path, name: str, source: str, sha256: str) -> tuple[Path, Record]:
    """Move a complete file into its entry under `name`, with its bytes on disk first; return its path and record."""
    with made.open("rb") as written:
        os.fsync(written.fileno())
    status = made.stat()
    record = Record(source, name, status.st_size, sha256, status.st_mtime_ns)
    (entry / RECORD_NAME).write_text(json.dumps(asdict(record), indent=2) + "\n", "utf-8")
    return made.replace(entry / name), record


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_sha256(found: str, expected: str | None, where: str) -> None:
    """Check that a hash is the expected one; None skips the check.

    Raises:
        CheckpointError: the hashes differ.
    """
    if expected is not None and found != expected:
        raise CheckpointError(
            f"{where}: sha256 is {found}, expected {expected}; the file is not the one that was asked for: name "
            f"another (model.precision=full, model.checkpoint=...), or take it as it is with model.sha256={found}"
        )
