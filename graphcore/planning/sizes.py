"""The sizes of a model's weights in bytes, sorted by how they can move.

    embedding | layer groups' matrices | head's matrix, in row slices      may stream: 0 | 1 .. G | G+1 .. G+m
    table of layers' features                                              its rows may be gathered
    experts' matrices                                                      stream one expert at a time
    vectors: norms, biases, scales, sinks; learned positions               never stream
    projection of the embedding to layers' features                        never streams

The size of every tensor includes its alignment, as in a slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.weights.draft_copy import DraftCopy
from graphcore.weights.experts import expert_linears, fewest_slots
from graphcore.weights.groups import LayerGroup, movable_groups, resident_groups, split_layers
from graphcore.weights.layout import aligned
from graphcore.weights.matching import EMBEDDING, FEATURES, HEAD


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of experts' matrices.

    Attributes:
        expert_nbytes_by_layer: bytes of one expert, for each layer that has experts.
        experts_per_layer: number of experts in such a layer.
        top_k: number of experts that a token is routed to in such a layer.
        min_slots: number of slots that a step needs at least.
    """

    expert_nbytes_by_layer: tuple[int, ...]
    experts_per_layer: int
    top_k: int
    min_slots: int

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that is large enough for any expert."""
        return max(self.expert_nbytes_by_layer)

    @property
    def num_experts(self) -> int:
        """Number of experts in all layers."""
        return self.experts_per_layer * len(self.expert_nbytes_by_layer)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all experts."""
        return self.experts_per_layer * sum(self.expert_nbytes_by_layer)


@dataclass(frozen=True)
class DraftSizes:
    """The sizes of the copies of matrices that a draft model has (weights/draft_copy.py), in bytes.

    Attributes:
        groups: bytes of the copies of each layer group's matrices.
        head: bytes of the copy of the head's matrix.
        smaller: bytes of all copies that are smaller than what they copy, experts included.
    """

    groups: tuple[int, ...]
    head: int
    smaller: int


@dataclass(frozen=True)
class WeightSizes:
    """The sizes of a model's weights, in bytes.

    Attributes:
        embedding: bytes of the embedding's table.
        head: bytes of the head's matrix; those of the table if it is tied.
        head_slices: bytes of the head's row slices, in order.
        is_tied: True if embedding and head share one stored tensor. If it is resident, there is one copy; if it
            streams, rows are gathered and slices are streamed from it.
        groups: bytes of the matrices of each layer group, without experts.
        on_link: the same on the link to a device (`Group.on_link`); empty if no matrix has fewer bytes there.
        always: bytes of all weights that never stream.
        features: bytes of the table of layers' features; 0 for none.
        experts: sizes of the experts; None if the model has none.
        draft: sizes of a draft model's copies; None without one.
        has_table: False if another process has the embedding.
    """

    embedding: int
    head: int
    head_slices: tuple[int, ...]
    is_tied: bool
    groups: tuple[int, ...]
    always: int
    experts: ExpertSizes | None = None
    features: int = 0
    on_link: tuple[int, ...] = ()
    draft: DraftSizes | None = None
    has_table: bool = True

    @property
    def total_nbytes(self) -> int:
        """Bytes of all weights; a tensor that embedding and head share counts once."""
        experts = 0 if self.experts is None else self.experts.total_nbytes
        tables = self.embedding + self.features + (0 if self.is_tied else self.head)
        return tables + sum(self.groups) + self.always + experts

    @property
    def read_nbytes(self) -> int:
        """Bytes that a decode step of one sequence reads: all weights except the tables and unrouted experts."""
        experts = 0 if self.experts is None else self.experts.top_k * sum(self.experts.expert_nbytes_by_layer)
        return sum(self.groups) + self.head + self.always + experts


def sizes_of(decoder: Decoder, is_tied: bool, layer_groups: Sequence[LayerGroup] = ()) -> WeightSizes:
    """Return the sizes of a decoder's weights, which may be meta tensors.

    Args:
        is_tied: True if embedding and head share one stored tensor.
        layer_groups: layers, or matrices of a layer, that move together; empty if each layer is a group.
    """
    layer_groups = layer_groups or split_layers(len(decoder.layers), 1)
    groups = movable_groups(decoder, layer_groups, [decoder.head.part(rows) for rows in decoder.head_rows()])
    matrices = {weight.name for group in groups for weight in group.weights}
    moving = {*matrices, EMBEDDING, FEATURES, HEAD, *expert_linears(decoder)}
    nbytes = [group.layout.nbytes for group in groups]
    of_layers = groups[: len(layer_groups)]
    on_link = tuple(group.on_link.layout.nbytes for group in of_layers)
    embedding, head = (
        aligned(one.nbytes) if decoder.has_ends else 0
        for one in (decoder.embed_tokens.weight, decoder.head.lm_head.weight)
    )
    per_layer = decoder.embed_tokens.per_layer
    return WeightSizes(
        embedding=embedding,
        head=embedding if is_tied else head,
        head_slices=tuple(nbytes[len(layer_groups) :]),
        is_tied=is_tied,
        groups=tuple(nbytes[: len(layer_groups)]),
        always=sum(group.layout.nbytes for group in resident_groups(decoder, is_tied, moving)),
        experts=_expert_sizes(decoder),
        features=0 if per_layer is None or not decoder.has_ends else aligned(per_layer.table.weight.nbytes),
        on_link=on_link if any(group.is_expanded for group in of_layers) else (),
        has_table=decoder.has_ends,
    )


def draft_sizes_of(draft: DraftCopy, layer_groups: Sequence[LayerGroup]) -> DraftSizes:
    """Return the sizes of a draft's copies; the layer groups are those of the model."""
    groups = movable_groups(draft.model, layer_groups, [])
    of_groups = [draft.nbytes_of({weight.name for weight in group.weights}) for group in groups]
    return DraftSizes(tuple(of_groups), draft.nbytes_of({HEAD}), draft.nbytes_of(draft.smaller))


def _expert_sizes(decoder: Decoder) -> ExpertSizes | None:
    parts = [part for part in decoder.modules() if isinstance(part, MoE)]
    if not parts:
        return None
    return ExpertSizes(
        expert_nbytes_by_layer=tuple(
            sum(aligned(weight[0].nbytes) for weight in _expert_weights(part)) for part in parts
        ),
        experts_per_layer=max(part.experts.up_proj.experts for part in parts),
        top_k=max(part.top_k for part in parts),
        min_slots=fewest_slots(decoder),
    )


def _expert_weights(part: MoE) -> Iterator[Tensor]:
    for child in part.experts.children():
        assert isinstance(child, ExpertLinear), f"{type(child).__name__} is no projection of experts"
        yield child.weight
