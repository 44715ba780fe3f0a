"""The shared bit tricks against one-element-at-a-time Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.quant.bits import field, fp16, lookup, planes, runs
from graphcore.quant.k_scales import unpack_scales_and_minimums

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
    assert lookup((5, -7, 9), torch.tensor([[2, 0], [1, 1]], dtype=torch.uint8)).tolist() == [[9.0, 5.0], [-7.0, -7.0]]


def pack_scales_and_minimums(scales, minimums):
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
    packed = torch.tensor([pack_scales_and_minimums(row[:8], row[8:]) for row in rows], dtype=torch.uint8)
    scales, minimums = unpack_scales_and_minimums(packed)
    assert scales.tolist() == [row[:8] for row in rows]
    assert minimums.tolist() == [row[8:] for row in rows]
