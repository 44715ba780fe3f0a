"""Latent attention of DeepSeek V2-Lite and V3 as they launch it, for gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.attention.latent import launch_attend_chunk_latent, launch_latent_token, launch_project_heads

Case = tuple[str, Callable[[], object]]
ROTATED, LATENT, PAGE, PAGES = 64, 512, 64, 128
DTYPES = (torch.bfloat16, torch.float32)


def cases() -> Iterator[Case]:
    """Yield one token of one and of eight sequences, a chunk, and products of heads."""
    for name, heads in (("DeepSeek V2-Lite", 16), ("DeepSeek V3", 128)):
        for dtype in DTYPES:
            short = str(dtype).removeprefix("torch.")
            for batch in (1, 8):
                yield f"{name}, {batch} tokens, {short}", token(heads, batch, dtype)
            yield f"{name}, 512 tokens, {short}", chunk(heads, 512, dtype)
            yield f"{name}, keys of heads, {short}", products(heads, 128, LATENT, ROTATED, dtype)
            yield f"{name}, values of heads, {short}", products(heads, LATENT, 128, 0, dtype)


def _cache(batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pool = torch.empty(1 + batch * PAGES, 1, PAGE, ROTATED + LATENT, dtype=dtype)
    table = torch.ones(batch, PAGES, dtype=torch.int32)
    return pool, table, torch.full((batch,), 4000), torch.ones(batch, dtype=torch.int64)


def token(heads: int, batch: int, dtype: torch.dtype) -> Callable[[], object]:
    query, key = torch.empty(batch, heads, ROTATED + LATENT, dtype=dtype), torch.empty(batch, ROTATED, dtype=dtype)
    value, rope = torch.empty(batch, LATENT, dtype=dtype), torch.empty(batch, 1, 2, ROTATED // 2)
    return lambda: launch_latent_token(query, key, value, *_cache(batch, dtype), rope, 0.1)


def chunk(heads: int, tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    query = torch.empty(1, tokens, heads, ROTATED + LATENT, dtype=dtype)
    row = torch.empty(1, tokens, 1, ROTATED + LATENT, dtype=dtype)
    return lambda: launch_attend_chunk_latent(query, row, *_cache(1, dtype), ROTATED, 0.1)


def products(heads: int, inputs: int, outputs: int, before: int, dtype: torch.dtype) -> Callable[[], object]:
    x, prefix = torch.empty(4, heads * inputs, dtype=dtype), torch.empty(4, heads * before, dtype=dtype)
    weight = torch.empty(heads, outputs, inputs, dtype=dtype)
    return lambda: launch_project_heads(x, weight, prefix if before else None)
