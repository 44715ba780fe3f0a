"""The packed kernels of every format and instruction set: bytes bit by bit, products against float64.

Legend: O rows (output features), I columns (input features), T tokens.
"""

from itertools import cycle
from itertools import product as every_pair

import numpy as np
import pytest
import torch
from support.cases import in_case
from support.packed_matrices import (
    GOLDEN,
    KERNEL_FORMATS,
    StoredMatrix,
    golden_matrix,
    native_kernels,
    num_differing,
    relative_error,
    stored_matrix,
)
from torch import Tensor

from graphcore.checkpoint.ternary_checkpoint import pack_i2_s
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS, KernelPacking
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, Matrix
from graphcore.kernels.cpu.products import Operand, multiply
from graphcore.quant import FORMATS
from graphcore.quant.level_formats import LevelFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 15, 16, 17, 53)
TOKENS = (1, 2, 7, 8, 9, 16, 17, 40)
# Relative RMS error of a product by rounding and dtype of x: what kernels/cpu/kernel_packing.py states, and 1e-3 for
# fp16, whose eleven bits alone are 2.4e-4.
BOUNDS = {
    ("float", torch.float32): 1e-6,
    ("float", torch.bfloat16): 4e-3,
    ("float", torch.float16): 1e-3,
    ("wide", torch.float32): 1e-4,
    ("wide", torch.bfloat16): 4e-3,
    ("wide", torch.float16): 1e-3,
    ("block", torch.float32): 1e-2,
    ("block", torch.bfloat16): 1.1e-2,
    ("block", torch.float16): 1e-2,
}


def columns_of(name: str, blocks: int) -> int:
    return FORMATS[name].block_elements * blocks


def product(matrix: StoredMatrix, library: str, x: Tensor, rounding: str, bias: Tensor | None = None) -> Tensor:
    packed = matrix.packed(library)
    return matrix.packing(library).linear(x, packed, bias, rounding)


def expected(matrix: StoredMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ matrix.dense.double().T
    return y if bias is None else y + bias.double()


def random_x(tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def rounded(x: Tensor, rounding: str) -> Tensor:
    """Return x as the rounding leaves it, float64; as kernels/cpu/kernel_packing.py defines it."""
    values = x.double() if rounding == "token" else x.double().unflatten(-1, (-1, 32))
    size = values.abs().amax(-1, keepdim=True)
    size = size.clamp(min=1e-5 if rounding == "token" else 1e-300)
    back = (values * 127 / size).round() * size / 127
    return back.view(x.shape)


def test_golden_blocks_come_back_bit_by_bit(library: str) -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            matrix = golden_matrix(name)
            packed, packing = matrix.packed(library), matrix.packing(library)
            for dtype in DTYPES:
                assert num_differing(packing.unpack(packed, dtype), matrix.dense.to(dtype)) == 0, dtype


def test_random_bytes_come_back_bit_by_bit_however_many_rows_and_blocks(library: str) -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            for rows in ROWS:
                for blocks in (1, 5):
                    matrix = stored_matrix(name, rows, columns_of(name, blocks), is_tame=False)
                    packed, packing = matrix.packed(library), matrix.packing(library)
                    for dtype in DTYPES:
                        assert num_differing(packing.unpack(packed, dtype), matrix.dense.to(dtype)) == 0, (
                            rows,
                            blocks,
                            dtype,
                        )


def test_gathered_rows_are_those_of_the_matrix(library: str) -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            matrix = stored_matrix(name, 53, columns_of(name, 3), is_tame=False)
            ids = torch.tensor([[0, 52, 16], [15, 17, 16]])
            for dtype in DTYPES:
                found = matrix.packing(library).gather(ids, matrix.packed(library), dtype)
                assert num_differing(found, matrix.dense[ids].to(dtype)) == 0


def test_products_are_within_the_bound_of_their_rounding(library: str) -> None:
    for rounding, name in every_pair(["float", "wide", "block"], KERNEL_FORMATS):
        with in_case(rounding, name):
            matrix = stored_matrix(name, 53, columns_of(name, 1) * max(1, 512 // columns_of(name, 1)))
            bias = torch.randn(53, generator=torch.Generator().manual_seed(1))
            for dtype in DTYPES:
                for tokens, added in zip(TOKENS, cycle([None, bias.to(dtype)]), strict=False):
                    x = random_x(tokens, matrix.dense.shape[1], dtype)
                    y = product(matrix, library, x, rounding, added)
                    assert (y.shape, y.dtype) == ((tokens, 53), dtype)
                    assert relative_error(y, expected(matrix, x, added)) < BOUNDS[rounding, dtype], (dtype, tokens)


def test_rounded_products_are_those_of_the_rounded_activations(library: str) -> None:
    """Ten times nearer than the rounding's own error; what is left is a tie that falls to the other side."""
    for rounding, name in every_pair(["block", "token"], KERNEL_FORMATS):
        with in_case(rounding, name):
            for rows, blocks in ((1, 1), (17, 3)):
                matrix = stored_matrix(name, rows, columns_of(name, blocks))
                for tokens in (1, 9):
                    x = random_x(tokens, matrix.dense.shape[1])
                    y = product(matrix, library, x, rounding)
                    fed = (
                        x if FORMATS[name].float_levels else rounded(x, rounding)
                    )  # codes that are floats never round x
                    assert relative_error(y, expected(matrix, fed)) < 2e-4


def test_no_sum_overflows(library: str) -> None:
    """Activations of one size are rounded to the largest whole numbers exactly, so the products are float32's."""
    for rounding, name in every_pair(["wide", "block", "token"], KERNEL_FORMATS):
        with in_case(rounding, name):
            for byte in (0xFF, 0x7F, 0x77):  # the largest codes of most formats, of q8_0 and of E2M1
                matrix = stored_matrix(name, 17, columns_of(name, 2), byte=byte)
                for tokens, value in every_pair((1, 8), (3.0, -3.0)):
                    x = torch.full((tokens, matrix.dense.shape[1]), value)
                    size = (
                        x.double().abs() @ matrix.dense.double().abs().T
                    )  # the products', which may cancel each other
                    error = (product(matrix, library, x, rounding) - expected(matrix, x)) / size.clamp(min=1e-30)
                    assert error.abs().max() < 1e-5, (byte, tokens, value)


def test_prompts_are_multiplied_in_float32_where_narrow_products_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is float32's, rounded once; of one slice of rows and of several."""
    monkeypatch.setattr("graphcore.kernels.cpu.kernel_packing.product_dtype", lambda _: torch.float32)
    monkeypatch.setattr("graphcore.kernels.cpu.products.has_panels", lambda _: False)
    library = native_kernels()
    for elements in (1 << 20, 1):
        monkeypatch.setattr("graphcore.kernels.cpu.kernel_packing.SLICE_ELEMENTS", elements)
        matrix, bias = stored_matrix("q4_k", 53, 512), torch.arange(53.0)
        for dtype in (torch.bfloat16, torch.float16):
            x = random_x(DENSE_TOKENS, 512, dtype)
            y = product(matrix, library, x, "float", bias.to(dtype))
            assert y.dtype == dtype
            assert relative_error(y, expected(matrix, x, bias)) < torch.finfo(dtype).eps / 4
            assert torch.equal(y, product(matrix, library, x.float(), "float", bias).to(dtype))


def test_every_row_count_is_multiplied_to_its_last_row(library: str) -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            for rows in ROWS:
                matrix = stored_matrix(name, rows, columns_of(name, 2))
                x = random_x(3, matrix.dense.shape[1])
                for rounding in ("float", "wide", "block"):
                    y = product(matrix, library, x, rounding)
                    error = (y.double() - expected(matrix, x)).norm(dim=0)  # of each row
                    size = x.norm() * matrix.dense.norm(dim=1) / x.shape[1] ** 0.5  # of what a row's products are about
                    assert (error / size).max() < 3 * BOUNDS[rounding, torch.float32], (rows, rounding)


def test_one_token_at_a_time_and_all_together_give_the_same(library: str) -> None:
    """To the bit, but where many tokens are multiplied with the unpacked matrix."""
    for name in KERNEL_FORMATS:
        with in_case(name):
            matrix = stored_matrix(name, 53, columns_of(name, max(2, 320 // columns_of(name, 1))))
            x = random_x(131, matrix.dense.shape[1])
            asked = torch.tensor([*range(9), *range(DENSE_TOKENS - 3, DENSE_TOKENS + 2), 39, *range(125, 131)]).unique()
            for rounding, bound in (("float", 1e-6), ("wide", 1e-4), ("block", 1e-6), ("token", 1e-6)):
                alone = torch.cat([product(matrix, library, x[at : at + 1], rounding) for at in asked])
                for tokens in (2, 3, 5, 7, 8, DENSE_TOKENS - 1, 40, 131):
                    rows = asked < tokens
                    together = product(matrix, library, x[:tokens], rounding)[asked[rows]]
                    if tokens >= DENSE_TOKENS and matrix.packing(library).unpacks(rounding):
                        assert relative_error(together, alone[rows]) < bound, (rounding, tokens)
                    else:
                        assert torch.equal(together, alone[rows]), (rounding, tokens)


def test_dense_rows_have_the_same_bits_for_any_number_of_tokens(library: str) -> None:
    for columns, dtype in every_pair([43, 2085, 4131], DTYPES):
        with in_case(columns, dtype):
            weight = torch.randn(21, columns, generator=torch.Generator().manual_seed(2)).to(dtype)
            x = random_x(16, columns)
            alone = torch.cat([dense_product(library, weight, token[None]) for token in x])
            assert relative_error(alone, x.double() @ weight.double().T) < 1e-6
            for tokens in (2, 3, 4, 5, 6, 7, 8, 16):
                assert torch.equal(dense_product(library, weight, x[:tokens]), alone[:tokens]), tokens


def dense_product(library: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    matrix = Matrix(weight.data_ptr(), *weight.shape, DTYPE_NUMBERS[weight.dtype], 1.0)
    return multiply(x, [Operand(matrix, weight, None, "float", library)])[0]


def test_zeros_give_the_bias(library: str) -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            matrix = stored_matrix(name, 17, columns_of(name, 2))
            bias = torch.arange(17.0)
            for tokens, rounding in every_pair((1, 8), ("float", "wide", "block", "token")):
                y = product(matrix, library, torch.zeros(tokens, matrix.dense.shape[1]), rounding, bias)
                assert torch.equal(y, bias.expand(tokens, 17)), (tokens, rounding)


def test_outliers_and_tiny_activations_keep_the_bound(library: str) -> None:
    for rounding, name in every_pair(["float", "wide", "block"], KERNEL_FORMATS):
        with in_case(rounding, name):
            matrix = stored_matrix(name, 53, columns_of(name, 2))
            for tokens in (1, 8):
                x = random_x(tokens, matrix.dense.shape[1])
                tiny, spiked = x * 1e-30, x.clone()
                spiked[:, 3], spiked[:, -1] = 3e4, -2e6
                for values in (tiny, spiked):
                    y = product(matrix, library, values, rounding)
                    assert relative_error(y, expected(matrix, values)) < BOUNDS[rounding, torch.float32]
                below = product(matrix, library, x * 1e-40, rounding)  # subnormal: as good as zero, and no NaN
                assert below.abs().max() < 1e-34


@pytest.mark.parametrize("case", ["", "_k384"])
def test_ternary_products_are_bitnets_whole_numbers(library: str, case: str) -> None:
    """x is rounded to the very codes of bitnet.cpp, and their products are exact."""
    stored = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / "i2s.npz").items()}
    ternary, scale = stored[f"ternary{case}"], stored[f"scale{case}"]
    raw_rows, found_scale = FORMATS["i2_s"].split_rows(stored[f"i2s_x86_raw{case}"], ternary.shape)
    packing = KernelPacking("i2_s", *ternary.shape, library)
    packed = packing.pack(raw_rows, found_scale)
    x = stored["x"] if not case else torch.cat((stored["x"], stored["x"][:, :128]), dim=1)
    codes, steps = stored["x_q8"], stored["x_scale"]
    if case:  # the golden activations are 256 wide; a row's largest stays where it is or is repeated
        codes = torch.cat((codes, codes[:, :128]), dim=1)
    sums = codes.long() @ ternary.long().T
    if not case:
        assert torch.equal(sums, stored["acc_i32"].long())
    y = packing.linear(x, packed, None, "token")
    steps = steps.view(-1, 1).double()
    assert torch.equal((y.double() * steps / scale.double()).round().long(), sums)
    np.testing.assert_allclose(y, (sums / steps * scale.double()).float(), rtol=1e-6, atol=0)
    if not case:
        np.testing.assert_allclose(y, stored["y_bitnetcpp"], rtol=1e-6, atol=0)


def test_hugging_face_ternary_bytes_give_transformers_products(library: str) -> None:
    """transformers' own packing, 2 bits a row of four, goes through i2_s; a scale divides, multiplies or is a mean."""
    for form in ["y_bitlinear", "y_autobitlinear_offline", "y_autobitlinear_online"]:
        with in_case(form):
            stored = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / "hf_bitnet.npz").items()}
            codes = torch.cat([stored["packed"] >> shift & 3 for shift in (0, 2, 4, 6)])
            scale = stored["weight_scale"].float().reshape(())
            if form == "y_autobitlinear_online":
                codes = (stored["weight_quant"] / stored["online_scale"]).round().add(1).to(torch.uint8)
                scale = stored["online_scale"].float().reshape(())
            else:
                assert torch.equal(codes.int() - 1, stored["ternary"].int())
            scale = 1 / scale if form == "y_bitlinear" else scale
            rows, found = FORMATS["i2_s"].split_rows(pack_i2_s(codes, scale), codes.shape)
            packing = KernelPacking("i2_s", *codes.shape, library)
            y = packing.linear(stored["x"], packing.pack(rows, found), None, "token")
            np.testing.assert_allclose(y, stored[form], rtol=1e-5, atol=1e-6 * stored[form].abs().max().item())


def test_hugging_face_mxfp4_experts_come_back_as_transformers_has_them(library: str) -> None:
    stored = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / "mxfp4_hf.npz").items()}
    packing = KernelPacking("mxfp4", 8, 96, library)
    for expert, rows in enumerate(stored["ggml_raw"].flatten(2)):
        packed = packing.pack(rows, 1.0)
        assert torch.equal(packing.unpack(packed, torch.float32), stored["values_f32_HF_transposed"][expert].T)
        narrow = stored["values_bf16_as_f32_HF_transposed"][expert].T
        assert torch.equal(packing.unpack(packed, torch.bfloat16).float(), narrow)
        assert num_differing(packing.unpack(packed, torch.float32), stored["ggml_f32"][expert]) == 0


@pytest.mark.parametrize("name", ["q4_k", "i2_s"])
def test_torch_knows_the_operations_shapes_without_running_them(name: str) -> None:
    library = native_kernels()
    matrix = stored_matrix(name, 17, 256)
    packed, x = matrix.packed(library), random_x(6, 256, torch.bfloat16).view(2, 3, 256)
    ops, where = torch.ops.graphcore, (name, 17, 256, library)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.packed_linear.default, (x, packed, None, *where, "wide"), test_utils=tests)
    torch.library.opcheck(ops.packed_matrix.default, (packed, *where, torch.float16), test_utils=tests)
    ids = torch.tensor([[1, 16]])
    torch.library.opcheck(ops.packed_rows.default, (ids, packed, *where, torch.bfloat16), test_utils=tests)
    assert matrix.packing(library).unpack(packed, torch.float32).equal(matrix.dense)


@pytest.mark.parametrize("outside", [-1, 17])
def test_a_row_outside_the_table_is_refused(outside: int) -> None:
    library = native_kernels()
    matrix = stored_matrix("q8_0", 17, 32)
    with pytest.raises(IndexError, match=r"of a table of 17 rows"):
        matrix.packing(library).gather(torch.tensor([0, outside]), matrix.packed(library), torch.float32)


def test_packed_bytes_are_about_as_many_as_the_files() -> None:
    library = native_kernels()
    for name in KERNEL_FORMATS:
        matrix = stored_matrix(name, 64, 2048)
        stored = matrix.rows.numel()
        if isinstance(FORMATS[name], LevelFormat):  # codes of whole bits, and scales, for entries of a grid
            stored = matrix.dense.numel() * FORMATS[name].bits / 8 * 1.06
        assert matrix.packing(library).nbytes <= 1.08 * stored + 256, name
