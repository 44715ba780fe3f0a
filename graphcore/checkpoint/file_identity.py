"""The identity of a file, which tells whether it is still the one whose header was read."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SAMPLES, SAMPLE_NBYTES = 64, 4096  # parts of a file that tell it from another of its size


@dataclass(frozen=True)
class FileIdentity:
    """The description of a file by the operating system at one moment.

    Attributes:
        device: number of the device that holds the file system.
        inode: number of the file; another number under the same name is another file.
        size: bytes of the file.
        modified_ns: time of the last write, in nanoseconds since 1970, with the file system's resolution.
        changed_ns: time of the last change of content, time of writing, owner, permissions or links, likewise; no
            program can set it, so it shows a write whose time of writing was set back.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the identity that `status` describes."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def change_to(self, now: "FileIdentity") -> str:
        """Return in words how the file changed until `now`; empty if it did not."""
        if (now.device, now.inode) != (self.device, self.inode):
            return "another file has taken its place"
        if now.size != self.size:
            return f"it {'shrank' if now.size < self.size else 'grew'} from {self.size} to {now.size} bytes"
        if now.modified_ns != self.modified_ns:
            return "it was written to"
        is_same = now.changed_ns == self.changed_ns
        return "" if is_same else "it was written to and its time set back, or its owner, permissions or links changed"


def sampled_hash(path: Path, size: int) -> str:
    """Return a hash of parts of a file, evenly spaced from its first bytes to its last, in a few milliseconds.

    It tells another model's file from this one, on whatever machine, but not a file with a few changed bytes.

    Args:
        size: bytes of the file.

    Raises:
        OSError: the file cannot be read.
    """
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_NBYTES) * number // (SAMPLES - 1))
            found.update(file.read(SAMPLE_NBYTES))
    return found.hexdigest()
