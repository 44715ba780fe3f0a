"""How fast memory can be read, by doing nothing else: what no decode step, which reads every weight, can beat."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcore.kernels.device_bandwidth import measure_device_bandwidth
from graphcore.kernels.library import open_library
from graphcore.memory_limit import affordable_nbytes

READ_NBYTES = 512 * 10**6  # far more than any cache holds
LEAST_NBYTES = 128 * 10**6  # of a smaller buffer caches hold a part
LINE_NBYTES = 64


@dataclass(frozen=True)
class ReadBandwidth:
    """Bytes per second of the fastest of some passes over one buffer.

    Attributes:
        torch: of torch.sum over float32.
        native: of the kernels' reader with all of torch's threads; None without kernels, and on other devices.
        nbytes: of the buffer.
        copied: of a copy inside a GPU's memory, read and written bytes counted; None on the CPU.
    """

    torch: float
    native: float | None
    nbytes: int
    copied: float | None = None

    @property
    def best(self) -> float:
        """The faster of the two that read."""
        return max(self.torch, self.native or 0.0)


def measure_read_bandwidth(
    device: torch.device, library: Path | None, nbytes: int = READ_NBYTES, repeats: int = 5
) -> ReadBandwidth | None:
    """Return how fast the device's memory is read, by torch and by the kernels' reader in turns.

    Args:
        library: of the kernels, or None.
        nbytes: of the buffer at most; it takes no more than half of what is free. A GPU's is larger, and it times
            itself (device_bandwidth.py).
        repeats: passes of each reader.

    Returns:
        None where so little memory is free that the buffer would lie in caches.
    """
    if device.type == "cuda":
        found = measure_device_bandwidth(device)
        return ReadBandwidth(found.read, None, found.nbytes, found.copied)
    nbytes = affordable_nbytes(nbytes) // LINE_NBYTES * LINE_NBYTES
    return read_buffer(nbytes, library, repeats) if nbytes >= LEAST_NBYTES else None


def read_buffer(nbytes: int, library: Path | None, repeats: int) -> ReadBandwidth:
    """Return how fast a buffer of that many bytes, a multiple of 64, is read on the CPU."""
    buffer = torch.ones(nbytes // 4)
    readers: dict[str, Callable[[], object]] = {"torch": lambda: buffer.sum().item()}
    if library is not None:
        readers["native"] = lambda: native_sum(buffer, library)
    fastest = dict.fromkeys(readers, float("inf"))
    for _ in range(repeats):
        for name, read in readers.items():
            began = time.perf_counter()
            read()
            fastest[name] = min(fastest[name], time.perf_counter() - began)
    native = nbytes / fastest["native"] if "native" in fastest else None
    return ReadBandwidth(nbytes / fastest["torch"], native, nbytes)


def native_sum(buffer: torch.Tensor, library: Path) -> int:
    """Return the sum of a buffer's 64-bit words, modulo 2^64, read with all of torch's threads.

    Args:
        buffer: on the CPU, contiguous, a whole number of 64-byte lines.
        library: of the kernels.
    """
    assert buffer.is_contiguous(), "the reader knows no strides"
    assert buffer.nbytes % LINE_NBYTES == 0, f"{buffer.nbytes} bytes are no whole lines"
    return int(open_library(str(library)).graphcore_read(torch.get_num_threads(), buffer.data_ptr(), buffer.nbytes))
