"""Pools of expert slots: who shares them, how many each gets, and that modules of all layers see the same memory."""

from dataclasses import replace

import pytest
import torch

from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec
from graphcore.streaming.experts.slots import allocate_pool, bind_experts, expert_pools
from graphcore.weights.experts import PARTS, expert_layers, expert_linears, fewest_slots

NORM = NormSpec("rms", 1e-6)
DENSE = BlockSpec(32, NORM, AttentionSpec(4, 2, 8, 1.0), MLPSpec(48, "silu"))
SMALL = replace(DENSE, mlp=MoESpec(experts=5, top_k=2, hidden=16))
LARGE = replace(DENSE, mlp=MoESpec(experts=7, top_k=3, hidden=24))


def decoder_of(*blocks: BlockSpec) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelSpec(32, 40, blocks, NORM, context=8), torch.bfloat16)


def test_layers_with_equal_experts_share_a_pool_and_dense_ones_have_none() -> None:
    (pool,) = expert_pools(decoder_of(SMALL, DENSE, SMALL), 6)
    assert (pool.layers, pool.num_slots, pool.num_experts) == ((0, 2), 6, 5)
    assert expert_pools(decoder_of(DENSE), 0) == []


@pytest.mark.parametrize("num_slots", [5, 6, 9, 14, 17])
def test_every_kind_gets_what_a_token_chooses_and_its_layers_share_of_the_rest(num_slots: int) -> None:
    decoder = decoder_of(SMALL, LARGE, SMALL)
    assert fewest_slots(decoder) == 5
    small, large = expert_pools(decoder, num_slots)
    assert small.num_slots >= 2
    assert large.num_slots >= 3
    assert small.num_slots <= 10
    assert large.num_slots <= 7
    assert small.num_slots + large.num_slots == num_slots


def test_two_layers_of_three_get_two_thirds_of_the_slots_beyond_the_fewest() -> None:
    small, large = expert_pools(decoder_of(SMALL, LARGE, SMALL), 11)
    assert (small.num_slots, large.num_slots) == (2 + 4, 3 + 2)


def test_modules_of_all_layers_are_bound_to_the_pool_s_memory() -> None:
    decoder = decoder_of(SMALL, DENSE, SMALL)
    (pool,) = expert_pools(decoder, 4)
    views = allocate_pool(decoder, pool, torch.device("cpu"))
    for layer in pool.layers:
        bind_experts(expert_layers(decoder)[layer].experts, views)
    assert {part: tuple(view.shape) for part, view in views.items()} == {
        "gate_proj": (4, 16, 32),
        "up_proj": (4, 16, 32),
        "down_proj": (4, 32, 16),
    }
    for name, linear in expert_linears(decoder).items():
        assert linear.weight is views[name.split(".")[-2]]
        assert linear.weight.dtype is torch.bfloat16
        assert linear.weight.data_ptr() % 256 == 0
    assert list(expert_linears(decoder)) == [
        f"layers.{layer}.mlp.experts.{part}.weight" for layer in (0, 2) for part in PARTS
    ]
