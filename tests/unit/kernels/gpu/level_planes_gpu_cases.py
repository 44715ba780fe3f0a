"""Launches of the kernel that makes planes of a file's blocks, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.packed.level_planes import launch_write_planes
from graphcore.quant import FORMATS
from graphcore.quant.level_formats import LevelFormat


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, one in FORMATS.items():
        if isinstance(one, LevelFormat):
            form = DevicePacking(name, 14336, 4096)
            arrived, out = (torch.empty(each.nbytes, dtype=torch.uint8, device="meta") for each in (form.on_link, form))
            grid = torch.empty(512, dtype=torch.int32, device="meta")

            def call(
                arrived: torch.Tensor = arrived,
                grid: torch.Tensor = grid,
                out: torch.Tensor = out,
                form: DevicePacking = form,
            ) -> None:
                launch_write_planes(arrived, grid, out, form)

            yield f"{name} 14336 x 4096", call
