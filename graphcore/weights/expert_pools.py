"""Slots that experts are fetched into; layers whose experts are alike share them, so that hot ones of any layer stay.

    gate  [slots, O, I]   |   up  [slots, O, I]   |   down  [slots, I, O]      or [slots, nbytes] where they are packed

The layers' modules are bound to the same three tensors, once; where an expert lies in them is the cache's to say.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, Experts, MoE
from graphcore.nn.spec import MoESpec
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


def alike(decoder: Decoder, last: int | None = None) -> list[list[int]]:
    """Return layers with experts, all or the last ones, those together whose experts have equal shapes and packings."""
    kinds: dict[object, list[int]] = {}
    layers = list(expert_layers(decoder).items())
    for layer, moe in layers if last is None else layers[-last:]:
        parts = [linear_of(moe.experts, part) for part in PARTS]
        kind = tuple((part.weight.shape[1:], part.weight.dtype, part.packing, len(part.bias)) for part in parts)
        kinds.setdefault(kind, []).append(layer)
    return list(kinds.values())


def linear_of(experts: Experts, part: str) -> ExpertLinear:
    """Return one projection of a layer's experts."""
    linear = experts.get_submodule(part)
    assert isinstance(linear, ExpertLinear), f"{type(linear).__name__} is no projection of experts"
    return linear


def fewest_slots(decoder: Decoder, last: int | None = None) -> int:
    """Return the slots without which a decode step cannot run: what a token chooses in a layer, for each kind."""
    layers = expert_layers(decoder)
    return sum(max(layers[layer].top_k for layer in together) for together in alike(decoder, last))


def expert_pools(decoder: Decoder, num_slots: int, last: int | None = None) -> list[ExpertPool]:
    """Return the pools that so many slots in all make: each what a token chooses, and its layers' share of the rest.

    Args:
        last: how many layers share them, the last ones with experts; None is all.
    """
    layers, kinds = expert_layers(decoder), alike(decoder, last)
    rest, waiting = num_slots - fewest_slots(decoder, last), sum(map(len, kinds))
    pools = []
    for together in kinds:
        count = len(linear_of(layers[together[0]].experts, PARTS[0]).bias)
        least, most = max(layers[layer].top_k for layer in together), count * len(together)
        more = min(rest * len(together) // waiting, most - least)
        rest, waiting = rest - more, waiting - len(together)
        pools.append(ExpertPool(tuple(together), least + more, count))
    return pools


def allocate_pool(decoder: Decoder, pool: ExpertPool, device: torch.device) -> dict[str, Tensor]:
    """Allocate a pool's slots; return the three tensors by projection."""
    moe = expert_layers(decoder)[pool.layers[0]]
    made: dict[str, Tensor] = {}
    for part in PARTS:
        one = linear_of(moe.experts, part).weight[0]
        memory = Slot.allocate(aligned(pool.num_slots * one.nbytes), device)
        raw = memory.raw[: pool.num_slots * one.nbytes]
        made[part] = raw.view(one.dtype).view(pool.num_slots, *one.shape)
    return made


def bind_experts(experts: Experts, tensors: Mapping[str, Tensor]) -> None:
    """Make these the matrices of a layer's experts, by projection, once."""
    for part, tensor in tensors.items():
        bind(linear_of(experts, part), "weight", tensor)


def beside(decoder: Decoder, layer: int, tensors: Mapping[str, Tensor]) -> Experts:
    """Return a layer's experts once more, with the same biases and these matrices."""
    spec, own = decoder.spec.blocks[layer].mlp, expert_layers(decoder)[layer].experts
    assert isinstance(spec, MoESpec), f"layer {layer} has no experts"
    with torch.device("meta"):
        other = Experts(spec, decoder.spec.dim, own.up_proj.bias.dtype)
    for part in PARTS:
        linear = linear_of(own, part)
        if linear.packing is not None:
            linear_of(other, part).pack(linear.packing, linear.rounding)
        bind(linear_of(other, part), "bias", linear.bias)
    bind_experts(other, tensors)
    return other


def expert_linears(decoder: Decoder, last: int | None = None) -> dict[str, ExpertLinear]:
    """Return every projection of the experts of all layers, or of the last ones, by the name of its matrices."""
    layers = list(expert_layers(decoder).items())
    return {
        expert_weight(layer, part): linear_of(moe.experts, part)
        for layer, moe in (layers if last is None else layers[-last:])
        for part in PARTS
    }
