"""The process's resident memory as it grows: what a model takes, and apart from it what the compiler does."""

import subprocess
import sys
from dataclasses import dataclass

from graphcore.graph.compile import load_compiler
from graphcore.memory_limit import free_nbytes
from graphcore.tasks.measure import resident_nbytes

COMPILER_NBYTES = 600 * 10**6  # that a process takes which loads the compiler; seen are 400 MB


@dataclass(frozen=True)
class Growth:
    """Bytes resident at three moments.

    Attributes:
        before: loading began.
        loaded: weights, caches and tokenizer are there.
        warm: programs are built and compiled.
    """

    before: int
    loaded: int
    warm: int


def resident_now() -> int:
    """Return the bytes of this process that are in memory."""
    return resident_nbytes("VmRSS")


def compiler_nbytes(growth: Growth, prefill: str) -> int | None:
    """Return what the compiler holds of the process's memory: its code and data, and what compiling left.

    The compiler is imported beside the reading of weights, where its share cannot be told from theirs, so a process of
    its own measures that.

    Args:
        growth: of this process.
        prefill: how prompts run; where they run eager, nothing is compiled.

    Returns:
        None where that process would not fit into what is free.
    """
    if prefill == "eager":
        return 0
    if free_nbytes() < COMPILER_NBYTES:
        return None
    source = f"from {__name__} import print_compiler_growth; print_compiler_growth()"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    loaded = int(done.stdout) if done.returncode == 0 else 0
    return loaded + max(0, growth.warm - growth.loaded)


def print_compiler_growth() -> None:
    """Print the bytes by which loading the compiler makes this process grow."""
    before = resident_now()
    load_compiler()
    print(resident_now() - before)
