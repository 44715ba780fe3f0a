"""Codes go back into the bytes that they were read from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.quant.bit_fields import (
    extreme,
    field,
    fp16,
    inverse,
    levels_of,
    pack_planes,
    pack_runs,
    planes,
    round_half_away,
    runs,
)
from graphcore.quant.formats.q3_k import pack_scales, unpack_scales
from graphcore.quant.formats.tq1_0 import base3_bytes, base3_digits
from graphcore.quant.k_scales import pack_scales_and_minimums, unpack_scales_and_minimums

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_plane_holds_one_bit_position_of_every_byte(bits):
    found = planes(ALL_BYTES.view(4, 64), bits)
    assert found.shape == (4, 8 // bits, 64)
    expected = [
        [[(64 * i + j) >> bits * p & (1 << bits) - 1 for j in range(64)] for p in range(8 // bits)] for i in range(4)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_run_holds_the_codes_of_each_byte_lowest_first(bits):
    found = runs(ALL_BYTES.view(4, 64), bits)
    assert found.shape == (4, 64 * 8 // bits)
    assert found.flatten().tolist() == [
        byte >> shift & (1 << bits) - 1 for byte in range(256) for shift in range(0, 8, bits)
    ]


def test_a_field_is_a_copy_of_its_bytes():
    blocks = ALL_BYTES.view(2, 128).clone()
    found = field(blocks, 3, 4)
    assert found.tolist() == [[3, 4, 5, 6], [131, 132, 133, 134]]
    assert found.is_contiguous()
    found.zero_()
    assert blocks[0, 3] == 3


def test_every_float16_widens_to_the_float32_numpy_gives():
    patterns = np.arange(1 << 16, dtype="<u2")
    found = fp16(torch.from_numpy(patterns.view(np.uint8).reshape(-1, 2)), 0).numpy()[:, 0]
    np.testing.assert_array_equal(found, patterns.view("<f2").astype(np.float32))


def test_lookup_takes_each_code_to_its_value_and_keeps_the_shape():
    assert levels_of((5, -7, 9), torch.tensor([[2, 0], [1, 1]], dtype=torch.uint8)).tolist() == [
        [9.0, 5.0],
        [-7.0, -7.0],
    ]


def ggml_scales_and_minimums(scales, minimums):
    """The writer's side of k_scales, from the loop of ggml's quantize_row_q4_K_ref."""
    packed = [0] * 12
    for j in range(4):
        packed[j], packed[j + 4] = scales[j], minimums[j]
    for j in range(4, 8):
        packed[j + 4] = (scales[j] & 15) | (minimums[j] & 15) << 4
        packed[j - 4] |= scales[j] >> 4 << 6
        packed[j] |= minimums[j] >> 4 << 6
    return packed


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 63), min_size=16, max_size=16), min_size=1, max_size=4))
def test_k_scales_unpack_what_ggml_packs(rows):
    packed = torch.tensor([ggml_scales_and_minimums(row[:8], row[8:]) for row in rows], dtype=torch.uint8)
    scales, minimums = unpack_scales_and_minimums(packed)
    assert scales.tolist() == [row[:8] for row in rows]
    assert minimums.tolist() == [row[8:] for row in rows]


GENERATOR = torch.Generator().manual_seed(0)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=GENERATOR)


def test_planes_and_runs_pack_to_the_bytes_they_came_from() -> None:
    raw = random_bytes(5, 16)
    for bits in (1, 2, 4):
        assert torch.equal(pack_planes(planes(raw, bits), bits), raw)
        assert torch.equal(pack_runs(runs(raw, bits), bits), raw)


def test_six_bit_scales_pack_to_the_bytes_they_came_from() -> None:
    raw = random_bytes(64, 12)
    assert torch.equal(pack_scales_and_minimums(*unpack_scales_and_minimums(raw)), raw)
    assert torch.equal(pack_scales(unpack_scales(raw)), raw)


def test_base_3_digits_read_back() -> None:
    digits = torch.cartesian_prod(*[torch.arange(3, dtype=torch.uint8)] * 5).T.unsqueeze(0)  # [1, 5, 243]
    assert torch.equal(base3_digits(base3_bytes(digits), num_digits=5).view(1, 5, 243), digits)


def test_halves_are_rounded_away_from_zero() -> None:
    values = torch.tensor([0.5, -0.5, 1.5, -1.5, 2.5, 0.49999997, -0.49999997, 126.5, 0.0])
    assert round_half_away(values).tolist() == [1, -1, 2, -2, 3, 0, 0, 127, 0]


def test_the_extreme_value_is_the_first_of_largest_magnitude() -> None:
    assert extreme(torch.tensor([[1.0, -3.0, 3.0], [-0.0, -0.0, -0.0]])).tolist() == [[-3.0], [0.0]]
    assert extreme(torch.tensor([[-0.0, -0.0]])).signbit().tolist() == [[False]]


def test_the_inverse_of_what_float32_cannot_invert_is_zero() -> None:
    assert inverse(torch.tensor([0.0, -0.0, 1e-45, -1e-39, 4.0])).tolist() == [0.0, 0.0, 0.0, 0.0, 0.25]
