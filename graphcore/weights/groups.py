"""Groups of weights that move together: matrices of layers, and parts of the head.

    group           0                    1 .. G                                              G + 1 ...
    holds           embedding            the matrices of its layers, or some of one layer    rows of the head
    when it moves   rows are gathered    streams through slots                               streams through slots

Norm weights, biases, scales, input orders and position tables never move: they are less than a thousandth of a model's
bytes, and captured programs copy them. Experts belong to no group, because they move one by one.

In RAM and on the link to a device, a whole matrix may have fewer bytes than in its slot (`Packing.on_link`). The device
then expands it (`Group.expansion`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from graphcore.kernels.packing import Packing
from graphcore.nn.decoder import Decoder, Head, is_movable
from graphcore.weights.conversion import fill_weight
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.loader import Loader
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.slots import Slot, bind


@dataclass(frozen=True)
class GroupWeight:
    """One weight of a group, and the module that holds it.

    Attributes:
        name: name of the weight in the model, such as "layers.3.mlp.up_proj.weight".
        module: module that holds the weight.
        leaf: name of the weight in that module.
        packing: packing of the weight; None if it is dense.
        rows: range of rows if this is part of a weight; None for all rows.
        is_on_link: True if this describes the weight's bytes on the link to a device instead of those in its slot.
    """

    name: str
    module: nn.Module
    leaf: str
    packing: Packing | None
    rows: range | None = None
    is_on_link: bool = False

    @property
    def is_expanded(self) -> bool:
        """Whether a device expands the weight when it arrives. Rows of tables, of which RAM holds one copy, are not."""
        return self.packing is not None and self.rows is None and self.packing.on_link is not self.packing

    @property
    def on_link(self) -> "GroupWeight":
        """The weight as it waits in RAM and crosses the link to a device."""
        if self.packing is None or not self.is_expanded:
            return self
        return replace(self, packing=self.packing.on_link, is_on_link=True)

    @property
    def tensor(self) -> Tensor:
        """Buffer or parameter that holds the weight, or a tensor like its bytes; it may be on the meta device."""
        if self.is_on_link and self.packing is not None:
            return torch.empty(self.packing.nbytes, dtype=torch.uint8, device="meta")
        parameter = self.module._parameters.get(self.leaf)
        return self.module.get_buffer(self.leaf) if parameter is None else parameter


@dataclass(frozen=True)
class Group:
    """A group of weights that lie together in one buffer: they move together, or are loaded together and stay.

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
        """Layout of the weights in the group's buffer, by their names in the model."""
        return layout_of((weight.name, weight.tensor) for weight in self.weights)

    @property
    def is_expanded(self) -> bool:
        """Whether a device expands any of the weights when they arrive."""
        return any(weight.is_expanded for weight in self.weights)

    @property
    def on_link(self) -> "Group":
        """The group as it waits in RAM and crosses the link to a device."""
        return replace(self, weights=[weight.on_link for weight in self.weights]) if self.is_expanded else self

    def expansion(self, arrived: Slot, slot: Slot) -> Callable[[], None]:
        """Return the work of a device that fills a slot with the group that has arrived, laid out as `on_link`.

        All that the work needs is allocated now. It runs in the device's current queue.
        """
        sources, targets = arrived.views(self.on_link.layout), slot.views(self.layout)
        steps: list[Callable[[], object]] = []
        for weight in self.weights:
            source, target = sources[weight.name], targets[weight.name]
            if weight.packing is not None and weight.is_expanded:
                steps.append(weight.packing.expansion(source, target))
            else:
                steps.append(partial(target.copy_, source))

        def run() -> None:
            for step in steps:
                step()

        return run

    def fill(self, loader: Loader, slot: Slot) -> None:
        """Read the weights from the checkpoint's files and write them into a slot in RAM.

        Raises:
            CheckpointError: a file changed, or holds values that are not valid weights.
        """
        views = slot.views(self.layout)
        for weight in self.weights:
            fill_weight(loader, weight.name, weight.packing, views[weight.name], weight.rows)

    def bind(self, slot: Slot) -> None:
        """Make the modules' weights views of a slot."""
        views = slot.views(self.layout)
        for weight in self.weights:
            bind(weight.module, weight.leaf, views[weight.name])


@dataclass(frozen=True)
class LayerGroup:
    """The layers of a layer group, or the projections of one layer.

    Attributes:
        layers: range of layers; a single one if the group is a part of it.
        matrices: names of the projections in the layer, such as "mlp.up_proj", in the order of use; empty for all. A
            projection's low-rank factors belong to it.
    """

    layers: range
    matrices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Label for messages, such as "layers 2 to 3" or "layer 2, mlp.up_proj"."""
        layers = layers_label(self.layers)
        return f"{layers}, {self.part_name}" if self.matrices else layers

    @property
    def part_name(self) -> str:
        """Name of a part of a layer, such as "mlp.up_proj" or "self_attn.q_proj to o_proj"; empty for whole layers."""
        if len(self.matrices) < 2:
            return "".join(self.matrices)
        first, last = self.matrices[0], self.matrices[-1]
        return f"{first} to {last.removeprefix(first.rpartition('.')[0] + '.')}"

    def holds(self, weight: str) -> bool:
        """Return whether a layer's weight, such as "mlp.up_proj.weight", is in the group."""
        return not self.matrices or weight.startswith(tuple(f"{name}." for name in self.matrices))


def split_layers(num_layers: int, group_size: int) -> list[LayerGroup]:
    """Return groups of whole layers; the last one may have fewer."""
    return split_run(range(num_layers), group_size)


def split_run(layers: range, group_size: int) -> list[LayerGroup]:
    """Return groups of neighbouring layers; the last one may have fewer."""
    return [LayerGroup(layers[at : at + group_size]) for at in range(0, len(layers), group_size)]


def numbered_groups(
    layer_groups: Sequence[LayerGroup],
    matrices: Callable[[LayerGroup], Iterable[GroupWeight]],
    head_slices: Sequence[GroupWeight],
) -> list[Group]:
    """Return a model's groups that can stream through slots, in the order of use, with their numbers and labels.

    Args:
        matrices: function from a layer group to its weights that move.
        head_slices: row slices of the head, in order.
    """
    groups = [Group(index, group.label, [*matrices(group)]) for index, group in enumerate(layer_groups, start=1)]
    for number, part in enumerate(head_slices, start=1):
        groups.append(Group(len(layer_groups) + number, f"head {number} of {len(head_slices)}", [part]))
    return groups


def layers_label(layers: range) -> str:
    """Return the label of a group of layers, such as "layers 2 to 3"."""
    first, last = layers.start, layers.stop - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def movable_groups(decoder: Decoder, layer_groups: Sequence[LayerGroup], head_parts: Sequence[Head]) -> list[Group]:
    """Return all groups of a decoder that can stream through slots, in the order of use.

    Args:
        head_parts: parts of the decoder's head, one for each range of `Decoder.head_rows`; none to leave the head out.
    """
    slices = [
        GroupWeight(HEAD, part.lm_head, "weight", part.lm_head.packing, rows)
        for rows, part in zip(decoder.head_rows() if head_parts else (), head_parts, strict=True)
    ]

    def matrices(group: LayerGroup) -> Iterator[GroupWeight]:
        for layer in group.layers:
            prefix = f"layers.{layer}."
            for weight in weights_in(decoder.layers[layer], prefix):
                if is_movable(weight.name, weight.tensor) and group.holds(weight.name.removeprefix(prefix)):
                    yield weight

    return numbered_groups(layer_groups, matrices, slices)


def resident_groups(decoder: Decoder, is_tied: bool, moved: Collection[str] = ()) -> list[Group]:
    """Return the weights of a decoder that do not move, in the order of use: embedding, each layer, head.

    Args:
        is_tied: True if the head reads the embedding's bytes and has none of its own.
        moved: names of weights that are not resident.
    """
    left_out = {*moved, HEAD} if is_tied else {*moved}
    return [
        Group(index, prefix, [weight for weight in weights_in(module, prefix) if weight.name not in left_out])
        for index, (prefix, module) in enumerate(decoder.groups())
    ]


def weights_in(module: nn.Module, prefix: str) -> Iterator[GroupWeight]:
    """Yield every weight of a module, its name after a prefix."""
    for name, _ in module.named_buffers():
        owner, _, leaf = name.rpartition(".")
        yield GroupWeight(prefix + name, module.get_submodule(owner), leaf, packing_of(module, name))
