"""Multi-head latent attention (MLA) over a paged cache of one row for each position, with absorbed projections.

Legend: B batch, T tokens, D model dim, H heads, N query features without rotation, R rotated features, C latent
features, V width of a head's values, P pages, G positions of a page.

    queries    [R | N] of a head  --rotate R, N --k_b-->  [R | C]
    a row      [R | C], a rotated key that all heads share, and normalised latent features
    output     softmax(query . row) latent features  [C]  --v_b-->  [V]

A head's keys and values are products of the latent features with its rows of kv_b_proj. Here its queries are multiplied
with the rows of the keys, and its output with those of the values (absorbed), so that neither keys nor values of heads
are ever made: a row is all that is stored of a position, and prefill and decode do the same operations.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1 and appendix C; transformers, modeling_deepseek_v3.
"""

import torch
from torch import Tensor, nn

from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.kernels.cpu.head_products import packed_heads
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.nn.linear import Linear, StackedLinear, is_a_token_each, is_one_row, joint_projections
from graphcore.nn.norm import build_norm
from graphcore.nn.rope import rotate
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, NormSpec


class HeadLinear(StackedLinear):
    """A product of each head with a matrix of its own: weight [H, O, I], without bias."""

    def __init__(self, heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(heads, inputs, outputs, bias=False, dtype=dtype)
        self.inputs, self.outputs = heads * inputs, heads * outputs

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each head: [B, T, H * I] to [B, T, H * O], compute dtype."""
        if self.packing is not None:
            return packed_heads(x, self.weight, self.packing, self.rounding)
        heads = x.unflatten(-1, (len(self.weight), -1))  # type: ignore[no-untyped-call]  # [B, T, H, I]
        is_decode = is_one_row(x) or is_a_token_each(x)
        if torch.compiler.is_compiling() and x.device.type == "cpu" and is_decode:
            product = (heads.float().unsqueeze(-2) * self.weight.float()).sum(-1)  # as in linear.py: reads it once
        else:
            product = torch.einsum("bthi,hoi->btho", heads, self.weight)
        joined: Tensor = product.flatten(-2).to(x.dtype)
        return joined


class LatentAttention(nn.Module):
    """Projections of queries and of a position's row, softmax over the cache, values of heads, output projection."""

    def __init__(self, spec: AttentionSpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None, "this attention has latent features"
        self.spec, self.latent = spec, latent
        self.backend: Backend = TorchBackend()
        norm, heads, has_bias = NormSpec("rms", latent.eps), spec.heads, spec.qkv_bias
        width = latent.query_rank or dim
        self.q_a_proj = Linear(dim, latent.query_rank, has_bias, dtype) if latent.query_rank else None
        self.q_a_layernorm = build_norm(norm, latent.query_rank) if latent.query_rank else None
        self.q_rope_proj = Linear(width, heads * latent.rotated, bias=False, dtype=dtype)
        self.q_nope_proj = Linear(width, heads * latent.nope, bias=False, dtype=dtype)
        self.k_rope_proj = Linear(dim, latent.rotated, has_bias, dtype)
        self.kv_a_proj = Linear(dim, latent.rank, has_bias, dtype)
        self.kv_a_layernorm = build_norm(norm, latent.rank)
        self.k_b_proj = HeadLinear(heads, latent.nope, latent.rank, dtype)
        self.v_b_proj = HeadLinear(heads, latent.rank, latent.value_dim, dtype)
        self.o_proj = Linear(heads * latent.value_dim, dim, spec.output_bias, dtype)

    def forward(
        self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor
    ) -> Tensor:
        """Write the span's rows into the cache, then attend.

        Args:
            x: [B, T, D] compute dtype.
            rope: [B, T, 2, R/2] float32.
            span: positions of the tokens in their sequences.
            k_cache: [P, 1, G, R + C] cache dtype, pages of rows; written in place.
            v_cache: the empty pool of values.
            table: [B, N] int32, pages of each sequence.

        Returns:
            [B, T, D] compute dtype.
        """
        assert rope is not None, "latent attention rotates"
        key, value, *queries = self._projections(x)
        query = joined_heads(queries[0], self.k_b_proj(queries[1]), self.spec.heads)  # [B, T, H, R + C]
        key = key.unflatten(-1, (-1, self.latent.rotated))  # type: ignore[no-untyped-call]  # [B, T, 1, R]
        query, key = self._turned(query, rope), self._turned(key, rope)
        value = self.kv_a_layernorm(value).unflatten(-1, (-1, self.latent.rank))  # [B, T, 1, C]
        how = AttentionParameters(0, self.spec.scale, values_from=self.spec.values_from)
        cache = k_cache, v_cache, table
        answers = self.backend.attend(query, key, value, cache, (span.starts, span.counts), how)  # [B, T, H, C]
        return self.o_proj(self.v_b_proj(answers.flatten(-2)))  # type: ignore[no-any-return]  # Module.__call__

    def _projections(self, x: Tensor) -> list[Tensor]:
        """Return the new key, the latent features before their norm, and both parts of the queries."""
        of_queries = [self.q_rope_proj, self.q_nope_proj]
        if self.q_a_proj is None or self.q_a_layernorm is None:
            return _products([self.k_rope_proj, self.kv_a_proj, *of_queries], x)
        key, value, compressed = _products([self.k_rope_proj, self.kv_a_proj, self.q_a_proj], x)
        return [key, value, *_products(of_queries, self.q_a_layernorm(compressed))]

    def _turned(self, heads: Tensor, rope: Tensor) -> Tensor:
        """Return heads whose first R features are rotated."""
        kernels = self.backend.token_rows(heads)
        return rotate(heads, rope) if kernels is None else kernels.rotate(heads, rope)


def _products(linears: list[Linear], x: Tensor) -> list[Tensor]:
    return joint_projections(linears, x) or [one(x) for one in linears]


def joined_heads(first: Tensor, second: Tensor, heads: int) -> Tensor:
    """Return heads of two parts: [..., H * R] and [..., H * C] to [..., H, R + C]."""
    parts = (part.unflatten(-1, (heads, -1)) for part in (first, second))  # type: ignore[no-untyped-call]
    return torch.cat(tuple(parts), dim=-1)
