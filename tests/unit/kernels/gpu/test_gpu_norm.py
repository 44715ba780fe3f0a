"""The norm kernel against float64."""

import pytest
import torch
from torch import Tensor

from graphcore.kernels.gpu.norm import residual_norm


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool) -> Tensor:
    wide = x.double()
    if not is_rms:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


@pytest.mark.parametrize("columns", [1, 7, 64, 576, 2880])
@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stream_takes_the_answer_and_is_normalised(columns: int, is_rms: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, added = torch.randn(2, 3, columns, generator=generator).unbind(0)
    weight = torch.randn(columns, generator=generator)
    bias = None if is_rms else torch.randn(columns, generator=generator)
    expected_x = x + added.to(dtype)
    expected = reference(expected_x, weight, bias, 1e-5, is_rms)
    fed = residual_norm(x, added.to(dtype), weight, bias, 1e-5, is_rms, dtype)
    assert fed.dtype == dtype
    torch.testing.assert_close(x, expected_x, rtol=0, atol=0)
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(fed.double(), expected, rtol=tolerance, atol=tolerance)
