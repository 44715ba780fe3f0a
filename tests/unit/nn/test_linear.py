"""The one Linear: against float64, eager and as a compiled graph sees it."""

from itertools import product as every_pair
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from support.cases import in_case
from support.packed_matrices import native_backend

from graphcore.kernels.ops.int8_rows import Int8Rows
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.nn.linear import Float32Linear, Linear, is_one_row
from graphcore.nn.spec import Int8Order

GOLDEN = Path(__file__).parents[2] / "golden"

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def filled_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> Linear:
    generator = torch.Generator().manual_seed(1)
    linear = Linear(inputs, outputs, bias, dtype)
    for buffer in linear.buffers():
        buffer.normal_(0.0, 0.1, generator=generator)
    return linear


def error(linear: Linear, x: torch.Tensor, out: torch.Tensor) -> float:
    exact = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        exact = exact + linear.bias.double()
    return float((out.double() - exact).abs().max() / exact.abs().max())


def test_linear_is_x_times_weight_transposed_plus_bias() -> None:
    for dtype, bias, rows in every_pair(DTYPES, [False, True], [(1, 1), (2, 1), (1, 7), (3, 5)]):
        with in_case(dtype, bias, rows):
            linear = filled_linear(48, 20, bias, dtype)
            x = torch.randn(*rows, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
            out = linear(x)
            assert out.shape == (*rows, 20)
            assert out.dtype == dtype
            assert error(linear, x, out) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_scores_a_token_with_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Qwen 3 30B-A3B's router. Its product is float32: that of the rounded numbers, and not rounded again."""
    generator = torch.Generator().manual_seed(3)
    router = Float32Linear(2048, 128, bias=True, dtype=dtype)
    for buffer in router.buffers():
        buffer.normal_(0.0, 0.1, generator=generator)
    router.backend = native_backend()
    x = torch.randn(1, 256, 2048, generator=generator).to(dtype)
    whole = router(x)
    assert whole.dtype is torch.float32
    assert error(router, x, whole) < 1e-6
    assert router.is_batch_invariant
    for begin, end in ((0, 1), (3, 5), (0, 16), (17, 60), (100, 256)):
        assert torch.equal(router(x[:, begin:end]), whole[:, begin:end]), (begin, end)


@pytest.mark.parametrize(
    ("dtype", "bias", "shape"),
    [
        (torch.float32, True, (1, 1, 48)),
        (torch.bfloat16, False, (1, 1, 48)),
        (torch.bfloat16, True, (1, 48)),
        (torch.float16, True, (1, 1, 48)),
    ],
)
def test_compiled_row_is_summed_in_float32_and_rounded_once(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    linear = filled_linear(48, 20, bias, dtype)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    # "aot_eager" traces as Inductor does, and then runs the traced operations one by one
    out = torch.compile(linear, backend="aot_eager", fullgraph=True)(x)
    assert out.shape == (*shape[:-1], 20)
    assert out.dtype == dtype
    assert error(linear, x, out) < 1.1 * max(torch.finfo(dtype).eps / 2, 1e-6)


def test_compiled_row_s_products_are_not_rounded_to_bf16_before_they_are_summed() -> None:
    linear = Linear(2, 1, False, torch.bfloat16)
    near_one = 1 + 2**-4  # its square is no bf16 number; less one, it is
    linear.weight.copy_(torch.tensor([[near_one, -1.0]]))
    x = torch.tensor([[[near_one, 1.0]]], dtype=torch.bfloat16)
    out = torch.compile(linear, backend="aot_eager", fullgraph=True)(x)
    assert out.item() == near_one**2 - 1


@pytest.mark.parametrize(("shape", "is_one"), [((1, 48), True), ((1, 1, 48), True), ((2, 1, 48), False), ((48,), True)])
def test_one_row_is_known_by_its_sizes(shape: tuple[int, ...], is_one: bool) -> None:
    assert is_one_row(torch.empty(shape)) is is_one


def test_compiled_product_of_one_row_uses_no_matrix_product_and_that_of_many_rows_does() -> None:
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph

    linear = filled_linear(48, 20, True, torch.float32)
    for rows in (1, 4):
        torch._dynamo.reset()
        torch.compile(linear, backend=record, fullgraph=True, dynamic=False)(torch.ones(1, rows, 48))
    assert "linear" not in seen[0]
    assert "linear" in seen[1]


def int8_linear(order: Int8Order, ternary: np.ndarray, scale: float, dtype: torch.dtype = torch.float32) -> Linear:
    linear = Linear(ternary.shape[1], ternary.shape[0], False, dtype, order)
    linear.weight.copy_(torch.from_numpy(ternary.astype(np.float32)))
    if linear.weight_scale is None:
        linear.weight *= scale
    else:
        linear.weight_scale.fill_(scale)
    return linear


@pytest.mark.parametrize(("order", "name"), [("divided", "y_bitlinear"), ("multiplied", "y_autobitlinear_offline")])
def test_int8_products_are_those_of_transformers(order: Int8Order, name: str) -> None:
    golden = np.load(GOLDEN / "hf_bitnet.npz")
    out = int8_linear(order, golden["ternary"], float(golden["weight_scale"][0]))(torch.from_numpy(golden["x"]))
    # 1e-6: a matrix product sums in another order on another machine
    assert np.abs(out.numpy() - golden[name]).max() <= 1e-6 * np.abs(golden[name]).max()


def test_int8_products_with_plain_weights_are_those_of_transformers() -> None:
    golden = np.load(GOLDEN / "hf_bitnet.npz")
    out = int8_linear("online", golden["weight_quant"], 1.0)(torch.from_numpy(golden["x"]))
    expected = golden["y_autobitlinear_online"]
    assert np.abs(out.numpy() - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", get_args(Int8Order))
def test_int8_products_are_bitnet_cpps_and_not_those_of_float_activations(order: Int8Order, dtype: torch.dtype) -> None:
    golden = np.load(GOLDEN / "i2s.npz")
    scale = float(golden["scale"][0])
    linear = int8_linear(order, golden["ternary"], 1 / scale if order == "divided" else scale, dtype)
    x, expected = torch.from_numpy(golden["x"]), golden["y_bitnetcpp"]
    if dtype is torch.float32:
        out = linear(x).double().numpy()
        bound = 1e-6 * np.abs(expected).max(axis=1, keepdims=True)
        assert (np.abs(out - expected) <= bound).all()
        assert (
            np.abs(out - golden["y_float_noactquant"]).max(axis=1)[[0, 3, 4]] > 100 * bound.max(axis=1)[[0, 3, 4]]
        ).all()
    else:
        # rows of fp16's and bf16's own range; the golden activations are rounded once before they are quantised
        rows = slice(0, 2)
        exact = int8_linear(order, golden["ternary"], linear_scale(linear, scale))(x[rows].to(dtype).float())
        out = linear(x[rows].to(dtype))
        assert out.dtype == dtype
        assert (out.float() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


def linear_scale(linear: Linear, scale: float) -> float:
    return scale if linear.weight_scale is None else linear.weight_scale.item()


@pytest.mark.parametrize("order", get_args(Int8Order))
def test_sums_of_codes_stay_inside_float16(order: Int8Order) -> None:
    linear = int8_linear(order, np.ones((2, 6912), np.int8), 1.0, torch.float16)
    out = linear(torch.full((1, 6912), 2.0, dtype=torch.float16))  # sums of codes are 877,824
    assert out.tolist() == [[pytest.approx(13824.0, rel=1e-3)] * 2]


@pytest.mark.parametrize("order", get_args(Int8Order))
def test_a_bias_is_added_after_the_scales(order: Int8Order) -> None:
    linear = Linear(4, 1, True, torch.float32, order)
    linear.weight.fill_(1.0)
    linear.bias.fill_(0.25)  # type: ignore[union-attr]
    if linear.weight_scale is not None:
        linear.weight_scale.fill_(0.5 if order == "divided" else 2.0)
    x = torch.tensor([[127.0, 1.0, 0.0, -3.0]])
    assert linear(x).item() == (125.25 if order == "online" else 250.25)


@pytest.mark.parametrize(("order", "expected"), [("divided", 32.25), ("multiplied", 2.25)])
def test_a_bias_is_added_after_the_scale_of_a_packed_product(order: Int8Order, expected: float) -> None:
    """The packing multiplies without the bias: here it answers 8, whatever it is given."""
    linear = Linear(128, 1, True, torch.float32, order)
    linear.bias.fill_(0.25)  # type: ignore[union-attr]
    linear.weight_scale.fill_(0.25)  # type: ignore[union-attr]

    class Eight(StoredPacking):
        def linear(
            self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, rounding: str
        ) -> torch.Tensor:
            assert bias is None
            return torch.full((*x.shape[:-1], 1), 8.0)

    linear.pack(Eight("i2_s", 1, 128), "token")
    assert linear(torch.ones(1, 128)).item() == expected


@pytest.mark.parametrize("order", get_args(Int8Order))
def test_projections_share_what_one_has_prepared(order: Int8Order) -> None:
    golden = np.load(GOLDEN / "hf_bitnet.npz")
    linear, x = int8_linear(order, golden["ternary"], 1.5), torch.from_numpy(golden["x"])
    shared = linear.prepare(x)
    assert isinstance(shared, Int8Rows)
    assert torch.equal(linear(shared), linear(x))
    assert Linear(4, 1, False, torch.float32).prepare(x) is x


@pytest.mark.parametrize("order", get_args(Int8Order))
def test_a_compiled_int8_row_is_the_eager_one(order: Int8Order) -> None:
    golden = np.load(GOLDEN / "hf_bitnet.npz")
    linear, x = int8_linear(order, golden["ternary"], 1.5), torch.from_numpy(golden["x"])[:1]
    out = torch.compile(linear, backend="aot_eager", fullgraph=True)(x)
    assert (out - linear(x)).abs().max() < 1e-5
