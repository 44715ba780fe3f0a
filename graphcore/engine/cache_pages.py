"""Who has which pages of the caches: pages are given when a sequence comes to their positions, and given back.

    free  --reserve-->  of one row or several  --window passed, free-->  free

Layers of one table have the same pages of a sequence, so a page is given in all of them at once. A ring gives back the
pages that lie wholly before the window of a sequence's next token. Rows that share a page only read it: whoever writes
a position has its page alone.

All this happens between two passes, in the thread that computes. On a GPU tables change in the order of the work that
was enqueued, so earlier steps find them as they were.

Legend: B rows, P pages, N pages of a sequence, G positions of a page, K kv heads, E head dim.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.graph.state import on_device
from graphcore.nn.layer_cache import TABLE_DTYPE, DeltaCache, KVCache, LayerCache
from graphcore.nn.spec import AttentionSpec, ModelSpec

NOBODYS = 0  # the page that a table names where a sequence has none
Kept = tuple[Tensor, Tensor]
"""Copies of both buffers' content: of some pages [n, K, G, E], or of a sequence's state."""


class PageTable:
    """The pages of the layers that share a table.

    Args:
        caches: the layers' caches.
        window: keys that a query sees in these layers; 0 for all.

    Attributes:
        caches: the same.
        page: int, positions of a page.
        num_pages: int, pages that sequences may have.
        rows: each row's pages by number: page n holds positions n G to n G + G - 1 of its sequence.
    """

    def __init__(self, caches: Sequence[KVCache], window: int) -> None:
        self.caches, self._window, self._table = caches, window, caches[0].table
        self.page, self.num_pages = caches[0].k.shape[2], len(caches[0].k) - 1
        self.rows: list[dict[int, int]] = [{} for _ in range(len(self._table))]
        self._free = list(range(1, 1 + self.num_pages))  # a heap, so that a sequence's pages are often neighbours
        self._users: dict[int, int] = {}  # rows and others that have a page
        self._lendable: list[int] = []
        self._lent: dict[int, list[Kept]] = {}
        with torch.inference_mode():
            self._table.fill_(NOBODYS)
        self._entries = self._table.numpy() if self._table.device.type == "cpu" else None  # the same memory

    @property
    def is_ring(self) -> bool:
        """Whether rows give pages back while they run."""
        return self._window > 0

    @property
    def num_free(self) -> int:
        """Pages that can be given."""
        return len(self._free) + len(self._lendable)

    def first_seen(self, position: int) -> int:
        """Return the number of the first page that a token at a position sees."""
        return max(0, position - self._window + 1) // self.page if self._window else 0

    def is_ready(self, row: int, begin: int, end: int) -> bool:
        """Return whether a row has all pages for tokens at positions begin .. end - 1, and none that they do not see.

        A row's pages have numbers without a gap.
        """
        held = self.rows[row]
        return (end - 1) // self.page in held and self.first_seen(begin) - 1 not in held

    def missing(self, row: int, begin: int, end: int) -> list[int]:
        """Return the numbers of the pages that a row lacks, of those that `numbers` names."""
        held = self.rows[row]
        return [number for number in self.numbers(begin, end) if number not in held]

    def numbers(self, begin: int, end: int) -> range:
        """Return the numbers of the pages for tokens at positions begin .. end - 1, and what they see."""
        return range(self.first_seen(begin), -(-end // self.page))

    def give(self, row: int, numbers: Sequence[int]) -> None:
        """Give a row free pages, of which there must be enough."""
        for number in numbers:
            page = heapq.heappop(self._free) if self._free else self._lend()
            self._users[page] = 1
            self.rows[row][number] = page
        self._put(row, numbers)

    def share(self, row: int, pages: dict[int, int]) -> None:
        """Give a row pages that others have, too, by number."""
        for number, page in pages.items():
            self.hold(page)
            self.rows[row][number] = page
        self._put(row, list(pages))

    def copy(self, row: int, number: int) -> None:
        """Give a row a copy of a page that it shares, in its place; there must be a free page."""
        shared = self.rows[row].pop(number)
        self.give(row, [number])
        copy = self.indices([self.rows[row][number]])
        for cache in self.caches:
            cache.copy_in(copy, cache.copy_out(self.indices([shared])))
        self.drop(shared)

    def hold(self, page: int) -> None:
        """Count one more who has a page."""
        self._users[page] += 1

    def drop(self, page: int) -> None:
        """Count one less who has a page; it is free when nobody has it."""
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            heapq.heappush(self._free, page)

    def is_shared(self, page: int) -> bool:
        """Return whether more than one have a page."""
        return self._users[page] > 1

    def take_back(self, row: int, position: int | None) -> None:
        """Take from a row the pages that a token at a position does not see; all for None."""
        held = self.rows[row]
        passed = [number for number in held if position is None or number < self.first_seen(position)]
        for number in passed:
            self.drop(held.pop(number))
        if passed:
            self._put(row, passed)

    def kept(self, row: int, tokens: int) -> list[Kept]:
        """Return copies of what the token after so many will see, for each cache, by the pages' numbers."""
        pages = self.indices([self.rows[row][number] for number in self.numbers(tokens, tokens)])
        return [cache.copy_out(pages) for cache in self.caches]

    def fill(self, row: int, tokens: int, kept: Sequence[Kept]) -> None:
        """Write copies into the pages of a row that has them all."""
        pages = self.indices([self.rows[row][number] for number in self.numbers(tokens, tokens)])
        for cache, each in zip(self.caches, kept, strict=True):
            cache.copy_in(pages, each)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Begin with rows that have no pages, and with all pages to give; afterwards everything is as it was before.

        Pages that nobody had come first; what the others hold is copied to the host before they are given.
        """
        before = self.rows, self._free, self._users
        self.rows, self._users = [{} for _ in self.rows], {}
        self._free, self._lendable = list(self._free), list(before[2])
        self._put_all()
        try:
            yield
        finally:
            for page, kept in self._lent.items():
                for cache, each in zip(self.caches, kept, strict=True):
                    cache.copy_in(self.indices([page]), each)
            self.rows, self._free, self._users = before
            self._lendable, self._lent = [], {}
            self._put_all()

    def _lend(self) -> int:
        page = self._lendable.pop()
        parts = [cache.copy_out(self.indices([page])) for cache in self.caches]
        self._lent[page] = [(k.cpu(), v.cpu()) for k, v in parts]
        return page

    def indices(self, pages: Sequence[int]) -> Tensor:
        """Return pages as an index on the caches' device."""
        return on_device(pages, self._table.device)

    def _put(self, row: int, numbers: Sequence[int]) -> None:
        """Write a row's pages of some numbers, or that it has none, to where kernels read them."""
        held, reach = self.rows[row], self._table.shape[1]
        if self._entries is not None:
            for number in numbers:
                self._entries[row, number % reach] = held.get(number, NOBODYS)
            return
        places = on_device([number % reach for number in numbers], self._table.device)
        pages = on_device([held.get(number, NOBODYS) for number in numbers], self._table.device, TABLE_DTYPE)
        self._table[row].index_copy_(0, places, pages)

    def _put_all(self) -> None:
        self._table.fill_(NOBODYS)
        for row, held in enumerate(self.rows):
            if held:
                self._put(row, list(held))


@dataclass(frozen=True)
class KeptSequence:
    """A copy of what the layers keep of one sequence, in host memory.

    Attributes:
        tokens: positions that it holds.
        parts: copies, first those of each table's caches, then those of the caches with a state.
    """

    tokens: int
    parts: Sequence[Kept]


class CachePages:
    """The pages of all layers, and the states of those that have no positions.

    Args:
        spec: the model.
        caches: one cache for each layer.

    Attributes:
        tables: the tables of pages; none for a model without attention.
        reclaim: function that gives back pages of a table that no row has, at most so many.
    """

    def __init__(self, spec: ModelSpec, caches: Sequence[LayerCache]) -> None:
        groups: dict[int, tuple[list[KVCache], list[int]]] = {}
        distinct = {id(cache): (cache, block.attention) for cache, block in zip(caches, spec.blocks, strict=True)}
        for cache, attention in distinct.values():
            if isinstance(cache, KVCache) and isinstance(attention, AttentionSpec):
                members, windows = groups.setdefault(id(cache.table), ([], []))
                members.append(cache)
                windows.append(attention.window or 0)
        self.tables = [PageTable(members, max(windows) if all(windows) else 0) for members, windows in groups.values()]
        self.reclaim: Callable[[PageTable, int], None] = lambda table, count: None
        self._states = [cache for cache, _ in distinct.values() if isinstance(cache, DeltaCache)]

    @property
    def has_states(self) -> bool:
        """Whether some layers' memory has no positions, so that a sequence can go on only after its last token."""
        return bool(self._states)

    def snapshot_rows(self, batch: int) -> range:
        """Return the rows of the states that belong to no row of the tables."""
        return range(batch, max((len(cache.recurrent) for cache in self._states), default=batch))

    def has_room(self, wishes: Sequence[tuple[int, int]]) -> bool:
        """Return whether rows could have pages for so many positions each, all of them together."""
        counts = [
            sum(max(0, len(table.numbers(positions, positions)) - len(table.rows[row])) for row, positions in wishes)
            for table in self.tables
        ]
        return self._make_room(counts)

    def reserve(self, row: int, begin: int, end: int) -> bool:
        """Give a row the pages that tokens at positions begin .. end - 1 need.

        Pages that only earlier tokens see are taken back first.

        Returns:
            False if there are not enough; the row is then given none.
        """
        if all(table.is_ready(row, begin, end) for table in self.tables):
            return True
        for table in self.tables:
            table.take_back(row, begin)
        missing = [table.missing(row, begin, end) for table in self.tables]
        if not self._make_room([len(numbers) for numbers in missing]):
            return False
        for table, numbers in zip(self.tables, missing, strict=True):
            if numbers:
                table.give(row, numbers)
        return True

    def copy(self, row: int, number: int) -> bool:
        """Give a row pages of its own in the place of those that it shares, by their number; False without room."""
        if not self._make_room([1] * len(self.tables)):
            return False
        for table in self.tables:
            table.copy(row, number)
        return True

    def copy_states(self, source: int, target: int) -> None:
        """Copy the states of one row to another."""
        for cache in self._states:
            cache.copy_in(target, cache.copy_out(source))

    def _make_room(self, counts: Sequence[int]) -> bool:
        """Return whether so many pages of each table can be given, after reclaiming those that no row has."""
        for table, count in zip(self.tables, counts, strict=True):
            if count > table.num_free:
                self.reclaim(table, count - table.num_free)
            if count > table.num_free:
                return False
        return True

    def take_back(self, row: int, position: int) -> None:
        """Take from a row the pages that a token at a position does not see."""
        for table in self.tables:
            if table.first_seen(position) - 1 in table.rows[row]:
                table.take_back(row, position)

    def free(self, row: int) -> None:
        """Take back all pages of a row."""
        for table in self.tables:
            table.take_back(row, None)

    def copy_out(self, row: int, tokens: int) -> KeptSequence:
        """Return a copy of what the layers keep of the sequence in a row, which has run so many tokens."""
        paged = [kept for table in self.tables for kept in table.kept(row, tokens)]
        parts = [*paged, *(cache.copy_out(row) for cache in self._states)]
        return KeptSequence(tokens, [(first.cpu(), second.cpu()) for first, second in parts])

    def copy_in(self, row: int, kept: KeptSequence) -> bool:
        """Put a copied sequence into a row that has no pages; False if there are not enough."""
        if not self.reserve(row, kept.tokens, kept.tokens):
            return False
        parts = list(kept.parts)
        for table in self.tables:
            table.fill(row, kept.tokens, [parts.pop(0) for _ in table.caches])
        for cache, each in zip(self._states, parts, strict=True):
            cache.copy_in(row, each)
        return True

    @contextmanager
    def lending(self, rows: Sequence[int]) -> Iterator[None]:
        """Let whoever computes inside the block use the whole cache; afterwards it holds what it held.

        Args:
            rows: rows whose states are kept, too.
        """
        states = {row: [tuple(each.cpu() for each in cache.copy_out(row)) for cache in self._states] for row in rows}
        with ExitStack() as lent:
            for table in self.tables:
                lent.enter_context(table.lending())
            try:
                yield
            finally:
                for row, kept in states.items():
                    for cache, (first, second) in zip(self._states, kept, strict=True):
                        cache.copy_in(row, (first, second))
