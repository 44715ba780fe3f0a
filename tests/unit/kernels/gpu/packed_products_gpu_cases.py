"""Launches of the products with packed matrices, for tests/gpu_compile.py: true shapes of three models."""

from collections.abc import Callable, Iterator

import torch
from product_gpu_cases import fused_norm_of_sum, squares_of
from torch import Tensor

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.matrix import DeviceMatrix
from graphcore.kernels.gpu.packed.few_tokens import launch_packed_gated, launch_packed_product

LLAMA = (4096, 14336, (4096, 1024, 1024))  # dim, hidden, q k v rows
GPT_OSS = (2880, 2880, (4096, 512, 512))
BITNET = (2560, 6912, (2560, 640, 640))
MODELS = {"i2_s": BITNET, "mxfp4": GPT_OSS}
TARGETS = ("q8_0", "q4_k", "q5_k", "q6_k", "q4_0", "i2_s")  # formats whose speed has a target in docs/numbers.md
OF_FOLDERS = ("affine4", "affine8", "fp8", "nf4", "fp4", "nvfp4_f32")  # formats that GGUF files do not have
VOCAB = 128256


def matrix(name: str, rows: int, columns: int) -> DeviceMatrix:
    weight = torch.empty(DevicePacking(name, rows, columns).nbytes, dtype=torch.uint8, device="meta")
    return DeviceMatrix(weight, None, None, name, rows)


def few(columns: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(tokens, columns, dtype=dtype, device="meta")


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name in DEVICE_LAYOUTS:
        dim, hidden, rows = MODELS.get(name, LLAMA)

        def project(name: str = name, dim: int = dim, rows: tuple[int, ...] = rows, tokens: int = 1) -> None:
            matrices = [matrix(name, count, dim) for count in rows]
            launch_packed_product(few(dim, tokens), None, matrices, False, "", few(sum(rows), tokens), False)

        def down(name: str = name, dim: int = dim, hidden: int = hidden, tokens: int = 1, feeds: bool = False) -> None:
            stream = few(dim, tokens, torch.float32)
            fused = fused_norm_of_sum(tokens, dim, torch.bfloat16) if feeds else None
            matrices = [matrix(name, dim, hidden)]
            launch_packed_product(few(hidden, tokens), None, matrices, False, "", stream, True, 0.0, fused)

        def gated(name: str = name, dim: int = dim, hidden: int = hidden, is_linked: bool = False) -> None:
            gate = up = matrix(name, hidden, dim)
            squares = squares_of(1) if is_linked else None
            launch_packed_gated(few(dim, 1), squares, gate, up, False, "silu", few(hidden, 1), 1e-5)

        def square(name: str = name, dim: int = dim) -> None:
            stream = few(dim, 1, torch.float32)
            launch_packed_product(few(dim, 1), None, [matrix(name, dim, dim)], False, "", stream, True)

        def head(name: str = name, dim: int = dim) -> None:
            logits = few(VOCAB, 1, torch.float32)
            launch_packed_product(few(dim, 1), None, [matrix(name, VOCAB, dim)], False, "", logits, False)

        yield f"{name} q, k, v", project
        if name in TARGETS:
            yield f"{name} o", square
            yield f"{name} down", down
            yield f"{name} head", head
        if name in OF_FOLDERS:
            yield f"{name} down of 8", lambda down=down: down(tokens=8)
        if name in (*TARGETS, *OF_FOLDERS, "mxfp4"):
            yield f"{name} gate and up", gated
        if name in ("q4_k", "q8_0", "i2_s", "mxfp4", "q6_k"):
            yield f"{name} down of 8", lambda down=down: down(tokens=8)
            yield f"{name} linked down", lambda down=down: down(feeds=True)
            yield f"{name} linked down of 8", lambda down=down: down(tokens=8, feeds=True)
            yield f"{name} linked gate and up", lambda gated=gated: gated(is_linked=True)
