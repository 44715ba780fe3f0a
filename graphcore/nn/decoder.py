"""The whole decoder: embedding, blocks, head. It is built on the meta device; the weights package allocates memory.

Legend: B batch, T tokens, D model dim, V vocab, P positions, E head dim.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor, nn

from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.kernels.packing import GROUP_ROWS, Packing
from graphcore.nn.attention import Attention
from graphcore.nn.block import RESIDUAL_DTYPE, Block
from graphcore.nn.delta_net import DeltaNet
from graphcore.nn.latent_attention import LatentAttention
from graphcore.nn.linear import Linear, StackedLinear
from graphcore.nn.mlp import MLP, ActivationModule, capped
from graphcore.nn.moe import MoE
from graphcore.nn.norm import LayerNorm, RMSNorm, UnitNorm, build_norm
from graphcore.nn.rope import rope_table
from graphcore.nn.short_conv import ShortConv
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, ModelSpec, PerLayerSpec

EXPERTS = ".experts."  # part of the names of the experts' weights
SUM_SCALE = 2**-0.5  # factor of the two summands of per-layer features, which preserves the variance


class Table(nn.Module):
    """An embedding table, in memory or with rows gathered on demand.

    Attributes:
        gather: function from token ids [B, T] to their rows [B, T, D], where the table is not in memory; else None.
        scale: factor of all rows.
    """

    weight: Tensor
    packing: Packing | None

    def __init__(self, rows: int, width: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype
        self.packing = None
        self.gather: Callable[[Tensor], Tensor] | None = None
        # transformers rounds the scale to the weight's dtype; in bf16 sqrt(1152) is 34, not 33.94
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()
        self.register_buffer("weight", torch.empty(rows, width, dtype=dtype))

    @property
    def is_gathered(self) -> bool:
        """Whether rows are gathered on demand."""
        return self.gather is not None

    def fetch_rows(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Gather rows with `gather`, from token ids [B, T] to rows [B, T, D], since the table is not in memory."""
        self.gather = gather

    def pack(self, packing: Packing) -> None:
        """Replace the table by an empty packed one, whose bytes are written later."""
        self.packing = packing
        self.weight = torch.empty(packing.nbytes, dtype=torch.uint8, device="meta")

    def rows(self, token_ids: Tensor) -> Tensor:
        """Return the scaled rows [B, T, D], float32, of `token_ids` [B, T] int64."""
        rows = self.stored_rows(token_ids)
        return rows * self.scale if self.scale != 1.0 else rows

    def stored_rows(self, token_ids: Tensor) -> Tensor:
        """Return the rows [B, T, D], float32, of `token_ids` [B, T] int64, not scaled."""
        if self.gather is not None:
            return self.gather(token_ids).to(RESIDUAL_DTYPE)
        if self.packing is None:
            return nn.functional.embedding(token_ids, self.weight).to(RESIDUAL_DTYPE)
        return self.packing.gather(token_ids, self.weight, RESIDUAL_DTYPE)


class LayerFeatures(nn.Module):
    """Computes per-layer features of tokens, from a second embedding table and a projection of the embedding (Gemma 4).

    Source: transformers, modeling_gemma4, `get_per_layer_inputs` and `project_per_layer_inputs`.
    """

    def __init__(self, spec: ModelSpec, per_layer: PerLayerSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_layers, self.width = len(spec.blocks), per_layer.width
        self.dtype, self.dim_scale = dtype, spec.dim**-0.5
        width = per_layer.layers * per_layer.width
        self.table = Table(per_layer.vocab, width, per_layer.width**0.5, dtype)
        self.projection = Linear(spec.dim, width, bias=False, dtype=dtype)
        self.norm = build_norm(per_layer.norm, per_layer.width)

    def forward(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the features of each layer, [L, B, T, P] float32.

        Args:
            token_ids: [B, T] int64.
            hidden: [B, T, D] float32, the tokens' embedding.
        """
        projected = self.projection(hidden.to(self.dtype)).float() * self.dim_scale
        normed = self.norm(projected.unflatten(-1, (-1, self.width)))  # [B, T, stored layers, P]
        features: Tensor = (normed + self.table.rows(token_ids).view(normed.shape)) * SUM_SCALE
        return rearrange(features[:, :, : self.num_layers], "b t l p -> l b t p").contiguous()


class Embedding(Table):
    """Looks up and scales token embeddings, and adds learned position embeddings if the model has them."""

    positions: Tensor | None

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec.vocab, spec.dim, spec.embedding_scale, dtype)
        self.register_buffer(
            "positions", torch.empty(spec.positions, spec.dim, dtype=dtype) if spec.positions else None
        )
        self.per_layer = None if spec.per_layer is None else LayerFeatures(spec, spec.per_layer, dtype)

    @property
    def asks_host(self) -> bool:
        """Whether rows of the embedding or of the features' table are gathered on demand, which needs the host."""
        return self.is_gathered or (self.per_layer is not None and self.per_layer.table.is_gathered)

    def forward(self, token_ids: Tensor, span: Span) -> Tensor:
        """Return the residual stream [B, T, D], float32, of `token_ids` [B, T] int64."""
        rows = self.rows(token_ids)
        if self.positions is not None:
            rows = rows + nn.functional.embedding(span.positions(token_ids.shape[1]), self.positions)
        return rows


class Head(nn.Module):
    """Final norm, projection to logits, and factor and soft cap of the logits if the model has them."""

    def __init__(
        self,
        norm: RMSNorm | LayerNorm,
        lm_head: Linear,
        dtype: torch.dtype,
        logit_cap: float = 0.0,
        logit_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.dtype, self.logit_cap, self.logit_factor = dtype, logit_cap, logit_factor
        self.norm = norm
        self.lm_head = lm_head

    def part(self, rows: range) -> "Head":
        """Return the head for a range of the vocabulary; its weight is a view of this head's."""
        lm_head = self.lm_head.part(rows.start, rows.stop)
        return Head(self.norm, lm_head, self.dtype, self.logit_cap, self.logit_factor)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [..., V] float32 for the residual stream `x` [..., D].

        A packed head computes in float32: bf16 logits near 25 are multiples of 1/8, so that close tokens would tie.
        """
        is_packed = self.lm_head.packing is not None
        logits: Tensor = self.lm_head(self.norm(x, torch.float32 if is_packed else self.dtype)).float()
        if self.logit_factor != 1.0:
            logits = logits * self.logit_factor
        return capped(logits, self.logit_cap) if self.logit_cap else logits


class AbsentLayer(nn.Module):
    """The place of a layer that another process has: no weights."""


class Decoder(nn.Module):
    """Embedding, blocks and head.

    Attributes:
        least_part_nbytes: bytes that parts of a layer, and of the head, may always have. Smaller ones would leave some
            of the threads that read them without work: four, of up to 2.5 MiB at a time.
        has_small_parts: True to split the head into parts of the size of a matrix, as layers can be where their blocks
            run in parts (graph/block_parts.py); False for parts of the size of a layer.
        has_ends: False if another process has embedding and head, whose weights are then absent here.
    """

    least_part_nbytes = 10 << 20
    has_small_parts = False
    has_ends = True

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec, dtype)
        self.layers = nn.ModuleList(Block(block, dtype) for block in spec.blocks)
        lm_head = Linear(spec.dim, spec.vocab, bias=False, dtype=dtype)
        self.head = Head(build_norm(spec.norm, spec.dim), lm_head, dtype, spec.logit_cap, spec.logit_factor)
        self._largest: tuple[int, int] | None = None  # what `_largest_nbytes` was before `keep`

    def keep(self, layers: Container[int], has_ends: bool) -> None:
        """Drop the weights of all other layers and, unless `has_ends`, of embedding and head.

        Call it when all matrices are packed, because the head is split by the bytes of all layers.
        """
        self._largest = self._largest_nbytes()
        self.has_ends = has_ends
        for index in range(len(self.layers)):
            if index not in layers:
                self.layers[index] = AbsentLayer()

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield the layers that are here, each with its index."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Block):
                yield index, layer

    def add_low_rank(self, ranks: Mapping[int, Mapping[str, int]]) -> None:
        """Add low-rank factors beside projections of layers: ranks by layer and by the projection's name in it."""
        for layer, of_block in ranks.items():
            block = self.layers[layer]
            assert isinstance(block, Block), f"{type(block).__name__} is no block"
            block.add_low_rank(of_block)
        blocks = tuple(block.spec for block in self.layers if isinstance(block, Block))
        self.spec = replace(self.spec, blocks=blocks)

    def groups(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the layer groups in order of use, each with the prefix of its weights' names."""
        if self.has_ends:
            yield "embed_tokens.", self.embed_tokens
        for index, block in self.blocks():
            yield f"layers.{index}.", block
        if self.has_ends:
            yield "", self.head

    def table(self, weight: str) -> Table:
        """Return the table whose weight has this name: the embedding, or the per-layer features' table."""
        table = self.get_submodule(weight.removesuffix(".weight"))
        assert isinstance(table, Table), f"{weight} is no table"
        return table

    def head_rows(self) -> list[range]:
        """Return the ranges of the vocabulary into which the head is split, in order; none if it is not here.

        A part has at most as many bytes as the largest layer's matrices, or as the largest group of them that streams
        alone, so that it fits in their slot. The split does not depend on what streams, because products of a different
        number of rows may differ in their last bits.
        """
        if not self.has_ends:
            return []
        lm_head = self.head.lm_head
        most, of_matrix = self._largest_nbytes()
        if self.has_small_parts:
            most = min(most, max(self.least_part_nbytes, of_matrix))
        if lm_head.packing is not None and not lm_head.packing.can_split:
            return [range(lm_head.outputs)]
        return equal_parts(lm_head.outputs, max(1, most * lm_head.outputs // lm_head.weight.nbytes))

    def _largest_nbytes(self) -> tuple[int, int]:
        """Return the bytes of the largest layer's matrices, and of the largest of all these matrices."""
        if self._largest is not None:
            return self._largest
        return max(map(movable_nbytes, self.layers)), max(map(largest_movable_nbytes, self.layers))

    def use_backend(self, backend: Backend) -> None:
        """Set the kernel backend of all modules in the blocks and the embedding; the default is plain PyTorch.

        Float32 blocks with int8 activations stay with torch: they must equal the reference to the bit, and int8
        rounding would turn a difference in the last bit into a whole step of a code.
        """
        kinds = Block | Attention | LatentAttention | DeltaNet | ShortConv | Linear | MLP | RMSNorm | UnitNorm
        for part in (self.embed_tokens, *(block for _, block in self.blocks())):
            is_reference = (
                isinstance(part, Block) and part.dtype is torch.float32 and part.spec.int8_activations is not None
            )
            for module in part.modules():
                if isinstance(module, kinds | ActivationModule):
                    module.backend = TorchBackend() if is_reference else backend

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token has the same bits in every eager chunk of at least `DENSE_TOKENS` tokens that its prompt has.

        With the C++ kernels it does, if they multiply all matrices: their sums are in one order. Where a library of
        torch multiplies (float32, fp16, bf16 without AVX512-BF16, dense experts), only whole chunks are alike.
        """
        parts = [*([self.embed_tokens] if self.has_ends else []), *(block for _, block in self.blocks())]
        kinds = Linear | StackedLinear | MoE | Attention
        found = [module for part in parts for module in part.modules() if isinstance(module, kinds)]
        return all(module.is_batch_invariant for module in found)

    def rope_tables(self, positions: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return a [P, 2, E/2] float32 table for each of the spec's ropes."""
        return tuple(rope_table(rope, head_dim, positions).to(device) for rope, head_dim in self.spec.ropes)

    def rope_index(self) -> tuple[int | None, ...]:
        """Return, for each block, the index of its rope table; None if the block has no rotation."""
        ropes, layers = self.spec.ropes, (block.attention for block in self.spec.blocks)
        attend = (one if isinstance(one, AttentionSpec) else None for one in layers)
        return tuple(ropes.index((one.rope, one.head_dim)) if one and one.rope else None for one in attend)


def is_movable(name: str, tensor: Tensor) -> bool:
    """Return whether a weight is a matrix that is streamed with its layer group.

    Vectors, short convolutions and position tables stay resident, and experts are fetched one by one.
    """
    is_matrix = tensor.ndim > 1 or tensor.dtype is torch.uint8
    return is_matrix and EXPERTS not in name and not name.endswith(("positions", "conv1d.weight"))


def movable_nbytes(group: nn.Module) -> int:
    """Return the bytes of the layer group's matrices that are streamed with it."""
    return sum(tensor.nbytes for name, tensor in group.named_buffers() if is_movable(name, tensor))


def largest_movable_nbytes(group: nn.Module) -> int:
    """Return the bytes of the largest of the layer group's matrices that are streamed with it."""
    return max((tensor.nbytes for name, tensor in group.named_buffers() if is_movable(name, tensor)), default=0)


def equal_parts(rows: int, most: int) -> list[range]:
    """Return consecutive parts of at most `most` rows, in multiples of 16.

    The parts are equal if that takes fewer than twice the smallest number of parts.
    """
    step = max(GROUP_ROWS, most // GROUP_ROWS * GROUP_ROWS)
    if step >= rows:
        return [range(rows)]
    fewest = -(-rows // step)
    even = (rows // count for count in range(fewest, 2 * fewest) if rows % (GROUP_ROWS * count) == 0)
    step = next(even, step)
    return [range(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
