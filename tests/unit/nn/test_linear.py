"""The one Linear: against float64, eager and as a compiled graph sees it."""

import pytest
import torch

from graphcore.nn.linear import Linear, is_one_row

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 7), (3, 5)])
def test_linear_is_x_times_weight_transposed_plus_bias(rows: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    linear = filled_linear(48, 20, bias, dtype)
    x = torch.randn(*rows, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = linear(x)
    assert out.shape == (*rows, 20)
    assert out.dtype == dtype
    assert error(linear, x, out) < 4 * torch.finfo(dtype).eps


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
