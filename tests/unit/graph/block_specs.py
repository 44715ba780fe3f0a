"""Specs of blocks: the architectures, and what else a spec can say, one departure from a plain Llama each."""

from collections.abc import Mapping
from dataclasses import replace

from tiny_graph import DIM, FULL, NORM, SLIDING

from graphcore.activations import ACTIVATIONS, CLAMPED_SWIGLU, Gating
from graphcore.nn.rope_spec import LinearScaling, PositionScale, RopeSpec
from graphcore.nn.spec import AttentionSpec, BlockSpec, ConvSpec, DeltaSpec, LatentSpec, MLPSpec, MoESpec, NormSpec
from graphcore.routing import ScoredRouting

LAYER_NORM = NormSpec("layer", 1e-5)
PLAIN = BlockSpec(
    DIM,
    NormSpec("rms", 1e-5),
    AttentionSpec(4, 2, 8, 8**-0.5, rope=RopeSpec(1e4)),
    MLPSpec(48, "silu"),
)
EXPERTS = replace(PLAIN, mlp=MoESpec(5, 2, 40, Gating(CLAMPED_SWIGLU, 0.7, 1.5), bias=True, router_bias=True))
WIDE = BlockSpec(256, NORM, AttentionSpec(4, 2, 64, 0.125, rope=RopeSpec(1e4)), MLPSpec(256, "silu"))
WIDE_EXPERTS = replace(WIDE, mlp=MoESpec(4, 2, 256, Gating(CLAMPED_SWIGLU, 7.0, 1.702), bias=True, router_bias=True))
WIDE_PLAIN_EXPERTS = replace(WIDE, mlp=MoESpec(experts=4, top_k=2, hidden=256))


DELTA = DeltaSpec(key_heads=2, value_heads=6, key_dim=8, value_dim=16, width=4, eps=1e-6)


def latent_attention(heads: int, latent: LatentSpec) -> AttentionSpec:
    row, rope = latent.rotated + latent.rank, RopeSpec(1e4, width=latent.rotated)
    return AttentionSpec(heads, 1, row, (latent.nope + latent.rotated) ** -0.5, rope=rope, latent=latent)


def attending(block: BlockSpec = PLAIN, **changes: object) -> BlockSpec:
    return replace(block, attention=replace(block.attention, **changes))


def feeding(block: BlockSpec = PLAIN, **changes: object) -> BlockSpec:
    return replace(block, mlp=replace(block.mlp, **changes))


ARCHITECTURES: Mapping[str, BlockSpec] = {
    "llama": PLAIN,
    "mistral": attending(window=16),
    "qwen2": attending(qkv_bias=True),
    "qwen3": attending(qk_norm=PLAIN.norm),
    "gemma2": attending(FULL, qk_norm=None, window=8, cap=1.5),
    "gemma3": FULL,
    "gemma3_sliding": SLIDING,
    "gpt2": replace(
        attending(rope=None, kv_heads=4, qkv_bias=True, output_bias=True),
        norm=LAYER_NORM,
        mlp=MLPSpec(48, "gelu_new", gated=False, bias=True),
    ),
    "starcoder2": replace(
        attending(window=8, qkv_bias=True, output_bias=True),
        norm=LAYER_NORM,
        mlp=MLPSpec(48, "gelu_pytorch_tanh", gated=False, bias=True),
    ),
    "stablelm": replace(attending(rope=RopeSpec(1e4, width=2), qkv_bias=True), norm=LAYER_NORM),
    "gpt_oss": attending(EXPERTS, window=4, qkv_bias=True, output_bias=True, sinks=True),
    "qwen3_moe": replace(attending(qk_norm=PLAIN.norm), mlp=MoESpec(experts=6, top_k=3, hidden=24)),
    "qwen3_next": replace(
        attending(qk_norm=NORM, rope=RopeSpec(1e4, width=4), output_gate=True),
        norm=NORM,
        mlp=MoESpec(experts=6, top_k=3, hidden=24, shared_hidden=20),
    ),
    "qwen3_next_delta": replace(
        PLAIN, norm=NORM, attention=DELTA, mlp=MoESpec(experts=6, top_k=3, hidden=24, shared_hidden=20)
    ),
    "qwen3_5_delta": replace(PLAIN, norm=NORM, attention=replace(DELTA, tiled=True)),
    "bitnet": feeding(attending(sub_norm=PLAIN.norm), sub_norm=PLAIN.norm, activation="relu2"),
    "lfm2_conv": replace(PLAIN, attention=ConvSpec(DIM, width=3)),
    "ministral3": attending(position_scale=PositionScale(0.4, 3)),
    "granite": replace(feeding(attending(scale=0.3, output_bias=True), bias=True), residual_factor=0.4),
    "granite_moe": replace(
        attending(scale=0.3),
        mlp=MoESpec(experts=6, top_k=3, hidden=24, shares=ScoredRouting("softmax", eps=0.0, factor=0.4)),
        residual_factor=0.4,
    ),
}

ATTENDING = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS = (*ATTENDING, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ORDERED: Mapping[str, BlockSpec] = {  # act-order: projections that read their input in orders of their own
    "ordered": replace(PLAIN, ordered_inputs=PROJECTIONS),
    "ordered_sandwich": replace(FULL, ordered_inputs=PROJECTIONS),
    "ordered_in_part": replace(attending(qkv_bias=True), ordered_inputs=("self_attn.k_proj", "mlp.gate_proj")),
    "ordered_layer_norm": replace(ARCHITECTURES["gpt2"], ordered_inputs=(*ATTENDING, "mlp.up_proj", "mlp.down_proj")),
    "ordered_gated_attention": replace(
        attending(output_gate=True, qk_norm=PLAIN.norm), ordered_inputs=(*PROJECTIONS, "self_attn.gate_proj")
    ),
    "ordered_delta_rule": replace(
        ARCHITECTURES["qwen3_next_delta"],
        ordered_inputs=(
            *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")),
            *("mlp.router", "mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj"),
        ),
    ),
}
SCORED: Mapping[str, BlockSpec] = {  # experts with scores of their own
    "sigmoid_experts": replace(
        PLAIN,
        mlp=MoESpec(
            experts=10,
            top_k=3,
            hidden=24,
            shares=ScoredRouting("sigmoid", factor=2.5),
            selection_bias=True,
            shared_hidden=20,
            shared_gate=False,
            scores_in_float32=True,
        ),
    ),
    "grouped_experts": replace(
        PLAIN,
        mlp=MoESpec(
            experts=21,
            top_k=4,
            hidden=20,
            shares=ScoredRouting("sigmoid", groups=7, used_groups=3, normalises=False, factor=0.7),
            selection_bias=True,
        ),
    ),
    "softmax_scored_experts": replace(
        PLAIN, mlp=MoESpec(experts=6, top_k=2, hidden=20, shares=ScoredRouting("softmax", eps=0.25))
    ),
}
LATENT: Mapping[str, BlockSpec] = {  # one row of the cache for keys and values of all heads
    "latent_attention": replace(PLAIN, attention=latent_attention(4, LatentSpec(32, 16, 12, 20, 0, 1e-6))),
    "latent_with_compressed_queries": replace(
        PLAIN, attention=latent_attention(6, LatentSpec(24, 8, 10, 14, query_rank=36, eps=1e-5))
    ),
    "latent_with_biases": replace(
        PLAIN,
        attention=replace(
            latent_attention(1, LatentSpec(20, 6, 10, 36, query_rank=24, eps=1e-6)), qkv_bias=True, output_bias=True
        ),
    ),
}
BLOCKS: Mapping[str, BlockSpec] = {
    "plain": PLAIN,
    "sandwich": FULL,
    "sandwich_multiplied": replace(FULL, residual_factor=0.4),
    "scaled_queries_without_rope": attending(rope=None, qk_norm=PLAIN.norm, position_scale=PositionScale(0.4, 3)),
    "sliding": SLIDING,
    "window_of_one": attending(window=1),
    "window_of_8": attending(window=8),
    "no_rope": attending(rope=None),
    "scaled_rope": attending(rope=RopeSpec(1e4, LinearScaling(8.0))),
    "partial_rope": attending(rope=RopeSpec(1e4, width=4)),
    "biases": attending(qkv_bias=True, output_bias=True),
    "sinks": attending(sinks=True),
    "sliding_sinks": attending(sinks=True, window=8),
    "capped": attending(cap=2.0),
    "sub_norms": feeding(attending(sub_norm=NORM), sub_norm=NORM, activation="relu2"),
    "layer_norm": replace(PLAIN, norm=LAYER_NORM),
    "not_gated": feeding(gated=False, bias=True),
    "mlp_biases": feeding(bias=True),
    "uneven_hidden": feeding(hidden=37),
    "experts": EXPERTS,
    "one_expert": replace(EXPERTS, mlp=MoESpec(experts=3, top_k=1, hidden=20)),
    "experts_of_gelu_with_biases": replace(EXPERTS, mlp=MoESpec(4, 2, 20, Gating("gelu"), bias=True, router_bias=True)),
    **SCORED,
    **LATENT,
    "post_norm": replace(FULL, pre_norm=False),
    "post_norm_over_heads": replace(attending(FULL, qk_norm_over_heads=True), pre_norm=False),
    "norm_over_heads": attending(qk_norm=PLAIN.norm, qk_norm_over_heads=True, qkv_bias=True),
    "post_norm_of_experts": replace(PLAIN, sandwich=True, pre_norm=False, mlp=MoESpec(experts=6, top_k=2, hidden=20)),
    "shares_over_all_experts": replace(EXPERTS, mlp=MoESpec(experts=21, top_k=4, hidden=20, shares="all")),
    "gated_attention": attending(output_gate=True, qk_norm=PLAIN.norm, qkv_bias=True),
    "shared_expert": ARCHITECTURES["qwen3_next"],
    **ORDERED,
    "ordered_convolution": replace(
        ARCHITECTURES["lfm2_conv"], ordered_inputs=("conv.in_proj", "conv.out_proj", "mlp.down_proj")
    ),
    "convolution_with_biases": replace(PLAIN, attention=ConvSpec(DIM, width=4, bias=True)),
    "convolution_of_other_width": replace(PLAIN, attention=ConvSpec(DIM + 5, width=1)),
    "delta_rule": ARCHITECTURES["qwen3_next_delta"],
    "delta_rule_of_tiled_heads": ARCHITECTURES["qwen3_5_delta"],
    "delta_rule_of_odd_heads": replace(PLAIN, attention=DeltaSpec(3, 3, 5, 7, width=3, eps=0.1)),
    **{name: feeding(activation=name) for name in ACTIVATIONS if name != PLAIN.mlp.activation},
    **{f"head_of_{width}": attending(head_dim=width, window=8) for width in (2, 20, 24, 64, 80, 130)},
    **{f"{group}_heads_a_key": attending(heads=2 * group, kv_heads=2, sinks=True) for group in (1, 3, 5, 7, 9)},
}
