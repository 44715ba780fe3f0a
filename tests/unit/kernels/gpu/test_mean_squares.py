"""Rows that a sum leaves for a norm, and products that apply it, against exact sums and float64."""

from fractions import Fraction

import pytest
import torch
from mixture_cases import dense_case, packed_case
from support.packed_matrices import stored_matrix
from torch import Tensor

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.experts.launch import add_expert_answers
from graphcore.kernels.gpu.matrix import DENSE, DeviceMatrix
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.norm import add_rms_normed, prepare_norm
from graphcore.kernels.gpu.products import dense
from graphcore.kernels.gpu.products.decode_products import add_product, gated_product, product

pytestmark = pytest.mark.thorough

EPS = 1e-6
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2}  # of numbers of order one


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused_norm_for(
    tokens: int, columns: int, dtype: torch.dtype, fill: float = float("nan"), seed: int = 5
) -> FusedNorm:
    rows = torch.full((tokens, columns), fill, dtype=dtype)
    return FusedNorm(random(columns, seed=seed), rows, torch.zeros(tokens, 2, dtype=torch.int64))


def left_of(stream: Tensor, dtype: torch.dtype) -> FusedNorm:
    """Return what a launch of the norm alone leaves."""
    fused = fused_norm_for(*stream.shape, dtype)
    fused.squares.fill_(-7)
    prepare_norm(stream.clone(), fused)
    return fused


def matrix_of(form: str, rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> tuple[DeviceMatrix, Tensor]:
    """Return a matrix, and its numbers in float64."""
    if form == DENSE:
        weight = (random(rows, columns, seed=seed) / columns**0.5).to(dtype)
        return DeviceMatrix(weight, None, None, DENSE, rows), weight.double()
    stored = stored_matrix(form, rows, columns)
    packing = DevicePacking(form, rows, columns)
    weight = packing.pack(stored.rows, stored.scale)
    return DeviceMatrix(weight, None, None, form, rows), stored.dense.double()


def normed(stream: Tensor, fused: FusedNorm) -> Tensor:
    wide = stream.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * fused.weight.double()


def test_squares_are_added_exactly_whatever_their_size() -> None:
    stream = torch.stack([random(600) * 10.0 ** torch.linspace(-8, 7, 600), random(600, seed=2) * 900_000])
    fused = left_of(stream, torch.float32)
    unit = Fraction(1, 2**44)
    for row, (upper, lower) in zip(stream, fused.squares.tolist(), strict=True):
        squares = [Fraction(float(value * value)) for value in row]
        assert upper * 16 + lower * unit == sum(square // unit * unit for square in squares)
    assert torch.equal(fused.rows, stream * 2**-10 * fused.weight)


def test_numbers_beyond_the_largest_square_do_not_overflow() -> None:
    stream = torch.full((1, 1 << 14), 1e18)
    assert left_of(stream, torch.bfloat16).squares.tolist() == [[2**62, 0]]


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [DENSE, "q4_0"])
def test_a_product_leaves_what_a_norm_alone_would(
    form: str, dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With programs of few rows and of many, the last of them partly past the end."""
    one, _ = matrix_of(form, 46, 64, dtype)
    x, before = random(tokens, 64, dtype=dtype), random(tokens, 46, seed=3) * 30
    for rows in (8, 32):
        monkeypatch.setattr(dense, "ROWS", rows)
        monkeypatch.setattr(dense, "SHARING_ROWS", rows)
        plain, stream, fused = before.clone(), before.clone(), fused_norm_for(tokens, 46, dtype)
        add_product(plain, x, None, one)
        add_product(stream, x, None, one, next_norm=fused)
        assert torch.equal(stream, plain)
        expected = left_of(stream, dtype)
        assert torch.equal(fused.rows, expected.rows)
        assert torch.equal(fused.squares, expected.squares)


def test_a_sandwiched_answer_is_left_too() -> None:
    stream, added, after = random(3, 70), random(3, 70, seed=1), random(70, seed=2)
    plain, fused = stream.clone(), fused_norm_for(3, 70, torch.bfloat16)
    add_rms_normed(plain, added, after, 1e-3)
    prepare_norm(stream, fused, added, after, 1e-3)
    assert torch.equal(stream, plain)
    expected = left_of(stream, torch.bfloat16)
    assert torch.equal(fused.rows, expected.rows)
    assert torch.equal(fused.squares, expected.squares)


@pytest.mark.parametrize(("form", "tokens"), [(DENSE, 1), (DENSE, 3), ("mxfp4", 1)])
def test_experts_leave_what_a_norm_alone_would(form: str, tokens: int) -> None:
    dtype = torch.bfloat16
    case = dense_case(tokens, dtype, 64, 32) if form == DENSE else packed_case(form, tokens, dtype, 64, 32)
    shares, before = random(*case.chosen.shape, seed=4, dtype=dtype), random(tokens, 64, seed=3)
    operands = case.chosen, shares, case.weights, case.biases, None, case.hidden, case.gating, case.formats
    plain, stream, fused = before.clone(), before.clone(), fused_norm_for(tokens, 64, dtype)
    add_expert_answers(plain, case.x, *operands)
    add_expert_answers(stream, case.x, *operands, next_norm=fused)
    assert torch.equal(stream, plain)
    expected = left_of(stream, dtype)
    assert torch.equal(fused.rows, expected.rows)
    assert torch.equal(fused.squares, expected.squares)


@pytest.mark.parametrize("size", [1e-3, 1e7])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [DENSE, "q4_0", "q4_k"])
def test_products_apply_the_norm(form: str, dtype: torch.dtype, tokens: int, size: float) -> None:
    stream = random(tokens, 256) * size
    fused = left_of(stream, dtype)
    first, second = (matrix_of(form, 32, 256, dtype, seed) for seed in (1, 2))
    expected = normed(stream, fused) @ torch.cat([first[1], second[1]]).T
    y = product(fused.rows, fused.squares, [first[0], second[0]], torch.float32, eps=EPS)
    assert (y - expected).pow(2).mean().sqrt() < CLOSE[dtype] * expected.pow(2).mean().sqrt()
    h = gated_product(fused.rows, fused.squares, first[0], second[0], torch.float32, False, "relu", EPS)
    gates, ups = expected.chunk(2, dim=1)
    assert (h - gates.relu() * ups).pow(2).mean().sqrt() < 2 * CLOSE[dtype] * (gates.relu() * ups).pow(2).mean().sqrt()


def test_a_bias_and_a_scale_come_after_the_norm() -> None:
    stream = random(2, 64) * 50
    fused, (one, weight) = left_of(stream, torch.float32), matrix_of(DENSE, 24, 64, torch.float32)
    bias, scale = random(24, seed=8), torch.tensor([0.37])
    y = product(fused.rows, fused.squares, [one._replace(bias=bias, scale=scale)], torch.float32, True, eps=EPS)
    expected = normed(stream, fused) @ weight.T / 0.37 + bias
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_gate_and_up_of_two_formats_both_apply_it() -> None:
    stream = random(2, 64) * 50
    fused, (gate, first), (up, second) = (
        left_of(stream, torch.float32),
        *(matrix_of(form, 32, 64, torch.float32) for form in ("q4_0", "q8_0")),
    )
    h = gated_product(fused.rows, fused.squares, gate, up, torch.float32, False, "relu", EPS)
    fed = normed(stream, fused)
    torch.testing.assert_close(h.double(), (fed @ first.T).relu() * (fed @ second.T), rtol=1e-5, atol=1e-5)
