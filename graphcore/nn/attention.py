"""Grouped-query attention over a paged KV cache.

Legend: B batch, T tokens, D model dim, H heads, K kv heads, E head dim, P pages, N pages of a sequence,
G positions of a page.

The cache write and the softmax are one custom op (kernels/ops/attend.py). It takes context lengths as tensors, so that
its cost follows the actual context, and lengths never cause a recompilation.
"""

import torch
from torch import Tensor, nn

from graphcore.kernels.backend import Backend, Positions, TorchBackend
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.nn.linear import Linear, joint_projections
from graphcore.nn.mlp import ActivationModule
from graphcore.nn.norm import UnitNorm, build_norm
from graphcore.nn.rope import rotate, scale_queries
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, Int8Order


class Attention(nn.Module):
    """q, k, v projections, norms of q and k, rotation, softmax over the cache, sub-norm, gate, output projection."""

    sinks: Tensor | None

    def __init__(self, spec: AttentionSpec, dim: int, dtype: torch.dtype, int8_order: Int8Order | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.backend: Backend = TorchBackend()
        width, has_values = spec.heads * spec.head_dim, not (spec.shares_cache or spec.values_are_keys)
        kv_sizes = (dim, spec.kv_heads * spec.head_dim, spec.qkv_bias, dtype, int8_order)
        self.q_proj = Linear(dim, width, spec.qkv_bias, dtype, int8_order)
        self.k_proj = None if spec.shares_cache else Linear(*kv_sizes)
        self.v_proj = Linear(*kv_sizes) if has_values else None
        self.o_proj = Linear(width, dim, spec.output_bias, dtype, int8_order)
        self.gate_proj = Linear(dim, width, spec.qkv_bias, dtype, int8_order) if spec.output_gate else None
        self.gate_activation = ActivationModule("sigmoid") if spec.output_gate else None
        self.register_buffer("sinks", torch.empty(spec.heads, dtype=torch.float32) if spec.sinks else None)
        self.attn_sub_norm = build_norm(spec.sub_norm, spec.heads * spec.head_dim) if spec.sub_norm else None
        sizes = (width, spec.kv_heads * spec.head_dim) if spec.qk_norm_over_heads else (spec.head_dim, spec.head_dim)
        self.q_norm = build_norm(spec.qk_norm, sizes[0]) if spec.qk_norm else None
        self.k_norm = build_norm(spec.qk_norm, sizes[1]) if spec.qk_norm and not spec.shares_cache else None
        assert has_values or not spec.qk_norm_over_heads, "keys that are normalised over heads are no values"
        self.v_norm = UnitNorm(spec.v_norm_eps) if spec.v_norm_eps and not spec.shares_cache else None

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's heads do not depend on its batch, given the products: not where torch takes logarithms."""
        return self.spec.position_scale is None

    def forward(
        self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor
    ) -> Tensor:
        """Write the span's keys and values into the cache, then attend.

        Args:
            x: [B, T, D] compute dtype.
            rope: [B, T, 2, E/2] float32; None if heads do not rotate.
            span: positions of the tokens in their sequences.
            k_cache, v_cache: [P, K, G, E] cache dtype, pages of keys and values; written in place.
            table: [B, N] int32, pages of each sequence.

        Returns:
            [B, T, D] compute dtype.
        """
        shared, spec = self.q_proj.prepare(x), self.spec
        cache = k_cache, v_cache, table
        linears = [one for one in (self.q_proj, self.k_proj, self.v_proj) if one is not None]
        projected = joint_projections(linears, shared) or [one(shared) for one in linears]
        if spec.qk_norm_over_heads and self.q_norm is not None and self.k_norm is not None:
            projected = [self.q_norm(projected[0]), self.k_norm(projected[1]), projected[2]]
        query, *others = (one.unflatten(-1, (-1, spec.head_dim)) for one in projected)  # type: ignore[no-untyped-call]
        if self.k_proj is None:
            query = self._scaled(self._turned(query, self.q_norm, rope), span)
            heads = self.backend.attend(query, None, None, cache, *self._scoring(span))
        else:
            key, value = others[0], others[-1]  # [B, T, K, E]; keys are values too if there is no v_proj
            if self.q_norm is not None and self.k_norm is not None and not spec.qk_norm_over_heads:
                query, key = self.q_norm(query), self.k_norm(key)
            if self.v_norm is not None:
                value = self.v_norm(value)
            query, key = self._scaled(self._turned(query, None, rope), span), self._turned(key, None, rope)
            heads = self.backend.attend(query, key, value, cache, *self._scoring(span))
        joined = heads.flatten(-2)  # [B, T, H * E]
        if self.attn_sub_norm is not None:
            joined = self.attn_sub_norm(joined)
        if self.gate_proj is not None and self.gate_activation is not None:
            joined = self.gate_activation(self.gate_proj(shared)) * joined
        return self.o_proj(joined)  # type: ignore[no-any-return]  # Module.__call__

    def _scoring(self, span: Span) -> tuple[Positions, AttentionParameters]:
        """Return the last arguments of the backend's `attend`."""
        spec = self.spec
        return (span.starts, span.counts), AttentionParameters(spec.window or 0, spec.scale, self.sinks, cap=spec.cap)

    def _scaled(self, query: Tensor, span: Span) -> Tensor:
        """Return the rotated queries [B, T, H, E], multiplied by a factor of their position if the spec has one."""
        scale = self.spec.position_scale
        return query if scale is None else scale_queries(query, span.starts, scale.beta, scale.period)

    def _turned(self, heads: Tensor, norm: nn.Module | None, rope: Tensor | None) -> Tensor:
        """Return heads [B, T, H, E], normalised if there is a norm, and rotated if the spec has a rope."""
        normed = heads if norm is None else norm(heads)
        if self.spec.rope is None:
            return normed
        assert rope is not None, "this attention rotates"
        kernels = self.backend.token_rows(normed)
        return rotate(normed, rope) if kernels is None else kernels.rotate(normed, rope)
