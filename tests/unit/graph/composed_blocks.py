"""Blocks that no architecture of graphcore has, as plain modules: what a decode step must run without knowing them.

Legend: D model dim, F hidden features.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from block_specs import DIM, LAYER_NORM, PLAIN, attending
from tiny_graph import NORM
from torch import Tensor, nn

from graphcore.kernels.ops.attend import attend
from graphcore.nn.attention import Attention
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import MLP, ActivationModule, capped
from graphcore.nn.norm import build_norm
from graphcore.nn.rope import rotate
from graphcore.nn.rope_spec import RopeSpec
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, NormSpec

WHERE = tuple[Tensor | None, Span, Tensor, Tensor]


class ComposedBlock(nn.Module):
    """Attention and an MLP, to be composed.

    Attributes:
        spec: of the attention.
    """

    def __init__(self, dtype: torch.dtype, spec: AttentionSpec = PLAIN.attention, norm: NormSpec = PLAIN.norm) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.self_attn = Attention(spec, DIM, dtype)
        self.mlp = MLP(PLAIN.mlp, DIM, dtype)
        self.first_norm, self.second_norm = build_norm(norm, DIM), build_norm(norm, DIM)

    def forward(
        self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor
    ) -> Tensor:
        """Advance the residual stream `x` [B, T, D]; arguments as of `Block.forward`."""
        return self.composed(x, (rope, span, k_cache, v_cache, table))

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        x = x + self.self_attn(self.first_norm(x, self.dtype), *where)
        return x + self.mlp(self.second_norm(x, self.dtype))


class Parallel(ComposedBlock):
    """Attention and MLP read one norm (GPT-J, Cohere)."""

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        fed = self.first_norm(x, self.dtype)
        return x + self.self_attn(fed, *where) + self.mlp(fed)


class TwoNormsParallel(ComposedBlock):
    """Attention and MLP read norms of their own of one stream (GPT-NeoX)."""

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        return x + self.self_attn(self.first_norm(x, self.dtype), *where) + self.mlp(self.second_norm(x, self.dtype))


class NormsAfter(ComposedBlock):
    """Sublayers' answers are normalised, what they are fed is not (OLMo 2)."""

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        x = x + self.first_norm(self.self_attn(x.to(self.dtype), *where), torch.float32)
        return x + self.second_norm(self.mlp(x.to(self.dtype)), torch.float32)


class NormsBoth(ComposedBlock):
    """Norms before and after (Gemma)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.third_norm, self.fourth_norm = build_norm(NORM, DIM), build_norm(NORM, DIM)

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        attended = self.self_attn(self.first_norm(x, self.dtype), *where)
        x = x + self.third_norm(attended, torch.float32)
        return x + self.fourth_norm(self.mlp(self.second_norm(x, self.dtype)), torch.float32)


class Multiplied(ComposedBlock):
    """Answers are scaled before they are added (Granite)."""

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        x = x + self.self_attn(self.first_norm(x, self.dtype), *where) * 0.22
        return x + 0.22 * self.mlp(self.second_norm(x, self.dtype))


class StreamReadAgain(ComposedBlock):
    """The MLP's answer is added to the sum of the new stream and the old one: the old one must stay."""

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        attended = x + self.self_attn(self.first_norm(x, self.dtype), *where)
        return x + self.mlp(self.second_norm(attended, self.dtype))


class ProductOfTheStream(ComposedBlock):
    """A projection of the stream is added to it: no row of the sum may be written while another is computed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.out_proj = Linear(DIM, DIM, bias=False, dtype=dtype)

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        x = x + self.self_attn(self.first_norm(x, self.dtype), *where)
        return x + self.out_proj(self.second_norm(x, self.dtype))


class OldHalves(ComposedBlock):
    """Parts of the old stream are read behind the sum."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.widened = Linear(DIM // 2, DIM, bias=False, dtype=dtype)

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        halves = x.chunk(2, dim=-1)
        x = x + self.self_attn(self.first_norm(x, self.dtype), *where)
        return x + self.widened((halves[0] * halves[1]).to(self.dtype))


class OutputGate(ComposedBlock):
    """What the heads answer is gated by a projection of what they are fed (Qwen 3.5)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        width = self.spec.heads * self.spec.head_dim
        self.gate_proj = Linear(DIM, width, bias=False, dtype=dtype)
        self.gate = ActivationModule("sigmoid")
        self.out_proj = Linear(DIM, DIM, bias=False, dtype=dtype)

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        fed = self.first_norm(x, self.dtype)
        x = x + self.out_proj(self.self_attn(fed, *where) * self.gate(self.gate_proj(fed)))
        return x + self.mlp(self.second_norm(x, self.dtype))


class FusedProjections(ComposedBlock):
    """q, k and v are one matrix, gate and up are another (Phi)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        spec = self.spec
        self.sizes = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
        self.qkv_proj = Linear(DIM, sum(self.sizes), bias=True, dtype=dtype)
        self.gate_up_proj = Linear(DIM, 2 * PLAIN.mlp.hidden, bias=False, dtype=dtype)
        self.activation = ActivationModule("silu")

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        rope, span, k_cache, v_cache, table = where
        projected = self.qkv_proj(self.first_norm(x, self.dtype)).split(self.sizes, dim=-1)
        query, key, value = (projected[index].unflatten(-1, (-1, self.spec.head_dim)) for index in range(3))
        turned = rotate(query, rope), rotate(key, rope), value
        heads = attend(*turned, k_cache, v_cache, table, span.starts, span.counts, 0, self.spec.scale)
        x = x + self.self_attn.o_proj(heads.flatten(-2))
        both = self.gate_up_proj(self.second_norm(x, self.dtype)).chunk(2, dim=-1)
        return x + self.mlp.down_proj(self.activation(both[0]) * both[1])


class CappedAnswers(ComposedBlock):
    """The MLP's answer is capped."""

    def composed(self, x: Tensor, where: WHERE) -> Tensor:
        x = x + self.self_attn(self.first_norm(x, self.dtype), *where)
        return x + capped(self.mlp(self.second_norm(x, self.dtype)), 0.5)


def of(kind: type[ComposedBlock], *arguments: object) -> Callable[[torch.dtype], ComposedBlock]:
    return lambda dtype: kind(dtype, *arguments)


PARTLY = replace(PLAIN.attention, rope=RopeSpec(1e4, width=4))
COMPOSED: Mapping[str, Callable[[torch.dtype], ComposedBlock]] = {
    "plain": of(ComposedBlock),
    "parallel": of(Parallel),
    "parallel with two norms": of(TwoNormsParallel),
    "parallel with layer norms": of(TwoNormsParallel, PLAIN.attention, LAYER_NORM),
    "norms after": of(NormsAfter),
    "norms before and after": of(NormsBoth),
    "no rotation": of(ComposedBlock, attending(rope=None).attention),
    "partial rotation": of(ComposedBlock, PARTLY),
    "partial rotation of normalised heads": of(ComposedBlock, replace(PARTLY, qk_norm=NORM)),
    "multiplied": of(Multiplied),
    "stream read again": of(StreamReadAgain),
    "product of the stream": of(ProductOfTheStream),
    "parts of the old stream": of(OldHalves),
    "output gate": of(OutputGate),
    "fused projections": of(FusedProjections),
    "capped answers": of(CappedAnswers),
}
