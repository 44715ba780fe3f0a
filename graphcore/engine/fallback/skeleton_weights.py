"""The weights of a transformers skeleton: the groups that move together, their bytes, and those that are loaded once.

    group       0                          1 .. G                      G + 1 ...
    holds       the table of embeddings    the matrices of a group     a row slice of the head
    streamed    its rows are fetched       through slots

Vectors, and all weights outside layers, table and head, always stay on the device. So does a table or a head whose
class computes more than a row or a product.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.engine.fallback.skeleton import Skeleton
from graphcore.engine.fallback.table_and_head import SlicedHead, TableEmbedding
from graphcore.planning.sizes import WeightSizes
from graphcore.progress import Progress
from graphcore.streaming.moving_weights import MovingWeights
from graphcore.weights.groups import Group, GroupWeight, LayerGroup, numbered_groups, split_layers
from graphcore.weights.layout import aligned
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan
from graphcore.weights.resident_weights import check_resident, load_groups
from graphcore.weights.slots import bind


@dataclass(frozen=True)
class SkeletonWeights:
    """A skeleton's weights, sorted by how they could move.

    Attributes:
        weights: all weights by name, perhaps on the meta device.
        shared: names of weights without bytes of their own, each with the name of the weight whose bytes it reads.
        table: the embedding, if it need not be in memory whole; else None.
        head: the head, if it can move; else None.
        layer_groups: layers of each group.
    """

    skeleton: Skeleton
    loader: Loader
    weights: Mapping[str, Tensor]
    shared: Mapping[str, str]
    table: TableEmbedding | None
    head: SlicedHead | None
    layer_groups: list[LayerGroup]

    @classmethod
    def of(cls, skeleton: Skeleton, loader: Loader, layer_group_size: int) -> "SkeletonWeights":
        """Return the weights, sorted by how they could move; the loader locates each of them."""
        shared = shared_weights(skeleton, loader)
        table, head = skeleton.table_module, skeleton.sliced_head
        is_tied = shared.pop(skeleton.head_weight, None) == skeleton.table_weight
        others = shared.values()
        if skeleton.table_weight in others or (is_tied and head is None):
            table = None
        if skeleton.head_weight in others or (is_tied and table is None):
            head = None
        if is_tied:
            shared[skeleton.head_weight] = skeleton.table_weight
        groups = split_layers(skeleton.num_layers, layer_group_size)
        return cls(skeleton, loader, skeleton.weights(), shared, table, head, groups)

    @property
    def is_tied(self) -> bool:
        """Whether the head reads the table's bytes, and both can move."""
        return self.head is not None and self.skeleton.head_weight in self.shared

    def groups(self) -> list[Group]:
        """Return every group that can move through slots, in order of use."""
        name, slices = self.skeleton.head_weight, () if self.head is None else self.head.slices
        parts = [GroupWeight(name, part, "weight", None, part.rows) for part in slices]
        return numbered_groups(self.layer_groups, self._matrices, parts)

    def _matrices(self, group: LayerGroup) -> list[GroupWeight]:
        prefixes = tuple(f"{self.skeleton.layers}.{layer}." for layer in group.layers)
        return [
            self._whole(name) for name, weight in self.weights.items() if name.startswith(prefixes) and weight.dim() > 1
        ]

    def _whole(self, name: str) -> GroupWeight:
        owner, _, leaf = name.rpartition(".")
        return GroupWeight(name, self.skeleton.model.get_submodule(owner), leaf, None)

    def moving(self, plan: Plan) -> MovingWeights:
        """Return the weights that move under a plan."""
        placed, skeleton = plan.groups, self.skeleton
        head = None if placed.is_head_resident else self.head
        table = None if placed.is_embedding_resident else self.table
        return MovingWeights(
            plan,
            [group for group in self.groups() if group.index in placed.streamed],
            sliced={} if head is None else {skeleton.head_weight: head},
            tables={} if table is None else {skeleton.table_weight: table},
            layer_groups=self.layer_groups,
        )

    def load_resident(self, device: torch.device, on_progress: Progress, moved: Collection[str] = ()) -> None:
        """Allocate one block of memory for the weights that do not move, fill it, and bind the model to it.

        Args:
            on_progress: callback with "load", the weight's index, bytes done and bytes in all.
            moved: names of weights that move; they stay on the meta device.

        Raises:
            CheckpointError: a file has changed, or holds values that are no weights.
            ResidencyError: a weight is not at its planned place.
        """
        skeleton = self.skeleton
        names = [name for name in self.weights if name not in moved and name not in self.shared]
        groups = [Group(index, name, [self._whole(name)]) for index, name in enumerate(names)]
        layouts = [group.layout for group in groups]
        slot = load_groups(self.loader, groups, device, on_progress)
        bound = skeleton.weights()
        for name, partner in self.shared.items():
            if name not in moved:
                bind(skeleton.model, name, bound[partner].detach())
        for name, buffer in list(skeleton.model.named_buffers()):
            if name not in self.weights:
                bind(skeleton.model, name, buffer.to(device))
        if skeleton.sliced_head is not None:
            skeleton.sliced_head.bind_slices()
        check_resident(skeleton.weights().items(), slot, layouts, device, moved, self.shared)

    def sizes(self) -> WeightSizes:
        """Return the bytes of the weights, sorted by how they could move."""
        moving = {weight.name for group in self.groups() for weight in group.weights}
        moving |= set() if self.table is None else {self.skeleton.table_weight}
        embedding = 0 if self.table is None else aligned(self.table.weight.nbytes)
        own = 0 if self.head is None else aligned(self.head.weight.nbytes)
        slices = () if self.head is None else self.head.slices
        always = (weight for name, weight in self.weights.items() if name not in moving and name not in self.shared)
        return WeightSizes(
            embedding=embedding,
            head=embedding if self.is_tied else own,
            head_slices=tuple(aligned(part.weight.nbytes) for part in slices),
            is_tied=self.is_tied,
            groups=tuple(group.layout.nbytes for group in self.groups()[: len(self.layer_groups)]),
            always=sum(aligned(weight.nbytes) for weight in always),
        )


def shared_weights(skeleton: Skeleton, loader: Loader) -> dict[str, str]:
    """Return the weights outside the layers that have no bytes of their own, each with the one whose bytes it reads.

    A head that is tied to the table reads the table's bytes.
    """
    first: dict[str, str] = {}
    shared = {}
    names = [name for name in skeleton.weights() if not name.startswith(f"{skeleton.layers}.")]
    for name in sorted(names, key=lambda name: (name == skeleton.head_weight, name != skeleton.table_weight)):
        partner = first.setdefault(loader.sources[name].name, name)
        if partner != name:
            shared[name] = partner
    return shared
