"""`attend` as a GPU computes it, chunks above all, against a loop over positions in float64 and the CPU's `attend`."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from attend_cases import Implementation, Sequences, Shape, beyond_the_cap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphcore.kernels.cpu.attention import sliced_attend
from graphcore.kernels.gpu.attention.prefill import tiles_of
from graphcore.kernels.gpu.attention.write_and_attend import launch_attend
from graphcore.kernels.gpu.registration import register
from graphcore.kernels.ops.attend import masked_attend

pytestmark = pytest.mark.thorough

# float32: a softmax of scores up to 10, then a sum of values up to 4
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever is allocated without a value holds NaN: a result that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(sequences: Sequences, *passes: list[int], padding: int = 0) -> None:
    """Run the passes; after each, the real tokens' results and every byte of both caches must be right."""
    narrowest = max(CLOSE[sequences.shape.dtype], CLOSE[sequences.shape.cache_dtype])
    for counts in passes:
        found, expected = sequences.run(launch_attend, counts, padding)
        torch.testing.assert_close(found, expected, rtol=0, atol=narrowest)
        for cache, right in zip((sequences.k_cache, sequences.v_cache), sequences.expected_caches(), strict=True):
            assert torch.equal(cache, right), f"cache after counts {counts}"


@pytest.mark.parametrize(
    "window", [0, 1, 8, 31, 32, *(pytest.param(window, marks=pytest.mark.slow) for window in (3, 100))]
)
@pytest.mark.parametrize("page", [0, pytest.param(4, marks=pytest.mark.slow), 5])
def test_chunks_of_odd_sizes_then_single_tokens_match_the_loop(window: int, page: int) -> None:
    check(Sequences(Shape(window=window, page=page), 1), [5], [7], [1], [1], [2], [3], [1], [1])


@pytest.mark.parametrize("window", [4, 5])
@pytest.mark.parametrize("page", [0, 1, 2])
def test_ring_wraps_around_many_times(window: int, page: int) -> None:
    check(Sequences(Shape(window=window, context=64, page=page), 1), [1], [9], [1], [4], [5], [17], [1], [1], [3])


@pytest.mark.slow
@pytest.mark.parametrize(("window", "padding"), [(0, 0), (0, 3), (6, 0), (6, 3)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_of_a_batch_grow_at_their_own_pace(window: int, padding: int, has_sinks: bool) -> None:
    sequences = Sequences(Shape(window=window, has_sinks=has_sinks), 3)
    check(sequences, [5, 1, 0], [2, 7, 3], [1, 1, 1], [0, 1, 1], [4, 0, 9], [0, 0, 1], padding=padding)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("window", [0, 4])
def test_a_pass_without_tokens_leaves_the_cache_as_it_is(tokens: int, window: int) -> None:
    sequences = Sequences(Shape(window=window), 2)
    check(sequences, [9, 0])
    before = sequences.k_cache.clone(), sequences.v_cache.clone()
    sequences.run(launch_attend, [0, 0], padding=tokens - 1)
    assert torch.equal(sequences.k_cache, before[0])
    assert torch.equal(sequences.v_cache, before[1])


def test_a_window_may_have_slots_for_the_whole_context() -> None:
    check(Sequences(Shape(window=4, is_ring=False), 2), [3, 9], [1, 1], [6, 2], [1, 1], [20, 18])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 3), (6, 2), (5, 1), (1, 1), (14, 2)])
def test_query_heads_share_kv_heads_in_order(heads: int, kv_heads: int) -> None:
    check(Sequences(Shape(heads, kv_heads, has_sinks=True), 2), [4, 2], [1, 1], [3, 1])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("cache_dtype", CLOSE)
def test_cache_may_have_a_dtype_of_its_own(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    shape = Shape(window=4, dtype=dtype, cache_dtype=cache_dtype)
    check(Sequences(shape, 2), [5, 2], [1, 1], [3, 4], [1, 0])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims_need_not_be_powers_of_two(head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(2, 1, head_dim, dtype=dtype, cache_dtype=dtype, scale=0.1)
    check(Sequences(shape, 1), [11], [9], [1])


def compare(other: Implementation, tokens: int, starts: list[int], counts: list[int], shape: Shape) -> None:
    """Attend as the GPU does and as another does, both over a cache whose dead slots are NaN."""
    generator = torch.Generator().manual_seed(tokens)
    batch, page = len(starts), shape.slots // shape.pages
    table = torch.randperm(batch * shape.pages, generator=generator).int().view(batch, -1)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    new = [torch.randn(batch, tokens, h, shape.head_dim, generator=generator).to(shape.dtype) for h in heads]
    size = (table.numel(), shape.kv_heads, page, shape.head_dim)
    caches = torch.randn(2, *size, generator=generator).to(shape.cache_dtype)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        dead = torch.arange(start, shape.slots)
        caches[:, table[row, dead // page], :, dead % page] = torch.nan
        for rows in new[1:]:
            rows[row, count:] = torch.nan  # padding
    spans = (table, torch.tensor(starts), torch.tensor(counts), shape.window, 0.3)
    cap = {"cap": shape.cap}
    theirs, ours = caches.clone(), caches.clone()
    expected = other(*(rows.nan_to_num() for rows in new), *theirs, *spans, **cap)
    found = launch_attend(*new, *ours, *spans, **cap)
    assert found.isfinite().all()
    for row, count in enumerate(counts):
        torch.testing.assert_close(found[row, :count], expected[row, :count], rtol=0, atol=CLOSE[shape.dtype])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("other", [sliced_attend, masked_attend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 20, 70])
def test_chunks_of_many_tiles_over_a_past_of_many_tiles(other: Implementation, window: int, dtype: torch.dtype) -> None:
    rows, tile, _ = tiles_of(1000, 16, dtype)
    tokens = rows // 4 + 3  # four heads each: two programs
    shape = Shape(4, 1, 16, 400, window, dtype, dtype, is_ring=False, page=40)
    compare(other, tokens, [0, 2 * tile + 2, tile], [tokens, tokens - 5, 0], shape)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
@pytest.mark.parametrize("start", [1, 63, 64, 65])
def test_tiles_end_where_keys_end(tokens: int, start: int) -> None:
    shape = Shape(2, 1, 16, context=140, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    compare(sliced_attend, tokens, [start], [tokens], shape)


def test_inputs_may_be_slices_of_one_product() -> None:
    def sliced(query: Tensor, key: Tensor, value: Tensor, *rest: object, **cap: float) -> Tensor:
        heads = [rows.shape[2] for rows in (query, key, value)]
        joined = torch.cat((query, key, value), dim=2)
        return launch_attend(*joined.split(heads, dim=2), *rest, **cap)  # type: ignore[arg-type]

    sequences = Sequences(Shape(), 2)
    for counts in ([3, 2], [1, 1]):
        found, expected = sequences.run(sliced, counts)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (0, True), (6, False), (6, True)])
def test_scores_are_capped_before_mask_and_sinks(window: int, has_sinks: bool, dtype: torch.dtype) -> None:
    shape = Shape(6, 2, window=window, dtype=dtype, cache_dtype=dtype, has_sinks=has_sinks, cap=2.0)
    check(Sequences(shape, 3), [5, 1, 0], [2, 7, 3], [1, 1, 1], [4, 0, 19], [0, 0, 1], padding=1)


@pytest.mark.parametrize("window", [0, 70])
def test_capped_chunks_of_many_tiles_over_a_past_of_many_tiles(window: int) -> None:
    shape = Shape(4, 1, 16, 400, window, torch.bfloat16, torch.bfloat16, is_ring=False, cap=2.0)
    compare(sliced_attend, 35, [0, 130, 64], [35, 30, 0], shape)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("tokens", [1, 40])
def test_scores_beyond_a_cap_weigh_as_the_cap(tokens: int, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's numpy on a power that overflows
        found, expected = beyond_the_cap(launch_attend, tokens, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_batch_matches_the_loop(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 2), "kv_heads")
    heads = kv_heads * data.draw(st.integers(1, 3), "group")
    window, has_sinks = data.draw(st.integers(0, 26), "window"), data.draw(st.booleans(), "has_sinks")
    shape = Shape(heads, kv_heads, 4, 24, window, has_sinks=has_sinks, page=data.draw(st.integers(0, 7), "page"))
    batch = data.draw(st.integers(1, 3), "batch")
    left, passes = [shape.context] * batch, []
    for _ in range(data.draw(st.integers(1, 4), "passes")):
        counts = [data.draw(st.integers(0, min(10, room)), "count") for room in left]
        left = [room - count for room, count in zip(left, counts, strict=True)]
        passes.append(counts)
    check(Sequences(shape, batch), *passes, padding=data.draw(st.integers(0, 2), "padding"))


def test_a_gpu_s_attend_is_this_one_after_registration_and_the_cpu_s_stays() -> None:
    register()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("graphcore::attend", "CUDA")
    assert has_kernel("graphcore::attend", "CPU")
    assert has_kernel("graphcore::attend_token", "CompositeExplicitAutograd")
