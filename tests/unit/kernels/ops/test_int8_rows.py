"""Activations as int8 codes, against bitnet.cpp's rounding and transformers' ActQuant."""

from pathlib import Path

import numpy as np
import pytest
import torch

from graphcore.kernels.ops.int8_rows import quantize_rows

GOLDEN = Path(__file__).parents[3] / "golden"


def test_codes_and_scales_are_bitnet_cpps() -> None:
    # Rows of the golden input: plain, zeros, times 1e-7 (below the smallest peak), times 1e3, one outlier.
    golden = np.load(GOLDEN / "i2s.npz")
    rows = quantize_rows(torch.from_numpy(golden["x"]))
    assert rows.codes.dtype is torch.int8
    assert np.array_equal(rows.codes.numpy(), golden["x_q8"])
    assert np.array_equal(rows.scale.numpy(), golden["x_scale"])


def test_codes_over_scales_are_what_transformers_rounds_to() -> None:
    golden = np.load(GOLDEN / "hf_bitnet.npz")
    rows = quantize_rows(torch.from_numpy(golden["x"]))
    assert np.array_equal((rows.codes / rows.scale).numpy(), golden["x_actquant"])


def test_halves_round_to_even_and_the_largest_value_is_127() -> None:
    rows = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]]))
    assert rows.codes.tolist() == [[127, 0, 2, 2, 0, -2, -127]]
    assert rows.scale.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    narrow, wide = quantize_rows(x), quantize_rows(x.float())
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scale, wide.scale)


def test_every_token_has_its_own_scale() -> None:
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    rows = quantize_rows(x)
    assert rows.scale.shape == (2, 3, 1)
    assert torch.equal(rows.codes[1, 2], quantize_rows(x[1, 2]).codes)
