"""Groups of weights that move together: the matrices of consecutive layers, and parts of the head.

    group           0                    1 .. G                        G + 1 ...
    holds           embedding            the matrices of its layers    rows of the head
    when it moves   rows are gathered    streams through slots         streams through slots

Norm weights, biases, scales and position tables never move: they are less than a thousandth of a model's bytes, and
captured programs copy them. Experts belong to no group, because they move one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from graphcore.kernels.packing import Packing
from graphcore.nn.decoder import Decoder, Head, is_movable
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import packing_of


@dataclass(frozen=True)
class GroupWeight:
    """One weight of a group, and the module that holds it.

    Attributes:
        name: name of the weight in the decoder, such as "layers.3.mlp.up_proj.weight".
        module: module that holds the weight.
        leaf: name of the weight in that module.
        packing: packing of the weight; None if it is dense.
        rows: range of rows if this is part of a weight; None for all rows.
    """

    name: str
    module: nn.Module
    leaf: str
    packing: Packing | None
    rows: range | None = None

    @property
    def tensor(self) -> Tensor:
        """Buffer or parameter that holds the weight; it may be on the meta device."""
        parameter = self.module._parameters.get(self.leaf)
        return self.module.get_buffer(self.leaf) if parameter is None else parameter


@dataclass(frozen=True)
class Group:
    """A group of weights that move together.

    Attributes:
        index: number of the group, in the order of use.
        label: name for messages, such as "layer 3", "layers 3 to 5" or "head 2 of 5".
        weights: weights of the group, in the order of its layout.
    """

    index: int
    label: str
    weights: Sequence[GroupWeight]

    @property
    def layout(self) -> Layout:
        """Layout of the weights in the group's buffer, by their names in the decoder."""
        return layout_of((weight.name, weight.tensor) for weight in self.weights)


def split_layers(num_layers: int, group_size: int) -> list[range]:
    """Return the layers of each layer group; the last group may have fewer."""
    return [range(begin, min(begin + group_size, num_layers)) for begin in range(0, num_layers, group_size)]


def movable_groups(decoder: Decoder, layer_groups: Sequence[range], head_parts: Sequence[Head]) -> list[Group]:
    """Return all groups that can stream through slots, in the order of use.

    Args:
        layer_groups: range of layers of each layer group.
        head_parts: parts of the decoder's head, one for each range of `Decoder.head_rows`.
    """
    groups = [_layer_group(decoder, index, layers) for index, layers in enumerate(layer_groups, start=1)]
    for number, (rows, part) in enumerate(zip(decoder.head_rows(), head_parts, strict=True), start=1):
        weight = GroupWeight(HEAD, part.lm_head, "weight", part.lm_head.packing, rows)
        groups.append(Group(len(layer_groups) + number, f"head {number} of {len(head_parts)}", [weight]))
    return groups


def _layer_group(decoder: Decoder, index: int, layers: range) -> Group:
    weights = [weight for layer in layers for weight in _matrices(decoder.layers[layer], f"layers.{layer}.")]
    return Group(index, layers_label(layers), weights)


def layers_label(layers: range) -> str:
    """Return the label of a group of layers, such as "layers 2 to 3"."""
    first, last = layers.start, layers.stop - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _matrices(module: nn.Module, prefix: str) -> Iterator[GroupWeight]:
    for name, tensor in module.named_buffers():
        if is_movable(name, tensor):
            owner, _, leaf = name.rpartition(".")
            yield GroupWeight(prefix + name, module.get_submodule(owner), leaf, packing_of(module, name))
