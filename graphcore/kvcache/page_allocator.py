"""Allocates KV-cache pages to sequences on demand and frees them.

    free  --reserve-->  of one row or several  --window passed, free-->  free

Layers of one table have the same pages of a sequence, so a page is allocated in all of them at once. A ring frees the
pages that lie wholly before the window of a sequence's next token. Rows that share a page only read it: a row that
writes a position does not share that position's page.

Pages are allocated and freed between two passes, in the worker thread. On a GPU, updates of tables are enqueued in the
stream of the steps, so steps that were enqueued before still see the old entries.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from graphcore.kvcache.buffers import KVCache, LayerCache, RecurrentCache
from graphcore.kvcache.host_copies import Copies, HostCopies, ToHost
from graphcore.kvcache.page_table import PageTable
from graphcore.nn.spec import AttentionSpec, ModelSpec


@dataclass(frozen=True)
class SwappedSequence:
    """A copy of one sequence's pages and recurrent states in host memory.

    Attributes:
        tokens: number of tokens that the sequence has run.
        copies: copies, first those of each table's caches, then those of the caches with a state.
    """

    tokens: int
    copies: HostCopies


class PageEvictor(Protocol):
    """A holder of pages that no running sequence needs, which frees them when the allocator has none left."""

    def num_evictable(self, table: PageTable) -> int:
        """Return how many pages of a table `evict` can free."""

    def evict(self, table: PageTable, count: int) -> None:
        """Free at least `count` pages of a table, of those that are evictable, the least recently used first."""


class PageAllocator:
    """Allocates the KV-cache pages of all layers, and copies the states of recurrent layers.

    Args:
        spec: the model.
        caches: one cache for each layer.
        to_host: function that brings copies of pages and states to the host, where the caches are not there already.

    Attributes:
        to_host: function that brings copies of pages and states to the host.
        tables: the tables of pages; none for a model without attention.
        states: caches of recurrent layers.
        prefix_cache: evictor of cached prefixes, asked first; None without a prefix cache.
        forward_states: evictor of forward states, which are swapped out to the host; None without any.
    """

    def __init__(self, spec: ModelSpec, caches: Sequence[LayerCache], to_host: ToHost = HostCopies) -> None:
        self.to_host = to_host
        groups: dict[int, tuple[list[KVCache], list[int]]] = {}
        distinct = {id(cache): (cache, block.attention) for cache, block in zip(caches, spec.blocks, strict=True)}
        for cache, attention in distinct.values():
            if isinstance(cache, KVCache) and isinstance(attention, AttentionSpec):
                members, windows = groups.setdefault(id(cache.table), ([], []))
                members.append(cache)
                windows.append(attention.window or 0)
        self.tables = [PageTable(members, max(windows) if all(windows) else 0) for members, windows in groups.values()]
        self.prefix_cache: PageEvictor | None = None
        self.forward_states: PageEvictor | None = None
        self._is_lent = False
        self.states = [cache for cache, _ in distinct.values() if isinstance(cache, RecurrentCache)]

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent, so that a sequence can continue only after its last token."""
        return bool(self.states)

    def page_counts(self, row: int) -> tuple[int, int]:
        """Return the number of pages of a row in all tables, and how many of them it shares with other rows."""
        held = sum(len(table.rows[row]) for table in self.tables)
        return held, sum(table.num_shared(row) for table in self.tables)

    def snapshot_rows(self, batch: int) -> range:
        """Return the rows of the state buffers that are for snapshots: those after the sequences' rows."""
        return range(batch, max((len(cache.recurrent) for cache in self.states), default=batch))

    def make_room_for(self, wishes: Sequence[tuple[int, int]]) -> bool:
        """Evict pages until all rows can get the pages that they need; False if that is impossible.

        Args:
            wishes: pairs of a row and the number of positions that it needs pages for.
        """
        counts = [
            sum(max(0, len(table.numbers(positions, positions)) - len(table.rows[row])) for row, positions in wishes)
            for table in self.tables
        ]
        return self.make_room(counts)

    def reserve(self, row: int, begin: int, end: int) -> bool:
        """Allocate the pages of a row that tokens at positions begin .. end - 1 need; free all its others first.

        Returns:
            False if there are not enough; none is then allocated.
        """
        if all(table.is_ready(row, begin, end) for table in self.tables):
            return True
        for table in self.tables:
            table.free_others(row, table.numbers(begin, end))
        missing = [table.missing(row, begin, end) for table in self.tables]
        if not self.make_room([len(numbers) for numbers in missing]):
            return False
        for table, numbers in zip(self.tables, missing, strict=True):
            if numbers:
                table.assign(row, numbers)
        return True

    def copy(self, row: int, number: int) -> bool:
        """Replace a row's shared page of each table, by number, by a copy (copy on write); False without room."""
        if not self.make_room([1] * len(self.tables)):
            return False
        for table in self.tables:
            table.copy(row, number)
        return True

    def allocate(self, counts: Sequence[int]) -> list[list[int]] | None:
        """Allocate pages of each table, which the caller frees with `decref`; None without room."""
        if not self.make_room(counts):
            return None
        return [table.allocate(count) for table, count in zip(self.tables, counts, strict=True)]

    def copy_states(self, source: int, target: int) -> None:
        """Copy the states of one row to another."""
        self.put_states([cache.copy_out(source) for cache in self.states], target)

    def put_states(self, copies: Sequence[Copies], target: int) -> None:
        """Write copies of states to a row."""
        for cache, each in zip(self.states, copies, strict=True):
            cache.copy_in(target, each)

    def make_room(self, counts: Sequence[int]) -> bool:
        """Return whether so many pages of each table can be allocated, after evicting those that no row uses.

        Pages of the prefix cache are evicted first, then those of forward states. None are evicted if they would not be
        enough, and none inside `lending`.
        """
        lacking = [(table, count) for table, count in zip(self.tables, counts, strict=True) if count > table.num_free]
        if not lacking:
            return True
        evictors = [one for one in (self.prefix_cache, self.forward_states) if one is not None]
        if self._is_lent or not all(
            count <= table.num_free + sum(one.num_evictable(table) for one in evictors) for table, count in lacking
        ):
            return False
        for table, count in lacking:
            for one in evictors:
                freed = min(count - table.num_free, one.num_evictable(table))
                if freed > 0:
                    one.evict(table, freed)
        return all(count <= table.num_free for table, count in lacking)

    def free_before_window(self, row: int, position: int) -> None:
        """Free the pages of a row that lie before the window of a token at a position."""
        for table in self.tables:
            first = table.first_seen(position)
            if first - 1 in table.rows[row]:
                table.free_others(row, range(first, 1 + max(table.rows[row])))

    def free(self, row: int) -> None:
        """Free all pages of a row."""
        for table in self.tables:
            table.free_others(row, range(0))

    def copy_out(self, row: int, tokens: int) -> SwappedSequence:
        """Return a copy of the sequence in a row, which has run `tokens` tokens."""
        paged = [kept for table in self.tables for kept in table.kept(row, tokens)]
        parts = [*paged, *(cache.copy_out(row) for cache in self.states)]
        return SwappedSequence(tokens, self.to_host(parts))

    def copy_in(self, row: int, kept: SwappedSequence) -> bool:
        """Write a copied sequence to a row that has no pages; False if too few pages are free."""
        if not self.reserve(row, kept.tokens, kept.tokens):
            return False
        parts = list(kept.copies.read())
        for table in self.tables:
            table.fill(row, kept.tokens, [parts.pop(0) for _ in table.caches])
        for cache, each in zip(self.states, parts, strict=True):
            cache.copy_in(row, each)
        return True

    @contextmanager
    def lending(self, rows: Sequence[int]) -> Iterator[None]:
        """Let the block use the whole cache; afterwards the cache holds what it held before.

        Args:
            rows: rows whose states are kept, too.
        """
        states = {row: self.to_host([cache.copy_out(row) for cache in self.states]) for row in rows}
        with ExitStack() as lent:
            for table in self.tables:
                lent.enter_context(table.lending(self.to_host))
            self._is_lent = True
            try:
                yield
            finally:
                self._is_lent = False
                for row, kept in states.items():
                    self.put_states(kept.read(), row)
