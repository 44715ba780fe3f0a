"""A cache of downloaded files, each of which is either complete or absent.

    <entry>/.lock          lock between processes and threads, held during all writes; its time is that of the last use
    <entry>/.new-xxxx/     temporary folder for a new file; deleted later if the process died
    <entry>/source.json    record, written before the file: its name, bytes, sha256, mtime
    <entry>/model.gguf     the file, renamed to this when it is complete and on disk

A file is valid only if its size and time match source.json, or if the time differs, its size and hash.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from graphcore.errors import CheckpointError

RECORD_NAME = "source.json"
LOCK_NAME = ".lock"
MAKING_PREFIX = ".new-"


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
            os.utime(entry / LOCK_NAME)
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


@contextlib.contextmanager
def making_folder(entry: Path) -> Iterator[Path]:
    """Provide an empty temporary folder inside the entry, deleted afterwards in all cases.

    Folders that dead processes left behind are deleted first, so the caller must hold the entry's lock.
    """
    for left in entry.glob(f"{MAKING_PREFIX}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=MAKING_PREFIX, dir=entry) as made:
        yield Path(made)


def find_whole(entry: Path) -> tuple[Path, Record] | None:
    """Return the entry's file and record if the file matches the record; else None."""
    record = _read_record(entry / RECORD_NAME)
    if record is None:
        return None
    path = entry / record.file
    try:
        status = path.stat()
    except (OSError, ValueError):  # absent, or an invalid file name
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size != record.nbytes:
        return None
    if status.st_mtime_ns != record.mtime_ns and file_sha256(path) != record.sha256:
        return None
    return path, record


def _read_record(path: Path) -> Record | None:
    try:
        record = Record(**json.loads(path.read_text("utf-8")))
    except (
        FileNotFoundError,
        ValueError,
        TypeError,
        RecursionError,
    ):  # absent, not JSON, or other keys: written by something else
        return None
    if not isinstance(record.file, str) or Path(record.file).name != record.file:
        return None
    return record


def keep(made: Path, entry: Path, name: str, source: str, sha256: str) -> Path:
    """Move a complete file into its entry under `name`, with its bytes on disk first, and return its new path."""
    descriptor = os.open(made, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    status = made.stat()
    record = Record(source, name, status.st_size, sha256, status.st_mtime_ns)
    (entry / name).unlink(missing_ok=True)
    new_record = made.with_name(RECORD_NAME)
    new_record.write_text(json.dumps(asdict(record), indent=2) + "\n", "utf-8")
    new_record.replace(entry / RECORD_NAME)
    made.replace(entry / name)
    return entry / name


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
            f"{where}: sha256 is {found}, expected {expected}; the file is not the one that was asked for: correct "
            "sha256 or the source"
        )
