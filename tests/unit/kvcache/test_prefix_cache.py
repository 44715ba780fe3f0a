"""Beginnings of prompts in the caches: which one is found, whose bits it has, and that no page of it is lost."""

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from support.comparisons import CountedTokens, steps_of

from graphcore.kvcache.buffers import KVCache, RecurrentCache, allocate_cache
from graphcore.kvcache.chunks import Chunks
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.kvcache.prefix_cache import PrefixCache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, MLPSpec, ModelSpec, NormSpec

NORM = NormSpec("rms", 1e-6)
FULL = AttentionSpec(heads=1, kv_heads=1, head_dim=1, scale=1.0)
SLIDING = AttentionSpec(heads=1, kv_heads=1, head_dim=1, scale=1.0, window=8)
DELTA = DeltaSpec(key_heads=1, value_heads=1, key_dim=1, value_dim=1, width=2, eps=1e-6)
MODELS = {"full": (FULL,), "ring": (SLIDING,), "both": (FULL, SLIDING), "states": (FULL, DELTA), "recurrent": (DELTA,)}
PAGE, CONTEXT, ROWS, SNAPSHOTS, CHUNK = 4, 64, 3, 2, 8


class Caches:
    """Caches of one number for each position: that of the sequence whose tokens they hold.

    Args:
        tokens: positions of the pool.
        min_invariant: the same as of `Chunks`.
    """

    def __init__(
        self, name: str = "full", tokens: int = 4 * CONTEXT, min_invariant: int = 1, context: int = CONTEXT
    ) -> None:
        blocks = tuple(BlockSpec(8, NORM, attention, MLPSpec(8, "silu")) for attention in MODELS[name])
        spec = ModelSpec(8, 10, blocks, NORM, context)
        sizes = CacheSizes(ROWS, context, torch.float32, CHUNK, page=PAGE, tokens=tokens, snapshots=SNAPSHOTS)
        self.caches = allocate_cache(spec, sizes, torch.device("cpu"))
        self.pages = PageAllocator(spec, self.caches)
        snapshots = self.pages.snapshot_rows(ROWS) if self.pages.has_states else range(0)
        self.tree = PrefixCache(self.pages, Chunks(CHUNK, min_invariant), snapshots)

    def write(self, row: int, begin: int, end: int, value: float) -> bool:
        """Write a number to positions of a row, and to its states, as chunks would; False without room."""
        for at in range(begin, end):
            if not self.pages.reserve(row, at, at + 1):
                return False
            for table in self.pages.tables:
                page = table.rows[row][at // PAGE]
                assert page != 0
                for cache in table.caches:
                    cache.k[page, :, at % PAGE] = cache.v[page, :, at % PAGE] = value + at
            self.pages.free_before_window(row, at + 1)
        for cache in self.caches:
            if isinstance(cache, RecurrentCache):
                cache.recurrent[row] = value + end
        return True

    def holds(self, row: int, tokens: int) -> list[list[float]]:
        """Return what a row's next token sees in each layer, of keys by position, of states the number."""
        found = []
        tables = {id(cache): table for table in self.pages.tables for cache in table.caches}
        for cache in self.caches:
            if isinstance(cache, KVCache):
                table = tables[id(cache)]
                first = table.first_seen(tokens) * PAGE
                places = [(table.rows[row][at // PAGE], at % PAGE) for at in range(first, tokens)]
                found.append([cache.k[page, 0, place].item() for page, place in places])
                assert found[-1] == [cache.v[page, 0, place].item() for page, place in places]
            elif isinstance(cache, RecurrentCache):
                found.append([cache.recurrent[row].item()])
        return found

    def keep(self, ids: Sequence[int], value: float, row: int = 0, *, is_bit_exact: bool = True) -> None:
        """Run a sequence in an empty row, keep it, and free the row."""
        assert self.write(row, 0, len(ids), value)
        self.tree.keep(row, ids, is_bit_exact=is_bit_exact, save_states=not is_bit_exact or len(ids) % CHUNK == 0)
        self.pages.free(row)

    def goes_on(self, ids: Sequence[int], row: int = 0, *, reuse_cache: bool = False) -> tuple[int, bool]:
        """Give a row what is found, free it, and return the length and whether it serves prompts."""
        found = self.tree.find(ids, reuse_cache)
        assert self.tree.attach(row, found)
        self.pages.free(row)
        return found.length, found.is_bit_exact

    def check_counts(self) -> None:
        """Check that every page is free or counted once for each row, and once for the tree."""
        for index, table in enumerate(self.pages.tables):
            users: dict[int, int] = {}
            in_tree = {node.pages[index] for node in self.tree._root.below()} - {None}
            for page in [*in_tree, *(page for held in table.rows for page in held.values())]:
                assert page is not None
                users[page] = users.get(page, 0) + 1
            assert users == table._refs
            assert set(table.idle) == {page for page in in_tree if page is not None and users[page] == 1}
            assert sorted([*users, *table._free]) == list(range(1, 1 + table.num_pages))
        assert all(node.children or node.snapshot is not None or any(node.pages) for node in self.tree._root.below()), (
            "a leaf that has nothing"
        )
        holders = [node.snapshot for node in self.tree._root.below() if node.snapshot is not None]
        free = self.tree._free_snapshots
        assert sorted([*holders, *free]) == sorted(set(holders) | set(free))
        assert len(holders) + len(free) == (SNAPSHOTS if self.pages.has_states else 0)

    def is_all_free(self) -> bool:
        """Return whether no page is left after the tree has forgotten everything."""
        self.tree.clear()
        self.check_counts()
        return all(table.num_free == table.num_pages for table in self.pages.tables)


def words(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


@pytest.mark.parametrize("name", ["full", "ring", "both"])
def test_the_longest_beginning_is_found_and_holds_what_was_computed(name: str) -> None:
    caches = Caches(name)
    caches.keep(words(10), 100.0)
    caches.keep([*words(10), *words(9, 50)], 200.0)
    longest = 12 if name == "full" else 8  # what a ring had of the second one was given back
    cases = (([*words(10), 50, 51, 9], longest), (words(7), 6), ([9], 0), ([0], 0), ([*words(6), 77, 78], 6))
    for ids, length in cases:
        found = caches.tree.find(ids, reuse_cache=False)
        assert (found.length, found.is_bit_exact) == (length, True)
        if length > 6:  # pages of the first window were given back in a ring
            assert caches.tree.attach(1, found)
            for layer in caches.holds(1, length):
                assert [number % 100 for number in layer] == words(length)[-len(layer) :]
            caches.pages.free(1)
        caches.check_counts()
    assert caches.is_all_free()


@pytest.mark.parametrize(
    ("min_invariant", "starts"), [(1, {9: 9, 13: 13, 15: 15}), (4, {9: 9, 13: 12, 15: 12}), (8, {9: 8, 15: 8})]
)
def test_a_prompt_goes_on_only_where_its_chunk_chooses_the_same_kernels(
    min_invariant: int, starts: dict[int, int]
) -> None:
    """The chunk after the start has at least `min_invariant` tokens, or is a whole one; prompts have 30 tokens."""
    caches = Caches(min_invariant=min_invariant)
    caches.keep(words(24), 100.0)
    for shared, start in starts.items():
        ids = [*words(shared), *words(30 - shared, 60)]
        assert caches.goes_on(ids) == (start, True)
        assert caches.goes_on(ids, reuse_cache=True) == (shared, start == shared)
    assert caches.is_all_free()


def test_answers_serve_only_those_who_ask() -> None:
    caches = Caches()
    caches.keep(words(6), 100.0)
    caches.keep(words(14), 200.0, is_bit_exact=False)
    assert caches.goes_on(words(20)) == (6, True)
    assert caches.goes_on(words(20), reuse_cache=True) == (14, False)
    assert caches.is_all_free()


@pytest.mark.parametrize("name", ["full", "ring", "both"])
def test_a_prompt_that_was_an_answer_before_has_only_the_prompts_pages(name: str) -> None:
    """A ring's earlier pages were given back when the prompt ended: those of the answer must not take their place."""
    caches = Caches(name)
    caches.keep(words(8), 500.0, is_bit_exact=False)
    caches.keep(words(24), 100.0)
    for length in (9, 25):
        found = caches.tree.find(words(length), reuse_cache=False)
        assert caches.tree.attach(1, found)
        assert not [number for layer in caches.holds(1, found.length) for number in layer if number >= 200]
        caches.pages.free(1)
    caches.check_counts()
    assert caches.is_all_free()


def test_pages_of_an_answer_do_not_fill_gaps_of_a_prompt() -> None:
    caches = Caches("ring")
    caches.keep(words(24), 100.0)  # the ring has its last pages only
    caches.keep(words(9), 500.0, is_bit_exact=False)
    assert caches.goes_on(words(9)) == (0, True)
    assert caches.is_all_free()


def test_states_of_an_answer_never_serve_a_prompt() -> None:
    caches = Caches("states")
    assert caches.write(0, 0, 8, 500.0)
    caches.tree.keep(0, words(8), is_bit_exact=False, save_states=True)
    assert caches.goes_on(words(12)) == (0, True)
    assert caches.write(1, 0, 8, 100.0)
    caches.tree.keep(1, words(8), is_bit_exact=True, save_states=False)  # the same tokens, now bit-exact
    assert caches.goes_on(words(12)) == (0, True)
    assert caches.goes_on(words(12), reuse_cache=True) == (8, False)
    caches.tree.keep(1, words(8), is_bit_exact=True, save_states=True)
    caches.tree.keep(0, words(8), is_bit_exact=False, save_states=True)
    found = caches.tree.find(words(12), reuse_cache=False)
    assert (found.length, found.is_bit_exact) == (8, True)
    assert caches.tree.attach(2, found)
    assert caches.holds(2, 8)[1] == [108.0]
    for row in range(ROWS):
        caches.pages.free(row)
    assert caches.is_all_free()


def test_the_snapshot_that_was_not_used_for_longest_makes_room() -> None:
    caches = Caches("states")
    for at in range(SNAPSHOTS):
        caches.keep(words(8, 10 * at), 100.0 * at)
    caches.goes_on(words(9))
    caches.keep(words(8, 50), 700.0)
    assert [caches.goes_on(words(9, first))[0] for first in (0, 10, 50)] == [8, 0, 8]
    caches.check_counts()
    assert caches.is_all_free()


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    caches = Caches(tokens=CONTEXT)  # 16 pages
    caches.keep(words(16), 100.0)
    caches.keep(words(16, 100), 200.0)
    caches.keep(words(16, 200), 300.0)
    caches.goes_on(words(17))
    assert caches.write(0, 0, 24, 900.0)  # six pages, of which four are free
    assert caches.goes_on(words(17, 100), 1)[0] == 8
    assert caches.goes_on(words(17), 1)[0] == 16
    assert caches.goes_on(words(17, 200), 1)[0] == 16
    caches.pages.free(0)
    assert caches.is_all_free()


def test_a_ring_gives_back_its_pages_and_the_full_layers_keep_theirs() -> None:
    caches = Caches("both", tokens=2 * CONTEXT)
    caches.keep(words(16), 100.0)
    full, ring = caches.pages.tables
    free = full.num_free
    caches.tree.evict(ring, ring.num_pages)
    assert (ring.num_free, full.num_free) == (ring.num_pages, free)
    assert caches.goes_on(words(17))[0] == 0
    caches.check_counts()
    assert caches.is_all_free()


def test_a_page_that_several_prefixes_have_is_given_back_when_all_have_gone() -> None:
    """The end of a prompt lies in the page in which its answer begins."""
    caches = Caches(tokens=CONTEXT)
    assert caches.write(0, 0, 7, 100.0)
    for end in (2, 5, 7):
        caches.tree.keep(0, words(end), is_bit_exact=True, save_states=False)
    assert caches.write(0, 7, 11, 100.0)
    caches.tree.keep(0, words(11), is_bit_exact=False, save_states=False)
    caches.pages.free(0)
    caches.check_counts()
    assert caches.write(1, 0, CONTEXT, 900.0)  # the whole pool
    assert caches.goes_on(words(12), 2, reuse_cache=True)[0] == 0
    caches.pages.free(1)
    assert caches.is_all_free()


def test_a_wish_that_cannot_be_granted_takes_nothing_from_the_tree() -> None:
    caches = Caches(tokens=CONTEXT)
    caches.keep(words(16), 100.0)
    assert caches.write(0, 0, 24, 200.0)
    assert not caches.pages.make_room_for([(1, 48)])
    assert not caches.pages.reserve(1, 0, 48)
    assert caches.goes_on(words(17), 2)[0] == 16
    assert caches.pages.make_room_for([(1, 40)])
    caches.pages.free(0)
    assert caches.is_all_free()


def test_whoever_borrows_the_cache_takes_nothing_from_the_tree() -> None:
    caches = Caches(tokens=CONTEXT)
    caches.keep(words(16), 100.0)
    with caches.pages.lending([]):
        assert caches.write(0, 0, CONTEXT, 900.0)
        assert not caches.pages.reserve(1, 0, 4)
        caches.pages.tables[0].share(1, dict(caches.pages.tables[0].rows[0]))
        caches.pages.free(1)
    caches.check_counts()
    found = caches.tree.find(words(17), reuse_cache=False)
    assert found.length == 16
    assert caches.tree.attach(2, found)
    assert caches.holds(2, 16) == [[100.0 + at for at in range(16)]]
    caches.pages.free(2)
    assert caches.is_all_free()


@pytest.mark.parametrize("name", MODELS)
def test_random_prompts_and_answers_lose_no_page_and_mix_no_bits(name: str) -> None:
    """Positions of prompts hold 1000, those of answers 5000 and more; thousands of steps, each of several calls."""
    caches, generator = Caches(name, tokens=2 * CONTEXT, min_invariant=3), random.Random(1)
    running: dict[int, tuple[list[int], int, bool]] = {}  # ids, tokens that ran, has a prompt's bits
    most = 0
    for step in range(5_000 if name == "both" else 1_500):
        row = generator.randrange(ROWS)
        if row in running:
            ids, ran, is_bit_exact = running.pop(row)
            if is_bit_exact:
                sure = caches.tree._chunks.invariant_length(len(ids))
                caches.tree.keep(row, ids[:sure], is_bit_exact=True, save_states=ran == sure and sure % CHUNK == 0)
            if generator.random() < 0.5:
                answer = [generator.randrange(2) for _ in range(generator.randrange(6))]
                if caches.write(row, ran, ran + len(answer), 5000.0):
                    caches.tree.keep(row, [*ids, *answer], is_bit_exact=False, save_states=True)
            caches.pages.free(row)
        else:
            reuse_cache = generator.random() < 0.3
            ids = [generator.randrange(2) if at % 5 == 0 else 7 for at in range(generator.randrange(1, 40))]
            found = caches.tree.find(ids, reuse_cache)
            assert found.length < len(ids)
            if not caches.tree.attach(row, found):
                assert not any(table.rows[row] for table in caches.pages.tables)
                continue
            most = max(most, found.length)
            held = caches.holds(row, found.length) if found.length else []
            if held and caches.pages.has_states:
                assert held.pop()[0] % 1000 == found.length, "a state after other tokens"
            for layer in held:
                assert [number % 1000 for number in layer] == words(found.length)[-len(layer) :]
            if found.is_bit_exact:
                assert all(1000.0 <= number < 2000.0 for layer in held for number in layer)
            value = 1000.0 if found.is_bit_exact else 3000.0
            if not caches.write(row, found.length, len(ids), value):
                caches.pages.free(row)
                continue
            running[row] = ids, len(ids), found.is_bit_exact
        if step % 50 == 0:
            caches.check_counts()
    assert most >= (8 if caches.pages.has_states else 20)
    for row in range(ROWS):
        caches.pages.free(row)
    assert caches.is_all_free()


def beside_a_sequence_that_begins_alike(caches: Caches) -> list[int]:
    """Let row 1 run a sequence whose first page the tree has from an ended one, and return its tokens."""
    assert caches.write(0, 0, 8, 100.0)
    ids = [*words(4), *words(4, 20)]
    assert caches.write(1, 0, 8, 200.0)
    for row, tokens in ((0, words(8)), (1, ids)):
        caches.tree.keep(row, tokens, is_bit_exact=True, save_states=True)
    caches.pages.free(0)
    return ids


@pytest.mark.parametrize("name", ["full", "both", "states"])
def test_an_idle_page_above_one_in_use_is_evicted_alone_and_comes_back(name: str) -> None:
    caches = Caches(name)
    ids = beside_a_sequence_that_begins_alike(caches)
    caches.keep(words(8, 50), 500.0)
    table = caches.pages.tables[0]
    free = table.num_free
    assert caches.tree.num_evictable(table) == 4
    for count, lengths in ((1, (4, 8, 8)), (1, (0, 0, 8)), (2, (0, 0, 0))):
        caches.tree.evict(table, count)
        caches.check_counts()
        prompts = (words(9), [*ids, 99], words(9, 50))
        expected = lengths if name != "states" else tuple(length if length == 8 else 0 for length in lengths)
        for reuse_cache in (False, True):
            assert tuple(caches.tree.find(prompt, reuse_cache).length for prompt in prompts) == expected
    assert (table.num_free, caches.tree.num_evictable(table)) == (free + 4, 0)
    caches.tree.keep(1, ids, is_bit_exact=True, save_states=True)
    caches.pages.free(1)
    assert caches.goes_on([*ids, 99]) == (8, True)
    assert caches.is_all_free()


def test_a_place_whose_page_was_evicted_takes_that_of_an_answer() -> None:
    caches = Caches()
    caches.keep(words(8), 100.0)
    (table,) = caches.pages.tables
    caches.tree.evict(table, 1)
    caches.keep(words(8), 500.0, is_bit_exact=False)
    assert caches.goes_on(words(9)) == (4, True)
    assert caches.goes_on(words(9), reuse_cache=True) == (8, False)
    caches.tree.evict(table, 2)
    beside_a_sequence_that_begins_alike(caches)
    caches.tree.evict(table, 2)  # the node stays above the one in use
    caches.keep(words(4), 500.0, is_bit_exact=False)
    assert caches.goes_on(words(9)) == (0, True)
    assert caches.goes_on(words(9), reuse_cache=True) == (4, False)
    caches.pages.free(1)
    assert caches.is_all_free()


def test_an_idle_page_gives_way_to_one_in_use_that_holds_the_same() -> None:
    """So the pages of a running sequence's path are in use, and an idle one is never evicted before those below it."""
    caches = Caches()
    ids = beside_a_sequence_that_begins_alike(caches)
    table = caches.pages.tables[0]
    free = table.num_free
    caches.tree.keep(1, ids, is_bit_exact=True, save_states=False)
    assert table.num_free == free + 1
    assert caches.goes_on(words(9), 2) == (8, True)
    caches.pages.free(1)
    path = [node.pages[0] for node in caches.tree.path(ids)]
    assert [page for page in table.idle if page in path] == path[::-1]
    assert caches.is_all_free()


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_of_which_something_was_evicted_is_refused(name: str) -> None:
    caches = Caches(name)
    caches.keep(words(8), 100.0)
    hit = caches.tree.find(words(9), reuse_cache=False)
    assert hit.length == 8
    if caches.pages.tables:
        caches.tree.evict(caches.pages.tables[-1], 2)
    else:
        for first in (20, 40):  # takes both snapshots
            caches.keep(words(8, first), 100.0)
    assert not caches.tree.attach(1, hit)
    assert not any(table.rows[1] for table in caches.pages.tables)
    assert caches.is_all_free()


def test_the_copy_of_a_hit_s_last_page_costs_nothing_of_the_hit() -> None:
    """No page is free, and the only idle one that is not the hit's lies above one in use."""
    caches = Caches("states", tokens=CONTEXT)  # 16 pages
    beside_a_sequence_that_begins_alike(caches)
    caches.keep(words(6, 50), 500.0, is_bit_exact=False)
    assert caches.write(1, 8, 52, 200.0)
    (table,) = caches.pages.tables
    hit = caches.tree.find(words(7, 50), reuse_cache=True)
    assert (table.num_free, caches.tree.num_evictable(table), hit.length) == (0, 3, 6)
    assert caches.write(2, 0, 0, 7.0)  # another sequence's state
    assert caches.tree.attach(2, hit)
    assert caches.holds(2, 6) == [[500.0 + at for at in range(6)], [506.0]]
    caches.check_counts()
    assert caches.tree.find(words(7, 50), reuse_cache=True).length == 6
    for row in (1, 2):
        caches.pages.free(row)
    assert caches.is_all_free()


def test_costs_grow_with_the_pages_that_are_asked_for_and_not_with_the_tree() -> None:
    """In bytecode instructions: the trees have 64 and 1,024 nodes, in prompts of four pages."""
    counting, evicting, keeping = list[int](), list[int](), list[int]()
    for count in (16, 256):
        caches = Caches(tokens=16 * count)
        for number in range(count):
            caches.keep(words(16, 100 * number), 100.0)
        (table,) = caches.pages.tables
        assert len(list(caches.tree._root.below())) == 4 * count
        counting.append(steps_of(partial(caches.tree.num_evictable, table)))
        evicting.append(steps_of(partial(caches.pages.make_room, [6])))
        assert table.num_free == 6
        assert caches.write(0, 0, 16, 100.0)
        keeping.append(steps_of(partial(caches.tree.keep, 0, words(16, 7), is_bit_exact=True, save_states=False)))
        assert caches.goes_on(words(17, 7), 1) == (16, True)
        assert caches.goes_on(words(17, 100))[0] == 8  # whose last two pages were evicted
    for small, large in (counting, evicting, keeping):
        assert 0 < large == small


def test_a_prompt_s_chunks_are_kept_one_after_another() -> None:
    """Each costs what it adds, not the whole prompt; and what was kept in parts is found as a whole."""
    caches, length = Caches(context=1024, tokens=1024), 1024
    ids, steps, after = CountedTokens(words(length)), list[int](), None
    for end in range(CHUNK, length + 1, CHUNK):
        assert caches.write(0, end - CHUNK, end, 0.0)
        new = ids[end - CHUNK : end]

        def keep(new: Sequence[int] = new) -> None:
            nonlocal after
            after = caches.tree.keep(0, new, is_bit_exact=True, save_states=False, after=after)

        steps.append(steps_of(keep))
    assert min(steps[1:]) == max(steps[1:])
    caches.pages.free(0)
    found, copied = list[int](), list[int]()
    for part in (length // 2, length):
        prompt = CountedTokens([*words(part), 99_999])
        found.append(steps_of(partial(caches.tree.find, prompt, reuse_cache=False)))
        copied.append(prompt.copied)
        assert caches.tree.find(prompt, reuse_cache=False).length == part
    assert found[1] < 2 * found[0]
    assert copied == [length // 2 + 1, length + 1]
    assert caches.is_all_free()
