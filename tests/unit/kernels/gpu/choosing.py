"""Tensors around a choice on the device, and calls of its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from graphcore.engine.sampler import SamplingParams
from graphcore.kernels.gpu.sampling.drawn import choose_drawn
from graphcore.kernels.gpu.sampling.likeliest import choose_likeliest

STARTS = 5


@dataclass
class Flow:
    """What a choice reads and writes besides logits, in the order of the ops' arguments; outputs hold nonsense."""

    token_ids: Tensor
    starts: Tensor
    counts: Tensor
    left: Tensor
    ends: Tensor
    chosen: Tensor
    report: Tensor

    @classmethod
    def of(cls, rows: int, counts: Sequence[int] = (), left: Sequence[int] = (), ends: Sequence[int] = ()) -> "Flow":
        return cls(
            torch.full((rows, 1), -7),
            torch.full((rows,), STARTS),
            torch.tensor(counts or [1] * rows),
            torch.tensor(left or [100] * rows),
            torch.tensor([*ends, -1, -1]),
            torch.full((rows,), -9),
            torch.full((rows, 3), float("nan"), dtype=torch.float64),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def likeliest(logits: Tensor) -> Flow:
    flow = Flow.of(len(logits))
    choose_likeliest(logits, *flow.tensors())
    return flow


def numbers_of(params: SamplingParams) -> Tensor:
    values = (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    return torch.tensor(values, dtype=torch.float32)


def drawn(logits: Tensor, params: SamplingParams, noise: Tensor, seen: Tensor | None = None) -> Flow:
    flow = Flow.of(len(logits))
    seen = torch.zeros(logits.shape, dtype=torch.uint8) if seen is None else seen
    narrows = params.top_k > 0 or params.top_p < 1.0
    choose_drawn(logits, numbers_of(params), noise, seen, narrows, *flow.tensors())
    return flow
