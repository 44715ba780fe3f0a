"""The norm kernel against float64."""

import pytest
import torch
from torch import Tensor

from graphcore.kernels.gpu.norm import add_rms_normed, residual_norm
from graphcore.nn.norm import RMSNorm
from graphcore.nn.spec import NormSpec

pytestmark = pytest.mark.thorough


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


def test_a_sandwiched_answer_is_normalised_before_it_is_added() -> None:
    generator = torch.Generator().manual_seed(1)
    x, added = torch.randn(2, 3, 70, generator=generator).unbind(0)
    weight, after = torch.randn(2, 70, generator=generator).unbind(0)
    expected_x = x + reference(added, after, None, 1e-3, True).float()
    only_added = x.clone()
    fed = residual_norm(x, added, weight, None, 1e-3, True, torch.float32, weight_after=after)
    torch.testing.assert_close(x, expected_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fed.double(), reference(expected_x, weight, None, 1e-3, True), rtol=2e-6, atol=2e-6)
    add_rms_normed(only_added, added, after, 1e-3)
    assert torch.equal(only_added, x)


@pytest.mark.parametrize("scale_in_float32", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_comes_where_the_module_has_it(scale_in_float32: bool, dtype: torch.dtype) -> None:
    """Equal up to a last place where the roots differ; the other order differs in more than a third of all places."""
    generator = torch.Generator().manual_seed(2)
    module = RMSNorm(NormSpec("rms", 1e-6, scale_in_float32), 2000)
    module.weight.normal_(generator=generator)
    x = torch.randn(2, 2000, generator=generator)
    fed = residual_norm(x, None, module.weight, None, 1e-6, True, dtype, scale_in_float32)
    assert (fed != module(x, dtype)).float().mean() < 0.01
    other = residual_norm(x, None, module.weight, None, 1e-6, True, dtype, not scale_in_float32)
    assert (other != module(x, dtype)).float().mean() > 0.3
