"""Who has which page: copies that come back whole, shared pages that nobody writes, counts that never go wrong."""

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from support.cases import in_case

from graphcore.kvcache.buffers import LayerCache, RecurrentCache, allocate_cache
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, MLPSpec, ModelSpec, NormSpec

NORM = NormSpec("rms", 1e-6)
FULL = AttentionSpec(heads=1, kv_heads=2, head_dim=32, scale=1.0)
SLIDING = AttentionSpec(heads=1, kv_heads=1, head_dim=32, scale=1.0, window=8)
DELTA = DeltaSpec(key_heads=1, value_heads=2, key_dim=3, value_dim=4, width=3, eps=1e-6)
MODELS = {"full": (FULL, FULL), "ring": (SLIDING,), "both": (FULL, SLIDING), "states": (FULL, DELTA)}
PAGE, CONTEXT, ROWS, SNAPSHOTS, CHUNK = 4, 32, 3, 2, 8


def caches_of(name: str, tokens: int = 2 * CONTEXT, dtype: str = "") -> tuple[PageAllocator, tuple[LayerCache, ...]]:
    blocks = tuple(BlockSpec(8, NORM, attention, MLPSpec(8, "silu")) for attention in MODELS[name])
    spec = ModelSpec(8, 10, blocks, NORM, CONTEXT)
    sizes = CacheSizes(ROWS, CONTEXT, dtype or torch.float32, CHUNK, page=PAGE, tokens=tokens, snapshots=SNAPSHOTS)
    caches = allocate_cache(spec, sizes, torch.device("cpu"))
    return PageAllocator(spec, caches), caches


def write(pages: PageAllocator, caches: tuple[LayerCache, ...], row: int, end: int, seed: int) -> None:
    """Write numbers that depend on a seed to all that a row has, which has run so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    for table in pages.tables:
        for page in table.rows[row].values():
            assert not table.is_shared(page)
            for tensor in (tensor for cache in table.caches for tensor in (cache.k, cache.v)):
                tensor[page] = torch.randint(0, 100, tensor[page].shape, generator=generator).to(tensor.dtype)
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            for tensor in cache.tensors:
                tensor[row] = torch.randn(tensor[row].shape, generator=generator) + end


def seen(pages: PageAllocator, caches: tuple[LayerCache, ...], row: int, tokens: int) -> list[torch.Tensor]:
    """Return what a row's next token sees, by the tables that kernels read."""
    found = []
    for table in pages.tables:
        for cache in table.caches:
            for number in table.numbers(tokens, tokens):
                page = int(cache.table[row, number % cache.table.shape[1]])
                assert page == table.rows[row][number]
                found += [cache.k[page].clone(), cache.v[page].clone()]
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            found += [tensor[row].clone() for tensor in cache.tensors]
    return found


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_a_copied_sequence_comes_back_as_it_was_in_another_row() -> None:
    for tokens, name, dtype in product([1, 3, 4, 9, 24, CONTEXT], MODELS, ["", "q8_0"]):
        with in_case(dtype, name, tokens):
            pages, caches = caches_of(name, dtype=dtype)
            assert pages.reserve(0, max(0, tokens - CHUNK), tokens)
            pages.free_before_window(0, tokens)
            write(pages, caches, 0, tokens, seed=1)
            before = seen(pages, caches, 0, tokens)
            kept = pages.copy_out(0, tokens)
            pages.free(0)
            assert pages.reserve(1, 0, 5)  # pages and their order are others
            write(pages, caches, 1, 5, seed=2)
            write(pages, caches, 0, 0, seed=3)
            assert pages.copy_in(2, kept)
            assert equal(seen(pages, caches, 2, tokens), before)
            assert len(before) >= 2
            assert not equal(seen(pages, caches, 2, tokens)[:1], [before[0] + 1])


def test_a_copy_that_finds_no_room_takes_nothing() -> None:
    pages, caches = caches_of("full", tokens=CONTEXT)
    assert pages.reserve(0, 0, 12)
    write(pages, caches, 0, 12, seed=1)
    kept = pages.copy_out(0, 12)
    assert pages.reserve(1, 0, 16)
    free = [table.num_free for table in pages.tables]
    assert not pages.copy_in(2, kept)
    assert ([table.num_free for table in pages.tables], pages.tables[0].rows[2]) == (free, {})
    pages.free(1)
    assert pages.copy_in(2, kept)


@pytest.mark.parametrize("name", ["full", "both", "states"])
def test_a_row_writes_only_pages_that_it_has_alone(name: str) -> None:
    """Two rows share a beginning; each gets a copy of the page that it goes on in, and the other's stays as it was."""
    pages, caches = caches_of(name)
    assert pages.reserve(0, 0, 6)
    write(pages, caches, 0, 6, seed=1)
    for table in pages.tables:
        table.share(1, dict(table.rows[0]))
    pages.copy_states(0, 1)
    before = seen(pages, caches, 0, 6)
    assert equal(seen(pages, caches, 1, 6), before)
    assert pages.copy(1, 1)
    assert equal(seen(pages, caches, 1, 6), before)
    for table in pages.tables:
        assert table.rows[0][0] == table.rows[1][0]
        assert table.is_shared(table.rows[0][0])
        assert table.rows[0][1] != table.rows[1][1]
        assert not table.is_shared(table.rows[1][1])
        for cache in table.caches:
            cache.k[table.rows[1][1]] += 1
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            cache.recurrent[1] += 1
    assert equal(seen(pages, caches, 0, 6), before)
    assert not equal(seen(pages, caches, 1, 6), before)
    pages.free(0)
    assert not any(table.is_shared(page) for table in pages.tables for page in table.rows[1].values())


@pytest.mark.parametrize("name", MODELS)
def test_what_was_lent_comes_back_whoever_wrote_it(name: str) -> None:
    pages, caches = caches_of(name)
    for row, end in ((0, 20), (2, 9)):
        assert pages.reserve(row, max(0, end - CHUNK), end)
        write(pages, caches, row, end, seed=row)
    before = [seen(pages, caches, row, end) for row, end in ((0, 20), (2, 9))]
    with pages.lending([0, 2]):
        assert not any(table.rows[row] for table in pages.tables for row in range(ROWS))
        for row in range(2):  # all pages that there are
            assert pages.reserve(row, CONTEXT - CHUNK, CONTEXT)
            write(pages, caches, row, CONTEXT, seed=7)
    assert equal(seen(pages, caches, 0, 20), before[0])
    assert equal(seen(pages, caches, 2, 9), before[1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_agrees_with_sets(name: str, seed: int) -> None:
    """A model of the pages as sets, made by the walk alone, says of each step what must have come of it."""
    pages, _ = caches_of(name, tokens=CONTEXT + 12)
    generator, steps = random.Random(seed), dict.fromkeys(("reserve", "refused", "share", "copy", "free", "take"), 0)
    owned: list[list[dict[int, int]]] = [[{} for _ in range(ROWS)] for _ in pages.tables]
    taken: list[list[int]] = [[] for _ in pages.tables]
    ends = [0] * ROWS
    for _ in range(600):
        row, other = generator.sample(range(ROWS), 2)
        kind = generator.choice(["reserve", "reserve", "reserve", "share", "copy", "free", "take"])
        users = [{*(p for held in rows for p in held.values()), *some} for rows, some in zip(owned, taken, strict=True)]
        free = [table.num_pages - len(used) for table, used in zip(pages.tables, users, strict=True)]
        if kind == "reserve":
            end = min(CONTEXT, ends[row] + generator.randint(1, CHUNK))
            wanted = [table.numbers(ends[row], end) for table in pages.tables]
            kept = [{n: p for n, p in rows[row].items() if n in need} for rows, need in zip(owned, wanted, strict=True)]
            others = [
                {*(p for at, held in enumerate(rows) if at != row for p in held.values()), *some}
                for rows, some in zip(owned, taken, strict=True)
            ]
            is_enough = all(
                len(need) - len(mine) <= table.num_pages - len(used | set(mine.values()))
                for table, need, mine, used in zip(pages.tables, wanted, kept, others, strict=True)
            )
            assert pages.reserve(row, ends[row], end) == is_enough
            ends[row] = end if is_enough else ends[row]
            steps["reserve" if is_enough else "refused"] += 1
            for table, rows, need, mine in zip(pages.tables, owned, wanted, kept, strict=True):
                assert set(table.rows[row]) == (set(need) if is_enough else set(mine))
                assert mine.items() <= table.rows[row].items()
                rows[row] = dict(table.rows[row])
        elif kind == "share" and not any(rows[row] for rows in owned):
            for table, rows in zip(pages.tables, owned, strict=True):
                table.share(row, dict(rows[other]))
                rows[row] = dict(rows[other])
            ends[row] = ends[other]
            steps["share"] += 1
        elif kind == "copy" and ends[row] and all((ends[row] - 1) // PAGE in rows[row] for rows in owned):
            number = (ends[row] - 1) // PAGE
            assert pages.copy(row, number) == all(count > 0 for count in free)
            for table, rows, used in zip(pages.tables, owned, users, strict=True):
                if all(count > 0 for count in free):
                    assert table.rows[row][number] not in used
                rows[row] = dict(table.rows[row])
            steps["copy"] += 1
        elif kind == "free":
            pages.free(row)
            ends[row] = 0
            steps["free"] += 1
            for rows in owned:
                rows[row] = {}
        elif kind == "take":
            if any(taken):
                for table, some in zip(pages.tables, taken, strict=True):
                    while some:
                        table.decref(some.pop())
            else:
                found = pages.allocate([1] * len(pages.tables))
                assert (found is not None) == all(count > 0 for count in free)
                for some, mine, used in zip(taken, found or [[]] * len(taken), users, strict=True):
                    assert not used.intersection(mine)
                    some += mine
            steps["take"] += 1
        for table, rows, some in zip(pages.tables, owned, taken, strict=True):
            assert table.rows == rows
            used = {*(page for held in rows for page in held.values()), *some}
            assert 0 not in used
            assert table.num_free == table.num_pages - len(used)
            for row_index, held in enumerate(rows):
                entries = {number % table.reach: page for number, page in held.items()}
                shown = {at: page for at, page in enumerate(table.caches[0].table[row_index].tolist()) if page}
                assert shown == entries
    assert all(steps[kind] for kind in steps if kind != "refused" or name != "ring")


@pytest.mark.parametrize("name", ["full", "ring", "both"])
def test_pages_are_free_shared_held_by_one_or_by_no_row(name: str) -> None:
    pages, _ = caches_of(name)
    assert all(table.use().free == table.use().pages == table.num_pages for table in pages.tables)
    assert pages.reserve(0, 0, 2 * PAGE)
    for table in pages.tables:
        table.share(1, dict(table.rows[0]))
    assert pages.reserve(2, 0, PAGE)
    kept = pages.allocate([1] * len(pages.tables))  # as the prefix cache holds pages
    assert kept is not None
    for table in pages.tables:
        use = table.use()
        assert (use.shared, use.prefix_only, use.free) == (2, 1, table.num_pages - 4)
    tables = len(pages.tables)
    assert pages.page_counts(0) == pages.page_counts(1) == (2 * tables, 2 * tables)
    assert pages.page_counts(2) == (tables, 0)
    pages.tables[0].incref(pages.tables[0].rows[2][0])  # the prefix cache has it, too, but no other row
    assert pages.page_counts(2) == (tables, 0)
    pages.free(1)
    assert pages.page_counts(0) == (2 * tables, 0)
