"""Custom ops whose schema is read from a function's signature."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from graphcore.kernels.custom_ops import register_custom_op, schema_of


def every_type(
    x: Tensor,
    bias: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    waiting: Sequence[Tensor] | None,
    rows: Sequence[int],
    places: Sequence[int] | None,
    formats: Sequence[str],
    dtype: torch.dtype,
    count: int = 1,
    eps: float = 0.5,
    is_rms: bool = True,
    library: str = "",
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def repeat_into(out: Tensor, x: Tensor, times: int, offset: float = 0.0) -> Tensor:
    out.copy_(x + offset)
    return torch.cat([x] * times)


def test_a_schema_has_the_parameters_of_the_function() -> None:
    expected = (
        "(Tensor x, Tensor(b!)? bias, Tensor(a!)[] weights, Tensor?[] biases, Tensor[]? waiting, int[] rows,"
        " int[]? places, str[] formats, ScalarType dtype, int count=1, float eps=0.5, bool is_rms=True,"
        " str library='', Tensor? sinks=None) -> (Tensor, Tensor)"
    )
    assert schema_of(every_type, ["weights", "bias"]) == expected


def test_what_torch_has_no_type_for_is_refused() -> None:
    def takes_a_set(x: Tensor, names: set[str]) -> None: ...

    with pytest.raises(KeyError, match="set"):
        schema_of(takes_a_set)
    with pytest.raises(AssertionError, match="missing"):
        schema_of(repeat_into, ["missing"])


def test_a_registered_op_runs_is_traced_and_is_checked_by_torch() -> None:
    def fake(times: int, x: Tensor) -> Tensor:
        return x.new_empty((len(x) * times, *x.shape[1:]))

    op = register_custom_op("test_repeat_into", repeat_into, fake, mutates_args=["out"])
    assert op is torch.ops.graphcore.test_repeat_into.default
    out, x = torch.zeros(2, 3), torch.randn(2, 3)
    assert torch.equal(op(out, x, times=2, offset=1.0), torch.cat((x, x)))
    assert torch.equal(out, x + 1)
    with FakeTensorMode():
        assert op(torch.empty(2, 3), torch.empty(2, 3), times=4).shape == (8, 3)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (out, x, 2), test_utils=checks)


def test_an_op_that_returns_nothing_needs_no_fake() -> None:
    def fill(out: Tensor, value: float) -> None:
        out.fill_(value)

    op = register_custom_op("test_fill", fill, mutates_args=["out"], dispatch_key="CPU")
    out = torch.zeros(3)
    op(out, 2.0)
    assert out.tolist() == [2.0] * 3
    torch.library.opcheck(op, (out, 1.0), test_utils=("test_schema", "test_faketensor"))


def test_the_op_of_experts_on_a_device_has_a_fake_without_triton() -> None:
    """Its implementation needs Triton, so that it is defined apart; a trace asks for the shape of its answer alone."""
    from graphcore.kernels.ops import packed_experts

    assert packed_experts.register_custom_op is register_custom_op
    x, chosen = torch.empty(3, 8, device="meta"), torch.empty(3, 2, dtype=torch.int64, device="meta")
    weights = [torch.empty(4, 16, dtype=torch.uint8, device="meta")] * 3
    op = torch.ops.graphcore.device_experts.default
    answer = op(x, chosen, weights, [], None, 16, "silu", 0.0, 1.0, ["q8_0"] * 3)
    assert (answer.shape, answer.dtype, answer.device.type) == ((3, 2, 8), torch.float32, "meta")


@dataclass(frozen=True)
class Norm:
    weight: Tensor


class Scaling(NamedTuple):
    weight: Tensor
    factor: float = 2.0


def scale_into(
    out: Tensor, first: Scaling, others: Sequence[Scaling], last: Norm | None = None, *, times: int = 1
) -> Tensor:
    for one in (first, *others):
        out += one.weight * one.factor * times
    return out.clone() if last is None else out * last.weight


def test_the_fields_of_records_are_arguments_of_the_op_and_implementations_get_records() -> None:
    def fake(out: Tensor, others: Sequence[Scaling]) -> Tensor:
        return torch.empty_like(out) if others else out

    schema = (
        "(Tensor(a!) out, Tensor first_weight, float first_factor, Tensor[] others_weight, float[] others_factor,"
        " Tensor? last_weight=None) -> Tensor"
    )
    assert schema_of(scale_into, ["out"]) == schema
    call = register_custom_op("test_scale_into", scale_into, fake, mutates_args=["out"])
    ones = torch.ones(2)
    first, others = Scaling(ones), [Scaling(ones, 3.0), Scaling(ones, factor=5.0)]
    assert call(torch.zeros(2), first, others).tolist() == [10.0, 10.0]
    assert call(torch.zeros(2), first, others=others, last=Norm(ones / 4)).tolist() == [2.5, 2.5]
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2), first, others, Norm(ones)).tolist() == [10.0, 10.0]
    arguments = torch.zeros(2), ones, 2.0, [ones], [3.0]
    torch.library.opcheck(torch.ops.graphcore.test_scale_into.default, arguments, test_utils=("test_schema",))
