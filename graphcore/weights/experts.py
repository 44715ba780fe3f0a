"""The mixture-of-experts layers of a decoder: their modules, groups of equal shape, and weight names."""

from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, Experts, MoE

PARTS = ("gate_proj", "up_proj", "down_proj")


def expert_layers(decoder: Decoder) -> dict[int, MoE]:
    """Return the mixture-of-experts modules of a decoder, by layer."""
    return {index: block.mlp for index, block in decoder.blocks() if isinstance(block.mlp, MoE)}


def expert_weight(layer: int, part: str) -> str:
    """Return the decoder's name of the weight that holds one projection of all of a layer's experts."""
    return f"layers.{layer}.mlp.experts.{part}.weight"


def layers_by_shape(decoder: Decoder, last: int | None = None) -> list[list[int]]:
    """Group the layers with experts, or the `last` ones of them, by equal shapes, dtypes and packings of experts."""
    kinds: dict[object, list[int]] = {}
    layers = list(expert_layers(decoder).items())
    for layer, moe in layers if last is None else layers[-last:]:
        parts = [linear_of(moe.experts, part) for part in PARTS]
        kind = tuple((part.weight.shape[1:], part.weight.dtype, part.packing, part.experts) for part in parts)
        kinds.setdefault(kind, []).append(layer)
    return list(kinds.values())


def linear_of(experts: Experts, part: str) -> ExpertLinear:
    """Return one projection of a layer's experts."""
    linear = experts.get_submodule(part)
    assert isinstance(linear, ExpertLinear), f"{type(linear).__name__} is no projection of experts"
    return linear


def fewest_slots(decoder: Decoder, last: int | None = None) -> int:
    """Return the fewest slots that a decode step needs: the largest top_k of each group of layers, summed."""
    layers = expert_layers(decoder)
    return sum(max(layers[layer].top_k for layer in together) for together in layers_by_shape(decoder, last))


def expert_linears(decoder: Decoder, last: int | None = None) -> dict[str, ExpertLinear]:
    """Return the projections of the experts of all layers, or of the `last` ones, by the name of their matrices."""
    layers = list(expert_layers(decoder).items())
    return {
        expert_weight(layer, part): linear_of(moe.experts, part)
        for layer, moe in (layers if last is None else layers[-last:])
        for part in PARTS
    }
