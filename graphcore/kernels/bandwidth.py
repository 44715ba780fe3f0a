"""Measures how fast memory can be read: the upper bound for a decode step, which reads every weight.

A GPU is timed with CUDA events: reading, which is what a decode step does, and copying, which published bandwidths
refer to. A copy of n bytes moves 2 n bytes, read and written; a decode step's target is a share of the copy rate.
Reading alone may be a little faster.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphcore.kernels.backend import Backend, NativeBackend
from graphcore.kernels.cpu.library import open_library
from graphcore.memory_limit import affordable_nbytes

DEVICE_NBYTES = 4 * 10**9  # largest size of the buffer: far more than any GPU's cache
FREE_SHARE = 4  # the buffer is at most a quarter of the free memory: a copy needs two, and some memory must stay free
WARM_RUNS = 2
READ_NBYTES = 512 * 10**6  # far more than any CPU cache
LEAST_NBYTES = 128 * 10**6  # a smaller buffer would partly fit in caches
LINE_NBYTES = 64


@dataclass(frozen=True)
class DeviceBandwidth:
    """Bytes per second of the fastest of several runs.

    Attributes:
        read: rate of torch.sum over float32.
        copied: rate of a copy on the device; read and written bytes both count, so twice the buffer.
        nbytes: size of the buffer.
    """

    read: float
    copied: float
    nbytes: int


def measure_device_bandwidth(device: torch.device, nbytes: int = DEVICE_NBYTES, repeats: int = 10) -> DeviceBandwidth:
    """Return how fast a GPU reads and copies its memory.

    Args:
        nbytes: largest size of the buffer; a quarter of the free memory if that is less.
        repeats: timed runs of each kind, after some that are not timed.
    """
    free = torch.cuda.mem_get_info(device)[0]
    count = min(nbytes, free // FREE_SHARE) // 4
    source, out = (
        torch.ones(count, device=device, dtype=torch.float32),
        torch.empty(count, device=device, dtype=torch.float32),
    )
    read = fastest_seconds(lambda: source.sum(), repeats)
    copied = fastest_seconds(lambda: out.copy_(source), repeats)
    return DeviceBandwidth(source.nbytes / read, 2 * source.nbytes / copied, source.nbytes)


def fastest_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of several runs of `work` on the current stream, timed with CUDA events."""
    found: list[float] = []
    for _ in range(WARM_RUNS + repeats):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type it
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        began.record()
        work()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended) / 1e3)
    return min(found[WARM_RUNS:])


@dataclass(frozen=True)
class ReadBandwidth:
    """Bytes per second of the fastest of several passes over one buffer.

    Attributes:
        torch: rate of torch.sum over float32.
        native: rate of the C++ reader with all of torch's threads; None without C++ kernels, and on a GPU.
        nbytes: size of the buffer.
        copied: rate of a copy inside a GPU's memory, read and written bytes counted; None on the CPU.
    """

    torch: float
    native: float | None
    nbytes: int
    copied: float | None = None

    @property
    def best(self) -> float:
        """The faster of the two reading rates."""
        return max(self.torch, self.native or 0.0)


def measure_read_bandwidth(
    device: torch.device, backend: Backend, nbytes: int = READ_NBYTES, repeats: int = 5
) -> ReadBandwidth | None:
    """Return how fast torch and, on a CPU, the C++ reader read the device's memory, measured alternately.

    Args:
        backend: kernels; the C++ kernels have a reader of their own.
        nbytes: largest size of the buffer; it takes at most half of the free memory. Ignored on a GPU, which uses
            `measure_device_bandwidth` with its own size.
        repeats: passes of each reader.

    Returns:
        The rates, or None if so little memory is free that the buffer would fit in caches.
    """
    if device.type == "cuda":
        found = measure_device_bandwidth(device)
        return ReadBandwidth(found.read, None, found.nbytes, found.copied)
    nbytes = affordable_nbytes(nbytes) // LINE_NBYTES * LINE_NBYTES
    return read_buffer(nbytes, backend, repeats) if nbytes >= LEAST_NBYTES else None


def read_buffer(nbytes: int, backend: Backend, repeats: int) -> ReadBandwidth:
    """Return how fast a buffer of that many bytes, a multiple of 64, is read on the CPU."""
    buffer = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
    readers: dict[str, Callable[[], object]] = {"torch": lambda: buffer.sum().item()}
    if isinstance(backend, NativeBackend):
        readers["native"] = lambda: native_sum(buffer, backend)
    fastest = dict.fromkeys(readers, float("inf"))
    for _ in range(repeats):
        for name, read in readers.items():
            began = time.perf_counter()
            read()
            fastest[name] = min(fastest[name], time.perf_counter() - began)
    native = nbytes / fastest["native"] if "native" in fastest else None
    return ReadBandwidth(nbytes / fastest["torch"], native, nbytes)


def native_sum(buffer: torch.Tensor, backend: NativeBackend) -> int:
    """Return the sum of a buffer's 64-bit words, modulo 2^64, read with all of torch's threads.

    Args:
        buffer: contiguous CPU tensor, a whole number of 64-byte lines.
        backend: C++ kernels.
    """
    assert buffer.is_contiguous(), "the reader knows no strides"
    assert buffer.nbytes % LINE_NBYTES == 0, f"{buffer.nbytes} bytes are no whole lines"
    return int(open_library(backend.library).graphcore_read(torch.get_num_threads(), buffer.data_ptr(), buffer.nbytes))
