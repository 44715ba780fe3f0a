"""Launches of the kernel of the gated short convolution, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.gated_convolution import launch_gated_convolution
from graphcore.kernels.ops.gated_convolution import ConvParts


def parts_of(tokens: int, channels: int, dtype: torch.dtype, batch: int) -> ConvParts:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    spans = (empty(batch, dtype=torch.int64) for _ in range(2))
    weights = empty(channels, 3), None, empty(batch, channels, 2)
    return ConvParts(empty(batch, tokens, 3 * channels, dtype=dtype), *weights, *spans)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 512):
            parts = parts_of(tokens, 2048, dtype, batch=8 if tokens == 1 else 1)
            yield (
                f"LFM2-1.2B, {tokens} tokens, {str(dtype).removeprefix('torch.')}",
                lambda parts=parts: launch_gated_convolution(parts),
            )
