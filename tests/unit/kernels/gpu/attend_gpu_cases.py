"""Launches of the attention kernels, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graphcore.kernels.gpu.decode_attend import launch_attend_written

# name, batch, heads, kv heads, head dim, slots, window, sinks
MODELS = (
    ("Llama-3.1-8B", 1, 32, 8, 128, 131072, 0, False),
    ("Llama-3.1-8B, 8 sequences", 8, 32, 8, 128, 131072, 0, False),
    ("gpt-oss-20b, window", 1, 64, 8, 64, 128, 128, True),
    ("gpt-oss-20b, whole", 1, 64, 8, 64, 131072, 0, True),
    ("Gemma 3 4B, window", 1, 8, 4, 256, 1024, 1024, False),
    ("Gemma 3 4B, whole", 1, 8, 4, 256, 131072, 0, False),
    ("Phi-3 mini", 1, 32, 32, 96, 131072, 0, False),
    ("Phi-2", 1, 32, 32, 80, 2048, 0, False),
)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, batch, heads, kv_heads, head_dim, slots, window, has_sinks in MODELS:
        for dtype in (torch.bfloat16, torch.float32):
            query = torch.empty(batch, 1, heads, head_dim, dtype=dtype, device="meta")
            cache = torch.empty(batch, kv_heads, slots, head_dim, dtype=dtype, device="meta")
            spans = torch.empty(2, batch, dtype=torch.int64, device="meta").unbind(0)
            sinks = torch.empty(heads, device="meta") if has_sinks else None

            def decode(
                query: Tensor = query,
                cache: Tensor = cache,
                spans: tuple[Tensor, ...] = spans,
                window: int = window,
                sinks: Tensor | None = sinks,
            ) -> None:
                launch_attend_written(query, cache, cache, *spans, window, 0.1, sinks)

            yield f"{name}, decode, {dtype}", decode
