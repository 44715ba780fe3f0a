"""A block's decode step on a GPU, as kernels called one after another: what a captured graph consists of.

Legend: B batch (one token of each), D model dim, H heads, K kv heads, E head dim, S cache slots, F hidden features.

    norm | q k v | rotate, write | attend | o, add | norm | gate up | down, add                       8 kernels
    sandwich:  ... | o | norm, add, norm | gate up | down | norm, add                                 9
    experts:   ... | o, add | norm | router | choose | gate up of the chosen | down of the chosen, add     10

Nothing here is compiled: between these kernels there is nothing left to fuse. The residual stream is changed in place,
in float32, and sublayers' answers reach it unrounded; but those of experts are rounded to the compute dtype, each and
their sum, so that the bits are the same where experts are fetched and their answers lie in memory first. What a block
computes is nn/block.py's matter; what cannot run is said by graph/device_obstacle.py before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.graph.device_obstacle import obstacle_of, obstacle_of_head
from graphcore.graph.step import BlockFunction, HeadFunction, RoutedBlock
from graphcore.kernels.gpu.codes import norm_to_codes
from graphcore.kernels.gpu.decode_attend import attend_written
from graphcore.kernels.gpu.experts import add_experts
from graphcore.kernels.gpu.matrix import DENSE, Matrix
from graphcore.kernels.gpu.norm import add_normed, residual_norm
from graphcore.kernels.gpu.product import add_product, gated, product
from graphcore.kernels.gpu.rotate_write import rotate_and_write
from graphcore.kernels.gpu.router import choose_experts
from graphcore.nn.attention import Attention
from graphcore.nn.block import Block, Routed
from graphcore.nn.decoder import Head
from graphcore.nn.kv_cache import LayerCache
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import MLP
from graphcore.nn.moe import MoE
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.nn.span import Span

AnyNorm = RMSNorm | LayerNorm
NO_NORM = (None, None, 0.0, True, True)
Fed = tuple[Tensor, Tensor | None]  # rows, and what they were multiplied with where they are int8 codes


@dataclass(frozen=True)
class DeviceBlocks:
    """Runs blocks of any spec that has no obstacle.

    Attributes:
        arrivals: [B * K or more] int32 zeros, where the parts of one attention count each other.
    """

    arrivals: Tensor

    @classmethod
    def allocate(cls, caches: Sequence[LayerCache], device: torch.device) -> "DeviceBlocks":
        """Return what runs the layers of those caches."""
        most = max(cache.k.shape[0] * cache.k.shape[1] for cache in caches)
        return cls(torch.zeros(most, dtype=torch.int32, device=device))

    def block_function(self, block: Block, batch: int, fetches: bool) -> BlockFunction | None:
        """Return what runs the block, or None where it has an obstacle."""
        if obstacle_of(block, batch) is not None:
            return None
        return RoutedBlock(self.route, Block.add_experts) if fetches else self.forward

    def head_function(self, head: Head, batch: int) -> HeadFunction | None:
        """Return what runs the head, or None where it has an obstacle."""
        return run_head if obstacle_of_head(head, batch) is None else None

    def forward(
        self, block: Block, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Run the block for one token of each sequence; arguments as of `Block.forward`, and `x` is changed."""
        stream, fed = self._until_mlp(block, x, rope, span, k_cache, v_cache)
        if isinstance(block.mlp, MoE):
            _add_experts(block.mlp, stream, fed[0], span)
        else:
            _add_mlp(block, block.mlp, stream, fed)
        return x

    def route(
        self, block: Block, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> Routed:
        """Run the block up to its experts, as `Block.route` does; `x` is changed."""
        assert isinstance(block.mlp, MoE), "a block without experts runs whole"
        _, (fed, _) = self._until_mlp(block, x, rope, span, k_cache, v_cache)
        chosen, shares = _choose(block.mlp, fed, span)
        return Routed(x, fed[:, None], chosen[:, None], shares[:, None])

    def _until_mlp(
        self, block: Block, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Fed]:
        """Add attention to the stream; return it, [B, D], and what the second half is fed."""
        stream, attention = x.view(len(x), -1), block.self_attn
        heads = self._attend(block, stream, rope, span, k_cache, v_cache)
        joined = _prepared(heads.view(len(x), -1), attention.attn_sub_norm, attention.o_proj)
        added = _add_or_return(block, attention.o_proj, stream, joined)
        norm = block.pre_feedforward_layernorm if block.sandwich else block.post_attention_layernorm
        first = block.mlp.router if isinstance(block.mlp, MoE) else block.mlp.up_proj
        if added is None:
            return stream, _prepared(stream, norm, first)
        assert isinstance(block.post_attention_layernorm, RMSNorm), "said by obstacle_of"
        after = block.post_attention_layernorm.weight
        fed = residual_norm(stream, added, *_norm(norm), block.dtype, _is_wide(norm), after)
        return stream, (fed, None) if first.int8_order is None else norm_to_codes(fed, *NO_NORM, block.dtype)

    def _attend(
        self, block: Block, stream: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Write the new key and value; return what the heads answer, [B, 1, H, E] compute dtype."""
        attention = block.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        x, scale = _prepared(stream, block.input_layernorm, attention.q_proj)
        matrices = [matrix_of(linear) for linear in projections]
        projected = product(x, scale, matrices, block.dtype, _divides(attention.q_proj))
        place = (k_cache, v_cache, span.starts, span.counts)
        query = rotate_and_write(projected, rope, *place, *_head_norms(attention))
        window, spec = attention.spec.window or 0, attention.spec
        return attend_written(query, *place, window, spec.scale, attention.sinks, self.arrivals)


def run_head(head: Head, x: Tensor) -> Tensor:
    """Return logits [B, V] float32 of the residual stream `x` [B, D], as `Head.forward` does."""
    dtype = head.dtype if head.lm_head.packing is None else torch.float32
    fed = residual_norm(x.contiguous(), None, *_norm(head.norm), dtype, _is_wide(head.norm))
    return product(fed, None, [matrix_of(head.lm_head)], torch.float32)


def matrix_of(linear: Linear) -> Matrix:
    """Return a projection as the product kernels take it."""
    name = DENSE if linear.packing is None else linear.packing.format
    return Matrix(linear.weight, linear.bias, linear.weight_scale, name, linear.outputs)


def _add_mlp(block: Block, mlp: MLP, stream: Tensor, fed: Fed) -> None:
    """Add down(act(gate) * up), or down(act(up)), to the stream."""
    x, scale = fed
    activation, divides = mlp.spec.activation, _divides(mlp.up_proj)
    # relu2 squares: the product outgrows fp16 where its factors do not, so it stays float32 up to the norm
    dtype = block.dtype if mlp.ffn_sub_norm is None else torch.float32
    up = matrix_of(mlp.up_proj)
    if mlp.gate_proj is None:
        hidden = product(x, scale, [up], dtype, divides, activation)
    else:
        hidden = gated(x, scale, matrix_of(mlp.gate_proj), up, dtype, divides, activation)
    added = _add_or_return(block, mlp.down_proj, stream, _prepared(hidden, mlp.ffn_sub_norm, mlp.down_proj))
    if added is not None:
        norm = block.post_feedforward_layernorm
        assert isinstance(norm, RMSNorm), "said by obstacle_of"
        add_normed(stream, added, norm.weight, norm.eps)


def _add_or_return(block: Block, linear: Linear, stream: Tensor, fed: Fed) -> Tensor | None:
    """Add a sublayer's answer to the stream; where it is normalised before, return it instead, [B, D] float32."""
    x, scale = fed
    if block.sandwich:
        return product(x, scale, [matrix_of(linear)], torch.float32, _divides(linear))
    add_product(stream, x, scale, matrix_of(linear), _divides(linear))
    return None


def _add_experts(moe: MoE, stream: Tensor, fed: Tensor, span: Span) -> None:
    """Add what the chosen experts answer to the stream."""
    chosen, shares = _choose(moe, fed, span)
    parts = (moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj)
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    formats = [DENSE if part.packing is None else part.packing.format for part in parts]
    clamp = (moe.experts.limit, moe.experts.alpha)
    add_experts(stream, fed, chosen, shares, weights, biases, None, clamp, formats)


def _choose(moe: MoE, fed: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Return the experts chosen for each token and their shares, [B, C] each; scores have the compute dtype."""
    return choose_experts(product(fed, None, [matrix_of(moe.router)], fed.dtype), span.counts, moe.top_k)


def _prepared(x: Tensor, norm: AnyNorm | None, linear: Linear) -> Fed:
    """Return `x` [B, I], normalised where there is a norm, as the projection reads it: contiguous, codes if int8."""
    if linear.int8_order is not None:
        if norm is None:
            return norm_to_codes(x, *NO_NORM, linear.dtype)
        return norm_to_codes(x, *_norm(norm), _is_wide(norm), linear.dtype)
    if norm is None:
        return x, None
    return residual_norm(x, None, *_norm(norm), linear.dtype, _is_wide(norm)), None


def _norm(norm: AnyNorm) -> tuple[Tensor, Tensor | None, float, bool]:
    """Return weight, bias, eps and whether it is an RMSNorm."""
    if isinstance(norm, RMSNorm):
        return norm.weight, None, norm.eps, True
    return norm.weight, norm.bias, norm.eps, False


def _is_wide(norm: AnyNorm) -> bool:
    return not isinstance(norm, RMSNorm) or norm.scale_in_float32


def _head_norms(attention: Attention) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """Return the weights of the norms of queries and keys, their eps, and where they round."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is None or k_norm is None:
        return None, None, 0.0, True
    return q_norm.weight, k_norm.weight, q_norm.eps, _is_wide(q_norm)


def _divides(linear: Linear) -> bool:
    return linear.int8_order == "divided"
