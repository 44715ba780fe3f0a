"""One transformer block: attention or a recurrent layer, then an MLP, both added to a residual stream.

Legend: B batch, T tokens, D model dim.

    pre-norm:  x += attention(norm(x));  x += mlp(norm(x))
    sandwich:  x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))
    Granite:   x += factor * attention(norm(x));  x += factor * mlp(norm(x))
    post-norm: x += norm(attention(x));  x += norm(mlp(x))                              (OLMo 2)
    Gemma 4:   sandwich;  x += norm(project(act(gate(x)) * per-layer features));  x *= learned factor

A block with experts can be run in two halves, so that experts' weights can be fetched in between:

    route: x += attention(norm(x)); choose experts   |   experts   |   add_experts: x += the weighted sum

The forward depends on no layer index, so that all layers of one spec share a compiled graph.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.nn.attention import Attention
from graphcore.nn.delta_net import DeltaNet
from graphcore.nn.latent_attention import LatentAttention
from graphcore.nn.linear import Linear, StackedLinear
from graphcore.nn.mlp import MLP, ActivationModule, scaled
from graphcore.nn.moe import (
    MoE,
    ParallelMLP,
    choose_experts,
    scaled_by_gate,
    weighted_sum,
    without_padding,
)
from graphcore.nn.norm import build_norm
from graphcore.nn.short_conv import ShortConv
from graphcore.nn.span import Span
from graphcore.nn.spec import BlockSpec, ConvSpec, DeltaSpec, MoESpec

# float32 whatever the compute dtype: rounding the stream to bf16 after every sublayer would cause half of the total
# error of bf16 logits, and Gemma's stream exceeds 65504, fp16's largest number.
RESIDUAL_DTYPE = torch.float32


class Routed(NamedTuple):
    """The results of a block's first half (`Block.route`).

    Attributes:
        x: [B, T, D] float32 residual stream.
        experts_input: [B, T, D] compute dtype, normalised input of the experts.
        chosen: [B, T, C] int64, chosen experts, best first; -1 for padding.
        shares: [B, T, C] compute dtype or float32, the experts' weights in each token's sum.
    """

    x: Tensor
    experts_input: Tensor
    chosen: Tensor
    shares: Tensor


class Block(nn.Module):
    """A transformer block built from its spec; modules and buffers are named as in Hugging Face checkpoints.

    Attributes:
        output_factor: [1] float32, learned factor of the stream after the block (Gemma 4), or None.
    """

    output_factor: Tensor | None

    def __init__(self, spec: BlockSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.backend: Backend = TorchBackend()
        self.sandwich = spec.sandwich
        int8_order = spec.int8_activations
        if isinstance(spec.attention, DeltaSpec):
            self.linear_attn = DeltaNet(spec.attention, spec.dim, dtype)
        elif isinstance(spec.attention, ConvSpec):
            self.conv = ShortConv(spec.attention, spec.dim, dtype)
        elif spec.attention.latent is not None:
            self.self_attn: Attention | LatentAttention = LatentAttention(spec.attention, spec.dim, dtype)
        else:
            self.self_attn = Attention(spec.attention, spec.dim, dtype, int8_order)
        if isinstance(spec.mlp, MoESpec):
            self.mlp: MLP | MoE = MoE(spec.mlp, spec.dim, dtype)
        else:
            self.mlp = MLP(spec.mlp, spec.dim, dtype, int8_order)
        assert spec.pre_norm or spec.sandwich, "a sublayer has a norm before or behind it"
        self.input_layernorm = build_norm(spec.norm, spec.dim) if spec.pre_norm else None
        self.post_attention_layernorm = build_norm(spec.norm, spec.dim)
        parallel = spec.mlp.parallel_mlp if isinstance(spec.mlp, MoESpec) else None
        self.parallel_mlp = None if parallel is None else ParallelMLP(parallel, spec.norm, spec.dim, dtype)
        if spec.sandwich:
            has_norm = spec.pre_norm and parallel is None
            self.pre_feedforward_layernorm = build_norm(spec.norm, spec.dim) if has_norm else None
            self.post_feedforward_layernorm = build_norm(spec.norm, spec.dim)
        self.per_layer = PerLayer(spec, dtype) if spec.per_layer else None
        scale = torch.empty(1, dtype=torch.float32) if spec.has_output_factor else None
        self.register_buffer("output_factor", scale)
        for name in spec.ordered_inputs:
            linear = self.get_submodule(name)
            assert isinstance(linear, Linear), f"{name} is a {type(linear).__name__}"
            linear.reorder_input()
        self.add_low_rank(dict(spec.low_rank))

    def add_low_rank(self, ranks: Mapping[str, int]) -> None:
        """Add low-rank factors beside projections, and to the spec, so that only blocks with the same ones are alike.

        Args:
            ranks: rank of the factors, by the projection's name in the block, such as "self_attn.q_proj".
        """
        for name, rank in ranks.items():
            projection = self.get_submodule(name)
            assert isinstance(projection, Linear), f"{name} is a {type(projection).__name__}"
            projection.add_low_rank(rank)
        self.spec = replace(self.spec, low_rank=tuple(ranks.items()))

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None,
        span: Span,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor | None,
        per_layer: Tensor | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: [B, T, D] float32 residual stream.
            rope: [B, T, 2, E/2] float32, or None.
            span: positions of the tokens in their sequences.
            k_cache, v_cache: buffers of the layer's cache (kvcache/buffers.py), written in place: keys and values, or
                the recurrent and the convolution state if the block is recurrent.
            table: [B, N] int32, pages of each sequence; None if the block is recurrent.
            per_layer: [B, T, P] float32, the tokens' features for this layer; None if the model has none.

        Returns:
            [B, T, D] float32 residual stream.
        """
        if isinstance(self.mlp, MoE):
            routed = self.route(x, rope, span, k_cache, v_cache, table)
            return self.add_experts(
                routed.x, self.mlp.experts(routed.experts_input, routed.chosen), routed.shares, per_layer
            )
        x = self._add_attention(x, rope, span, k_cache, v_cache, table)
        return self._finish(self._add_mlp_output(x, self.mlp(self._mlp_norm(x))), per_layer)

    def route(
        self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor | None
    ) -> Routed:
        """Run the block up to its experts, with the arguments of `forward`. Padding tokens choose no expert."""
        assert isinstance(self.mlp, MoE), "a block without experts runs whole"
        x = self._add_attention(x, rope, span, k_cache, v_cache, table)
        experts_input = (
            self._mlp_norm(x) if self.parallel_mlp is None else self.parallel_mlp.experts_norm(x, self.dtype)
        )
        scores = self.mlp.router(
            experts_input if self.parallel_mlp is None else self.parallel_mlp.router_norm(x, self.dtype)
        )
        how = self.mlp.shares, self.mlp.expert_scales, self.mlp.selection_bias
        chosen, shares = choose_experts(scores, self.mlp.top_k, *how)
        if self.mlp.shared_expert is not None and self.mlp.shared_expert_gate is not None:
            x = x + scaled_by_gate(self.mlp.shared_expert_gate(experts_input), self.mlp.shared_expert(experts_input))
        elif self.mlp.shared_expert is not None:
            x = x + self.mlp.shared_expert(experts_input)
        return Routed(x, experts_input, without_padding(chosen, span), shares)

    def add_experts(self, x: Tensor, answers: Tensor, shares: Tensor, per_layer: Tensor | None = None) -> Tensor:
        """Add the weighted sum of the experts' outputs to the stream, and finish the block.

        Args:
            x: [B, T, D] float32 residual stream.
            answers: [B, T, C, D] compute dtype, the chosen experts' outputs.
            shares: [B, T, C] compute dtype or float32, weights of the outputs.
            per_layer: the same as in `forward`.

        Returns:
            [B, T, D] float32 residual stream.
        """
        answer = weighted_sum(answers, shares)
        mlp_output = answer if self.parallel_mlp is None else self.parallel_mlp.add(x, answer, self.dtype)
        return self._finish(self._add_mlp_output(x, mlp_output), per_layer)

    def _add_attention(
        self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor | None
    ) -> Tensor:
        normed = x.to(self.dtype) if self.input_layernorm is None else self.input_layernorm(x, self.dtype)
        if isinstance(self.spec.attention, DeltaSpec):
            attended = self.linear_attn(normed, span, k_cache, v_cache)
        elif isinstance(self.spec.attention, ConvSpec):
            attended = self.conv(normed, span, v_cache)
        else:
            attended = self.self_attn(normed, rope, span, k_cache, v_cache, table)
        if self.sandwich:
            attended = self.post_attention_layernorm(attended, RESIDUAL_DTYPE)
        return self._sum(x, self._multiplied(attended))

    def _mlp_norm(self, x: Tensor) -> Tensor:
        if not self.spec.pre_norm:
            return x.to(self.dtype)
        norm = self.pre_feedforward_layernorm if self.sandwich else self.post_attention_layernorm
        assert norm is not None, "experts with an MLP beside them have norms of their own"
        return norm(x, self.dtype)  # type: ignore[no-any-return]

    def _add_mlp_output(self, x: Tensor, mlp_output: Tensor) -> Tensor:
        if self.sandwich:
            mlp_output = self.post_feedforward_layernorm(mlp_output, RESIDUAL_DTYPE)
        # experts have the factor in their shares
        return self._sum(x, mlp_output if isinstance(self.mlp, MoE) else self._multiplied(mlp_output))

    def _multiplied(self, added: Tensor) -> Tensor:
        """Return a sublayer's output [B, T, D] times the residual factor, float32 if there is one."""
        return added if self.spec.residual_factor == 1.0 else added.float() * self.spec.residual_factor

    def _sum(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the stream after a sublayer's output was added."""
        kernels = self.backend.token_rows(x)
        return x + added if kernels is None else kernels.add(x, added)

    def _finish(self, x: Tensor, per_layer: Tensor | None) -> Tensor:
        """Return the stream after Gemma 4's per-layer features and output factor, if the layer has them."""
        if self.per_layer is not None:
            assert per_layer is not None, "this layer has features of its own"
            x = x + self.per_layer(x, per_layer)
        return x if self.output_factor is None else scaled(x, self.output_factor)


class PerLayer(nn.Module):
    """norm(projection(act(gate(x)) * per-layer features)), which a block adds to the stream (Gemma 4)."""

    def __init__(self, spec: BlockSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.activation = ActivationModule(spec.per_layer_activation)
        self.gate = Linear(spec.dim, spec.per_layer, bias=False, dtype=dtype)
        self.projection = Linear(spec.per_layer, spec.dim, bias=False, dtype=dtype)
        self.norm = build_norm(spec.norm, spec.dim)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        """Map the stream [B, T, D] float32 and features [B, T, P] float32 to [B, T, D] float32."""
        gated = self.activation(self.gate(x.to(self.dtype))) * features.to(self.dtype)
        return self.norm(self.projection(gated), RESIDUAL_DTYPE)  # type: ignore[no-any-return]  # Module.__call__


def packed_formats(block: nn.Module) -> dict[str, str]:
    """Return the stored format of every packed matrix in a block, by the name of the module that holds it."""
    return {
        name: module.packing.format
        for name, module in block.named_modules()
        if isinstance(module, Linear | StackedLinear) and module.packing is not None
    }
