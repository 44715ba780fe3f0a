"""Every format's weights against libggml's golden ones and against gguf-py or a scalar formula on random bytes."""

from itertools import product as every_pair

import gguf
import numpy as np
import torch
from support.cases import in_case
from support.golden_blocks import load_golden, random_blocks
from support.packed_matrices import FOLDER_FORMATS, folder_weights

from graphcore.quant import FORMATS, dequantize
from graphcore.quant.block_slices import SLICE_ELEMENTS

WIDTH_AS_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def num_differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many elements differ in any bit; two NaNs are equal."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    integer = WIDTH_AS_INTEGER[found.itemsize]
    same = found.view(integer) == expected.view(integer)
    return int((~(same | (found.isnan() & expected.isnan()))).sum())


def q1_0_by_element(block):
    scale = np.frombuffer(block[:2].tobytes(), "<f2").astype(np.float32)[0]
    return [scale if block[2 + j // 8] >> j % 8 & 1 else -scale for j in range(128)]


def q2_0_by_element(block):
    scale = np.frombuffer(block[:2].tobytes(), "<f2").astype(np.float32)[0]
    return [np.float32(int(block[2 + j // 4] >> 2 * (j % 4) & 3) - 1) * scale for j in range(64)]


def reference(name, blocks):
    """Return [N, E] float32 by gguf-py, or by a formula where gguf-py cannot."""
    by_element = {"q1_0": q1_0_by_element, "q2_0": q2_0_by_element}
    with np.errstate(all="ignore"):
        if name in FOLDER_FORMATS:
            return folder_weights(name, blocks)
        if name in by_element:
            return np.array([by_element[name](block) for block in blocks], dtype=np.float32)
        ggml_type = gguf.GGMLQuantizationType[name.upper()]
        return gguf.quants.dequantize(blocks, ggml_type).astype(np.float32).reshape(len(blocks), -1)


def test_weights_are_bit_exact_with_the_golden_ones():
    for format_name in sorted(FORMATS):
        golden = load_golden(format_name)
        with in_case(format_name):
            raw, weights = golden.tensor(len(golden.blocks))
            found = dequantize(torch.from_numpy(raw), format_name, weights.shape)
            assert num_differing(found, torch.from_numpy(weights)) == 0


def test_random_bytes_decode_as_gguf_py_decodes_them():
    for name, num_blocks in every_pair(sorted(set(FORMATS) - {"i2_s"}), [1, 600]):
        with in_case(name, num_blocks):
            blocks = random_blocks(name, num_blocks)
            expected = reference(name, blocks)
            assert expected.shape == (num_blocks, FORMATS[name].block_elements)
            found = dequantize(torch.from_numpy(blocks).view(-1), name, expected.shape)
            assert num_differing(found, torch.from_numpy(expected)) == 0


def test_slices_meet_without_a_gap():
    for format_name in sorted(FORMATS):
        golden = load_golden(format_name)
        for extra in [-1, 0, 1]:
            with in_case(format_name, extra):
                blocks_per_slice = SLICE_ELEMENTS // FORMATS[format_name].block_elements
                raw, weights = golden.tensor(2 * blocks_per_slice + extra)
                found = dequantize(torch.from_numpy(raw), format_name, weights.shape)
                assert num_differing(found, torch.from_numpy(weights)) == 0


def test_another_dtype_is_the_float32_result_cast():
    for format_name in sorted(FORMATS):
        golden = load_golden(format_name)
        for dtype in [torch.bfloat16, torch.float16, torch.float64]:
            with in_case(format_name, dtype):
                raw, weights = golden.tensor(len(golden.blocks))
                found = dequantize(torch.from_numpy(raw), format_name, weights.shape, dtype)
                assert num_differing(found, torch.from_numpy(weights).to(dtype)) == 0


def test_any_number_of_dimensions_keeps_row_major_order():
    for format_name in sorted(FORMATS):
        golden = load_golden(format_name)
        for leading in [(), (1,), (3, 5), (2, 3, 4)]:
            with in_case(format_name, leading):
                num_blocks = int(np.prod(leading, dtype=int)) * 2
                raw, weights = golden.tensor(num_blocks)
                shape = (*leading, 2 * FORMATS[format_name].block_elements)
                found = dequantize(torch.from_numpy(raw), format_name, shape)
                assert num_differing(found, torch.from_numpy(weights).view(shape)) == 0


def test_bytes_may_start_at_any_address_and_stay_as_they_are():
    for format_name in sorted(FORMATS):
        golden = load_golden(format_name)
        for offset in [1, 2, 3]:
            with in_case(format_name, offset):
                raw, weights = golden.tensor(len(golden.blocks))
                memory = torch.from_numpy(np.concatenate((np.full(offset, 0xAA, np.uint8), raw)))
                found = dequantize(memory[offset:], format_name, weights.shape)
                assert num_differing(found, torch.from_numpy(weights)) == 0
                assert memory.numpy()[offset:].tobytes() == raw.tobytes()


def test_no_rows_are_an_empty_tensor():
    for format_name in sorted(FORMATS):
        golden = load_golden(format_name)
        with in_case(format_name):
            raw, _ = golden.tensor(0)
            shape = (0, FORMATS[format_name].block_elements)
            assert dequantize(torch.from_numpy(raw), format_name, shape).shape == shape
