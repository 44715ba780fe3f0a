"""Slots that experts are fetched into; layers whose experts are alike share them, so that hot ones of any layer stay.

    gate  [slots, O, I]   |   up  [slots, O, I]   |   down  [slots, I, O]      or [slots, nbytes] where they are packed

Every layer's modules are bound to the same three tensors, once; where an expert lies in them is the cache's to say.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.weights.layout import aligned
from graphcore.weights.slots import Slot, bind

PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertPool:
    """Slots of one kind.

    Attributes:
        layers: that share them.
        num_slots: experts that they hold.
        num_experts: of each layer.
    """

    layers: tuple[int, ...]
    num_slots: int
    num_experts: int


def expert_layers(decoder: Decoder) -> dict[int, MoE]:
    """Return the mixtures by layer."""
    return {
        index: block.get_submodule("mlp")  # type: ignore[misc]  # an MoE, as the condition says
        for index, block in enumerate(decoder.layers)
        if isinstance(block.get_submodule("mlp"), MoE)
    }


def expert_weight(layer: int, part: str) -> str:
    """Return the decoder's name of the matrices of all experts of a layer."""
    return f"layers.{layer}.mlp.experts.{part}.weight"


def alike(decoder: Decoder) -> list[list[int]]:
    """Return the layers with experts, those together whose experts have the same shapes and packings."""
    kinds: dict[object, list[int]] = {}
    for layer, moe in expert_layers(decoder).items():
        parts = [linear_of(moe, part) for part in PARTS]
        kind = tuple((part.weight.shape[1:], part.weight.dtype, part.packing, len(part.bias)) for part in parts)
        kinds.setdefault(kind, []).append(layer)
    return list(kinds.values())


def linear_of(moe: MoE, part: str) -> ExpertLinear:
    """Return one projection of a mixture."""
    linear = moe.experts.get_submodule(part)
    assert isinstance(linear, ExpertLinear), f"{type(linear).__name__} is no projection of experts"
    return linear


def fewest_slots(decoder: Decoder) -> int:
    """Return the slots without which a decode step cannot run: what a token chooses in a layer, for each kind."""
    layers = expert_layers(decoder)
    return sum(max(layers[layer].top_k for layer in together) for together in alike(decoder))


def expert_pools(decoder: Decoder, num_slots: int) -> list[ExpertPool]:
    """Return the pools that so many slots in all make: each what a token chooses, and its layers' share of the rest."""
    layers, kinds = expert_layers(decoder), alike(decoder)
    rest, waiting = num_slots - fewest_slots(decoder), len(layers)
    pools = []
    for together in kinds:
        count = len(linear_of(layers[together[0]], PARTS[0]).bias)
        least, most = max(layers[layer].top_k for layer in together), count * len(together)
        more = min(rest * len(together) // waiting, most - least)
        rest, waiting = rest - more, waiting - len(together)
        pools.append(ExpertPool(tuple(together), least + more, count))
    return pools


def bind_pool(decoder: Decoder, pool: ExpertPool, device: torch.device) -> dict[str, Tensor]:
    """Allocate a pool's slots and bind its layers' matrices to them, once; return the three tensors by projection."""
    layers = expert_layers(decoder)
    bound: dict[str, Tensor] = {}
    for part in PARTS:
        one = linear_of(layers[pool.layers[0]], part).weight[0]
        memory = Slot.allocate(aligned(pool.num_slots * one.nbytes), device)
        raw = memory.raw[: pool.num_slots * one.nbytes]
        bound[part] = raw.view(one.dtype).view(pool.num_slots, *one.shape)
        for layer in pool.layers:
            bind(linear_of(layers[layer], part), "weight", bound[part])
    return bound


def expert_linears(decoder: Decoder) -> dict[str, ExpertLinear]:
    """Return every projection of every layer's experts, by the name of its matrices."""
    return {
        expert_weight(layer, part): linear_of(moe, part)
        for layer, moe in expert_layers(decoder).items()
        for part in PARTS
    }
