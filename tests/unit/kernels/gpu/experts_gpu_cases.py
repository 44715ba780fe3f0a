"""Launches of the experts' kernels with the shapes of gpt-oss, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graphcore.kernels.device_layout import DeviceForm
from graphcore.kernels.gpu.experts.few_tokens import launch_few
from graphcore.kernels.gpu.experts.grouped import launch_many
from graphcore.kernels.gpu.experts.launch import launch_add_experts
from graphcore.kernels.gpu.experts.operands import mixture_of
from graphcore.kernels.gpu.experts.router import launch_choose_experts

DIM, EXPERTS, TOP_K = 2880, 32, 4
CLAMP = 7.0, 1.702


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def weights_of(form: str) -> list[Tensor]:
    if form == "dense":
        return [empty(EXPERTS, DIM, DIM)] * 3
    return [empty(EXPERTS, DeviceForm(form, DIM, DIM).nbytes, dtype=torch.uint8)] * 3


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    biases = [empty(EXPERTS, DIM)] * 3
    places = empty(EXPERTS, dtype=torch.int32)

    def few(form: str) -> None:
        mixture = mixture_of(weights_of(form), biases, None, *CLAMP, [form] * 3)
        launch_few(empty(1, DIM), empty(1, TOP_K, dtype=torch.int64), mixture)

    def summed(form: str) -> None:
        stream, chosen = empty(1, DIM, dtype=torch.float32), empty(1, TOP_K, dtype=torch.int64)
        shares = empty(1, TOP_K)
        launch_add_experts(stream, empty(1, DIM), chosen, shares, weights_of(form), biases, places, *CLAMP, [form] * 3)

    def many(form: str) -> None:
        mixture = mixture_of(weights_of(form), biases, None, *CLAMP, [form] * 3)
        launch_many(empty(512, DIM), empty(512, TOP_K, dtype=torch.int64), mixture)

    for form in ("dense", "mxfp4"):
        for call in (few, summed, many):
            yield f"{call.__name__} {form}", lambda call=call, form=form: call(form)
    yield "many q8_0", lambda: many("q8_0")
    yield "router", lambda: launch_choose_experts(empty(1, EXPERTS), empty(1, dtype=torch.int64), TOP_K)
