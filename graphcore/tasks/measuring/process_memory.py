"""The memory that a run takes: its peak, the process's growth, and the compiler's part of it."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcore.graph.compile import load_compiler
from graphcore.memory_limit import free_ram_nbytes

COMPILER_NBYTES = 600 * 10**6  # bytes that a process with the compiler may take; 400 MB were measured


class PeakMemory:
    """The peak memory since this object was made.

    On CUDA it is the memory that torch has allocated on the device. On the CPU it is the growth of the process's
    resident set: weights, caches, the memory of loading and compiling, and code.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._baseline = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
        else:
            with suppress(OSError):  # where Linux does not permit a reset, an earlier peak counts
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._baseline = resident_nbytes("VmRSS")

    def nbytes(self) -> int:
        """Return the peak so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._baseline
        return max(0, resident_nbytes("VmHWM") - self._baseline)


def resident_nbytes(field: str) -> int:
    """Return VmRSS (resident now), VmHWM (its highest) or RssShmem (shared memory now) of this process.

    Source: proc(5), /proc/pid/status.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024


@dataclass(frozen=True)
class Growth:
    """The process's resident bytes at three moments.

    Attributes:
        before: bytes when loading began.
        loaded: bytes when weights, caches and tokenizer were loaded.
        warm: bytes when programs were built and compiled.
    """

    before: int
    loaded: int
    warm: int


def resident_now() -> int:
    """Return the resident bytes of this process."""
    return resident_nbytes("VmRSS")


def compiler_nbytes(growth: Growth, prefill: str) -> int | None:
    """Return the bytes of the process's memory that belong to the compiler: code, data and remains of compiling.

    The compiler is imported while weights are read, so that its share cannot be told from theirs. A separate process
    therefore measures the import.

    Args:
        growth: this process's resident bytes.
        prefill: how prompts run: "compiled" or "eager", which compiles nothing.

    Returns:
        Bytes, or None where the separate process would not fit into free memory.
    """
    if prefill == "eager":
        return 0
    if free_ram_nbytes() < COMPILER_NBYTES:
        return None
    source = f"from {__name__} import print_compiler_growth; print_compiler_growth()"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    loaded = int(done.stdout) if done.returncode == 0 else 0
    return loaded + max(0, growth.warm - growth.loaded)


def print_compiler_growth() -> None:
    """Print the bytes by which this process grows when it loads the compiler."""
    before = resident_now()
    load_compiler(torch.device("cpu"))
    print(resident_now() - before)
