"""Launches of the product kernels, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.matrix import DENSE, DeviceMatrix
from graphcore.kernels.gpu.products.decode_products import launch_gate
from graphcore.kernels.gpu.products.dense import launch_dense_gated, launch_dense_product


def matrix(rows: int, columns: int, dtype: torch.dtype, has_bias: bool = False) -> DeviceMatrix:
    bias = torch.empty(rows, dtype=dtype, device="meta") if has_bias else None
    return DeviceMatrix(torch.empty(rows, columns, dtype=dtype, device="meta"), bias, None, DENSE, rows)


def product(
    tokens: int, dtype: torch.dtype, columns: int, *rows: int, has_bias: bool = False, adds: bool = False
) -> None:
    x = torch.empty(tokens, columns, dtype=dtype, device="meta")
    out = torch.empty(tokens, sum(rows), dtype=torch.float32 if adds else dtype, device="meta")
    launch_dense_product(x, None, [matrix(one, columns, dtype, has_bias) for one in rows], False, "", out, adds)


def gated(tokens: int, dtype: torch.dtype, columns: int, rows: int) -> None:
    x = torch.empty(tokens, columns, dtype=dtype, device="meta")
    out = torch.empty(tokens, rows, dtype=dtype, device="meta")
    launch_dense_gated(x, None, *[matrix(rows, columns, dtype)] * 2, False, "silu", out)


def gate_apart() -> None:
    both = torch.empty(1, 2 * 14336, device="meta")
    launch_gate(both, "silu", torch.empty(1, 14336, dtype=torch.bfloat16, device="meta"))


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    bf16 = torch.bfloat16
    for tokens in (1, 3, 8):
        yield f"Llama-3.1-8B qkv x {tokens}", lambda n=tokens: product(n, bf16, 4096, 4096, 1024, 1024)
        yield f"Llama-3.1-8B gate and up x {tokens}", lambda n=tokens: gated(n, bf16, 4096, 14336)
        yield f"Llama-3.1-8B down x {tokens}", lambda n=tokens: product(n, bf16, 14336, 4096, adds=True)
    yield "Llama-3.1-8B gate and up of two formats", gate_apart
    yield "Llama-3.1-8B o", lambda: product(1, bf16, 4096, 4096, adds=True)
    yield "Llama-3.1-8B head", lambda: product(1, bf16, 4096, 128256)
    yield "gpt-oss-20b qkv", lambda: product(1, bf16, 2880, 4096, 512, 512, has_bias=True)
    yield "Llama-3.1-8B qkv fp32", lambda: product(1, torch.float32, 4096, 4096, 1024, 1024)
