"""Times a Gated DeltaNet layer's op on the CPU, beside the layer's packed projections, for several chunk lengths.

    python benchmarks/delta_rule.py --tokens 1 512 --threads 2          # Qwen 3.5's shape; a minute

The rule and the projections alternate, and the share is the median of the runs' own shares, so that load by
other processes affects both. Weights, projections and states are random.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from graphcore.config.compose import compose_settings
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.cpu.library import find_library
from graphcore.kernels.ops.gated_delta import DeltaParts, delta_heads

DIM, KEY_HEADS, HEADS, HEAD_DIM, WIDTH = 2048, 16, 32, 128, 4  # sizes of Qwen 3.5 and 3.6
CHANNELS, VALUES = (2 * KEY_HEADS + HEADS) * HEAD_DIM, HEADS * HEAD_DIM
PROJECTIONS = ((CHANNELS, DIM), (VALUES, DIM), (HEADS, DIM), (HEADS, DIM), (DIM, VALUES))


def parts_of(tokens: int, dtype: torch.dtype, library: str) -> DeltaParts:
    """Return the op's arguments for one sequence that continues from earlier states."""

    def rows(width: int) -> torch.Tensor:
        return torch.randn(1, tokens, width).to(dtype)

    return DeltaParts(
        mixed=rows(CHANNELS),
        z=rows(VALUES),
        a=rows(HEADS),
        b=rows(HEADS),
        conv_weight=torch.randn(CHANNELS, WIDTH),
        conv_bias=None,
        rate=-torch.rand(HEADS),
        dt_bias=torch.randn(HEADS),
        norm_weight=torch.ones(HEAD_DIM),
        convolution=torch.randn(1, CHANNELS, WIDTH - 1),
        recurrent=torch.randn(1, HEADS, HEAD_DIM, HEAD_DIM),
        starts=torch.tensor([1]),
        counts=torch.tensor([tokens]),
        key_heads=KEY_HEADS,
        eps=1e-6,
        library=library,
    )


def projections_of(tokens: int, dtype: torch.dtype, library: str, stored: str, rounding: str) -> Callable[[], object]:
    """Return a function that runs the layer's projections."""
    matrices = []
    for rows, columns in PROJECTIONS:
        packing = KernelPacking(stored, rows, columns, library)
        packed = torch.randint(0, 64, (packing.nbytes,), dtype=torch.uint8)
        matrices.append((packing, torch.randn(1, tokens, columns).to(dtype), packed))
    return lambda: [packing.linear(x, packed, None, rounding) for packing, x, packed in matrices]


def seconds(call: Callable[[], object]) -> float:
    """Return the time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(words: Sequence[str] | None = None) -> None:
    """Print a table, a row for each number of tokens and rounding of activations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--stored", default="q4_k", help="format of the projections")
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args(words)
    torch.set_num_threads(asked.threads)
    library = find_library(Path(compose_settings([]).cache_dir).expanduser() / "kernels")
    assert library is not None, "no C++ compiler works here"
    dtype = getattr(torch, asked.dtype)
    print("| tokens | activations | rule, ms | plain torch, ms | projections, ms | rule / projections |")
    print("|---|---|---|---|---|---|")
    for tokens in asked.tokens:
        parts = parts_of(tokens, dtype, str(library))
        plain = parts._replace(library="")
        for rounding in ("wide", "block"):
            project = projections_of(tokens, dtype, str(library), asked.stored, rounding)
            calls = (lambda: delta_heads(*parts), lambda: delta_heads(*plain), project)  # noqa: B023  # called here
            for call in calls:
                call()
            runs = [[seconds(call) * 1e3 for call in calls] for _ in range(asked.repeats)]
            times = " | ".join(f"{median(column):.2f}" for column in zip(*runs, strict=True))
            print(f"| {tokens} | {rounding} | {times} | {median(run[0] / run[2] for run in runs):.2f} |", flush=True)


if __name__ == "__main__":
    main()
