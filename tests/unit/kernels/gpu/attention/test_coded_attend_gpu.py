"""Attention over codes as a GPU computes it, against what the codes stand for in float64, and what it writes."""

from collections.abc import Iterator

import pytest
import torch
from coded_cases import SCALE, Grown, pool

from graphcore.kernels.gpu.attention.write_and_attend import launch_attend
from graphcore.kernels.ops.attend import masked_attend
from graphcore.kernels.ops.kv_formats import FLOAT8, KVType

pytestmark = pytest.mark.thorough

KINDS = [("q8_0", "q8_0"), ("q5_0", "q4_0"), (torch.float32, "q8_0"), ("q4_0", torch.float32), (FLOAT8, FLOAT8)]
SOME = [(("q8_0", "q8_0"), 9), (("q4_0", torch.float32), 0), ((FLOAT8, FLOAT8), 9)]  # in CI; split chunks have q5_0
CLOSE = 2e-5  # float32: a softmax of scores up to 10, then a sum of values up to 4


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever is allocated without a value holds NaN: a result that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("kinds", "window"),
    [
        pytest.param(kinds, window, marks=() if (kinds, window) in SOME else pytest.mark.slow)
        for kinds in KINDS
        for window in (0, 9)
    ],
    ids=str,
)
def test_attention_is_that_of_the_codes_in_float64(kinds: tuple[KVType, KVType], window: int) -> None:
    for head_dim, page, heads in ((32, 16, 6), (96, 5, 4)):
        grown = Grown(kinds, head_dim, window, page, heads)
        for counts in [[5, 1], [1, 1], [0, 1], [19, 7], [1, 1]]:
            found, expected = grown.run(launch_attend, counts)
            torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q4_0"])
@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_pages_hold_the_blocks_that_plain_torch_writes(name: str, head_dim: int) -> None:
    tokens, generator, found = 13, torch.Generator().manual_seed(5), []
    new = [torch.randn(1, tokens, 2, head_dim, generator=generator) for _ in range(3)]
    spans = (torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([2]), torch.tensor([tokens]), 0, SCALE)
    for attend in (masked_attend, launch_attend):
        pools = [pool(name, head_dim, 8, 3).zero_() for _ in range(2)]
        attend(*new, *pools, *spans)
        found.append(pools)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_layer_that_shares_a_cache_reads_its_codes(tokens: int) -> None:
    grown = Grown(("q8_0", "q5_0"), 64)
    grown.run(launch_attend, [11, 9])
    query = torch.randn(2, tokens, 6, 64, generator=torch.Generator().manual_seed(0))
    where = (*grown.pools, grown.table, torch.tensor([11 - tokens, 9 - tokens]), torch.tensor([tokens] * 2), 0, SCALE)
    before = [one.clone() for one in grown.pools]
    found, expected = launch_attend(query, None, None, *where), masked_attend(query, None, None, *where)
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)
    assert all(torch.equal(one, other) for one, other in zip(grown.pools, before, strict=True))
