"""Times how many dense weights a second become packed ones: in C++ and in torch, by format.

`python -m benchmarks.quantize_rates [--threads 2] [--formats q4_k q6_k]`. A bf16 matrix is packed in turn by C++ (8M
weights) and by torch (1M), errors included, as `quant=` does at load. Each line gives medians of the rounds, least and
most, in million weights a second. `--library` names the kernels of another instruction set (kernels/cpu/built/).
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

from graphcore.device import use_threads
from graphcore.kernels.cpu.library import FORMAT_NUMBERS, find_library, open_library
from graphcore.kernels.cpu.quantize import quantize_weights
from graphcore.quant import FORMATS

ROWS, COLUMNS = 4096, 2048
TORCH_ROWS = 512


def million_weights_per_second(name: str, dense: torch.Tensor, library: str) -> float:
    """Return the rate of packing a matrix; in torch if the library is empty."""
    began = time.perf_counter()
    quantize_weights(FORMATS[name], dense, library)
    return dense.numel() / (time.perf_counter() - began) / 1e6


def in_words(rates: list[float]) -> str:
    """Return the median, and the smallest and the largest rate."""
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", nargs="+", default=None)
    parser.add_argument("--library", default=None, help="kernels of another instruction set")
    given = parser.parse_args()
    use_threads(given.threads)
    library = given.library or str(find_library(Path.home() / ".cache" / "graphcore" / "kernels"))
    knows = open_library(library).graphcore_can_quantize
    dense = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for name in given.formats or [name for name, number in FORMAT_NUMBERS.items() if knows(number)]:
        rates: dict[str, list[float]] = {"C++": [], "torch": []}
        for _ in range(given.rounds):
            rates["C++"].append(million_weights_per_second(name, dense, library))
            rates["torch"].append(million_weights_per_second(name, dense[:TORCH_ROWS], ""))
        ratio = statistics.median(rates["C++"]) / statistics.median(rates["torch"])
        print(
            f"{name}: C++ {in_words(rates['C++'])}, torch {in_words(rates['torch'])}, {ratio:.0f} x; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
