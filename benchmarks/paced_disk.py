"""A disk with a rate: files that weights stream from are read no faster than that, whatever the disk gives.

For benchmarks and tests of several processes on one machine, each with a disk of its own: `pace_files` is called in a
process before it loads a model. Reads in flight share the rate, as at an NVMe disk, so that a row of a table does not
wait for megabytes of a layer.
"""

import threading
import time
from typing import Any

from torch import Tensor

from graphcore.checkpoint.streamed_file import StreamedFile

PIECE_NBYTES = 128 << 10  # bytes of a read that are due before another read's turn


class PacedDisk:
    """The time at which a disk has read all pieces that were asked of it.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at, self._lock = rate, 0.0, threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Wait until the disk has read these bytes, piece by piece, in turn with reads of other threads."""
        for at in range(0, nbytes, PIECE_NBYTES):
            with self._lock:
                self._free_at = max(self._free_at, time.perf_counter()) + min(PIECE_NBYTES, nbytes - at) / self._rate
                ends = self._free_at
            time.sleep(max(0.0, ends - time.perf_counter()))


def pace_files(rate: float) -> None:
    """Read all streamed files of this process from one disk of `rate` bytes per second, from now on."""
    disk, read = PacedDisk(rate), StreamedFile.read_into

    def paced(file: StreamedFile, space: Tensor, offset: int, nbytes: int) -> int:
        count = read(file, space, offset, nbytes)
        disk.wait(count)
        return count

    streamed_file: Any = StreamedFile
    streamed_file.read_into = paced
