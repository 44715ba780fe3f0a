"""The weights of a model that move while it runs, the slots that they move through, and the files that hold them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource, StreamedFile
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.moe import ExpertLinear
from graphcore.streaming.embedding_rows import RowTable
from graphcore.streaming.host_store import MatrixModule
from graphcore.weights.experts import expert_linears
from graphcore.weights.groups import Group, LayerGroup, movable_groups
from graphcore.weights.loader import Loader
from graphcore.weights.matching import EMBEDDING, FEATURES, HEAD
from graphcore.weights.plan import Plan
from graphcore.weights.slots import Slot


@dataclass(frozen=True)
class MovingWeights:
    """The weights of a model that move under a plan, decided before anything is allocated.

    Attributes:
        groups: groups that stream through slots.
        sliced: head whose row slices are among these groups, by its weight's name; else empty.
        tables: tables whose rows are fetched for each token, by their weights' names.
        experts: projections whose matrices are fetched expert by expert, by the matrices' names.
        layer_groups: layers, or matrices of a layer, of each layer group.
        heads: parts of a decoder's head, if they stream; else empty.
    """

    plan: Plan
    groups: Sequence[Group] = ()
    sliced: Mapping[str, MatrixModule] = field(default_factory=dict)
    tables: Mapping[str, RowTable] = field(default_factory=dict)
    experts: Mapping[str, ExpertLinear] = field(default_factory=dict)
    layer_groups: Sequence[LayerGroup] = ()
    heads: Sequence[Head] = ()

    @property
    def group_of_layer(self) -> dict[int, int]:
        """Number of the layer group, by layer; the last one of a layer whose matrices are in several."""
        return {layer: number for number, group in enumerate(self.layer_groups, start=1) for layer in group.layers}

    @property
    def names(self) -> frozenset[str]:
        """Names of all weights that are not resident on the device."""
        names = {weight.name for group in self.groups for weight in group.weights}
        return frozenset({*names, *self.experts, *self.tables})


def find_moving(decoder: Decoder, plan: Plan, layer_groups: Sequence[LayerGroup]) -> MovingWeights:
    """Return the weights that move under a plan; the decoder is on the meta device."""
    parts, placed = [decoder.head.part(rows) for rows in decoder.head_rows()], plan.groups
    gathered = {EMBEDDING: not placed.is_embedding_resident, FEATURES: not placed.are_features_resident}
    return MovingWeights(
        plan,
        [group for group in movable_groups(decoder, layer_groups, parts) if group.index in placed.streamed],
        sliced={} if placed.is_head_resident else {HEAD: decoder.head.lm_head},
        tables={name: decoder.table(name) for name, is_gathered in gathered.items() if is_gathered},
        experts={} if plan.experts is None else expert_linears(decoder, plan.experts.num_layers),
        layer_groups=layer_groups,
        heads=() if placed.is_head_resident else parts,
    )


def open_files(loader: Loader, weights: Sequence[str], direct: bool) -> dict[Path, ByteSource]:
    """Open the files that hold the given weights and return them by path.

    Raises:
        CheckpointError: a file changed, or cannot be read.
    """
    checkpoint = loader.checkpoint
    paths = {span.file for name in weights for span in checkpoint.spans(loader.sources[name].name)}
    with ExitStack() as opened:  # closes the open files if one cannot be opened
        files: dict[Path, ByteSource] = {}
        for path in sorted(paths):
            files[path] = opened.enter_context(StreamedFile.open(path, checkpoint.files[path], direct))
        opened.pop_all()
    return files


@dataclass(frozen=True)
class BoundSlots:
    """Slots that modules are bound to.

    Attributes:
        memory: [nbytes] uint8, memory of each group's slot, by group.
        arrival: [nbytes] uint8, buffer from which a device expands groups into their slots; empty if it expands none.
    """

    memory: Mapping[int, Tensor]
    arrival: Tensor


def bind_slots(groups: Sequence[Group], plan: Plan, device: torch.device) -> BoundSlots:
    """Allocate the slots and bind the modules of each group to its slot."""
    memory = Slot.allocate(plan.groups.slots_nbytes, device)
    memory.raw.zero_()  # so that all pages are allocated now, and later growth of memory is not due to the slots
    bound: dict[int, Tensor] = {}
    for number, group in enumerate(groups):
        assert group.layout.nbytes <= plan.groups.slot_nbytes, (
            f"{group.label} does not fit in a slot of {plan.groups.slot_nbytes} bytes"
        )
        start = number % plan.groups.num_slots * plan.groups.slot_nbytes
        slot = Slot(memory.raw[start : start + group.layout.nbytes])
        group.bind(slot)
        bound[group.index] = slot.raw
    return BoundSlots(bound, memory.raw[plan.groups.num_slots * plan.groups.slot_nbytes :])
