"""Launches of the elementwise kernel, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.gpu.elementwise import launch_elementwise


def rows(columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, columns, dtype=dtype, device="meta")


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    gates = (rows(4096), rows(4096), rows(4096))
    for kind in (Activation.NONE, Activation.SIGMOID):
        yield f"gate {kind.name}", lambda name=kind.kernel_name: launch_elementwise(*gates, "gate", name, 1.0)
    sums = (rows(4096, torch.float32), rows(4096, torch.float32), rows(4096))
    yield "add", lambda: launch_elementwise(*sums, "add", "", 0.22)
    logits = rows(256000, torch.float32)
    yield "cap", lambda: launch_elementwise(logits, logits, None, "cap", "", 30.0)
