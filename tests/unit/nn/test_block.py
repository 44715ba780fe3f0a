"""A block's residual structure, written out from its own parts, and what must stay wide in fp16."""

from dataclasses import replace

import pytest
import torch
from plain_attention import fill

from graphcore.nn.block import Block
from graphcore.nn.rope import rope_table
from graphcore.nn.rope_spec import RopeSpec
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, MoESpec, NormSpec

TOKENS, DIM = 6, 24
ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5, rope=RopeSpec(10_000.0))
PRE_NORM = BlockSpec(DIM, NormSpec("rms", 1e-6), ATTENTION, MLPSpec(40, "silu"))
SANDWICH = replace(PRE_NORM, sandwich=True)
EXPERTS = replace(PRE_NORM, mlp=MoESpec(experts=5, top_k=2, hidden=20))


def filled_block(spec: BlockSpec, dtype: torch.dtype = torch.float32) -> Block:
    block = Block(spec, dtype)
    fill(block)
    return block


def context(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Span, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rope rows, span, empty caches and the table of one sequence."""
    span = Span(torch.tensor([0]), torch.tensor([TOKENS]))
    rope = rope_table(RopeSpec(10_000.0), 8, TOKENS)[span.positions(TOKENS)]
    caches = torch.zeros(1, 2, TOKENS, 8, dtype=dtype), torch.zeros(1, 2, TOKENS, 8, dtype=dtype)
    return rope, span, *caches, torch.zeros(1, 1, dtype=torch.int32)


def hidden() -> torch.Tensor:
    return torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


def test_pre_norm_block_adds_attention_and_then_mlp_of_the_normalised_stream() -> None:
    block, x = filled_block(PRE_NORM), hidden()
    after = x + block.self_attn(block.input_layernorm(x), *context())
    expected = after + block.mlp(block.post_attention_layernorm(after))
    assert torch.allclose(block(x, *context()), expected, atol=1e-6)
    assert not hasattr(block, "pre_feedforward_layernorm")


def test_sandwich_block_normalises_each_sublayer_s_output_before_it_is_added() -> None:
    block, x = filled_block(SANDWICH), hidden()
    after = x + block.post_attention_layernorm(block.self_attn(block.input_layernorm(x), *context()))
    expected = after + block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(after)))
    assert torch.allclose(block(x, *context()), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_residual_stream_is_float32_whatever_the_compute_dtype(dtype: torch.dtype) -> None:
    for spec in (PRE_NORM, SANDWICH):
        assert filled_block(spec, dtype)(hidden(), *context(dtype)).dtype == torch.float32


def test_a_stream_beyond_float16_passes_through_a_block_that_computes_in_float16() -> None:
    x = hidden()
    x[0, :, 0] = 1e5  # Gemma 3's residual stream reaches such values
    out = filled_block(SANDWICH, torch.float16)(x, *context(torch.float16))
    exact = filled_block(SANDWICH)(x, *context())
    assert out.isfinite().all()
    assert (out - exact).abs().max() < 2e-2  # both sublayers' outputs, of order one, rounded to float16


@pytest.mark.parametrize("sandwich", [False, True])
def test_block_with_experts_is_its_two_halves_and_the_experts_between(sandwich: bool) -> None:
    block, x = filled_block(replace(EXPERTS, sandwich=sandwich)), hidden()
    attended = block.self_attn(block.input_layernorm(x), *context())
    after = x + (block.post_attention_layernorm(attended) if sandwich else attended)
    norm = block.pre_feedforward_layernorm if sandwich else block.post_attention_layernorm
    fed = block.mlp(norm(after))
    expected = after + (block.post_feedforward_layernorm(fed) if sandwich else fed)
    routed = block.route(x, *context())
    halves = block.add_experts(routed.x, block.mlp.experts(routed.experts_input, routed.chosen), routed.shares)
    assert torch.allclose(halves, expected, atol=1e-6)
    assert torch.equal(block(x, *context()), halves)


def test_padding_chooses_no_expert_and_changes_no_real_token() -> None:
    block, x = filled_block(EXPERTS), hidden()
    rope, span, *caches = context()
    whole = block.route(x, rope, span, *caches)
    rope, _, *caches = context()
    routed = block.route(x, rope, Span(torch.tensor([0]), torch.tensor([4])), *caches)
    assert torch.equal(routed.chosen[:, :4], whole.chosen[:, :4])
    assert (routed.chosen[:, 4:] == -1).all()
    assert (whole.chosen >= 0).all()
