"""All implementations of attention over a static cache, against float64, one query at a time."""

from dataclasses import replace
from itertools import cycle
from itertools import product as every_pair

import pytest
import torch
from attend_cases import SENTINEL, Implementation, Sequences, Shape, beyond_the_cap
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import in_case
from support.packed_matrices import native_kernels
from torch import Tensor

from graphcore.kernels.cpu.attention import sliced_attend
from graphcore.kernels.ops.attend import attend, masked_attend


def native_attend(*arguments: Tensor | int | float | None, cap: float = 0.0) -> Tensor:
    return sliced_attend(*arguments, library=native_kernels(), cap=cap)  # type: ignore[arg-type]  # the op's own


IMPLEMENTATIONS = {"sliced": sliced_attend, "masked": masked_attend, "op": attend, "native": native_attend}
# float32: a softmax of scores up to 10, then a sum of values up to 4
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}

ONE_PAGE = torch.zeros(1, 1, dtype=torch.int32)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def check(sequences: Sequences, implementation: Implementation, passes: list[list[int]], padding: int = 0) -> None:
    """Run the passes; after each, the real tokens' results and every byte of both caches must be right."""
    narrowest = max(CLOSE[sequences.shape.dtype], CLOSE[sequences.shape.cache_dtype])
    for counts in passes:
        found, expected = sequences.run(implementation, counts, padding)
        assert (found - expected).abs().max().item() < narrowest if len(found) else True, f"counts {counts}"
        for cache, right in zip((sequences.k_cache, sequences.v_cache), sequences.expected_caches(), strict=True):
            assert torch.equal(cache, right), f"cache after counts {counts}"


@every_implementation
def test_chunks_of_odd_sizes_then_single_tokens_match_the_loop(implementation: Implementation) -> None:
    windows = [0, 1, 3, 8, 31, 32, 100]
    for window, page in [
        *zip(windows, cycle([0, 1, 4, 5]), strict=False),
        *zip(windows, cycle([5, 4, 0]), strict=False),
    ]:
        with in_case(window, page):
            shape = Shape(window=window, page=page)
            check(Sequences(shape, 1), implementation, [[5], [7], [1], [1], [2], [3], *[[1]] * 13])


@every_implementation
def test_ring_wraps_around_many_times(implementation: Implementation) -> None:
    for window, page in every_pair([4, 5], [0, 1, 2, 4]):
        with in_case(window, page):
            shape = Shape(window=window, context=64, page=page)
            check(Sequences(shape, 1), implementation, [[1]] * 11 + [[9], [1], [4], [5], [1], [1]])


@every_implementation
def test_bits_do_not_depend_on_pages(implementation: Implementation) -> None:
    for window, (page, dtype) in every_pair(
        [0, 24], zip([1, 2, 4, 8, 12], cycle([torch.float32, torch.bfloat16]), strict=False)
    ):
        with in_case(window, page, dtype):
            shape = Shape(6, 2, 20, context=96, window=window, dtype=dtype, cache_dtype=dtype, has_sinks=True)
            whole, paged = Sequences(shape, 2), Sequences(replace(shape, page=page), 2)
            assert whole.shape.slots == paged.shape.slots
            for counts in ([5, 1], [19, 7], [1, 1], [0, 1], [33, 30], *[[1, 1]] * 9, [9, 9]):
                (_, expected), (_, found) = (one.step(implementation, counts) for one in (whole, paged))
                for row, count in enumerate(counts):
                    assert torch.equal(found[row, :count], expected[row, :count]), f"counts {counts}"


@every_implementation
def test_first_chunk_longer_than_the_ring_leaves_its_last_tokens_in_it(implementation: Implementation) -> None:
    for tokens in [3, 4, 5, 9, 17]:
        with in_case(tokens):
            check(Sequences(Shape(window=4), 1), implementation, [[tokens], [1], [6]])


@every_implementation
def test_rows_of_a_batch_grow_at_their_own_pace(implementation: Implementation) -> None:
    for window, padding in every_pair([0, 6], [0, 3]):
        with in_case(window, padding):
            passes = [[5, 1, 0], [2, 7, 3], [1, 1, 1], [0, 1, 1], [4, 0, 9], [0, 0, 1], [1, 1, 1]]
            check(Sequences(Shape(window=window), 3), implementation, passes, padding)


@every_implementation
def test_a_pass_without_tokens_leaves_the_cache_as_it_is(implementation: Implementation) -> None:
    for window, grown in every_pair([0, 4], [0, 3, 4, 9]):
        with in_case(window, grown):
            sequences = Sequences(Shape(window=window), 2)
            if grown:
                sequences.run(implementation, [grown, 0])
            before = sequences.k_cache.clone(), sequences.v_cache.clone()
            sequences.run(implementation, [0, 0], padding=5)
            assert torch.equal(sequences.k_cache, before[0])
            assert torch.equal(sequences.v_cache, before[1])
            assert (sequences.k_cache[sequences.table[1]] == SENTINEL).all()


@every_implementation
def test_a_window_may_have_slots_for_the_whole_context(implementation: Implementation) -> None:
    shape = Shape(window=4, is_ring=False)
    check(Sequences(shape, 2), implementation, [[3, 9], [1, 1], [6, 2], [1, 1], [1, 1], [20, 18]])


@every_implementation
def test_query_heads_share_kv_heads_in_order(implementation: Implementation) -> None:
    for heads, kv_heads in [(4, 4), (6, 3), (6, 2), (5, 1), (1, 1)]:
        with in_case(heads, kv_heads):
            check(Sequences(Shape(heads=heads, kv_heads=kv_heads), 2), implementation, [[4, 2], [1, 1], [3, 1]])


@every_implementation
def test_cache_may_have_a_dtype_of_its_own(implementation: Implementation) -> None:
    for (dtype, cache_dtype), window in every_pair(
        [
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
        ],
        [0, 4],
    ):
        with in_case(dtype, cache_dtype, window):
            shape = Shape(window=window, dtype=dtype, cache_dtype=cache_dtype)
            check(Sequences(shape, 2), implementation, [[5, 2], [1, 1], [3, 4], [1, 0], [1, 1]])


@every_implementation
def test_scale_multiplies_the_scores(implementation: Implementation) -> None:
    check(Sequences(Shape(scale=0.05), 1), implementation, [[6], [1]])
    check(Sequences(Shape(scale=2.0), 1), implementation, [[6], [1]])


@every_implementation
def test_each_head_s_sink_takes_its_share_of_the_softmax(implementation: Implementation) -> None:
    for window, (heads, kv_heads), dtype in every_pair([0, 4], [(4, 4), (6, 2)], [torch.float32, torch.bfloat16]):
        with in_case(window, heads, kv_heads, dtype):
            shape = Shape(heads, kv_heads, window=window, dtype=dtype, cache_dtype=dtype, has_sinks=True)
            passes = [[5, 1, 0], [2, 7, 3], [1, 1, 1], [0, 1, 1], [4, 0, 9], [1, 1, 1]]
            check(Sequences(shape, 3), implementation, passes, padding=2)
            check(Sequences(shape, 3), implementation, passes)


@every_implementation
@pytest.mark.parametrize("tokens", [1, 200])
def test_a_sink_below_every_score_changes_nothing_and_one_above_takes_all(
    implementation: Implementation, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, tokens, heads, 8, generator=generator) for heads in (4, 2, 2))

    def run(*sinks: torch.Tensor) -> torch.Tensor:
        caches = torch.zeros(2, 1, 2, 256, 8)
        return implementation(
            query, key, value, *caches, ONE_PAGE, torch.tensor([0]), torch.tensor([tokens]), 0, 0.3, *sinks
        )

    torch.testing.assert_close(run(torch.full((4,), -1e4)), run(), rtol=1e-5, atol=1e-6)
    assert run(torch.full((4,), 1e4)).abs().max() == 0


@every_implementation
def test_scores_are_capped_before_mask_and_sinks(implementation: Implementation) -> None:
    """Scores reach 10: a cap of 2 bends nearly all of them, one of 30 few; 19 tokens leave no whole vectors."""
    for window, has_sinks, dtype in every_pair([0, 4], [False, True], CLOSE):
        with in_case(window, has_sinks, dtype):
            passes = [[5, 1, 0], [2, 7, 3], [1, 1, 1], [0, 1, 1], [4, 0, 19], [1, 1, 1]]
            for cap, heads, padding in ((2.0, 6, 2), (30.0, 4, 0)):
                shape = Shape(heads, 2, window=window, dtype=dtype, cache_dtype=dtype, has_sinks=has_sinks, cap=cap)
                check(Sequences(shape, 3), implementation, passes, padding)


@every_implementation
def test_scores_beyond_a_cap_weigh_as_the_cap(implementation: Implementation) -> None:
    for dtype, tokens in every_pair(CLOSE, [1, 40]):
        with in_case(dtype, tokens):
            found, expected = beyond_the_cap(implementation, tokens, dtype)
            torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])


@every_implementation
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_cap_of_zero_is_none_and_a_huge_one_changes_little(implementation: Implementation, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, tokens, heads, 8, generator=generator) for heads in (4, 2, 2))
    past = torch.randn(2, 1, 2, 32, 8, generator=generator)
    spans = (ONE_PAGE, torch.tensor([20]), torch.tensor([tokens]), 0, 0.3)
    none, zero, huge = (
        implementation(query, key, value, *past.clone(), *spans, **cap) for cap in ({}, {"cap": 0.0}, {"cap": 3e3})
    )
    assert torch.equal(none, zero)
    assert not torch.equal(none, huge)
    torch.testing.assert_close(huge, none, rtol=0, atol=3e-3)  # a score of 3 moves by 1e-6, a last place of 1 is 4e-4


@every_implementation
def test_inputs_may_be_strided_views(implementation: Implementation) -> None:
    """Projections are sliced out of wider tensors; nothing may read past the strides."""

    def on_views(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object, **cap: float
    ) -> torch.Tensor:
        views = [torch.cat((x, x + 50), dim=2)[:, :, : x.shape[2]] for x in (query, key, value)]
        assert not views[0].is_contiguous()
        return implementation(*views, *rest, **cap)

    check(Sequences(Shape(), 2), on_views, [[3, 2], [1, 1]])


@every_implementation
def test_padding_of_a_full_cache_writes_nowhere(implementation: Implementation) -> None:
    check(Sequences(Shape(context=8), 2), implementation, [[6, 7], [2, 1]], padding=4)


@every_implementation
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_batch_matches_the_loop(implementation: Implementation, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 2), "kv_heads")
    shape = Shape(
        heads=kv_heads * data.draw(st.integers(1, 3), "group"),
        kv_heads=kv_heads,
        head_dim=4,
        context=24,
        window=data.draw(st.integers(0, 26), "window"),
        page=data.draw(st.integers(0, 7), "page"),
    )
    batch = data.draw(st.integers(1, 3), "batch")
    left, passes = [shape.context] * batch, []
    for _ in range(data.draw(st.integers(1, 6), "passes")):
        counts = [data.draw(st.integers(0, min(10, room)), "count") for room in left]
        left = [room - count for room, count in zip(left, counts, strict=True)]
        passes.append(counts)
    padding = data.draw(st.integers(0, 2), "padding")
    check(Sequences(shape, batch, data.draw(st.integers(0, 99), "seed")), implementation, passes, padding)


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_an_earlier_sequence_left_is_not_seen_even_if_it_is_nan(tokens: int) -> None:
    start, slots = 4, 12
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, tokens, 2, 8, generator=generator) for _ in range(3))
    past = torch.randn(2, 1, 2, slots, 8, generator=generator)
    dirty = past.clone()
    dirty[:, :, :, start + tokens :] = float("nan")
    starts, counts = torch.tensor([start]), torch.tensor([tokens])
    for implementation in (sliced_attend, masked_attend):
        clean = implementation(query, key, value, past[0].clone(), past[1].clone(), ONE_PAGE, starts, counts, 0, 0.3)
        found = implementation(query, key, value, dirty[0].clone(), dirty[1].clone(), ONE_PAGE, starts, counts, 0, 0.3)
        assert torch.equal(found, clean), implementation.__name__
