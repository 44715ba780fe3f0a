"""Attention of chunks whose keys are shared by splits, against float64 and against what one split computes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from arrivals import orders_of_arrival
from attend_cases import Sequences, Shape
from coded_cases import Grown
from support.cases import in_case
from torch import Tensor

from graphcore.kernels.gpu.attention import prefill
from graphcore.kernels.gpu.attention.write_and_attend import launch_attend
from graphcore.kernels.ops.kv_formats import FLOAT8, KVType
from graphcore.planning.workspace import PROCESSORS, rows_at_once

pytestmark = pytest.mark.thorough

# float32: a softmax of scores up to 10; bfloat16 and float16: weights are rounded before they multiply values
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
LONG = Shape(8, 2, 64, 2048, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, scale=0.125, page=64)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever is allocated without a value holds NaN: a result that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows and 16 keys, each of which may be a split, so that short sequences have up to 16."""
    monkeypatch.setattr(prefill, "tiles_of", lambda *_: (16, 16, 4))
    monkeypatch.setattr(prefill, "LEAST_TILES", 1)
    monkeypatch.setattr(prefill, "processors_of", lambda _: 16)


def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "splits_of_rows", lambda *_: 1)


class Chunk:
    """A chunk after pasts of `starts` positions; slots that hold none of them are NaN, and so is padding."""

    def __init__(self, shape: Shape, starts: list[int], counts: list[int]) -> None:
        self.shape, self.starts, self.counts = shape, torch.tensor(starts), torch.tensor(counts)
        generator, tokens = torch.Generator().manual_seed(sum(starts)), max(counts)
        self.table = torch.randperm(len(starts) * shape.pages, generator=generator).int().view(len(starts), -1)
        self.page = shape.slots // shape.pages
        pool = (2, self.table.numel(), shape.kv_heads, self.page, shape.head_dim)
        self.caches = torch.full(pool, torch.nan, dtype=shape.cache_dtype)
        size = (len(starts), tokens, shape.head_dim)
        self.query = torch.randn(*size[:2], shape.heads, size[2], generator=generator).to(shape.dtype)
        self.new = torch.randn(2, *size[:2], shape.kv_heads, size[2], generator=generator).to(shape.dtype)
        self.sinks = 3 * torch.randn(shape.heads, generator=generator) if shape.has_sinks else None
        self.past = []
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            past = torch.randn(2, shape.kv_heads, start, shape.head_dim, generator=generator).to(shape.cache_dtype)
            slot = torch.arange(max(0, start - shape.slots), start)
            pages = self.table[row, slot % shape.slots // self.page]
            self.caches[:, pages, :, slot % shape.slots % self.page] = past[:, :, slot].movedim(2, 0)
            self.new[:, row, count:] = torch.nan
            self.past.append(past)

    def attended(self, rows: slice = slice(None)) -> Tensor:
        """Return what the kernels make of some of the sequences."""
        spans = self.table[rows], self.starts[rows], self.counts[rows]
        caches = self.caches.clone()
        how = self.shape.window, self.shape.scale, self.sinks
        return launch_attend(self.query[rows], *self.new[:, rows], *caches, *spans, *how, cap=self.shape.cap)

    def expected(self, row: int) -> Tensor:
        """Return the answers to a sequence's tokens in float64."""
        shape, count, start = self.shape, int(self.counts[row]), int(self.starts[row])
        chunk = self.new[:, row, :count].transpose(1, 2)
        keys, values = (
            torch.cat((self.past[row].to(shape.dtype), chunk), 2)
            .double()
            .repeat_interleave(shape.heads // shape.kv_heads, 1)
        )  # [H, L, E]
        scores = shape.scale * self.query[row, :count].double().transpose(0, 1) @ keys.mT
        if shape.cap:
            scores = shape.cap * (scores / shape.cap).tanh()
        ago = start + torch.arange(count)[:, None] - torch.arange(start + count)
        hidden = (ago < 0) | (ago >= shape.window) if shape.window else ago < 0
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double().view(-1, 1, 1).expand(-1, count, 1)), 2)
        return (scores.softmax(2)[..., : start + count] @ values).transpose(0, 1)

    def check(self) -> None:
        found = self.attended()
        assert found.isfinite().all()
        for row, count in enumerate(self.counts):
            torch.testing.assert_close(
                found[row, :count].double(), self.expected(row), rtol=0, atol=CLOSE[self.shape.dtype]
            )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("start", "tokens"),
    [
        pytest.param(start, tokens, marks=() if start == 97 or tokens == 5 else pytest.mark.slow)
        for start in (0, 1, 15, 16, 17, 97, 300)
        for tokens in (2, 5, 16, 37)
    ],
)
def test_every_past_is_split_and_added_up(start: int, tokens: int) -> None:
    Chunk(Shape(4, 2, 16, 400, has_sinks=tokens == 5), [start], [tokens]).check()


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("window", "is_ring"),
    [
        (1, True),
        (40, True),
        (16, False),
        *(pytest.param(window, True, marks=pytest.mark.slow) for window in (7, 16, 100)),
        *(pytest.param(window, False, marks=pytest.mark.slow) for window in (1, 7, 40, 100)),
    ],
)
def test_windows_and_rings_are_split(window: int, is_ring: bool) -> None:
    for page in (0, 4, 10):
        shape = Shape(4, 2, 16, 400, window, is_ring=is_ring, has_sinks=page == 4, page=page)
        Chunk(shape, [333, 0, 30], [21, 21, 3]).check()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("window", "page"), [(0, 5), pytest.param(31, 0, marks=pytest.mark.slow), (40, 8)])
def test_sequences_grow_chunk_by_chunk(window: int, page: int) -> None:
    sequences = Sequences(Shape(context=128, window=window, has_sinks=True, page=page), 2)
    for counts in ([40, 3], [7, 30], [1, 1], [2, 0], [33, 16]):
        found, expected = sequences.run(launch_attend, counts, padding=1)
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[torch.float32])
        for cache, right in zip((sequences.k_cache, sequences.v_cache), sequences.expected_caches(), strict=True):
            assert torch.equal(cache, right)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        pytest.param(head_dim, dtype, marks=() if head_dim == 80 or dtype is torch.bfloat16 else pytest.mark.slow)
        for head_dim in (64, 80, 96, 128, 256, 512)
        for dtype in CLOSE
    ],
)
def test_every_width_and_dtype_is_split(head_dim: int, dtype: torch.dtype) -> None:
    Chunk(Shape(6, 2, head_dim, 256, dtype=dtype, cache_dtype=dtype, scale=0.1, page=16), [130, 7], [5, 2]).check()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", CLOSE)
def test_capped_scores_are_split(dtype: torch.dtype) -> None:
    shape = Shape(6, 2, 16, 256, dtype=dtype, cache_dtype=torch.float16, has_sinks=True, cap=2.0)
    Chunk(shape, [130, 7], [19, 2]).check()


SMALL, ODD = (32, 16), (96, 5)  # features of a head, and slots of a page
CODES = [((("q8_0", "q8_0"), 0), SMALL), ((("q5_0", "q4_0"), 33), ODD)]
MORE_CODES = [((("q8_0", "q8_0"), 0), ODD), ((("q5_0", "q4_0"), 33), SMALL)]
MORE_CODES += [(((FLOAT8, FLOAT8), 33), size) for size in (SMALL, ODD)]
MORE_CODES += [
    (kept, size) for kept in (((torch.float32, "q8_0"), 33), (("q4_0", torch.float32), 0)) for size in (SMALL, ODD)
]


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("kinds", "window", "head_dim", "page"),
    [
        *((*kept, *size) for kept, size in CODES),
        *(pytest.param(*kept, *size, marks=pytest.mark.slow) for kept, size in MORE_CODES),
    ],
    ids=str,
)
def test_codes_are_split(kinds: tuple[KVType, KVType], window: int, head_dim: int, page: int) -> None:
    grown = Grown(kinds, head_dim, window, page, 4)
    for counts in ([33, 19], [5, 16]):
        found, expected = grown.run(launch_attend, counts)
        torch.testing.assert_close(found, expected, rtol=0, atol=2 * CLOSE[torch.float32])


@pytest.mark.parametrize("tokens", [2, 3, 4, 8, 16])
def test_a_few_tokens_after_a_long_past(tokens: int) -> None:
    """With a GPU's own tiles: 24 tiles of keys, six splits."""
    Chunk(replace(LONG, has_sinks=tokens == 3), [1500], [tokens]).check()


@pytest.mark.slow
def test_a_later_tile_of_rows_has_splits_of_its_own() -> None:
    Chunk(replace(LONG, context=1024), [0, 700], [150, 90]).check()


def test_one_split_has_the_bits_of_a_kernel_without_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(LONG, [190, 0], [9, 5])
    found = chunk.attended()
    unsplit(monkeypatch)
    for row, count in enumerate(chunk.counts):
        assert torch.equal(found[row, :count], chunk.attended()[row, :count])


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_bits_depend_neither_on_neighbours_nor_on_room_nor_on_the_order_of_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Shape(4, 2, 16, 320, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, page=64)
    chunk = Chunk(shape, [150, 3, 61], [9, 9, 9])
    found = chunk.attended()
    chunk.check()
    for row in range(3):
        assert torch.equal(chunk.attended(slice(row, row + 1))[0], found[row])
    chunk.table = torch.cat((chunk.table, torch.zeros(3, 200, dtype=torch.int32)), 1)
    assert torch.equal(chunk.attended(), found)
    for _ in orders_of_arrival(monkeypatch):
        assert torch.equal(chunk.attended(), found)


def test_programs_fill_the_device_once() -> None:
    for warps, rows_tiles, kv_heads in product([4, 8], [1, 3, 16, 64], [1, 2, 8, 32]):
        with in_case(kv_heads, rows_tiles, warps):
            most = 132 * 8 // warps
            splits = prefill.splits_of_rows(kv_heads, rows_tiles, 2000, warps, 132)
            assert splits == max(1, most // (kv_heads * rows_tiles))
            assert prefill.splits_of_rows(kv_heads, rows_tiles, prefill.LEAST_TILES, warps, 132) == 1


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", CLOSE)
def test_a_plan_counts_what_splits_leave(head_dim: int, dtype: torch.dtype) -> None:
    for kv_heads in (1, 2, 8, 32):
        for tokens in (2, 4, 7, 16, 64, 100, 256, 1024):
            rows, _, warps = prefill.tiles_of(tokens * 4, head_dim, dtype)
            tiles = -(-tokens * 4 // rows)
            splits = prefill.splits_of_rows(kv_heads, tiles, 1 << 20, warps, PROCESSORS)
            assert splits == 1 or kv_heads * tiles * splits * rows <= PROCESSORS * rows_at_once(head_dim)
