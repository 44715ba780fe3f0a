"""What a model's weights take, in bytes, sorted by how they could move.

    embedding | layer groups' matrices | head's matrix, in row slices      may stream: 0 | 1 .. G | G+1 .. G+m
    experts' matrices                                                      stream one expert at a time
    vectors: norms, biases, scales, sinks; learned positions               never stream

Every tensor counts with its alignment, as it will lie in a slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.weights.layout import aligned
from graphcore.weights.packed_weights import packing_of

SLICE_ROWS = 64  # rows of a slice of the head are a multiple: whole runs of every packing


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
    layers = [matrix_nbytes(layer) for layer in decoder.layers]
    embedding = aligned(decoder.embed_tokens.weight.nbytes)
    head = embedding if is_tied else matrix_nbytes(decoder.head)
    vectors = sum(
        aligned(tensor.nbytes)
        for _, group in decoder.groups()
        for name, tensor in group.named_buffers()
        if not is_matrix(group, name, tensor)
    )
    return WeightSizes(
        embedding=embedding,
        head=head,
        head_slices=head_slices(decoder.head.lm_head.weight.nbytes, decoder.spec.vocab, max(layers)),
        is_tied=is_tied,
        groups=tuple(
            sum(layers[begin : begin + layer_group_size]) for begin in range(0, len(layers), layer_group_size)
        ),
        always=vectors,
        experts=_expert_sizes(decoder),
    )


def matrix_nbytes(module: nn.Module) -> int:
    """Return the bytes of a layer's or the head's matrices, experts left out."""
    return sum(
        aligned(tensor.nbytes)
        for name, tensor in module.named_buffers()
        if is_matrix(module, name, tensor) and not _is_of_experts(module, name)
    )


def is_matrix(group: nn.Module, name: str, tensor: Tensor) -> bool:
    """Return whether the buffer `name` of a group is one of the weights that may stream: a projection or the table."""
    is_weight = name.rpartition(".")[2] == "weight"
    return packing_of(group, name) is not None or (is_weight and tensor.dim() >= 2)


def head_slices(nbytes: int, rows: int, most_nbytes: int) -> tuple[int, ...]:
    """Return the bytes of the row slices that a head is computed in, resident or not.

    Args:
        nbytes: of the whole matrix.
        rows: of it: the vocabulary.
        most_nbytes: that a slice may have: a layer's; it has SLICE_ROWS rows at least.
    """
    row_nbytes = nbytes / rows
    step = max(int(most_nbytes / row_nbytes) // SLICE_ROWS, 1) * SLICE_ROWS
    return tuple(aligned(int(row_nbytes * min(step, rows - begin))) for begin in range(0, rows, step))


def _is_of_experts(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), ExpertLinear)


def _expert_sizes(decoder: Decoder) -> ExpertSizes | None:
    parts = [part for part in decoder.modules() if isinstance(part, MoE)]
    if not parts:
        return None
    return ExpertSizes(
        nbytes=tuple(sum(aligned(weight[0].nbytes) for weight in _expert_weights(part)) for part in parts),
        count=max(len(part.experts.up_proj.weight) for part in parts),
        routed=max(part.top_k for part in parts),
        least=max(part.top_k for part in parts),
    )


def _expert_weights(part: MoE) -> Iterator[Tensor]:
    for child in part.experts.children():
        assert isinstance(child, ExpertLinear), f"{type(child).__name__} is no projection of experts"
        yield child.weight
