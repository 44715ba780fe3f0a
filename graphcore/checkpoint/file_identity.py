"""What tells that a file is still the one whose header was read."""

import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class FileIdentity:
    """A file as the operating system describes it at one moment.

    Attributes:
        device: of the file system.
        inode: of the file; another one under the same name is another file.
        size: in bytes.
        modified_ns: when it was last written to, in nanoseconds since 1970, as finely as the file system counts.
    """

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the identity that `status` describes."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def change_to(self, now: "FileIdentity") -> str:
        """Return in words what happened to the file since, or an empty string if nothing did."""
        if (now.device, now.inode) != (self.device, self.inode):
            return "another file has taken its place"
        if now.size != self.size:
            return f"it {'shrank' if now.size < self.size else 'grew'} from {self.size} to {now.size} bytes"
        return "it was written to" if now.modified_ns != self.modified_ns else ""
