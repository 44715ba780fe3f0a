"""Files that graphcore wrote into its cache, and reads only as they were written.

    <name>.json, <name>.so    the file
    <name>.sha256             its sha256 in hexadecimal, written after it

What was cut short, lost a bit, or lost its hash counts as not there, so that whoever made it makes it again.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

DIGEST_SUFFIX = ".sha256"


def read_checked(path: Path) -> bytes | None:
    """Return the file's bytes if they are what `write_checked` wrote, else None."""
    try:
        content, digest = path.read_bytes(), path.with_suffix(DIGEST_SUFFIX).read_bytes()
    except OSError:  # not there, or not to be read
        return None
    return content if _digest(content) == digest else None


def write_checked(path: Path, content: bytes) -> None:
    """Write the file and its hash, so that no reader takes half of it for the whole; its folder is made if need be.

    A folder in its place, which nobody can have meant, goes.

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
            unfinished.replace(place)  # another process may write the same: the last one wins


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode("ascii")
