"""Attention as torch sees it: schema, fake, dispatch, and a compiled caller."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphcore.kernels.cpu.attention import sliced_attend
from graphcore.kernels.ops.attend import attend, masked_attend

OP = torch.ops.graphcore.attend.default
Arguments = tuple[Tensor | int | float, ...]


def arguments(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> Arguments:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    new = randn(batch, tokens, 4, 8), randn(batch, tokens, 2, 8), randn(batch, tokens, 2, 8)
    caches = randn(2 * batch, 2, 8, 8), randn(2 * batch, 2, 8, 8), torch.arange(2 * batch).flip(0).int().view(batch, 2)
    return (*new, *caches, torch.tensor([3, 5])[:batch], torch.tensor([tokens, 1])[:batch], 0, 0.35)


def copied(args: Arguments) -> Arguments:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)


def test_schema_says_that_both_caches_are_written_and_nothing_else() -> None:
    written = [arg.name for arg in OP._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
    assert [result.alias_info for result in OP._schema.returns] == [None]


@pytest.mark.parametrize("more", [(), (torch.arange(4.0),), (None, "", 2.0)], ids=["plain", "sinks", "capped"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_opcheck_finds_schema_and_fake_true_to_the_op(
    tokens: int, more: tuple[Tensor | str | float | None, ...]
) -> None:
    torch.library.opcheck(OP, (*arguments(tokens), *more), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("implementation", [sliced_attend, masked_attend])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_has_the_shape_strides_and_dtype_of_the_real_result(
    implementation: object, tokens: int, dtype: torch.dtype
) -> None:
    query, *rest = arguments(tokens, dtype=dtype)
    assert isinstance(query, Tensor)
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    real = implementation(strided, *copied(tuple(rest)))  # type: ignore[operator]
    with FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in (strided, *rest)]
        fake = OP(*fake_args)
    assert fake.shape == real.shape
    assert fake.stride() == real.stride()
    assert fake.dtype == real.dtype


class WritesOfIndices(TorchDispatchMode):
    """Checks every write through indices: a slot that is written twice must get one value."""

    writes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.ops.aten.index_put_.default:
            self.writes += 1
            _, (batch, _, slot), values = args[:3]
            batch, slot = torch.broadcast_tensors(batch, slot)  # [B, T]
            rows = values.expand(*batch.shape, *values.shape[-2:]).flatten(0, 1)  # [B T, K, E]
            written: dict[tuple[int, int], Tensor] = {}
            for sequence, place, row in zip(batch.flatten().tolist(), slot.flatten().tolist(), rows, strict=True):
                first = written.setdefault((sequence, place), row)
                assert torch.equal(first, row), "the winner of two writes to one slot would be chance on a GPU"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("start", "count"), [(0, 16), (3, 16), (3, 9), (20, 5), (20, 16), (7, 1), (7, 0)])
def test_masked_implementation_writes_no_slot_with_two_values(start: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 16, heads, 8, generator=generator) for heads in (4, 2, 2))
    caches = [torch.randn(3, 2, 2, 8, generator=generator) for _ in range(2)]  # a ring of 6
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    with WritesOfIndices() as watch:
        masked_attend(query, key, value, *caches, table, torch.tensor([start]), torch.tensor([count]), 6, 0.35)
    assert watch.writes == 2


def test_op_on_the_cpu_is_the_sliced_implementation() -> None:
    args = arguments(4)
    first, second = copied(args), copied(args)
    assert torch.equal(attend(*first), sliced_attend(*second))  # type: ignore[arg-type]


def test_inputs_other_than_the_caches_are_not_written() -> None:
    for implementation in (sliced_attend, masked_attend):
        args = arguments(4)
        used = copied(args)
        implementation(*used)  # type: ignore[arg-type]
        for index in (0, 1, 2, 5, 6, 7):
            before, after = args[index], used[index]
            assert isinstance(before, Tensor)
            assert isinstance(after, Tensor)
            assert torch.equal(before, after)


def test_compiled_caller_writes_the_caller_s_caches_in_place() -> None:
    args = arguments(4)
    eager, compiled = copied(args), copied(args)
    expected = attend(*eager)  # type: ignore[arg-type]
    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(*compiled)
    assert torch.equal(found, expected)
    for index in (3, 4):
        before, after, right = args[index], compiled[index], eager[index]
        assert isinstance(before, Tensor)
        assert isinstance(after, Tensor)
        assert isinstance(right, Tensor)
        assert torch.equal(after, right)
        assert not torch.equal(after, before)
