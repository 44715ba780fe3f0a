"""Which weights move together: matrices of consecutive layers, parts of the head. Vectors never move.

    group       0           1 .. G                            G + 1 ...
    holds       embedding   the matrices of its layers        rows of the head
    streamed    its rows are gathered, one by one             through slots

Norm weights, biases, scales and tables of positions are less than a thousandth of a model's bytes, and recorded
programs copy them; they stay on the device whatever moves. So do the experts of a mixture, which move one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from graphcore.nn.decoder import Decoder, Head, is_movable
from graphcore.quant.packing import Packing
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import packing_of


@dataclass(frozen=True)
class Place:
    """Where a weight of a group is bound.

    Attributes:
        name: of the weight in the decoder: "layers.3.mlp.up_proj.weight".
        module: that holds it.
        leaf: its name there.
        packing: None is dense.
        rows: of the whole weight that this is; None is all of them.
    """

    name: str
    module: nn.Module
    leaf: str
    packing: Packing | None
    rows: range | None = None

    @property
    def tensor(self) -> Tensor:
        """The buffer or parameter, perhaps on the meta device."""
        parameter = self.module._parameters.get(self.leaf)
        return self.module.get_buffer(self.leaf) if parameter is None else parameter


@dataclass(frozen=True)
class Group:
    """Weights that move together.

    Attributes:
        index: in the order of use; see above.
        label: for people: "layer 3", "layers 3 to 5", "head 2 of 5".
        places: of its weights, in order.
    """

    index: int
    label: str
    places: Sequence[Place]

    @property
    def layout(self) -> Layout:
        """Where each weight stands in the group's buffer, by the decoder's names."""
        return layout_of((place.name, place.tensor) for place in self.places)


def split_layers(num_layers: int, group_size: int) -> list[range]:
    """Return the layers of each layer group; the last group may have fewer."""
    return [range(begin, min(begin + group_size, num_layers)) for begin in range(0, num_layers, group_size)]


def movable_groups(decoder: Decoder, layer_groups: Sequence[range], head_parts: Sequence[Head]) -> list[Group]:
    """Return every group that can stream through slots, in order of use.

    Args:
        head_parts: the decoder's head in its parts (`Decoder.head_rows`).
    """
    groups = [_layer_group(decoder, index, layers) for index, layers in enumerate(layer_groups, start=1)]
    for number, (rows, part) in enumerate(zip(decoder.head_rows(), head_parts, strict=True), start=1):
        place = Place(HEAD, part.lm_head, "weight", part.lm_head.packing, rows)
        groups.append(Group(len(layer_groups) + number, f"head {number} of {len(head_parts)}", [place]))
    return groups


def _layer_group(decoder: Decoder, index: int, layers: range) -> Group:
    first, last = layers.start, layers.stop - 1
    label = f"layer {first}" if first == last else f"layers {first} to {last}"
    places = [place for layer in layers for place in _matrices(decoder.layers[layer], f"layers.{layer}.")]
    return Group(index, label, places)


def _matrices(module: nn.Module, prefix: str) -> Iterator[Place]:
    for name, tensor in module.named_buffers():
        if is_movable(name, tensor):
            owner, _, leaf = name.rpartition(".")
            yield Place(prefix + name, module.get_submodule(owner), leaf, packing_of(module, name))
