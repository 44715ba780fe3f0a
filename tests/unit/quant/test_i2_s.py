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


@pytest.mark.parametrize("layout", ["i2s_arm64_bug_raw", "i2s_1x4_raw"])
def test_the_other_two_layouts_are_not_mistaken_for_this_one(layout):
    raw = STORED[layout][: STORED["i2s_x86_raw"].size]
    assert not np.array_equal(decode(raw), STORED["dequant"])


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
