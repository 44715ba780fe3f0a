"""Split-KV decode of keys that are in the cache, against attention over all live ones in float64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import in_case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphcore.kernels.gpu.attention import decode
from graphcore.kernels.gpu.attention.decode import attend_token, launch_attend_token
from graphcore.kernels.gpu.attention.splits import ALONE_TILES, MOST_SHARE, keys_of_tile, most_splits, split_count
from graphcore.kernels.ops.attention_parameters import AttentionParameters

pytestmark = pytest.mark.thorough

TILE = 16
ONE_PAGE = torch.zeros(1, 1, dtype=torch.int32)
# float32: scores up to 10; bfloat16 and float16: weights are rounded before they multiply values
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` live positions, the new one included; 0 is a row without a token."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    slots: int = 300
    window: int = 0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    has_sinks: bool = False
    cap: float = 0.0
    page: int = 0  # positions of a page, which divides the slots; 0 for one page of all


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever is allocated without a value holds NaN: a result that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attended(query: Tensor, keys: Tensor, values: Tensor, scale: float, sink: Tensor | None, cap: float) -> Tensor:
    """Return one head's answer [E] to its query [E] over keys and values [L, E]."""
    scores = scale * (keys.double() @ query.double())
    if cap:
        scores = cap * (scores / cap).tanh()
    if sink is not None:
        scores = torch.cat((scores, sink.double().view(1)))
    return scores.softmax(0)[: len(keys)] @ values.double()


def check(case: Case, tile: int = TILE, arrivals: Tensor | None = None, alone: int = 1) -> None:
    generator = torch.Generator().manual_seed(sum(case.lengths))
    batch, scale = len(case.lengths), 1.5 / math.sqrt(case.head_dim)
    query = torch.randn(batch, 1, case.heads, case.head_dim, generator=generator).to(case.dtype)
    page = case.page or case.slots
    table = torch.randperm(batch * (case.slots // page), generator=generator).int().view(batch, -1)
    size = (table.numel(), case.kv_heads, page, case.head_dim)
    k_cache, v_cache = (torch.full(size, torch.nan, dtype=case.cache_dtype) for _ in range(2))
    sinks = 3 * torch.randn(case.heads, generator=generator) if case.has_sinks else None
    expected = torch.zeros(query.shape, dtype=torch.float64)
    for row, length in enumerate(case.lengths):
        seen = min(length, case.window or length)
        slot = torch.arange(length - seen, length) % case.slots
        new = torch.randn(2, case.kv_heads, seen, case.head_dim, generator=generator).to(case.cache_dtype)
        pages, places = table[row, slot // page], slot % page
        k_cache[pages, :, places], v_cache[pages, :, places] = new.transpose(1, 2)
        for head in range(case.heads if length else 0):
            keys, values = new.to(case.dtype)[:, head // (case.heads // case.kv_heads)]
            sink = None if sinks is None else sinks[head]
            expected[row, 0, head] = attended(query[row, 0, head], keys, values, scale, sink, case.cap)
    starts, counts = (
        torch.tensor(numbers) for numbers in zip(*((n - 1, int(n > 0)) for n in case.lengths), strict=True)
    )
    starts = starts.clamp(min=0)
    spans = (starts, counts, AttentionParameters(case.window, scale, sinks, cap=case.cap))
    found = launch_attend_token(query, None, None, k_cache, v_cache, table, *spans, arrivals, tile=tile, alone=alone)
    assert found.dtype == case.dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=CLOSE[case.dtype])


@pytest.mark.parametrize(
    ("length", "has_sinks"),
    [*((length, True) for length in (1, 2, TILE - 1, TILE, TILE + 1, 3 * TILE, 300)), (TILE + 1, False), (299, False)],
)
def test_every_length_is_split_and_added_up(length: int, has_sinks: bool) -> None:
    check(Case((length,), has_sinks=has_sinks))


@pytest.mark.parametrize(
    ("length", "has_sinks"), [(ALONE_TILES * TILE, False), (ALONE_TILES * TILE + 1, True), (300, True)]
)
def test_short_sequences_are_not_split(length: int, has_sinks: bool) -> None:
    check(Case((length, 5), has_sinks=has_sinks), alone=ALONE_TILES)
    check(Case((length, 30), slots=100, window=100, has_sinks=has_sinks), alone=ALONE_TILES)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_of_a_batch_have_lengths_of_their_own_and_some_have_no_token(has_sinks: bool) -> None:
    check(Case((70, 0, 17, 1), has_sinks=has_sinks))


@pytest.mark.parametrize(("page", "has_sinks"), [(1, True), (10, False), (20, True), (60, False)])
def test_pages_may_be_smaller_and_larger_than_a_tile(page: int, has_sinks: bool) -> None:
    check(Case((60, 0, 41, 17), slots=60, has_sinks=has_sinks, page=page))
    check(Case((255, 19, 20, 61), slots=60, window=60, has_sinks=has_sinks, page=page))


@pytest.mark.parametrize("length", [1, 50, 51, 101, 1234])
def test_a_ring_holds_the_window_wherever_it_begins(length: int) -> None:
    check(Case((length, 30), slots=50, window=50, has_sinks=True))


@pytest.mark.parametrize("length", [36, 37, 38, 290])
def test_of_a_buffer_longer_than_the_window_the_window_alone_is_read(length: int) -> None:
    check(Case((length,), window=37))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((width, torch.float32) for width in (1, 4, 80, 96, 256)), (64, torch.bfloat16), (80, torch.bfloat16)],
)
def test_head_dims_need_not_be_powers_of_two(head_dim: int, dtype: torch.dtype) -> None:
    check(Case((70,), head_dim=head_dim, dtype=dtype, cache_dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (5, 1), (20, 1), (8, 1)])
def test_query_heads_share_kv_heads_in_order(heads: int, kv_heads: int) -> None:
    check(Case((60, 5), heads=heads, kv_heads=kv_heads, has_sinks=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_may_have_a_dtype_of_its_own(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check(Case((40, 3), dtype=dtype, cache_dtype=cache_dtype))


def test_many_splits_are_added_up_in_several_rounds() -> None:
    check(Case((400,), heads=16, kv_heads=1, head_dim=64, slots=400))


@pytest.mark.parametrize(
    ("slots", "window", "dtype"), [(100, 0, torch.float32), (100, 37, torch.bfloat16), (50, 50, torch.float16)]
)
def test_capped_scores_are_added_up_over_splits_rings_and_sinks(slots: int, window: int, dtype: torch.dtype) -> None:
    for heads in (2, 6):
        case = Case((90, 0, 17, 1), heads, 2, 32, slots, window, dtype, dtype, has_sinks=heads == 6, cap=1.5)
        check(case)


@pytest.mark.parametrize("lengths", [(60, 5, 0), (60, 60, 60), (1, 1, 1)])
def test_arrivals_are_zero_again(lengths: tuple[int, ...]) -> None:
    arrivals = torch.zeros(len(lengths) * 2, dtype=torch.int32)
    for _ in range(2):
        check(Case(lengths, slots=60), arrivals=arrivals)
        assert arrivals.count_nonzero() == 0


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    keys, values = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 64, 16)
    keys[0, 0, 5, 0], values[0, 0, 5] = 3000, 7
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1
    spans = (torch.tensor([63]), torch.tensor([1]))
    for sign, answer in ((1.0, 7.0), (-1.0, 0.0)):
        how = AttentionParameters(0, 1.0)
        found = launch_attend_token(sign * query, None, None, keys, values, ONE_PAGE, *spans, how, tile=TILE, alone=1)
        torch.testing.assert_close(found, torch.full_like(found, answer))
    how = AttentionParameters(0, 1.0, torch.full((1,), 1e4))
    found = launch_attend_token(query, None, None, keys, values, ONE_PAGE, *spans, how, tile=TILE, alone=1)
    assert found.abs().max() == 0


def test_caches_beyond_2_31_elements_are_addressed_in_64_bits() -> None:
    torch.use_deterministic_algorithms(False)  # or all of it would be touched
    table = torch.tensor([[2], [0], [1]], dtype=torch.int32)
    far = (1 << 30) + (1 << 12)
    memory = torch.empty(2 * far + (1 << 12), dtype=torch.float16)
    cache = memory.as_strided((3, 1, 64, 16), (far, 1024, 16, 1))
    cache.copy_(torch.randn(3, 1, 64, 16))
    query = torch.randn(3, 1, 2, 16)
    spans = torch.tensor([40, 63, 9]), torch.tensor([1, 1, 1]), AttentionParameters(0, 0.25)
    near = launch_attend_token(query, None, None, cache.clone(), cache.clone(), table, *spans, tile=TILE, alone=1)
    assert torch.equal(launch_attend_token(query, None, None, cache, cache, table, *spans, tile=TILE, alone=1), near)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_case_matches_float64(data: st.DataObject) -> None:
    page = data.draw(st.integers(1, 20), "page")
    slots = page * data.draw(st.integers(1, 60 // page), "pages")
    window = data.draw(st.sampled_from([0, 1, slots, max(1, slots // 2)]), "window")
    longest = 2 * slots if window == slots else slots
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=3), "lengths")
    kv_heads, group = data.draw(st.integers(1, 2), "kv_heads"), data.draw(st.integers(1, 3), "group")
    has_sinks = data.draw(st.booleans(), "has_sinks")
    check(Case(tuple(lengths), kv_heads * group, kv_heads, 8, slots, window, has_sinks=has_sinks, page=page))


def test_op_is_the_kernel_and_its_fake_has_the_result_s_shape() -> None:
    query, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 40, 16)
    place = (
        cache,
        cache.flip(2),
        torch.tensor([[1], [0]], dtype=torch.int32),
        torch.tensor([30, 3]),
        torch.ones(2).long(),
    )
    found = attend_token(query, None, None, *place, AttentionParameters(0, 0.25))
    assert torch.equal(found, launch_attend_token(query, None, None, *place, AttentionParameters(0, 0.25)))
    capped = attend_token(query, None, None, *place, AttentionParameters(0, 0.25, cap=0.5))
    assert torch.equal(capped, launch_attend_token(query, None, None, *place, AttentionParameters(0, 0.25, cap=0.5)))
    assert not torch.equal(capped, found)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (query, *place)]
        fake = attend_token(fakes[0], None, None, *fakes[1:], AttentionParameters(0, 0.25))
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


def answers(lengths: tuple[int, ...], **how: int) -> Tensor:
    """Return the answers to sequences whose numbers are those of their place in the batch."""
    place, kv_heads, slots, width = torch.arange(len(lengths), dtype=torch.int32)[:, None], 2, 600, 16
    rows = [torch.randn(3, kv_heads, slots, width, generator=torch.Generator().manual_seed(at)) for at in range(8)]
    query, k_cache, v_cache = torch.stack(rows[: len(lengths)], dim=1)
    spans = (torch.tensor(lengths) - 1).clamp(min=0), torch.tensor(lengths).clamp(max=1)
    query = query[:, :, 0].repeat_interleave(2, 1)[:, None]
    return launch_attend_token(
        query, None, None, k_cache, v_cache, place, *spans, AttentionParameters(0, 0.3), tile=TILE, **how
    )


@pytest.mark.parametrize("processors", [1, 5])
def test_an_answer_has_the_same_bits_whatever_lies_beside_it(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "processors_of", lambda _device: processors)
    own = 600, 40, 0, 350  # the first is more tiles than a split takes, MOST_SHARE
    whole = answers(own)
    for lengths in ((600, 1, 1, 1), (5, 40, 1, 350), (600, 300, 0, 350)):
        found = answers(lengths)
        for row, length in enumerate(lengths):
            if length == own[row]:
                assert torch.equal(found[row], whole[row])


@pytest.mark.slow
@pytest.mark.parametrize(("processors", "has_sinks"), [(1, True), (2, False), (5, True)])
def test_long_and_short_sequences_are_split_on_devices_of_all_sizes(
    processors: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "processors_of", lambda _device: processors)
    check(Case((600, 300, 0), heads=6, kv_heads=3, slots=600, page=100, has_sinks=has_sinks))
    arrivals = torch.zeros(8, dtype=torch.int32)
    check(Case((600, 0, 17, 350), slots=600, has_sinks=has_sinks), arrivals=arrivals)
    assert arrivals.count_nonzero() == 0


@pytest.mark.parametrize(
    ("batch", "kv_heads", "expected"), [(1, 8, 33), (4, 8, 33), (8, 8, 16), (2, 4, 66), (64, 8, 2), (300, 8, 1)]
)
def test_a_long_sequence_has_the_splits_that_it_has_alone_up_to_a_bound(
    batch: int, kv_heads: int, expected: int
) -> None:
    assert most_splits(batch, kv_heads, 131072, 64, 132) == expected
    assert most_splits(batch, kv_heads, 131072, 64, 132) >= split_count(batch, kv_heads, 131072, 64, 132)
    assert most_splits(batch, kv_heads, 64 * MOST_SHARE.value, 64, 132) <= MOST_SHARE.value


def test_programs_fill_the_device_once() -> None:
    for visible, kv_heads, batch in product([1, 64, 128, 4096, 131072], [1, 5, 8, 32], [1, 2, 8, 300]):
        with in_case(batch, kv_heads, visible):
            splits = split_count(batch, kv_heads, visible, 64, 132)
            programs = splits * batch * kv_heads
            assert splits == 1 or programs <= 2 * 132
            assert splits <= math.ceil(visible / 64)
            if visible == 131072 and batch * kv_heads <= 32:
                assert programs >= 1.5 * 132


def test_tiles_are_16_kib_of_keys() -> None:
    assert [keys_of_tile(width, torch.bfloat16) for width in (64, 128, 256)] == [128, 64, 32]
    assert keys_of_tile(128, torch.float32) == 32
