"""Launches of the norm kernel, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.norm import launch_residual_norm


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, columns in (("Llama-3.1-8B", 4096), ("gpt-oss-20b", 2880)):
        x = torch.empty(1, columns, device="meta")
        weight = torch.empty(columns, device="meta")

        def call(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            launch_residual_norm(x, x.bfloat16(), weight, None, 1e-5, True, torch.bfloat16)

        yield name, call
