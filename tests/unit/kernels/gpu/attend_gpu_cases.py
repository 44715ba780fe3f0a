"""Launches of the attention kernels, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from graphcore.kernels.gpu.attention.write_and_attend import launch_attend
from graphcore.kernels.ops.kv_formats import pool_dtype, vector_shape
from graphcore.kvcache.sizes import PAGE

BF16, FP32 = torch.bfloat16, torch.float32
# name, heads, kv heads, head dim, slots, window, sinks, cap, dtype, tokens of a pass
PASSES = (
    ("Llama-3.1-8B", 32, 8, 128, 131072, 0, False, 0.0, BF16, (1, 2, 8, 16, 512)),
    ("Llama-3.1-8B", 32, 8, 128, 131072, 0, False, 0.0, FP32, (1, 512)),
    ("gpt-oss-20b, window", 64, 8, 64, 128, 128, True, 0.0, BF16, (1, 512)),
    ("gpt-oss-20b, whole", 64, 8, 64, 131072, 0, True, 0.0, BF16, (1, 8, 512)),
    ("Gemma 3 4B, window", 8, 4, 256, 1024, 1024, False, 0.0, BF16, (1, 512)),
    ("Gemma 3 4B, whole", 8, 4, 256, 131072, 0, False, 0.0, BF16, (1, 8, 32)),
    ("Gemma 3 4B, whole", 8, 4, 256, 131072, 0, False, 0.0, FP32, (1, 512)),
    ("Gemma 4 E2B, whole", 8, 1, 512, 131072, 0, False, 0.0, BF16, (1, 4, 512)),
    ("Gemma 4 26B, whole", 16, 2, 512, 262144, 0, False, 0.0, BF16, (1, 512)),
    ("Gemma 2 9B, window", 16, 8, 256, 4096, 4096, False, 50.0, BF16, (1, 512)),
    ("Gemma 2 9B, whole", 16, 8, 256, 8192, 0, False, 50.0, BF16, (1, 16, 512)),
    ("Gemma 2 9B, whole", 16, 8, 256, 8192, 0, False, 50.0, FP32, (1, 512)),
    ("Phi-3 mini", 32, 32, 96, 131072, 0, False, 0.0, BF16, (1, 512)),
)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, heads, kv_heads, head_dim, slots, window, has_sinks, cap, dtype, lengths in PASSES:
        cache = torch.empty(slots // PAGE, kv_heads, PAGE, head_dim, dtype=dtype, device="meta")
        table = torch.empty(1, slots // PAGE, dtype=torch.int32, device="meta")
        spans = torch.empty(2, 1, dtype=torch.int64, device="meta").unbind(0)
        sinks = torch.empty(heads, device="meta") if has_sinks else None
        for tokens in lengths:
            # q, k and v are slices of one product's result
            product = torch.empty(1, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device="meta")
            new = product.split([heads, kv_heads, kv_heads], dim=2)
            call = partial(launch_attend, *new, cache, cache, table, *spans, window, 0.1, sinks, cap=cap)
            yield f"{name}, {tokens} tokens, {str(dtype).removeprefix('torch.')}", call
    yield from coded_cases()


def coded_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield attention over pages in codes, of Llama 3 8B and of Gemma 3."""
    for name, heads, kv_heads, head_dim in (("Llama 3", 32, 8, 128), ("Gemma 3", 4, 1, 256)):
        for kind in ("q8_0", "q5_0", "q4_0", torch.float8_e4m3fn):
            shape = (2048, kv_heads, PAGE, *vector_shape(kind, head_dim))
            cache = torch.empty(shape, dtype=pool_dtype(kind), device="meta")
            table = torch.empty(1, 2048, dtype=torch.int32, device="meta")
            spans = torch.empty(2, 1, dtype=torch.int64, device="meta").unbind(0)
            for tokens in (1, 8, 16, 512):
                product = torch.empty(1, tokens, heads + 2 * kv_heads, head_dim, dtype=BF16, device="meta")
                new = product.split([heads, kv_heads, kv_heads], dim=2)
                call = partial(launch_attend, *new, cache, cache, table, *spans, 0, 0.1)
                yield f"{name}, {tokens} tokens, {str(kind).removeprefix('torch.')} keys and values", call
