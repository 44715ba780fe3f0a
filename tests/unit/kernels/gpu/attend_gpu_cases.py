"""Launches of the attention kernels, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.attend import launch_attend

# name, batch, heads, kv heads, head dim, slots, window, sinks
MODELS = (
    ("Llama-3.1-8B", 1, 32, 8, 128, 131072, 0, False),
    ("gpt-oss-20b, window", 1, 64, 8, 64, 128, 128, True),
    ("gpt-oss-20b, whole", 1, 64, 8, 64, 131072, 0, True),
    ("Gemma 3 4B, window", 1, 8, 4, 256, 1024, 1024, False),
    ("Gemma 3 4B, whole", 1, 8, 4, 256, 131072, 0, False),
    ("BitNet 2B", 1, 20, 5, 128, 4096, 0, False),
    ("Phi-3 mini", 1, 32, 32, 96, 131072, 0, False),
    ("Phi-2", 1, 32, 32, 80, 2048, 0, False),
)
PASSES = (("one token", 1), ("8 tokens", 8), ("512 tokens", 512))


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, batch, heads, kv_heads, head_dim, slots, window, has_sinks in MODELS:
        for dtype in (torch.bfloat16, torch.float32):
            for label, tokens in PASSES:
                # q, k and v are slices of one product's result
                product = torch.empty(batch, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device="meta")
                new = product.split([heads, kv_heads, kv_heads], dim=2)
                cache = torch.empty(batch, kv_heads, slots, head_dim, dtype=dtype, device="meta")
                spans = torch.empty(2, batch, dtype=torch.int64, device="meta").unbind(0)
                sinks = torch.empty(heads, device="meta") if has_sinks else None
                arguments = (*new, cache, cache, *spans, window, 0.1, sinks)

                def call(arguments: tuple = arguments) -> None:
                    launch_attend(*arguments)

                yield f"{name}, {label}, {str(dtype).removeprefix('torch.')}", call
