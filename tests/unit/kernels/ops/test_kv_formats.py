"""Caches of codes: what is rounded, where it lies, and attention over it by every implementation on the CPU.

The reference unpacks the codes of each position and attends them in float64; what it rounds is libggml's (the golden
blocks of tests/unit/quant), of heads that a Hadamard matrix in float64 has mixed.
"""

from functools import partial
from itertools import product as every_pair

import pytest
import torch
from attend_cases import Implementation
from attend_instruction import attend_as_a_program
from coded_cases import PAIRS, PASSES, SCALE, Grown, hadamard, pool
from support.cases import in_case
from support.packed_matrices import native_kernels
from torch import Tensor

from graphcore.kernels.cpu.attention import sliced_attend
from graphcore.kernels.ops.attend import attend, masked_attend
from graphcore.kernels.ops.kv_formats import (
    CODED,
    FLOAT8,
    KVType,
    code_planes,
    entries,
    head_dim_of,
    heads_of,
    kept_at,
    mixed,
)
from graphcore.kvcache.buffers import KVCache
from graphcore.quant.registry import FORMATS


def native(attend: Implementation) -> Implementation:
    return partial(attend, library=native_kernels())


IMPLEMENTATIONS = {"sliced": sliced_attend, "masked": masked_attend, "native": None}


def implementation_of(name: str) -> Implementation:
    return IMPLEMENTATIONS[name] or native(sliced_attend)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
def test_heads_are_multiplied_with_hadamard_matrices_and_back(head_dim: int) -> None:
    heads = torch.randn(3, 5, head_dim, generator=torch.Generator().manual_seed(head_dim))
    size = {96: 32, 160: 32}.get(head_dim, head_dim)
    expected = (heads.double().unflatten(-1, (-1, size)) @ hadamard(size)).flatten(-2)
    torch.testing.assert_close(mixed(heads).double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(mixed(mixed(heads)), heads, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("attend", [masked_attend, sliced_attend])
def test_pages_hold_libggml_s_blocks_of_mixed_heads(name: str, attend: Implementation) -> None:
    """The blocks' rounding is byte for byte libggml's (tests/unit/quant); here they must be found in the planes."""
    check_pages(name, attend, 21)


def test_kernels_of_every_instruction_set_write_these_pages(library: str) -> None:
    for name, tokens in every_pair(CODED, [1, 21]):
        with in_case(name, tokens):
            check_pages(name, partial(sliced_attend, library=library), tokens)
            if tokens == 1:
                check_pages(name, partial(attend_as_a_program, library=library), tokens)


def check_pages(name: str, attend: Implementation, tokens: int) -> None:
    """Write tokens to pages with other content, and compare the planes with blocks of heads that plain torch mixes."""
    head_dim, page = 96, 16
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, tokens, heads, head_dim, generator=generator) for heads in (4, 2, 2))
    pools = [pool(name, head_dim, page, 3) for _ in range(2)]
    table, starts = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([5])
    for cache in pools:
        cache[2].zero_()  # positions 0 .. 4 are attended, too
    attend(query, key, value, *pools, table, starts, torch.tensor([tokens]), 0, SCALE)
    codes, scales = code_planes(pools[0])[0], code_planes(pools[0])[-1]
    assert codes[1].shape == (3, 2, page, 3, 32 if name == "q8_0" else 16)
    assert codes[1].data_ptr() == pools[0].data_ptr(), "codes come first"
    assert scales[1].shape[-1] == 2
    for cache, new in zip(pools, (key, value), strict=True):
        expected = FORMATS[name].quantize_blocks(mixed(new[0]).reshape(-1, 32)).view(tokens, 2, 3, -1)
        positions = torch.arange(5, 5 + tokens)
        found = kept_at(cache, table[0][positions // page], positions % page)
        assert torch.equal(found, expected)


def test_attention_is_that_of_the_codes_in_float64() -> None:
    for at, (kinds, name) in enumerate(every_pair(PAIRS, IMPLEMENTATIONS)):  # three of them, so all meet both windows
        window = (0, 9)[at % 2]
        with in_case(window, kinds, name):
            for head_dim, page in ((32, 16), (96, 5), (128, 64)):
                grown = Grown(kinds, head_dim, window, page)
                for counts in PASSES:
                    found, expected = grown.run(implementation_of(name), counts)
                    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_an_instruction_attends_codes_as_the_loop_does(library: str) -> None:
    for window, kinds in every_pair([0, 9], PAIRS):
        with in_case(window, kinds):
            for head_dim, page, heads in ((32, 16, 2), (96, 5, 4), (128, 64, 6), (64, 16, 8), (256, 16, 10)):
                grown = Grown(kinds, head_dim, window, page, heads)
                grown.run(partial(sliced_attend, library=library), [40, 17])
                for counts in [[1, 1]] * 6:
                    found, expected = grown.run(partial(attend_as_a_program, library=library), counts)
                    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", CODED)
def test_a_damaged_query_shows_in_its_answer(library: str, kind: KVType, fault: float) -> None:
    """A query may be rounded to whole numbers, which cannot say that it is damaged."""
    grown = Grown((kind, kind), 64)
    grown.run(partial(sliced_attend, library=library), [20, 3])

    def damaged(query: Tensor, *rest: object) -> Tensor:
        query[0, 0, 4, 37] = fault
        return attend_as_a_program(query, *rest, library=library)

    answers = grown.run(damaged, [1, 1])[0]
    assert answers[4].isnan().all()
    assert answers[[0, 1, 2, 3, *range(5, 12)]].isfinite().all()


@pytest.mark.parametrize("kinds", PAIRS, ids=str)
def test_chunk_borders_do_not_show(library: str, kinds: tuple[KVType, KVType]) -> None:
    """Whatever the borders, a query meets the same codes in the same order: the bits agree."""
    whole, parts = Grown(kinds, 64), Grown(kinds, 64)
    inputs = [torch.randn(1, 60, heads, 64, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 2)]

    def run(grown: Grown, sizes: list[int]) -> Tensor:
        found, start = [], 0
        for size in sizes:
            tokens = [one[:, start : start + size].contiguous() for one in inputs]
            where = (*grown.pools, grown.table[:1], torch.tensor([start]), torch.tensor([size]))
            found.append(sliced_attend(*tokens, *where, 0, SCALE, library=library))
            start += size
        return torch.cat(found, dim=1)

    expected = run(whole, [60])
    assert torch.equal(run(parts, [16, 3, 41]), expected)
    for one, other in zip(whole.pools, parts.pools, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_layers_that_share_a_cache_read_the_codes_that_were_written() -> None:
    """The second layer's queries meet what the first layer's did, and the pools stay as they are."""
    for name, kinds, tokens in every_pair(
        IMPLEMENTATIONS, [("q8_0", "q4_0"), ("q5_0", "q5_0"), (torch.float32, torch.float32)], [1, 13]
    ):
        with in_case(name, kinds, tokens):
            attend = implementation_of(name)
            for window in (0, 9):
                grown = Grown(kinds, 64, window)
                grown.run(attend, [11, 20])
                counts = [tokens, max(1, tokens - 4)]
                asked: list[Tensor] = []

                def keep_query(
                    query: Tensor, *rest: object, attend: Implementation = attend, asked: list = asked
                ) -> Tensor:
                    asked.append(query)
                    return attend(query, *rest)

                starts = torch.tensor([len(row) for row in grown.seen[0]])
                first, _ = grown.run(keep_query, counts)
                before = [one.view(torch.uint8).clone() for one in grown.pools]
                where = (*grown.pools, grown.table, starts, torch.tensor(counts))
                shared = attend(asked[0], None, None, *where, window, SCALE, grown.sinks)
                found = torch.cat([shared[row, :count].flatten(0, 1) for row, count in enumerate(counts)]).double()
                torch.testing.assert_close(found, first, rtol=0, atol=2e-6)
                assert all(
                    torch.equal(one.view(torch.uint8), other) for one, other in zip(grown.pools, before, strict=True)
                )


def test_the_op_shares_a_cache_too() -> None:
    grown = Grown(("q8_0", "q8_0"), 32)
    grown.run(sliced_attend, [6, 3])
    query = torch.randn(2, 3, 6, 32, generator=torch.Generator().manual_seed(0))
    where = (*grown.pools, grown.table, torch.tensor([3, 0]), torch.tensor([3, 3]), 0, SCALE)
    found = attend(query, None, None, *where)
    torch.testing.assert_close(found, masked_attend(query, None, None, *where), rtol=0, atol=2e-6)


def test_float8_is_plain_torch_and_saturates() -> None:
    grown = Grown((FLOAT8, FLOAT8), 64)
    for counts in PASSES:
        found, expected = grown.run(sliced_attend, counts)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    huge = entries(torch.full((1, 64), 1e4), grown.pools[0])
    assert heads_of(huge, torch.float32)[0, 0] == 448
    assert head_dim_of(grown.pools[0]) == 64


def test_a_snapshot_brings_codes_back_into_another_row() -> None:
    grown = Grown(("q5_0", "q8_0"), 64)
    grown.run(sliced_attend, [23, 30])
    cache = KVCache(*grown.pools, grown.table)
    cache.copy_in(grown.table[0], cache.copy_out(grown.table[1]))
    assert all(torch.equal(one[grown.table[0]], one[grown.table[1]]) for one in grown.pools)
