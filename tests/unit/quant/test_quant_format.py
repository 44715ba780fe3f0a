"""What a Format refuses, what it promises about sizes, and what the registry answers."""

import dataclasses

import gguf
import pytest
import torch
from support.cases import in_case

from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.quant import FORMATS, Format, dequantize

FLAT = {"i2_s"}  # groups run over the whole tensor, not along rows
NOT_IN_GGUF_PY = {
    "q2_0": (64, 18),
    "i2_s": (128, 32),
    "affine4": (32, 19),
    "affine8": (32, 37),
    "fp8": (32, 36),
    "nf4": (32, 20),
    "fp4": (32, 20),
    "nvfp4_f32": (32, 24),
}


def one_row(name):
    shape = (1, FORMATS[name].block_elements)
    return torch.zeros(FORMATS[name].nbytes(shape), dtype=torch.uint8), shape


def test_block_sizes_are_those_of_ggml():
    for format_name in sorted(FORMATS):
        with in_case(format_name):
            stored = FORMATS[format_name]
            expected = (
                NOT_IN_GGUF_PY.get(format_name) or gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_name.upper()]]
            )
            assert (stored.block_elements, stored.block_nbytes) == expected


def test_a_format_is_frozen_and_knows_its_name():
    for format_name in sorted(FORMATS):
        with in_case(format_name):
            stored = FORMATS[format_name]
            assert stored.name == format_name
            with pytest.raises(dataclasses.FrozenInstanceError):
                stored.name = "other"


def test_the_registry_cannot_be_changed():
    with pytest.raises(TypeError):
        FORMATS["q4_0"] = FORMATS["q4_1"]


def test_decoded_blocks_are_float32_and_own_their_memory():
    for format_name in sorted(FORMATS):
        with in_case(format_name):
            stored = FORMATS[format_name]
            blocks = torch.zeros(3, stored.block_nbytes, dtype=torch.uint8)
            weights = stored.dequantize_blocks(blocks)
            assert weights.shape == (3, stored.block_elements)
            assert weights.dtype == torch.float32
            weights.fill_(1.0)
            assert not blocks.any()


def test_a_tensor_takes_the_bytes_of_its_blocks():
    for format_name in sorted(FORMATS):
        with in_case(format_name):
            stored = FORMATS[format_name]
            tail = 32 if format_name == "i2_s" else 0
            assert stored.nbytes((3, 5, 2 * stored.block_elements)) == 30 * stored.block_nbytes + tail


def test_a_scalar_is_one_element():
    assert dequantize(torch.tensor([1.5]).view(torch.uint8), "f32", ()).item() == 1.5


def test_a_row_that_is_no_whole_number_of_blocks_is_refused():
    for name in sorted(one for one in FORMATS if FORMATS[one].block_elements > 1):
        with in_case(name):
            raw, (_, row) = one_row(name)
            with pytest.raises(
                CheckpointError, match=rf"^{name}: shape \[{row // 2}\] .* not a multiple of the \w+ of {row}"
            ):
                dequantize(raw, name, (row // 2,))


def test_a_shape_in_ggml_order_is_refused_even_if_the_bytes_would_do():
    for name in sorted(one for one in FORMATS if one not in FLAT and FORMATS[one].block_elements > 1):
        with in_case(name):
            raw, (_, row) = one_row(name)
            with pytest.raises(CheckpointError, match="torch order"):
                dequantize(raw, name, (row, 1))


def test_a_wrong_number_of_bytes_is_refused_with_both_numbers():
    for format_name in sorted(FORMATS):
        for change in [-1, 1]:
            with in_case(format_name, change):
                raw, shape = one_row(format_name)
                wrong = torch.zeros(raw.numel() + change, dtype=torch.uint8)
                with pytest.raises(
                    CheckpointError, match=rf"{format_name}.* takes {raw.numel()} bytes, found {wrong.numel()};"
                ):
                    dequantize(wrong, format_name, shape)


def test_anything_but_a_flat_run_of_bytes_is_refused():
    for format_name in sorted(FORMATS):
        for spoil in [
            lambda raw: raw.view(torch.int8),
            lambda raw: raw.to(torch.float32),
            lambda raw: raw.view(1, -1),
            lambda raw: raw.repeat_interleave(2)[::2],
        ]:
            with in_case(format_name, spoil):
                raw, shape = one_row(format_name)
                with pytest.raises(
                    CheckpointError, match=f"^{format_name}: raw bytes must be a contiguous uint8 tensor"
                ):
                    dequantize(spoil(raw), format_name, shape)


@pytest.mark.parametrize("name", ["iq2_m", "Q4_K", "tl2", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(UnsupportedError, match=f"unknown weight format '{name}'.*known: .*q4_k, .*tq2_0"):
        dequantize(torch.zeros(1, dtype=torch.uint8), name, (1,))


def test_a_format_without_a_decoder_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Format("nothing", block_elements=1, block_nbytes=1)
