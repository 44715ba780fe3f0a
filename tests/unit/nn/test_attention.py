"""The attention module: shapes, and every option of its spec against the textbook in float64."""

from dataclasses import replace
from itertools import product as every_pair

import pytest
import torch
from plain_attention import fill, plain, run
from support.cases import in_case
from support.comparisons import causal_mask, sliding_window_causal_mask

from graphcore.nn.attention import Attention
from graphcore.nn.rope_spec import RopeSpec
from graphcore.nn.spec import AttentionSpec, NormSpec

DIM, TOKENS = 24, 11
BASE = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5, rope=RopeSpec(10_000.0))
SPECS = {
    "base": BASE,
    "qk_norm": replace(BASE, qk_norm=NormSpec("rms", 1e-6)),
    "query_pre_attn_scalar": replace(BASE, scale=24**-0.5),
    "qk_norm_and_scale": replace(BASE, qk_norm=NormSpec("rms", 1e-5, scale_in_float32=True), scale=1.0),
    "qkv_bias": replace(BASE, qkv_bias=True),
    "both_biases": replace(BASE, qkv_bias=True, output_bias=True),
    "no_rope": replace(BASE, rope=None),
    "one_kv_head": replace(BASE, kv_heads=1),
    "as_many_kv_heads": replace(BASE, kv_heads=4),
    "sub_norm": replace(BASE, sub_norm=NormSpec("rms", 1e-3)),
    "other_theta": replace(BASE, rope=RopeSpec(100.0)),
}


def filled_attention(spec: AttentionSpec, dtype: torch.dtype = torch.float32) -> Attention:
    module = Attention(spec, DIM, dtype)
    fill(module)
    return module


def hidden(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(batch, tokens, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_causal_attention_is_the_textbook_s(spec: AttentionSpec) -> None:
    module, x = filled_attention(spec), hidden()
    out = run(module, x)
    assert out.shape == (2, TOKENS, DIM)
    assert out.dtype == torch.float32
    assert (out.double() - plain(module, x, causal_mask(TOKENS))).abs().max() < 2e-5  # float32 sums of 32 products


def test_sliding_attention_is_the_textbook_s_under_a_sliding_mask() -> None:
    for window, spec in every_pair([1, 3, TOKENS, 64], SPECS.values()):
        with in_case(window, spec):
            module, x = filled_attention(replace(spec, window=window)), hidden()
            out = run(module, x, slots=min(window, TOKENS))
            expected = plain(module, x, sliding_window_causal_mask(TOKENS, window))
            assert (out.double() - expected).abs().max() < 2e-5


def test_head_dim_need_not_be_dim_over_heads() -> None:
    """Gemma 3 1B: hidden_size 1152, but 4 heads of 256."""
    module = filled_attention(replace(BASE, head_dim=32, scale=32**-0.5))
    assert module.q_proj.weight.shape == (4 * 32, DIM)
    assert module.k_proj.weight.shape == (2 * 32, DIM)
    assert module.o_proj.weight.shape == (DIM, 4 * 32)
    x = hidden()
    assert (run(module, x).double() - plain(module, x, causal_mask(TOKENS))).abs().max() < 5e-5


def test_names_are_hugging_face_leaf_names() -> None:
    module = Attention(replace(BASE, qk_norm=NormSpec("rms", 1e-6), qkv_bias=True), DIM, torch.float32)
    weights = {f"{part}_proj.weight" for part in "qkvo"} | {f"{part}_proj.bias" for part in "qkv"}
    assert {name for name, _ in module.named_buffers()} == weights | {"q_norm.weight", "k_norm.weight"}
    assert {name for name, _ in Attention(BASE, DIM, torch.float32).named_buffers()} == {
        f"{part}_proj.weight" for part in "qkvo"
    }


def test_norms_of_q_and_k_are_per_head_and_see_no_other_head() -> None:
    module = filled_attention(replace(BASE, qk_norm=NormSpec("rms", 1e-6)))
    x = hidden()
    before = run(module, x)
    module.q_proj.weight[:8] *= 5.0  # head 0 only: its norm takes the factor back out
    assert (run(module, x) - before).abs().max() < 1e-4
    plain_module = filled_attention(BASE)
    before = run(plain_module, x)
    plain_module.q_proj.weight[:8] *= 5.0
    assert (run(plain_module, x) - before).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_narrow_and_near(dtype: torch.dtype) -> None:
    module, x = filled_attention(replace(BASE, qk_norm=NormSpec("rms", 1e-6)), dtype), hidden().to(dtype)
    out, expected = run(module, x), plain(module, x, causal_mask(TOKENS))
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()
