"""Tensors around a choice on the device, and calls of its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from graphcore.kernels.gpu.sampling.drawn import choose_drawn
from graphcore.kernels.gpu.sampling.likeliest import choose_likeliest
from graphcore.kernels.ops.draw import Draw

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
    def of(
        cls,
        rows: int,
        counts: Sequence[int] = (),
        left: Sequence[int] = (),
        ends: Sequence[Sequence[int]] = (),
        starts: Sequence[int] = (),
    ) -> "Flow":
        """Return inputs of that many rows; `ends` are two for each row."""
        return cls(
            torch.full((rows, 1), -7),
            torch.tensor(starts or [STARTS] * rows),
            torch.tensor(counts or [1] * rows),
            torch.tensor(left or [100] * rows),
            torch.tensor([[*each, -1, -1] for each in ends or [(-1, -1)] * rows]),
            torch.full((rows,), -9),
            torch.full((rows, 3), float("nan"), dtype=torch.float64),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def likeliest(logits: Tensor) -> Flow:
    flow = Flow.of(len(logits))
    choose_likeliest(logits, *flow.tensors())
    return flow


def drawn(logits: Tensor, draws: Sequence[Draw]) -> Flow:
    """Draw a token for each row, which has its own settings, history and position."""
    flow = Flow.of(len(logits), starts=[draw.position - 1 for draw in draws])
    numbers = [one.params.numbers for one in draws]
    seen = torch.stack([torch.zeros(logits.shape[1]) if one.seen is None else one.seen for one in draws])
    seeds = torch.tensor([one.params.seed for one in draws])
    has_top_k_top_p = any(one.params.top_k > 0 or one.params.top_p < 1.0 for one in draws)
    choose_drawn(logits, torch.tensor(numbers), seeds, seen.to(torch.uint8), has_top_k_top_p, *flow.tensors())
    return flow
