"""Launches of the kernel that rotates and writes, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.attention.rotate_and_write import launch_rotate_and_write


def launch(heads: int, kv_heads: int, head_dim: int, has_norm: bool, rotated: int) -> None:
    projected = torch.empty(1, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16, device="meta")
    rope = torch.empty(1, 1, 2, rotated // 2, device="meta") if rotated else None
    cache = torch.empty(64, kv_heads, 64, head_dim, dtype=torch.bfloat16, device="meta")
    table = torch.empty(1, 64, dtype=torch.int32, device="meta")
    starts = torch.empty(1, dtype=torch.int64, device="meta")
    weight = torch.empty(head_dim, device="meta") if has_norm else None
    launch_rotate_and_write(projected, rope, cache, cache, table, starts, starts, weight, weight, 1e-6, False)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    yield "Llama-3.1-8B", lambda: launch(32, 8, 128, has_norm=False, rotated=128)
    yield "Qwen3-8B", lambda: launch(32, 8, 128, has_norm=True, rotated=128)
    yield "Gemma 3 4B", lambda: launch(8, 4, 256, has_norm=True, rotated=256)
    yield "gpt-oss-20b", lambda: launch(64, 8, 64, has_norm=False, rotated=64)
    yield "GPT-2", lambda: launch(12, 12, 64, has_norm=False, rotated=0)
    yield "a quarter of a head", lambda: launch(16, 2, 256, has_norm=True, rotated=64)
