"""What a model's weights take, in bytes, sorted by how they could move.

    embedding | layer groups' matrices | head's matrix, in row slices      may stream: 0 | 1 .. G | G+1 .. G+m
    experts' matrices                                                      stream one expert at a time
    vectors: norms, biases, scales, sinks; learned positions               never stream

Every tensor counts with its alignment, as it will lie in a slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from graphcore.nn.decoder import Decoder, is_movable
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.weights.expert_pools import fewest_slots
from graphcore.weights.groups import split_layers
from graphcore.weights.layout import aligned


@dataclass(frozen=True)
class ExpertSizes:
    """Experts' matrices.

    Attributes:
        nbytes: of one expert, for each layer that has experts.
        count: experts of such a layer.
        routed: that a token goes through in such a layer.
        least: slots without which a step cannot run; at least one.
    """

    nbytes: tuple[int, ...]
    count: int
    routed: int
    least: int

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that holds any expert."""
        return max(self.nbytes)

    @property
    def num_experts(self) -> int:
        """Experts of all layers."""
        return self.count * len(self.nbytes)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all experts."""
        return self.count * sum(self.nbytes)


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights.

    Attributes:
        embedding: the table's.
        head: the matrix's; the table's once more if is_tied.
        head_slices: of its row slices, in order.
        is_tied: one copy serves as table and head where it is resident; where it streams, rows are gathered and slices
            are read from the same stored tensor.
        groups: of each layer group's matrices, experts left out.
        always: what never streams, of all groups together.
        experts: None where the model has none.
    """

    embedding: int
    head: int
    head_slices: tuple[int, ...]
    is_tied: bool
    groups: tuple[int, ...]
    always: int
    experts: ExpertSizes | None = None

    @property
    def total_nbytes(self) -> int:
        """Bytes of all weights; what table and head share counts once."""
        experts = 0 if self.experts is None else self.experts.total_nbytes
        return self.embedding + (0 if self.is_tied else self.head) + sum(self.groups) + self.always + experts

    @property
    def read_nbytes(self) -> int:
        """Bytes that a decode step of one sequence reads: all but the table, and of experts those that are routed."""
        experts = 0 if self.experts is None else self.experts.routed * sum(self.experts.nbytes)
        return sum(self.groups) + self.head + self.always + experts


def sizes_of(decoder: Decoder, is_tied: bool, layer_group_size: int) -> WeightSizes:
    """Return the sizes of a decoder's weights; meta tensors will do.

    Args:
        is_tied: the head reads the embedding's bytes.
        layer_group_size: layers that move together; the last group may have fewer.
    """
    layers = [movable_nbytes(layer) for layer in decoder.layers]
    parts = [decoder.head.part(rows).lm_head.weight for rows in decoder.head_rows()]
    embedding = aligned(decoder.embed_tokens.weight.nbytes)
    return WeightSizes(
        embedding=embedding,
        head=embedding if is_tied else aligned(decoder.head.lm_head.weight.nbytes),
        head_slices=tuple(aligned(part.nbytes) for part in parts),
        is_tied=is_tied,
        groups=tuple(sum(layers[group.start : group.stop]) for group in split_layers(len(layers), layer_group_size)),
        always=sum(_vectors(decoder)),
        experts=_expert_sizes(decoder),
    )


def movable_nbytes(layer: nn.Module) -> int:
    """Return the bytes of a layer's matrices, experts left out, as they lie in a slot."""
    return sum(aligned(tensor.nbytes) for name, tensor in layer.named_buffers() if is_movable(name, tensor))


def _vectors(decoder: Decoder) -> Iterator[int]:
    """Yield the bytes of every weight that never moves."""
    for _, group in decoder.groups():
        for name, tensor in group.named_buffers():
            is_table = name in ("weight", "lm_head.weight")  # of the embedding and of the head
            if not is_table and not is_movable(name, tensor) and not _is_experts_weight(group, name):
                yield aligned(tensor.nbytes)


def _is_experts_weight(module: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and isinstance(module.get_submodule(owner), ExpertLinear)


def _expert_sizes(decoder: Decoder) -> ExpertSizes | None:
    parts = [part for part in decoder.modules() if isinstance(part, MoE)]
    if not parts:
        return None
    return ExpertSizes(
        nbytes=tuple(sum(aligned(weight[0].nbytes) for weight in _expert_weights(part)) for part in parts),
        count=max(len(part.experts.up_proj.weight) for part in parts),
        routed=max(part.top_k for part in parts),
        least=fewest_slots(decoder),
    )


def _expert_weights(part: MoE) -> Iterator[Tensor]:
    for child in part.experts.children():
        assert isinstance(child, ExpertLinear), f"{type(child).__name__} is no projection of experts"
        yield child.weight
