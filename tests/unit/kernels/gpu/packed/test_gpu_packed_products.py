"""Products of a few tokens with packed matrices, against float64 of the dequantised weights.

Legend: N tokens, O rows (output features), I columns (input features).
"""

import json
from pathlib import Path

import pytest
import torch
from support.packed_matrices import StoredMatrix, golden_matrix, relative_error, stored_matrix
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.matrix import DeviceMatrix
from graphcore.kernels.gpu.packed import linear, program_tiles
from graphcore.kernels.gpu.packed.few_tokens import launch_packed_gated, launch_packed_product
from graphcore.kernels.gpu.packed.linear import launch_packed_linear
from graphcore.kernels.gpu.packed.program_tiles import Tile, tile_of_threads
from graphcore.kernels.ops.gating import FUNCTIONS
from graphcore.kernels.ops.int8_rows import quantize_rows
from graphcore.quant import FORMATS

pytestmark = pytest.mark.thorough

# Relative RMS error: of float32 sums, and of rounding a result to its dtype.
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
DTYPES = tuple(BOUNDS)
DOTTED_BOUNDS = {"nf4": 3e-6}  # of sums on tensor cores, where levels of nf4 are two bf16; others: as of float32
OF_FOLDERS = [name for name in DEVICE_LAYOUTS if FORMATS[name].ggml_id is None]  # formats that GGUF files do not have
# Microseconds of one token's product on an H100 (docs/lab/gpu.md), by format, shape, and rows x warps of a program.
TILES = Path(__file__).parents[4] / "golden" / "packed_tiles_h100.json"


def packed(matrix: StoredMatrix, bias: Tensor | None = None, scale: Tensor | None = None) -> DeviceMatrix:
    packing = DevicePacking(matrix.format, *matrix.dense.shape)
    return DeviceMatrix(packing.pack(matrix.rows, matrix.scale), bias, scale, matrix.format, packing.rows)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(tokens: int, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((tokens, rows), float("nan"), dtype=dtype)


def product(x: Tensor, matrices: list[DeviceMatrix], x_scale: Tensor | None = None) -> Tensor:
    out = poisoned(len(x), sum(matrix.rows for matrix in matrices), x.dtype)
    launch_packed_product(x, x_scale, matrices, False, "", out, False)
    return out


@pytest.mark.parametrize("name", sorted(DEVICE_LAYOUTS))
def test_golden_blocks_are_multiplied(name: str) -> None:
    """Eight tokens, because one token's product with one large row may happen to be small beside what is summed."""
    matrix = golden_matrix(name)
    is_finite = matrix.dense.isfinite().all(1) & (matrix.dense.abs().amax(1) < 1e30)
    x = random(8, matrix.dense.shape[1])
    expected = x.double() @ matrix.dense.double().T
    found = product(x, [packed(matrix)])
    assert relative_error(found[:, is_finite], expected[:, is_finite]) < BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in DEVICE_LAYOUTS), ("q4_k", torch.float16), ("mxfp4", torch.bfloat16)],
)
def test_products_of_every_format_and_dtype(name: str, dtype: torch.dtype) -> None:
    """Three blocks: no whole number of tiles; 19 rows: no whole number of groups."""
    matrix = stored_matrix(name, 19, 3 * FORMATS[name].block_elements)
    bias, x = random(19, dtype=dtype), random(3, matrix.dense.shape[1], dtype=dtype)
    expected = x.double() @ matrix.dense.double().T + bias.double()
    assert relative_error(product(x, [packed(matrix, bias)]), expected) < BOUNDS[dtype]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_to_eight_tokens(tokens: int, dtype: torch.dtype) -> None:
    matrix = stored_matrix("q4_0", 5, 32)
    x = random(tokens, 32, dtype=dtype)
    expected = x.double() @ matrix.dense.double().T
    assert relative_error(product(x, [packed(matrix)]), expected) < BOUNDS[dtype]


@pytest.mark.parametrize("name", list(DEVICE_LAYOUTS))
def test_tensor_cores_multiply_every_format(name: str) -> None:
    """Three tokens and more of 16 bits; the products are summed in float32 and given so."""
    matrix = stored_matrix(name, 19, 3 * FORMATS[name].block_elements)
    x, out = random(3, matrix.dense.shape[1], dtype=torch.bfloat16), poisoned(3, 19)
    launch_packed_product(x, None, [packed(matrix)], False, "", out, False)
    bound = DOTTED_BOUNDS.get(name, BOUNDS[torch.float32])
    assert relative_error(out, x.double() @ matrix.dense.double().T) < bound


@pytest.mark.parametrize(
    ("name", "tokens", "columns", "dtype"),
    [
        (name, *size, DTYPES[(index + place) % len(DTYPES)])
        for index, name in enumerate(OF_FOLDERS)
        for place, size in enumerate([(1, 160), (2, 1312), (5, 160), (8, 1312)])
    ],
)
def test_columns_that_are_no_multiple_of_256(
    name: str, tokens: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More vectors than a program has threads, and a last tile that is not full."""
    monkeypatch.setattr(program_tiles, "INTERPRETED", Tile(2, 32, 1))
    matrix = stored_matrix(name, 35, columns)
    x, out = random(tokens, columns, dtype=dtype), poisoned(tokens, 35)
    launch_packed_product(x, None, [packed(matrix)], False, "", out, False)
    is_dotted = tokens >= program_tiles.FEWEST_DOTTED_TOKENS and dtype is not torch.float32
    bound = DOTTED_BOUNDS.get(name, BOUNDS[torch.float32]) if is_dotted else BOUNDS[torch.float32]
    assert relative_error(out, x.double() @ matrix.dense.double().T) < bound


@pytest.mark.parametrize("name", list(DEVICE_LAYOUTS))
@pytest.mark.parametrize("tokens", [1, 3])
def test_nothing_behind_a_matrix_counts(name: str, tokens: int) -> None:
    """Threads behind the end of a row multiply zeros; what they read as a scale must not be a NaN from elsewhere."""
    matrix = stored_matrix(name, 16, FORMATS[name].block_elements)
    own = packed(matrix)
    longer = torch.full((len(own.weight) + 4096,), 0xFF, dtype=torch.uint8)
    longer[: len(own.weight)] = own.weight
    x, out = random(tokens, matrix.dense.shape[1], dtype=torch.bfloat16), poisoned(tokens, 16)
    launch_packed_product(x, None, [own._replace(weight=longer[: len(own.weight)])], False, "", out, False)
    bound = BOUNDS[torch.float32] if tokens == 1 else DOTTED_BOUNDS.get(name, BOUNDS[torch.float32])
    assert relative_error(out, x.double() @ matrix.dense.double().T) < bound


@pytest.mark.parametrize("tile", [Tile(1, 8, 4), Tile(2, 4, 2), Tile(2, 1, 1)])
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "i2_s"])
def test_tiles_that_a_gpu_takes(name: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_tiles, "INTERPRETED", tile)
    matrix = stored_matrix(name, 9, 1280)
    x = random(2, 1280)
    expected = x.double() @ matrix.dense.double().T
    assert relative_error(product(x, [packed(matrix)]), expected) < BOUNDS[torch.float32]


def test_three_matrices_of_one_input_come_side_by_side() -> None:
    matrices = [stored_matrix("q4_k", rows, 256, seed=rows) for rows in (19, 5, 33)]
    biases = [random(len(matrix.dense), seed=1) for matrix in matrices]
    x = random(2, 256)
    expected = torch.cat(
        [x.double() @ m.dense.double().T + b.double() for m, b in zip(matrices, biases, strict=True)], 1
    )
    found = product(x, list(map(packed, matrices, biases)))
    assert relative_error(found, expected) < BOUNDS[torch.float32]


def test_a_product_is_added_to_the_stream() -> None:
    matrix = stored_matrix("q6_k", 19, 256)
    x, stream = random(2, 256), random(2, 19, seed=1)
    expected = stream.double() + x.double() @ matrix.dense.double().T
    launch_packed_product(x, None, [packed(matrix)], False, "", stream, True)
    assert relative_error(stream, expected) < BOUNDS[torch.float32]


def test_rows_of_x_may_lie_apart_and_columns_beside_the_result_are_left_alone() -> None:
    matrix = stored_matrix("q4_0", 19, 64)
    x, out = random(2, 128)[:, :64], poisoned(2, 40)
    launch_packed_product(x, None, [packed(matrix)], False, "", out[:, 10:29], False)
    assert relative_error(out[:, 10:29], x.double() @ matrix.dense.double().T) < BOUNDS[torch.float32]
    assert out[:, :10].isnan().all()
    assert out[:, 29:].isnan().all()


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gate_and_up_are_one_launch(activation: Activation) -> None:
    gate, up = (stored_matrix("q4_k", 19, 256, seed=seed) for seed in (1, 2))
    x = random(1, 256) / (gate.dense.std() * 16)  # products of about one
    gates, ups = (x.double() @ one.dense.double().T for one in (gate, up))
    out = poisoned(1, 19)
    launch_packed_gated(x, None, packed(gate), packed(up), False, activation.kernel_name, out)
    # the interpreter's exponential and error function are as good as numpy's float32
    assert relative_error(out, FUNCTIONS[activation](gates) * ups) < 3e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("divides", "tokens"), [(True, 2), (False, 3)])
def test_int8_codes_have_exact_sums(dtype: torch.dtype, divides: bool, tokens: int) -> None:
    """The sums of codes are whole numbers; they are only scaled, in float32."""
    matrix = stored_matrix("i2_s", 19, 640)
    codes, x_scale = quantize_rows(random(tokens, 640))
    scale = torch.tensor([3.0])
    sums = codes.double() @ (matrix.dense.double() / matrix.scale).T
    expected = sums * matrix.scale / x_scale.double() / (3.0 if divides else 1 / 3.0)
    out = poisoned(tokens, 19)
    launch_packed_product(codes.to(dtype), x_scale.flatten(), [packed(matrix, None, scale)], divides, "", out, False)
    torch.testing.assert_close(out.double(), expected, rtol=4e-7, atol=0)


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(1, torch.bfloat16), (8, torch.float32), (9, torch.float32), (40, torch.bfloat16), (9, torch.float16)],
)
def test_any_number_of_tokens(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SLICE_ELEMENTS", 16 * 256)
    matrix = stored_matrix("q4_k", 37, 256)
    x, bias = random(1, tokens, 256, dtype=dtype), random(37, dtype=dtype)
    form = DevicePacking("q4_k", 37, 256)
    for added in (bias, None):
        expected = x.double() @ matrix.dense.double().T + (0 if added is None else added.double())
        found = launch_packed_linear(x, packed(matrix).weight, added, form, rounds=False)
        assert (found.shape, found.dtype) == ((1, tokens, 37), dtype)
        assert relative_error(found, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("tokens", [2, 12])
@pytest.mark.parametrize(
    ("name", "dtype"), [("i2_s", torch.float32), ("i2_s", torch.bfloat16), ("q4_0", torch.float16)]
)
def test_rows_are_rounded_to_codes(tokens: int, dtype: torch.dtype, name: str) -> None:
    matrix = stored_matrix(name, 19, 256)
    x = random(tokens, 256, dtype=dtype)
    codes, x_scale = quantize_rows(x)
    expected = codes.double() / x_scale.double() @ matrix.dense.double().T
    form = DevicePacking(name, 19, 256)
    found = launch_packed_linear(x, packed(matrix).weight, None, form, rounds=True)
    assert relative_error(found, expected) < BOUNDS[dtype]


def test_no_token_gives_no_row() -> None:
    matrix = stored_matrix("q4_0", 5, 32)
    form = DevicePacking("q4_0", 5, 32)
    assert launch_packed_linear(random(0, 32), packed(matrix).weight, None, form, rounds=False).shape == (0, 5)


def test_warps_follow_from_the_columns_alone() -> None:
    """Parts of a matrix are then summed in the order of the whole."""
    for layout in DEVICE_LAYOUTS.values():
        for columns in (256, 2560, 2880 // 256 * 256, 4096, 14336):
            assert len({tile_of_threads(layout, rows, columns, 1).warps for rows in (16, 512, 4096, 128256)}) == 1


def test_tiles_take_little_more_than_the_fastest_on_an_h100() -> None:
    for name, shapes in json.loads(TILES.read_text(encoding="utf-8")).items():
        for shape, times in shapes.items():
            rows, columns = map(int, shape.split(" x "))
            tile = tile_of_threads(DEVICE_LAYOUTS[name], rows, columns, 1)
            assert times[f"{tile.rows} x {tile.warps}"] <= 1.14 * min(times.values()), (name, shape, tile)
