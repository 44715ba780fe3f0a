"""Reads and writes graphcore's cache files, and ignores those that changed since they were written.

    <name>.json, <name>.so    the file
    <name>.sha256             its sha256 in hexadecimal, written after it

A file that is truncated, corrupted or without its hash counts as missing, so that the caller writes it again.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

DIGEST_SUFFIX = ".sha256"


def read_checked(path: Path) -> bytes | None:
    """Return the file's bytes if they are exactly what `write_checked` wrote, else None."""
    try:
        content, digest = path.read_bytes(), path.with_suffix(DIGEST_SUFFIX).read_bytes()
    except OSError:  # missing or unreadable
        return None
    return content if _digest(content) == digest else None


def write_checked(path: Path, content: bytes) -> None:
    """Write the file and its hash, so that no reader accepts a partial file; creates the folder if needed.

    A folder in the file's place is removed: it can only be a mistake.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as scratch:
        for place, written in ((path, content), (path.with_suffix(DIGEST_SUFFIX), _digest(content))):
            unfinished = Path(scratch) / place.name
            unfinished.write_bytes(written)
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            unfinished.replace(place)  # another process may write the same file: the last one wins


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode("ascii")
