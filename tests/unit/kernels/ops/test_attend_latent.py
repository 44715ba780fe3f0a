"""All implementations of latent attention on the CPU, against float64, one query at a time."""

from collections.abc import Callable
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from support.comparisons import LatentSequences
from support.packed_matrices import native_kernels
from torch import Tensor

from graphcore.kernels.cpu.attention import sliced_attend
from graphcore.kernels.ops.attend import attend, masked_attend
from graphcore.kernels.ops.kv_formats import is_mixed, vector_shape


def native_attend(*arguments: Tensor | int | float | None, values_from: int) -> Tensor:
    return sliced_attend(*arguments, library=native_kernels(), values_from=values_from)  # type: ignore[arg-type]  # the op's own


IMPLEMENTATIONS = {"sliced": sliced_attend, "masked": masked_attend, "op": attend, "native": native_attend}
# sums of up to 40 values up to 4
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@every_implementation
def test_passes_of_a_batch_match_the_loop(implementation: Callable[..., Tensor]) -> None:
    for dtype, (widths, heads) in every_pair(CLOSE, [((8, 20), 3), ((2, 7), 1), ((64, 64), 20), ((32, 96), 6)]):
        with in_case(dtype, widths, heads):
            sequences = LatentSequences(3, dtype, widths, heads)
            for counts, tokens in (([5, 1, 0], 6), ([2, 7, 3], 7), ([1, 1, 1], 1), ([0, 1, 1], 1), ([17, 0, 9], 17)):
                assert sequences.error(implementation, counts, tokens) < CLOSE[dtype]


@pytest.mark.parametrize("kind", ["q8_0", "q5_0", "q4_0"])
def test_quantised_rows_are_attended_alike(kind: str) -> None:
    """Rows of 96 features are mixed in blocks of 32, and values begin at the second block."""
    generator, rotated, latent = torch.Generator().manual_seed(1), 32, 64
    query = torch.randn(1, 9, 4, rotated + latent, generator=generator)
    key = torch.randn(1, 9, 1, rotated, generator=generator)
    value = torch.randn(1, 9, 1, latent, generator=generator)
    found = []
    for implementation in (sliced_attend, masked_attend, native_attend):
        pools = [torch.zeros(4, 1, 4, *vector_shape(kind, width), dtype=torch.uint8) for width in (96, 0)]
        assert is_mixed(pools[0])
        table, start, count = torch.tensor([[3, 1, 2]], dtype=torch.int32), torch.tensor([0]), torch.tensor([8])
        spans = 0, 0.2
        first = implementation(
            query[:, :8], key[:, :8], value[:, :8], *pools, table, start, count, *spans, values_from=32
        )
        last = implementation(
            query[:, 8:], key[:, 8:], value[:, 8:], *pools, table, start + 8, count - 7, *spans, values_from=32
        )
        found.append((torch.cat((first, last), 1), pools[0]))
    for outputs, pool in found[1:]:
        torch.testing.assert_close(outputs, found[0][0], rtol=0, atol=1e-4)
        assert torch.equal(pool, found[0][1])
    rows = torch.cat((key, value), -1)[0, :, 0]
    weights = (query[0] @ rows.T * 0.2).masked_fill(~torch.ones(9, 9).tril().bool()[:, None], -torch.inf).softmax(-1)
    assert (found[0][0][0] - weights @ rows[:, rotated:]).abs().max() < {"q8_0": 0.03, "q5_0": 0.3, "q4_0": 0.6}[kind]
