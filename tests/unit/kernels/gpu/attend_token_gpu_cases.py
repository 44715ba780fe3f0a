"""Launches of a decode step's attention, heads prepared and cache written in it, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from graphcore.kernels.gpu.attention.decode import HeadNorms, launch_attend_token
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.kv_formats import KVType, pool_dtype, vector_shape
from graphcore.kvcache.sizes import PAGE

BF16 = torch.bfloat16
# name, heads, kv heads, head dim, has norms, rotated, window
MODELS = (
    ("Llama-3.1-8B", 32, 8, 128, False, 128, 0),
    ("Qwen3-8B", 32, 8, 128, True, 128, 0),
    ("Gemma 3 4B", 8, 4, 256, True, 256, 0),
    ("Gemma 3 4B, window", 8, 4, 256, True, 256, 1024),
    ("gpt-oss-20b", 64, 8, 64, False, 64, 0),
    ("GPT-2", 12, 12, 64, False, 0, 0),
    ("a quarter of a head", 16, 2, 256, True, 64, 0),
)


def launch(
    heads: int,
    kv_heads: int,
    head_dim: int,
    has_norm: bool,
    rotated: int,
    window: int,
    kind: KVType,
    dtype: torch.dtype,
) -> None:
    projected = torch.empty(1, 1, heads + 2 * kv_heads, head_dim, dtype=dtype, device="meta")
    rope = torch.empty(1, 1, 2, rotated // 2, device="meta") if rotated else None
    shape = (2048, kv_heads, PAGE, *vector_shape(kind, head_dim))
    cache = torch.empty(shape, dtype=pool_dtype(kind), device="meta")
    table = torch.empty(1, (window or 131072) // PAGE, dtype=torch.int32, device="meta")
    starts, arrivals = (
        torch.empty(1, dtype=torch.int64, device="meta"),
        torch.empty(64, dtype=torch.int32, device="meta"),
    )
    weight = torch.empty(head_dim, device="meta") if has_norm else None
    parts = projected.split([heads, kv_heads, kv_heads], dim=2)
    how = AttentionParameters(window, 0.1), arrivals, rope, HeadNorms(weight, weight, 1e-6, False)
    launch_attend_token(*parts, cache, cache, table, starts, starts, *how)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, *sizes in MODELS:
        yield name, partial(launch, *sizes, BF16, BF16)
    for name, *sizes in MODELS[1:3]:
        yield f"{name}, float32", partial(launch, *sizes, torch.float32, torch.float32)
        for kind in ("q8_0", "q5_0", "q4_0", torch.float8_e4m3fn):
            yield f"{name}, {str(kind).removeprefix('torch.')}", partial(launch, *sizes, kind, BF16)
