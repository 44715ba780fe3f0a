"""BitNet's i2_s against bytes written by microsoft/BitNet's own packer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from graphcore.quant import dequantize

STORED = np.load(Path(__file__).parents[2] / "golden" / "i2s.npz")
SHAPE = (48, 256)


def decode(raw, shape=SHAPE):
    return dequantize(torch.from_numpy(raw.copy()), "i2_s", shape).numpy()


def test_rows_of_384_decode_to_the_packed_ternary_weights():
    found = decode(STORED["i2s_x86_raw_k384"], (20, 384))
    assert np.array_equal(found, STORED["ternary_k384"] * STORED["scale_k384"].astype(np.float32))


def test_the_c_and_the_python_writer_decode_alike():
    assert np.array_equal(decode(STORED["i2s_py_raw"]), STORED["dequant"])


def in_64_16_order(codes):
    """Lay codes out as builds on ARM do since November 2025 (microsoft/BitNet issues 585, 598, 600).

    64 elements to 16 bytes; byte j: element j, 16 + j, 32 + j, 48 + j, highest bits first.
    """
    groups = codes.reshape(-1, 4, 16)
    return groups[:, 0] << 6 | groups[:, 1] << 4 | groups[:, 2] << 2 | groups[:, 3]


def in_row_order(codes):
    """Lay codes out as x86 builds without ACT_PARALLEL do: a byte holds one column of four consecutive rows."""
    rows = codes.reshape(-1, 4, codes.shape[-1])
    return rows[:, 0] << 6 | rows[:, 1] << 4 | rows[:, 2] << 2 | rows[:, 3]


@pytest.mark.parametrize(("layout", "order"), [("i2s_arm64_bug_raw", in_64_16_order), ("i2s_1x4_raw", in_row_order)])
def test_the_other_two_layouts_are_not_mistaken_for_this_one(layout, order):
    """Both hold the same weights and the same scale, in as many bytes; only the order tells them apart."""
    raw, right = STORED[layout], STORED["i2s_x86_raw"]
    assert np.array_equal(raw[:-32], order((STORED["ternary"] + 1).astype(np.uint8)).reshape(-1))
    assert np.array_equal(raw[-32:-28], right[-32:-28])
    assert raw.size == right.size
    wrong = decode(raw) != STORED["dequant"]
    assert 0.4 < wrong.mean() < 0.8  # of two unrelated ternary weights two thirds differ


def test_groups_run_over_the_flattened_tensor_and_may_cross_rows():
    assert np.array_equal(decode(STORED["i2s_x86_raw"], (128, 96)), STORED["dequant"].reshape(128, 96))


def test_the_scale_is_one_float32_and_its_padding_is_ignored():
    raw = STORED["i2s_x86_raw"].copy()
    raw[-28:] = 0xFF  # the C writer leaves these bytes as it found them
    raw[-32:-28] = np.array([-0.375], dtype="<f4").view(np.uint8)
    assert np.array_equal(decode(raw), STORED["ternary"] * np.float32(-0.375))


def test_random_codes_sit_where_the_picture_says():
    rng = np.random.default_rng(7)
    groups = rng.integers(0, 256, (9, 32), dtype=np.uint8)
    scale = np.array([1.7], dtype="<f4")
    raw = np.concatenate((groups.reshape(-1), scale.view(np.uint8), np.zeros(28, np.uint8)))
    expected = [
        np.float32(int(group[e % 32] >> (6 - 2 * (e // 32)) & 3) - 1) * scale[0] for group in groups for e in range(128)
    ]
    assert np.array_equal(decode(raw, (9 * 128,)), np.array(expected, dtype=np.float32))
