"""Launches of the norm kernel, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.int8_rows import launch_norm_to_codes
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.norm import launch_add_normed, launch_prepare_norm, launch_residual_norm


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, columns in (("Llama-3.1-8B", 4096), ("gpt-oss-20b", 2880)):
        x = torch.empty(1, columns, device="meta")
        weight = torch.empty(columns, device="meta")

        def call(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            launch_residual_norm(x, x.bfloat16(), weight, None, 1e-5, True, torch.bfloat16, False)

        yield name, call

    def sandwich() -> None:
        x, weight = torch.empty(1, 2560, device="meta"), torch.empty(2560, device="meta")
        launch_residual_norm(x, x, weight, None, 1e-6, True, torch.bfloat16, True, weight)
        launch_add_normed(x, x, weight, 1e-6)

    def left() -> None:
        x, weight = torch.empty(1, 2560, device="meta"), torch.empty(2560, device="meta")
        squares = torch.empty(1, 2, dtype=torch.int64, device="meta")
        launch_prepare_norm(x, FusedNorm(weight, x.bfloat16(), squares), x, weight, 1e-6)
        launch_prepare_norm(x, FusedNorm(weight, x.bfloat16(), squares))

    def codes() -> None:
        x, weight = torch.empty(1, 6912, device="meta"), torch.empty(6912, device="meta")
        launch_norm_to_codes(x, weight, None, 1e-5, True, False, torch.bfloat16)

    yield "Gemma 3 4B", sandwich
    yield "Gemma 3 4B, linked", left
    yield "BitNet 2B", codes
