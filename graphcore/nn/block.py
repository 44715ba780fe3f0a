"""One transformer block: attention, or a delta rule, and MLP around a residual stream.

Legend: B batch, T tokens, D model dim.

    pre-norm:  x += attention(norm(x));  x += mlp(norm(x))
    sandwich:  x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))

A block with experts runs in two halves, so that experts' weights can be fetched in between:

    route: x += attention(norm(x)); choose experts   |   experts   |   add_experts: x += the weighted sum

The forward reads no integer that differs between layers: every layer of one spec runs the same compiled graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from graphcore.nn.attention import Attention
from graphcore.nn.delta_net import DeltaNet
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import MLP
from graphcore.nn.moe import ExpertLinear, MoE, choose_experts, scaled_by_gate, weighted_sum, without_padding
from graphcore.nn.norm import build_norm
from graphcore.nn.span import Span
from graphcore.nn.spec import BlockSpec, DeltaSpec, MoESpec

# float32 whatever the compute dtype: rounding the stream to bf16 after every sublayer would lose half of what bf16
# logits lose in all, and Gemma's stream exceeds 65504, fp16's largest number.
RESIDUAL_DTYPE = torch.float32


class Routed(NamedTuple):
    """A block's state between its halves.

    Attributes:
        x: [B, T, D] float32 residual stream.
        fed: [B, T, D] compute dtype, the experts' input.
        chosen: [B, T, C] int64 experts, best first; -1 for padding.
        shares: [B, T, C] compute dtype, the experts' weights in each token's sum.
    """

    x: Tensor
    fed: Tensor
    chosen: Tensor
    shares: Tensor


class Block(nn.Module):
    """A block built from its spec; its buffers carry Hugging Face leaf names."""

    def __init__(self, spec: BlockSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.sandwich = spec.sandwich
        int8_order = spec.int8_activations
        if isinstance(spec.attention, DeltaSpec):
            self.linear_attn = DeltaNet(spec.attention, spec.dim, dtype)
        else:
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
            span: positions of the tokens in their sequences.
            k_cache, v_cache: the tensors of the layer's cache (nn/layer_cache.py), which are keys and values unless the
                block has a delta rule; written in place.

        Returns:
            [B, T, D] float32 residual stream.
        """
        if isinstance(self.mlp, MoE):
            routed = self.route(x, rope, span, k_cache, v_cache)
            return self.add_experts(routed.x, self.mlp.experts(routed.fed, routed.chosen), routed.shares)
        x = self._add_attention(x, rope, span, k_cache, v_cache)
        return self._add_fed(x, self.mlp(self._mlp_norm(x)))

    def route(self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor) -> Routed:
        """Run the block up to its experts, with the arguments of `forward`. Padding tokens choose no expert."""
        assert isinstance(self.mlp, MoE), "a block without experts runs whole"
        x = self._add_attention(x, rope, span, k_cache, v_cache)
        fed = self._mlp_norm(x)
        chosen, shares = choose_experts(self.mlp.router(fed), self.mlp.top_k, self.mlp.shares)
        if self.mlp.shared_expert is not None and self.mlp.shared_expert_gate is not None:
            x = x + scaled_by_gate(self.mlp.shared_expert_gate(fed), self.mlp.shared_expert(fed))
        return Routed(x, fed, without_padding(chosen, span), shares)

    def add_experts(self, x: Tensor, answers: Tensor, shares: Tensor) -> Tensor:
        """Finish the block.

        Args:
            x: [B, T, D] float32 residual stream.
            answers: [B, T, C, D] compute dtype, the chosen experts' answers.
            shares: [B, T, C] compute dtype.

        Returns:
            [B, T, D] float32 residual stream.
        """
        return self._add_fed(x, weighted_sum(answers, shares))

    def _add_attention(self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        normed = self.input_layernorm(x, self.dtype)
        if isinstance(self.spec.attention, DeltaSpec):
            attended = self.linear_attn(normed, span, k_cache, v_cache)
        else:
            attended = self.self_attn(normed, rope, span, k_cache, v_cache)
        if self.sandwich:
            attended = self.post_attention_layernorm(attended, RESIDUAL_DTYPE)
        return x + attended  # type: ignore[no-any-return]  # Module.__call__

    def _mlp_norm(self, x: Tensor) -> Tensor:
        norm = self.pre_feedforward_layernorm if self.sandwich else self.post_attention_layernorm
        return norm(x, self.dtype)  # type: ignore[no-any-return]

    def _add_fed(self, x: Tensor, fed: Tensor) -> Tensor:
        if self.sandwich:
            fed = self.post_feedforward_layernorm(fed, RESIDUAL_DTYPE)
        return x + fed


def packed_formats(block: nn.Module) -> dict[str, str]:
    """Return the stored format of every packed matrix in a block, by the name of the module that holds it."""
    return {
        name: module.packing.format
        for name, module in block.named_modules()
        if isinstance(module, Linear | ExpertLinear) and module.packing is not None
    }
