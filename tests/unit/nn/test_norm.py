"""Norms against their formulas in float64, and against transformers' rounding bit by bit."""

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from graphcore.nn.norm import LayerNorm, RMSNorm, build_norm
from graphcore.nn.spec import NormSpec

DIM = 96
NARROW = [torch.bfloat16, torch.float16, torch.float32]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def rms_norm(weight: Tensor, eps: float = 1e-6, scale_in_float32: bool = False) -> RMSNorm:
    norm = RMSNorm(NormSpec("rms", eps, scale_in_float32), len(weight))
    norm.weight = weight
    return norm


@pytest.mark.parametrize("scale_in_float32", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_is_its_formula(eps: float, scale_in_float32: bool) -> None:
    x, weight = normal(2, 5, DIM), normal(DIM, seed=1)
    out = rms_norm(weight, eps, scale_in_float32)(x)
    wide = x.double()
    expected = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps) * weight.double()
    assert out.shape == x.shape
    assert out.dtype == torch.float32
    assert (out.double() - expected).abs().max() < 2e-6  # a few float32 roundings of values up to 8


def test_layer_norm_is_its_formula() -> None:
    x, norm = normal(2, 5, DIM) + 3.0, LayerNorm(NormSpec("layer", 1e-2), DIM)
    norm.weight, norm.bias = normal(DIM, seed=1), normal(DIM, seed=2)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-2)
    expected = scaled * norm.weight.double() + norm.bias.double()
    assert (norm(x).double() - expected).abs().max() < 5e-6  # a few float32 roundings of values up to 15


@pytest.mark.parametrize("dtype", NARROW)
def test_rms_norm_rounds_as_llama_does(dtype: torch.dtype) -> None:
    weight, x = normal(DIM, seed=1), normal(3, 7, DIM, scale=4.0).to(dtype)
    reference = LlamaRMSNorm(DIM, eps=1e-6).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(weight)
        assert torch.equal(rms_norm(weight.to(dtype).float())(x), reference(x))


@pytest.mark.parametrize("dtype", NARROW)
def test_rms_norm_with_one_added_rounds_as_gemma_does(dtype: torch.dtype) -> None:
    stored, x = normal(DIM, seed=1).to(dtype), normal(3, 7, DIM, scale=4.0).to(dtype)
    reference = Gemma3RMSNorm(DIM, eps=1e-6).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(stored)
        assert torch.equal(rms_norm(1.0 + stored.float(), scale_in_float32=True)(x), reference(x))


def test_the_two_rounding_orders_differ_in_bf16() -> None:
    weight, x = normal(DIM, seed=1).bfloat16().float(), normal(3, 7, DIM).bfloat16()
    assert not torch.equal(rms_norm(weight)(x), rms_norm(weight, scale_in_float32=True)(x))


@pytest.mark.parametrize("spec", [NormSpec("rms", 1e-6), NormSpec("rms", 1e-6, True), NormSpec("layer", 1e-6)])
def test_result_has_the_dtype_that_is_asked_for(spec: NormSpec) -> None:
    norm = build_norm(spec, DIM)
    wide = normal(2, DIM)
    assert norm(wide, torch.bfloat16).dtype == torch.bfloat16
    assert norm(wide.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(norm(wide.bfloat16(), torch.float32), norm(wide.bfloat16().float()))


@pytest.mark.parametrize("spec", [NormSpec("rms", 1e-6), NormSpec("layer", 1e-6)])
def test_values_whose_squares_overflow_float16_are_normalised(spec: NormSpec) -> None:
    x = normal(2, DIM, scale=2000.0).half()
    out = build_norm(spec, DIM)(x)
    assert out.isfinite().all()
    assert abs(out.float().pow(2).mean().item() - 1.0) < 1e-2  # unit mean square, by definition


def test_kind_chooses_the_module() -> None:
    assert isinstance(build_norm(NormSpec("rms", 1e-6), 4), RMSNorm)
    assert isinstance(build_norm(NormSpec("layer", 1e-6), 4), LayerNorm)
