"""The ops that torch calls in C++: products and attention against float64, and as torch sees them."""

import pytest
import torch
from attend_cases import Sequences, Shape
from support.cases import in_case
from support.packed_matrices import KERNEL_FORMATS, native_kernels, relative_error, stored_matrix
from torch import Tensor

from graphcore.kernels.cpu.attention import cache_number
from graphcore.kernels.cpu.library import ROUNDINGS, open_library
from graphcore.kernels.cpu.torch_ops import are_implemented_by, native_attend, native_linear
from graphcore.quant import FORMATS

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
CHUNKS = [[5, 1], [2, 7], [1, 1], [0, 1], [19, 4], [1, 1]]


@pytest.fixture(autouse=True)
def _implemented() -> None:
    open_library(native_kernels())
    if not are_implemented_by(native_kernels()):
        pytest.skip(f"torch {torch.__version__} has no such interface, or another library of this process has the ops")


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    library: str = "",
    cap: float = 0.0,
) -> Tensor:
    new = (None if one is None else one.contiguous() for one in (key, value))
    formats = map(cache_number, (k_cache, v_cache))
    return native_attend(
        query.contiguous(), *new, k_cache, v_cache, table, starts, counts, *formats, window, scale, sinks, cap
    )


def test_products_of_every_format_are_those_of_float64() -> None:
    for name in KERNEL_FORMATS:
        matrix = stored_matrix(name, 17, FORMATS[name].block_elements * 2)
        packed, packing = matrix.packed(native_kernels()), matrix.packing(native_kernels())
        x = torch.randn(3, 1, packing.columns, generator=torch.Generator().manual_seed(0))
        for bias in (None, torch.arange(17.0)):
            for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
                with in_case(name, dtype, bias):
                    narrow = x.to(dtype)
                    found = native_linear(narrow, packed, bias, *packing.numbers, ROUNDINGS["float"])
                    expected = narrow.double() @ matrix.dense.double().T + (0 if bias is None else bias)
                    assert found.dtype is dtype
                    assert relative_error(found, expected) < bound


def test_attention_matches_the_loop() -> None:
    for window, cap, page, dtype in (
        (0, 0.0, 0, torch.float32),
        (7, 2.0, 3, torch.bfloat16),
        (7, 0.0, 16, torch.float16),
    ):
        for heads, head_dim in ((6, 20), (2, 64)):
            with in_case(window, cap, page, dtype, heads):
                shape = Shape(
                    heads, 2, head_dim, 64, window, dtype, dtype, 0.2, has_sinks=heads == 6, cap=cap, page=page
                )
                sequences = Sequences(shape, 2)
                for counts in CHUNKS:
                    found, expected = sequences.run(attend, counts)
                    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])


def test_torch_knows_their_shapes_and_what_they_write() -> None:
    matrix = stored_matrix("q4_k", 17, 256)
    x, tests = torch.randn(2, 3, 256), ("test_schema", "test_faketensor")
    given = (x, matrix.packed(native_kernels()), None, *matrix.packing(native_kernels()).numbers, ROUNDINGS["wide"])
    torch.library.opcheck(torch.ops.graphcore.native_linear.default, given, test_utils=tests)
    new, pool = (torch.randn(1, 2, heads, 8) for heads in (4, 2, 2)), torch.zeros(2, 2, 4, 8)
    places = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([3]), torch.tensor([2])
    given = (*new, pool, pool.clone(), *places, 0, 0, 0, 0.35, torch.arange(4.0), 0.0)
    torch.library.opcheck(torch.ops.graphcore.native_attend.default, given, test_utils=tests)
