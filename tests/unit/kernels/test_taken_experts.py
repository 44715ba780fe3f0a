"""The reference of a layer's slots for experts, against slots that give way by age, written once more."""

from itertools import product as every_pair

import pytest
import torch
from expert_slot_cases import check, layer_of, walk
from support.cases import in_case
from support.comparisons import OldestFirst

from graphcore.activations import SILU
from graphcore.kernels.ops.expert_slots import IN_PLACE, ExpertSlots, cached_experts, take_experts
from graphcore.kernels.ops.experts import looped_experts


def test_a_walk_leaves_what_slots_by_age_leave() -> None:
    for rows, (num_experts, num_slots, choices) in every_pair(
        [1, 2, 3, 8, 16], [(12, 5, 3), (8, 2, 4), (7, 7, 2), (128, 32, 8)]
    ):
        with in_case(rows, num_experts, num_slots, choices):
            experts, model = layer_of(num_experts, num_slots, torch.bfloat16), OldestFirst(num_slots)
            for chosen in walk(rows, num_experts, rows, choices, 40):
                take_experts(chosen, experts)
                model.ask(chosen.flatten().tolist())
                check(experts, chosen, model)
            assert min(model.loads, model.hits) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_answers_have_the_bits_of_resident_experts(tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weights = [torch.randn(6, *shape, generator=generator).to(dtype) / 4 for shape in ((12, 16), (12, 16), (16, 12))]
    biases = [torch.randn(6, rows, generator=generator).to(dtype) for rows in (12, 12, 16)]
    experts = ExpertSlots.empty(weights, [torch.full_like(one[:2], torch.nan) for one in weights])
    for _ in range(4):
        x = torch.randn(tokens, 16, generator=generator).to(dtype)
        chosen = torch.rand(tokens, 6, generator=generator).topk(3).indices
        chosen[-1, 1] = -1
        found = cached_experts(x, chosen, experts, biases, 12, SILU, ["dense"] * 3)
        assert torch.equal(found, looped_experts(x, chosen, weights, biases, SILU))
    assert experts.tallies[IN_PLACE] > 0 or tokens == 1
