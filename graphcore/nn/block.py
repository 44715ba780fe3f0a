"""One transformer block: attention and MLP around a residual stream.

Legend: B batch, T tokens, D model dim, K kv heads, E head dim, S cache slots.

    pre-norm:  x += attention(norm(x));  x += mlp(norm(x))
    sandwich:  x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))

The forward reads no integer that differs between layers: every layer of one spec runs the same compiled graph.
"""

import torch
from torch import Tensor, nn

from graphcore.nn.attention import Attention
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import MLP
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.nn.norm import build_norm
from graphcore.nn.span import Span
from graphcore.nn.spec import BlockSpec, MoESpec

# Whatever the compute dtype: a stream that bf16 rounds after every sublayer loses half of what bf16 logits lose in all,
# and Gemma's passes 65504, fp16's largest number.
RESIDUAL_DTYPE = torch.float32


class Block(nn.Module):
    """A block built from its spec; its buffers carry Hugging Face leaf names."""

    def __init__(self, spec: BlockSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.sandwich = spec.sandwich
        int8_order = spec.int8_activations
        self.self_attn = Attention(spec.attention, spec.dim, dtype, int8_order)
        if isinstance(spec.mlp, MoESpec):
            self.mlp: MLP | MoE = MoE(spec.mlp, spec.dim, dtype)
        else:
            self.mlp = MLP(spec.mlp, spec.dim, dtype, int8_order)
        self.input_layernorm = build_norm(spec.norm, spec.dim)
        self.post_attention_layernorm = build_norm(spec.norm, spec.dim)
        if spec.sandwich:
            self.pre_feedforward_layernorm = build_norm(spec.norm, spec.dim)
            self.post_feedforward_layernorm = build_norm(spec.norm, spec.dim)

    def forward(self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Run the block.

        Args:
            x: [B, T, D] float32 residual stream.
            rope: [B, T, 2, E/2] float32, or None.
            span: where the tokens stand in their sequences.
            k_cache, v_cache: [B, K, S, E]; written in place.

        Returns:
            [B, T, D] float32 residual stream.
        """
        attended = self.self_attn(self.input_layernorm(x, self.dtype), rope, span, k_cache, v_cache)
        if not self.sandwich:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x, self.dtype))  # type: ignore[no-any-return]
        x = x + self.post_attention_layernorm(attended, RESIDUAL_DTYPE)
        fed = self.mlp(self.pre_feedforward_layernorm(x, self.dtype))
        return x + self.post_feedforward_layernorm(fed, RESIDUAL_DTYPE)  # type: ignore[no-any-return]


def packed_formats(block: nn.Module) -> dict[str, str]:
    """Return the stored format of every packed matrix in a block, by the name of the module that holds it."""
    return {
        name: module.packing.format
        for name, module in block.named_modules()
        if isinstance(module, Linear | ExpertLinear) and module.packing is not None
    }
