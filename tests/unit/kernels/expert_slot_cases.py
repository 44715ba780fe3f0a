"""Layers of experts with few slots, and what must be true of them after calls, for the op and for the GPU's kernels."""

import random
from collections.abc import Iterator

import torch
from support.comparisons import OldestFirst
from torch import Tensor

from graphcore.kernels.ops.expert_slots import HITS, IN_PLACE, LOADED, ExpertSlots

Shapes = tuple[tuple[int, ...], ...]
SHAPES = ((3, 8), (3, 8), (8, 3))


def layer_of(num_experts: int, num_slots: int, dtype: torch.dtype, shapes: Shapes = SHAPES) -> ExpertSlots:
    """Return a layer whose experts' numbers differ, and whose slots hold none of them."""

    def matrices(index: int, shape: tuple[int, ...], count: int) -> Tensor:
        size = count * torch.Size(shape).numel()
        numbers = (torch.arange(size) * 7 + index) % 251
        return numbers.view(count, *shape).to(dtype)

    waiting = [matrices(index, shape, num_experts) for index, shape in enumerate(shapes)]
    return ExpertSlots.empty(waiting, [torch.zeros(num_slots, *shape, dtype=dtype) for shape in shapes])


def walk(seed: int, num_experts: int, rows: int, choices: int, calls: int) -> Iterator[Tensor]:
    """Yield choices [rows, choices] of distinct experts; some rows are padding, and some experts are liked."""
    generator = random.Random(seed)
    liked = [generator.random() ** 3 for _ in range(num_experts)]
    for _ in range(calls):
        chosen = []
        for _ in range(rows):
            order = sorted(range(num_experts), key=lambda expert: liked[expert] * generator.random(), reverse=True)
            chosen.append([-1] * choices if generator.random() < 0.2 else order[:choices])
        yield torch.tensor(chosen)


def check(experts: ExpertSlots, chosen: Tensor, model: OldestFirst) -> None:
    """Check what a call has left: each slot holds its expert's bytes, and it is the one that must be there."""
    places = {expert: place for expert, place in enumerate(experts.places.tolist()) if place >= 0}
    assert places == model.places
    held = [model.held.get(slot, -1) for slot in range(len(experts.holders))]
    assert experts.holders.tolist() == held
    for source, target in zip(experts.waiting, experts.slots, strict=True):
        for expert, place in places.items():
            assert torch.equal(target[place], source[expert])
    assert experts.tallies.tolist() == [model.calls, *(getattr(model, name) for name in ("hits", "loads", "without"))]
    assert (HITS, LOADED, IN_PLACE) == (1, 2, 3)
    served = set(chosen.flatten().tolist()) - {-1}
    if len(served) <= len(held):
        assert served <= places.keys()
