"""C++ quantises to the bytes that torch makes, on every instruction set and number of threads.

What those bytes are worth is tested beside libggml's: here with C++, in tests/unit/quant/test_quantize.py with torch.
"""

import ctypes
from itertools import product as every_pair

import gguf
import numpy as np
import pytest
import torch
from support.cases import in_case
from support.packed_matrices import GOLDEN
from torch import Tensor

from graphcore.errors import CheckpointError
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, FORMAT_NUMBERS, open_library
from graphcore.kernels.cpu.quantize import QuantizedSums, quantize_weights
from graphcore.quant import FORMATS
from graphcore.quant.packing_error import packing_error

EXACT = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")  # libggml's own bytes
SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
QUANTIZED = (*EXACT, *SEARCHED)
COLUMNS = 1280  # five blocks: an odd number, as two blocks of q4_k are quantised together


def random_rows(seed: int) -> Tensor:
    return torch.randn(13, COLUMNS, generator=torch.Generator().manual_seed(seed))


def single_weights() -> Tensor:
    rows = torch.zeros(13, COLUMNS)
    rows.view(13, -1, 16)[:, :, 7] = random_rows(5)[:, : COLUMNS // 16]
    return rows


def opposite_extremes() -> Tensor:
    rows = random_rows(6).clamp_(-1, 1)
    rows[:, ::16], rows[:, 5::16] = 2.0, -2.0
    return rows


# Rows that are unlike weights, beside some that are like them.
ROWS = {
    "normal": lambda: random_rows(0) * 0.02,
    "heavy": lambda: random_rows(1) ** 5,
    "positive": lambda: random_rows(2).abs() + 0.5,
    "constant": lambda: torch.full((13, COLUMNS), -0.3),
    "zeros": lambda: torch.zeros(13, COLUMNS) * torch.tensor([1.0, -1.0]).repeat(COLUMNS // 2),
    "single": single_weights,
    "extremes": opposite_extremes,
    "ties": lambda: (random_rows(3) * 8).round() / 16,
    "sparse": lambda: random_rows(4) * (random_rows(7) > 1),
    "mixed sizes": lambda: random_rows(8) * 10.0 ** torch.arange(-39, 0, 3).unsqueeze(1),
    "denormal": lambda: random_rows(9) * 1e-40,
    "large": lambda: random_rows(10) * 1e4,
}


def test_the_kernels_quantise_these_formats(library: str) -> None:
    knows = open_library(library).graphcore_can_quantize
    assert {name for name, number in FORMAT_NUMBERS.items() if knows(number)} == set(QUANTIZED)


def test_bytes_are_torchs(library: str) -> None:
    for name in QUANTIZED:
        with in_case(name):
            one = FORMATS[name]
            for kind, rows in ROWS.items():
                dense = rows()
                found, error = quantize_weights(one, dense, library)
                expected = one.quantize(dense)
                assert torch.equal(found, expected), kind
                by_torch = packing_error(dense, expected, one, dense.shape)
                assert error.difference == pytest.approx(by_torch.difference, rel=1e-5, abs=1e-44), kind
                assert error.size == pytest.approx(by_torch.size, rel=1e-5, abs=1e-44), kind


def test_any_float_dtype_is_quantised_as_its_float32_values(library: str) -> None:
    for dtype, name in every_pair([torch.bfloat16, torch.float16, torch.float64], QUANTIZED):
        with in_case(dtype, name):
            dense = (random_rows(11) * 10.0 ** torch.arange(-7, 6).unsqueeze(1)).clamp_(-6e4, 6e4).to(dtype)
            dense = dense[:, : COLUMNS - 256].t().contiguous().t()  # rows that are no run of memory
            expected = FORMATS[name].quantize(dense.to(torch.float32))
            assert torch.equal(quantize_weights(FORMATS[name], dense, library)[0], expected)


def test_the_number_of_threads_changes_neither_bytes_nor_sums(library: str) -> None:
    for name in QUANTIZED:
        with in_case(name):
            dense = torch.cat([random_rows(seed) for seed in range(12)])
            first = quantize_weights(FORMATS[name], dense, library, threads=1)
            for threads in (2, 3, 7):
                raw, error = quantize_weights(FORMATS[name], dense, library, threads=threads)
                assert torch.equal(raw, first[0])
                assert error == first[1]


def test_nothing_but_the_weights_is_read_and_nothing_but_their_blocks_written(library: str) -> None:
    for blocks, name in every_pair([1, 5, 16, 17, 129], QUANTIZED):
        with in_case(blocks, name):
            one = FORMATS[name]
            weights = blocks * one.block_elements
            memory = torch.full((weights + 2048,), torch.nan)
            memory[1024:-1024] = torch.randn(weights, generator=torch.Generator().manual_seed(weights))
            nbytes, sums = one.nbytes((weights,)), QuantizedSums()
            raw = torch.full((nbytes + 2 * 4096,), 0xA5, dtype=torch.uint8)
            open_library(library).graphcore_quantize(
                *(1, FORMAT_NUMBERS[name], DTYPE_NUMBERS[torch.float32], weights),
                *(memory[1024:].data_ptr(), raw[4096:].data_ptr(), ctypes.byref(sums)),
            )
            assert sums.largest == memory[1024:-1024].abs().max()  # no NaN was met
            assert (raw[:4096] == 0xA5).all()
            assert (raw[4096 + nbytes :] == 0xA5).all()
            assert torch.equal(raw[4096 : 4096 + nbytes], one.quantize(memory[1024:-1024]))


def test_the_error_is_at_most_libggmls(library: str) -> None:
    for name, kind in every_pair(QUANTIZED, ["normal", "laplace", "heavy"]):
        with in_case(name, kind):
            stored = np.load(GOLDEN / "libggml" / "quantised.npz")
            dense = torch.from_numpy(stored[f"{kind}.source"])
            raw, error = quantize_weights(FORMATS[name], dense, library)
            by_gguf = gguf.quants.dequantize(raw.view(len(dense), -1).numpy(), gguf.GGMLQuantizationType[name.upper()])
            found = np.square(by_gguf.astype(np.float64) - dense.double().numpy()).mean()
            assert found <= (1 + 1e-6 if name in EXACT else 1.0) * stored[f"{kind}.{name}.mse"]
            assert error.difference / dense.numel() == pytest.approx(found, rel=1e-5)


def test_blocks_are_libggmls_byte_for_byte(library: str) -> None:
    for name in EXACT:
        with in_case(name):
            stored = np.load(GOLDEN / "ggml_blocks.npz")
            source = torch.from_numpy(stored[f"{name.upper()}.source"])
            expected = torch.from_numpy(stored[f"{name.upper()}.raw"][: len(source)].copy())
            assert torch.equal(quantize_weights(FORMATS[name], source, library)[0], expected.flatten())


def test_infinite_and_nan_weights_are_refused_wherever_they_are(library: str) -> None:
    for value, dtype, name in every_pair(
        [float("inf"), float("-inf"), float("nan")], [torch.float32, torch.bfloat16, torch.float16], QUANTIZED
    ):
        with in_case(value, dtype, name):
            for place in (0, 700, 13 * COLUMNS - 1):
                dense = random_rows(12).to(dtype)
                dense.view(-1)[place] = value
                with pytest.raises(CheckpointError, match=f"^{name}: .*infinite or NaN"):
                    quantize_weights(FORMATS[name], dense, library)


def test_weights_beyond_the_range_of_a_float16_scale_are_refused(library: str) -> None:
    for name in QUANTIZED:
        with in_case(name):
            with pytest.raises(CheckpointError, match=r"as large as 1e\+30, beyond the range of this format"):
                quantize_weights(FORMATS[name], torch.full((1, 256), -1e30), library)
            with pytest.raises(CheckpointError, match=r"as large as 2e\+38, beyond the range of this format"):
                quantize_weights(FORMATS[name], torch.tensor([2e38, -2e38]).repeat(1, 128), library)


def test_rows_must_be_whole_blocks(library: str) -> None:
    with pytest.raises(CheckpointError, match="rows of 288 elements"):
        quantize_weights(FORMATS["q4_k"], torch.zeros(2, 288), library)


def test_no_weights_make_no_bytes(library: str) -> None:
    raw, error = quantize_weights(FORMATS["q4_k"], torch.zeros(0, 256), library)
    assert (raw.numel(), error.difference, error.size) == (0, 0.0, 0.0)


def test_a_packed_matrix_is_quantised_in_cpp_and_without_a_copy(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy in float32 that torch's search begins with would have four times the bytes of the result."""
    packing, dense = KernelPacking("q4_k", 16, 256, library), torch.randn(16, 256).bfloat16()
    expected = FORMATS["q4_k"].quantize(dense)

    def refuse(*_: object) -> None:
        raise AssertionError("torch was asked")

    monkeypatch.setattr(type(FORMATS["q4_k"]), "quantize_blocks", refuse)
    monkeypatch.setattr(Tensor, "to", refuse)
    assert torch.equal(packing.quantize(dense)[0], expected)
