"""Launches of the experts' kernels with the shapes of gpt-oss, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.experts_decode import launch_few
from graphcore.kernels.gpu.experts_grouped import launch_many

DIM, EXPERTS, TOP_K = 2880, 32, 4


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    x = torch.empty(1, DIM, device="meta", dtype=torch.bfloat16)
    chosen = torch.empty(1, TOP_K, device="meta", dtype=torch.int64)
    shares = torch.empty(1, TOP_K, device="meta", dtype=torch.bfloat16)
    weights = [torch.empty(EXPERTS, DIM, DIM, device="meta", dtype=torch.bfloat16)] * 3
    biases = [torch.empty(EXPERTS, DIM, device="meta", dtype=torch.bfloat16)] * 3
    places = torch.empty(EXPERTS, device="meta", dtype=torch.int32)
    yield "dense", lambda: launch_few(x, chosen, None, weights, biases, (7.0, 1.7), None)
    yield "dense sums", lambda: launch_few(x, chosen, shares, weights, biases, (7.0, 1.7), places)
    many, choices = x.expand(512, DIM).contiguous(), chosen.expand(512, TOP_K).contiguous()
    yield "dense many", lambda: launch_many(many, choices, weights, biases, (7.0, 1.7), None)
