"""Dense weights become the bytes that libggml writes, or bytes that are at least as near to the weights."""

from itertools import product as every_pair
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import in_case

from graphcore import encodings
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.quant import FORMATS
from graphcore.quant.packing_error import packing_error

GOLDEN = Path(__file__).parents[2] / "golden"
EXACT = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "tq1_0", "tq2_0")  # one way to do it, and libggml does it so
SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl")
DENSE = ("f32", "f16", "bf16")
PACKABLE = (*EXACT, *SEARCHED, *DENSE, "i2_s")
ALLOWED_OVER_LIBGGML = 1.05  # of the mean squared error


def golden_source(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights that libggml was given and the blocks that it made: [48, E] float32, [48, W] uint8."""
    stored = np.load(GOLDEN / "ggml_blocks.npz")
    source = torch.from_numpy(stored[f"{name.upper()}.source"])
    return source, torch.from_numpy(stored[f"{name.upper()}.raw"][: len(source)].copy())


def test_the_formats_that_can_be_packed_are_these() -> None:
    assert {name for name, one in FORMATS.items() if one.can_quantize} == set(PACKABLE)


def test_the_command_line_names_the_formats_that_can_be_packed() -> None:
    assert sorted(encodings.PACKABLE) == sorted(PACKABLE)


@pytest.mark.parametrize("name", EXACT)
def test_blocks_are_libggmls_byte_for_byte(name: str) -> None:
    source, expected = golden_source(name)
    assert torch.equal(FORMATS[name].quantize_blocks(source), expected)


@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
def test_of_zeros_with_both_signs_the_minimum_is_the_first_as_in_libggml(name: str) -> None:
    """ggml-quants.c, quantize_row_q4_1_ref: `if (v < min) min = v`."""
    for first, bits in ((0.0, 0x00), (-0.0, 0x80)):
        dense = torch.tensor([first, 0.0, -0.0] * 11)[:32].view(1, 32)
        assert FORMATS[name].quantize_blocks(dense)[0, :4].tolist() == [0, 0, 0, bits]


@pytest.mark.parametrize("name", SEARCHED)
def test_no_golden_block_is_further_from_its_weights_than_libggmls(name: str) -> None:
    source, expected = golden_source(name)
    one = FORMATS[name]
    ours, theirs = (
        (one.dequantize_blocks(blocks).double() - source).square().mean(1)
        for blocks in (one.quantize_blocks(source), expected)
    )
    rounding = 1e-7 * source.double().square().mean(1)  # a constant block is exact to either's float16
    assert (ours <= ALLOWED_OVER_LIBGGML * theirs + rounding).all()


def test_an_mxfp4_weight_between_two_levels_takes_the_smaller_magnitude() -> None:
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    dense = torch.zeros(1, 32)
    dense[0, :6] = (levels[:-1] + levels[1:]) / 2
    dense[0, 6:12] = -dense[0, :6]
    dense[0, 12] = 4.0  # fixes the exponent
    back = FORMATS["mxfp4"].dequantize(FORMATS["mxfp4"].quantize(dense), dense.shape)
    assert back[0, :12].tolist() == [*levels[:6].tolist(), *(-levels[:6]).tolist()]


def test_the_error_is_at_most_libggmls() -> None:
    for kind, name in every_pair(
        ["normal", "laplace", "heavy"], [name for name in (*EXACT, *SEARCHED) if not name.startswith("tq")]
    ):
        with in_case(kind, name):
            stored = np.load(GOLDEN / "libggml" / "quantised.npz")
            dense = torch.from_numpy(stored[f"{kind}.source"])
            back = FORMATS[name].dequantize(FORMATS[name].quantize(dense), dense.shape)
            error = (back.double() - dense).square().mean().item()
            assert error <= (1 + 1e-6 if name in EXACT else 1.0) * stored[f"{kind}.{name}.mse"]


def test_ternary_weights_become_the_tensor_that_bitnets_own_code_writes() -> None:
    stored = np.load(GOLDEN / "i2s.npz")
    for ternary, scale, raw in (("ternary", "scale", "i2s_py_raw"), ("ternary_k384", "scale_k384", "i2s_x86_raw_k384")):
        dense = torch.from_numpy(stored[ternary].astype(np.float32) * stored[scale])
        packed, used = FORMATS["i2_s"].quantize(dense), dense.numel() // 4 + 4  # what follows is unused
        assert packed[:used].tolist() == stored[raw][:used].tolist()


def test_weights_that_are_not_ternary_are_rounded_in_units_of_their_mean_magnitude() -> None:
    stored = np.load(GOLDEN / "hf_bitnet.npz")
    dense = torch.from_numpy(stored["master_weight"])
    back = FORMATS["i2_s"].dequantize(FORMATS["i2_s"].quantize(dense), dense.shape)
    np.testing.assert_allclose(back.numpy(), stored["weight_quant"], rtol=1e-5)


def test_a_tensor_is_packed_as_its_slices_are() -> None:
    for name in PACKABLE:
        with in_case(name):
            generator = torch.Generator().manual_seed(0)
            dense = torch.randn(3, 2, 256, 256, generator=generator).sign_() if name == "i2_s" else None
            dense = torch.randn(3, 2, 256, 256, generator=generator) if dense is None else dense
            one = FORMATS[name]
            whole = one.quantize(dense)
            assert whole.numel() == one.nbytes(dense.shape)
            for index in range(3):
                part = one.quantize(dense[index])
                body = part.numel() - (32 if name == "i2_s" else 0)
                assert torch.equal(whole[index * body : (index + 1) * body], part[:body])


def test_any_float_dtype_is_packed_as_its_float32_values() -> None:
    for dtype, name in every_pair([torch.bfloat16, torch.float16, torch.float64], PACKABLE):
        with in_case(dtype, name):
            dense = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
            assert torch.equal(FORMATS[name].quantize(dense), FORMATS[name].quantize(dense.float()))


def test_packing_does_not_write_to_the_weights() -> None:
    for name in PACKABLE:
        with in_case(name):
            dense = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
            before = dense.clone()
            FORMATS[name].quantize(dense)
            assert torch.equal(dense, before)


def test_zeros_stay_zeros() -> None:
    for name in PACKABLE:
        with in_case(name):
            for zeros in (torch.zeros(2, 256), -torch.zeros(2, 256)):
                assert not FORMATS[name].dequantize(FORMATS[name].quantize(zeros), zeros.shape).any()


def test_a_constant_block_keeps_its_value() -> None:
    for value, name in every_pair([0.3, -0.3], [name for name in PACKABLE if name != "mxfp4"]):
        with in_case(value, name):
            dense = torch.full((2, 256), value)
            back = FORMATS[name].dequantize(FORMATS[name].quantize(dense), dense.shape)
            assert (back - dense).abs().max() < 0.004 * 0.3  # bf16 has 8 bits, fp16 scales 11


def test_a_single_outlier_survives_alone() -> None:
    for sign, name in every_pair([1.0, -1.0], PACKABLE):
        with in_case(sign, name):
            dense = torch.zeros(1, 256)
            dense[0, 17] = sign * 96.0
            back = FORMATS[name].dequantize(FORMATS[name].quantize(dense), dense.shape)
            assert (back - dense).abs().max() < 0.01 * 96


def test_weights_too_small_for_the_scales_become_small_and_finite() -> None:
    for size, name in every_pair([1e-45, 1e-40, 1e-38, 1e-30, 1e-12], PACKABLE):
        with in_case(size, name):
            dense = torch.randn(8, 256, generator=torch.Generator().manual_seed(3)) * size
            back = FORMATS[name].dequantize(FORMATS[name].quantize(dense), dense.shape)
            assert back.isfinite().all()
            assert back.abs().max() <= 1.01 * dense.abs().max()


def test_tiny_weights_beside_large_ones_do_not_spoil_them() -> None:
    for name in PACKABLE:
        with in_case(name):
            dense = torch.randn(1, 256, generator=torch.Generator().manual_seed(4))
            mixed = torch.cat((dense[:, :128], torch.full((1, 128), 1e-42)), dim=1)
            back = FORMATS[name].dequantize(FORMATS[name].quantize(mixed), mixed.shape)
            assert back.isfinite().all()
            assert back[:, 128:].abs().max() < 0.2
            assert packing_error(mixed, FORMATS[name].quantize(mixed), FORMATS[name], mixed.shape).relative < 0.85


def test_infinite_and_nan_weights_are_refused_by_name() -> None:
    for value, name in every_pair([float("inf"), float("-inf"), float("nan")], PACKABLE):
        with in_case(value, name):
            dense = torch.ones(3, 256)
            dense[1, 7] = value
            with pytest.raises(CheckpointError, match=f"^{name}: .*infinite or NaN"):
                FORMATS[name].quantize(dense)


def test_weights_beyond_the_range_of_a_float16_scale_are_refused() -> None:
    for name in [name for name in PACKABLE if name not in ("f32", "bf16", "mxfp4", "i2_s")]:
        with in_case(name):
            with pytest.raises(CheckpointError, match=r"beyond the range of this format; pack it as bf16 or f32"):
                FORMATS[name].quantize(torch.full((1, 256), -1e30))
            with pytest.raises(CheckpointError, match="as large as 2e\\+38, beyond the range of this format"):
                FORMATS[name].quantize(torch.tensor([2e38, -2e38]).repeat(1, 128))  # their difference overflows float32


@pytest.mark.parametrize("name", ["f32", "bf16", "mxfp4", "i2_s"])
def test_wide_formats_take_large_weights(name: str) -> None:
    dense = torch.full((1, 256), -1.5 * 2.0**100)
    assert torch.equal(FORMATS[name].dequantize(FORMATS[name].quantize(dense), dense.shape), dense)


def test_a_format_that_is_only_read_says_so() -> None:
    for name in sorted(FORMATS.keys() - set(PACKABLE)):
        with pytest.raises(UnsupportedError, match=f"^{name}: graphcore reads this format and does not write it"):
            FORMATS[name].quantize(torch.zeros(1, 256))


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(CheckpointError, match="rows of 48 elements"):
        FORMATS["q4_0"].quantize(torch.zeros(2, 48))


def test_the_packing_error_is_relative_to_the_weights() -> None:
    dense = torch.tensor([[3.0, -4.0]])
    raw = torch.tensor([3.0, -4.5]).view(torch.uint8)
    assert packing_error(dense, raw, FORMATS["f32"], (1, 2)).relative == pytest.approx(0.1)
    assert packing_error(dense, dense.view(torch.uint8).flatten(), FORMATS["f32"], (1, 2)).relative == 0.0
    assert packing_error(torch.zeros(1, 2), raw, FORMATS["f32"], (1, 2)).relative == float("inf")
