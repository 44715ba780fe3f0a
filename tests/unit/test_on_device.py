"""Launches get copies of their tensors' memory, and what they write comes back; the "device" here is the CPU."""

import torch
from support.gpu_kernels import launch_on

from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS

CPU = torch.device("cpu")


def test_views_of_one_memory_stay_views_of_one_memory_and_writes_come_back() -> None:
    whole = torch.arange(24, dtype=torch.float32)
    rows, tail = whole[4:16].view(3, 4).T, whole[20:]
    seen = []

    def launch(kernel: object, *args: torch.Tensor, out: tuple[torch.Tensor, ...], size: int) -> str:
        moved_rows, moved_tail = args[0], out[0]
        seen.append((moved_rows.data_ptr(), moved_rows.storage_offset(), moved_rows.stride(), size))
        assert moved_rows.untyped_storage().data_ptr() == moved_tail.untyped_storage().data_ptr()
        assert torch.equal(moved_rows, rows)
        moved_tail.copy_(moved_rows[:, 0])
        assert tail.tolist() == [20, 21, 22, 23], "the test's own memory is not what a kernel sees"
        return "launched"

    assert launch_on(CPU, launch)("kernel", rows, out=(tail,), size=3) == "launched"
    assert seen == [(seen[0][0], 4, (1, 4), 3)]
    assert seen[0][0] != rows.data_ptr()
    assert tail.tolist() == [4, 5, 6, 7]


def test_what_lies_on_no_cpu_is_left_alone() -> None:
    meta = torch.empty(3, device="meta")
    assert launch_on(CPU, lambda kernel, argument, **_: argument)("kernel", meta, grid=(1,)) is meta
    layout = DEVICE_LAYOUTS["q4_k"]
    assert launch_on(CPU, lambda kernel, **options: options["L"])("kernel", L=layout) is layout
    empty = torch.empty(0, dtype=torch.int64)
    assert launch_on(CPU, lambda kernel, argument, **_: argument)("kernel", empty).shape == (0,)
