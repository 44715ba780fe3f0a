"""Launches of the kernels of Gated DeltaNet, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.delta.launch import launch_delta_heads
from graphcore.kernels.ops.gated_delta import DeltaParts


def parts_of(tokens: int, key_heads: int, heads: int, dtype: torch.dtype, batch: int = 1) -> DeltaParts:
    channels = (2 * key_heads + heads) * 128

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    mixed, z = empty(batch, tokens, channels, dtype=dtype), empty(batch, tokens, heads * 128, dtype=dtype)
    a, b = (empty(batch, tokens, heads, dtype=dtype) for _ in range(2))
    weights = (empty(channels, 4), None, empty(heads), empty(heads), empty(128))
    states = (empty(batch, channels, 3), empty(batch, heads, 128, 128))
    spans = (empty(batch, dtype=torch.int64) for _ in range(2))
    return DeltaParts(mixed, z, a, b, *weights, *states, *spans, key_heads, 1e-6)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 512):
            parts = parts_of(tokens, 16, 32, dtype, batch=8 if tokens == 1 else 1)
            yield (
                f"Qwen 3.5, {tokens} tokens, {str(dtype).removeprefix('torch.')}",
                lambda parts=parts: launch_delta_heads(parts),
            )
