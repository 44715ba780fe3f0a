"""Launches of the product kernels, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.matrix import DENSE, DeviceMatrix
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.products.decode_products import launch_gate
from graphcore.kernels.gpu.products.dense import launch_dense_gated, launch_dense_product


def matrix(rows: int, columns: int, dtype: torch.dtype, has_bias: bool = False) -> DeviceMatrix:
    bias = torch.empty(rows, dtype=dtype, device="meta") if has_bias else None
    return DeviceMatrix(torch.empty(rows, columns, dtype=dtype, device="meta"), bias, None, DENSE, rows)


def product(
    tokens: int,
    dtype: torch.dtype,
    columns: int,
    *rows: int,
    has_bias: bool = False,
    adds: bool = False,
    is_linked: bool = False,
) -> None:
    """Launch a product; linked, it applies a norm, or leaves its sum to one."""
    x = torch.empty(tokens, columns, dtype=dtype, device="meta")
    out = torch.empty(tokens, sum(rows), dtype=torch.float32 if adds else dtype, device="meta")
    squares = squares_of(tokens) if is_linked and not adds else None
    fused = fused_norm_of_sum(tokens, rows[0], dtype) if is_linked and adds else None
    matrices = [matrix(one, columns, dtype, has_bias) for one in rows]
    launch_dense_product(x, squares, matrices, False, "", out, adds, 1e-5, fused)


def squares_of(tokens: int) -> torch.Tensor:
    return torch.empty(tokens, 2, dtype=torch.int64, device="meta")


def fused_norm_of_sum(tokens: int, columns: int, dtype: torch.dtype) -> FusedNorm:
    rows = torch.empty(tokens, columns, dtype=dtype, device="meta")
    return FusedNorm(torch.empty(columns, device="meta"), rows, squares_of(tokens))


def gated(tokens: int, dtype: torch.dtype, columns: int, rows: int, is_linked: bool = False) -> None:
    x = torch.empty(tokens, columns, dtype=dtype, device="meta")
    out = torch.empty(tokens, rows, dtype=dtype, device="meta")
    squares = squares_of(tokens) if is_linked else None
    launch_dense_gated(x, squares, *[matrix(rows, columns, dtype)] * 2, False, "silu", out, 1e-5)


def gate_apart() -> None:
    both = torch.empty(1, 2 * 14336, device="meta")
    launch_gate(both, "silu", torch.empty(1, 14336, dtype=torch.bfloat16, device="meta"))


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    bf16 = torch.bfloat16
    for tokens in (1, 3, 8):
        yield f"Llama-3.1-8B qkv x {tokens}", lambda n=tokens: product(n, bf16, 4096, 4096, 1024, 1024)
        yield f"Llama-3.1-8B gate and up x {tokens}", lambda n=tokens: gated(n, bf16, 4096, 14336)
        yield f"Llama-3.1-8B down x {tokens}", lambda n=tokens: product(n, bf16, 14336, 4096, adds=True)
        yield (
            f"Llama-3.1-8B linked qkv x {tokens}",
            lambda n=tokens: product(n, bf16, 4096, 4096, 1024, 1024, is_linked=True),
        )
        yield (
            f"Llama-3.1-8B linked gate and up x {tokens}",
            lambda n=tokens: gated(n, bf16, 4096, 14336, is_linked=True),
        )
        yield (
            f"Llama-3.1-8B linked down x {tokens}",
            lambda n=tokens: product(n, bf16, 14336, 4096, adds=True, is_linked=True),
        )
    yield "Llama-3.1-8B gate and up of two formats", gate_apart
    yield "Llama-3.1-8B o", lambda: product(1, bf16, 4096, 4096, adds=True)
    yield "Llama-3.1-8B head", lambda: product(1, bf16, 4096, 128256)
    yield "gpt-oss-20b qkv", lambda: product(1, bf16, 2880, 4096, 512, 512, has_bias=True)
    yield "Llama-3.1-8B qkv fp32", lambda: product(1, torch.float32, 4096, 4096, 1024, 1024)
