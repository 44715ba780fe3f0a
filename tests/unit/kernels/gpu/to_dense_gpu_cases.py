"""Launches of the unpacking kernel, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.packed.to_dense import launch_rows, launch_unpack


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name in DEVICE_LAYOUTS:
        form = DevicePacking(name, 4096, 4096)
        packed = torch.empty(form.nbytes, dtype=torch.uint8, device="meta")

        def call(form: DevicePacking = form, packed: torch.Tensor = packed) -> None:
            launch_unpack(packed, form, torch.bfloat16)

        yield f"{name} 4096 x 4096", call
    form = DevicePacking("q6_k", 128256, 4096)
    table = torch.empty(form.nbytes, dtype=torch.uint8, device="meta")
    ids = torch.empty(1, 1, dtype=torch.int64, device="meta")
    yield "a row of a table", lambda: launch_rows(ids, table, form, torch.float32)
