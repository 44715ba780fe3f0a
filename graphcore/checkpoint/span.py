"""A run of bytes in a file."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Span:
    """Bytes offset .. offset + nbytes - 1 of a file."""

    file: Path
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.offset + self.nbytes
