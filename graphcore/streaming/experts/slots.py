"""Slots that experts are fetched into. Layers whose experts have the same shapes share a pool of slots.

    gate  [slots, O, I]   |   up  [slots, O, I]   |   down  [slots, I, O]      or [slots, nbytes] where they are packed

The modules of these layers are bound once to the same three tensors; the cache maps each expert to its slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import Experts
from graphcore.nn.spec import MoESpec
from graphcore.weights.experts import PARTS, expert_layers, fewest_slots, layers_by_shape, linear_of
from graphcore.weights.layout import aligned
from graphcore.weights.slots import Slot, bind


@dataclass(frozen=True)
class ExpertPool:
    """A pool of slots that several layers share.

    Attributes:
        layers: indices of the layers that share the slots.
        num_slots: number of slots; each holds one expert.
        num_experts: number of experts in each layer.
    """

    layers: tuple[int, ...]
    num_slots: int
    num_experts: int


def expert_pools(decoder: Decoder, num_slots: int, last: int | None = None) -> list[ExpertPool]:
    """Split slots into pools: each gets its layers' largest top_k, and its layers' share of the remaining slots.

    Args:
        num_slots: number of slots in all pools together.
        last: number of layers, counted from the end, whose experts move; None for all layers with experts.
    """
    layers, kinds = expert_layers(decoder), layers_by_shape(decoder, last)
    rest, waiting = num_slots - fewest_slots(decoder, last), sum(map(len, kinds))
    pools = []
    for together in kinds:
        count = linear_of(layers[together[0]].experts, PARTS[0]).experts
        least, most = max(layers[layer].top_k for layer in together), count * len(together)
        more = min(rest * len(together) // waiting, most - least)
        rest, waiting = rest - more, waiting - len(together)
        pools.append(ExpertPool(tuple(together), least + more, count))
    return pools


def allocate_pool(decoder: Decoder, pool: ExpertPool, device: torch.device) -> dict[str, Tensor]:
    """Allocate a pool's slots and return the three tensors, by projection."""
    moe = expert_layers(decoder)[pool.layers[0]]
    made: dict[str, Tensor] = {}
    for part in PARTS:
        one = linear_of(moe.experts, part).weight[0]
        memory = Slot.allocate(aligned(pool.num_slots * one.nbytes), device)
        raw = memory.raw[: pool.num_slots * one.nbytes]
        made[part] = raw.view(one.dtype).view(pool.num_slots, *one.shape)
    return made


def bind_experts(experts: Experts, tensors: Mapping[str, Tensor]) -> None:
    """Bind tensors, by projection, as the matrices of a layer's experts."""
    for part, tensor in tensors.items():
        bind(linear_of(experts, part), "weight", tensor)


def beside(decoder: Decoder, layer: int, tensors: Mapping[str, Tensor]) -> Experts:
    """Return a second module for a layer's experts, with the same biases, if any, and the given matrices."""
    spec, own = decoder.spec.blocks[layer].mlp, expert_layers(decoder)[layer].experts
    assert isinstance(spec, MoESpec), f"layer {layer} has no experts"
    with torch.device("meta"):
        other = Experts(spec, decoder.spec.dim, own.up_proj.weight.dtype)
    for part in PARTS:
        linear = linear_of(own, part)
        if linear.packing is not None:
            linear_of(other, part).pack(linear.packing, linear.rounding)
        if linear.bias is not None:
            bind(linear_of(other, part), "bias", linear.bias)
    bind_experts(other, tensors)
    return other
