"""Rows rounded to int8 codes, against kernels/ops/int8_rows.py."""

import pytest
import torch

from graphcore.kernels.gpu.int8_rows import norm_to_codes
from graphcore.kernels.ops.int8_rows import quantize_rows
from graphcore.nn.norm import build_norm
from graphcore.nn.spec import NormSpec

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("columns", [1, 7, 640, 2560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_those_of_the_plain_statement(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    codes, scales = norm_to_codes(x, None, None, 0.0, True, True, dtype)
    expected = quantize_rows(x)
    assert codes.dtype == dtype
    assert torch.equal(codes, expected.codes.to(dtype))
    assert torch.equal(scales, expected.scale[:, 0])


def test_halves_go_to_even_and_rows_of_zeros_keep_a_finite_scale() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0], [0.0] * 7])
    codes, scales = norm_to_codes(x, None, None, 0.0, True, True, torch.float32)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -127], [0] * 7]
    assert scales.isfinite().all()


@pytest.mark.parametrize("spec", [NormSpec("rms", 1e-5), NormSpec("rms", 1e-5, True), NormSpec("layer", 1e-5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_rounds_to_its_own_dtype_before(spec: NormSpec, dtype: torch.dtype) -> None:
    """Where the norm's last place differs, a code may: in less than a hundredth of all places, by one."""
    generator = torch.Generator().manual_seed(3)
    module = build_norm(spec, 1000)
    for buffer in module.buffers():
        buffer.normal_(generator=generator)
    x = torch.randn(2, 1000, generator=generator)
    bias = None if spec.kind == "rms" else module.bias
    codes, scales = norm_to_codes(x, module.weight, bias, spec.eps, spec.kind == "rms", spec.scale_in_float32, dtype)
    expected = quantize_rows(module(x, dtype))
    assert (codes - expected.codes).abs().max() <= 1
    assert (codes != expected.codes).float().mean() < 0.01
    torch.testing.assert_close(scales, expected.scale[:, 0], rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=0)
