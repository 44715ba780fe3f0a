"""The sequences of forward states between two calls: their pages stay in the caches, without a row of the tables.

    call:     exchange the first rows' pages for the state's  -->  run the blocks  -->  exchange them back
    between:  if no page is free and another sequence needs one, the sequence is swapped out to host memory

All this runs in the worker thread, except `drop`, which a garbage collector may call in any thread.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from graphcore.kvcache.host_copies import Copies, HostCopies
from graphcore.kvcache.page_allocator import PageAllocator, SwappedSequence
from graphcore.kvcache.page_table import PageTable


class ForwardCache(ABC):
    """The caches of a forward state's sequences between two calls."""

    @abstractmethod
    def drop(self) -> None:
        """Mark the state as collected. A finalizer may call this in any thread, so it must not take a lock."""


@dataclass(eq=False)
class ForwardSequence:
    """The pages and recurrent states of one sequence.

    Attributes:
        tokens: number of tokens that the sequence has run.
        pages: pages of each table by number; none if the sequence is swapped out.
        states: copies of the recurrent states, in host memory.
        swapped: copy of pages and states if the sequence is swapped out, else None.
    """

    tokens: int
    pages: Sequence[dict[int, int]]
    states: HostCopies
    swapped: SwappedSequence | None = None


class ForwardSequences(ForwardCache):
    """The sequences of one forward state.

    Attributes:
        rows: sequences of the state, one for each row.
    """

    def __init__(self, owner: "ForwardSequencePool") -> None:
        self._owner = owner
        self.rows: list[ForwardSequence] = []

    def drop(self) -> None:
        """Queue the sequences, so that the worker thread frees their pages; takes no lock."""
        self._owner.dropped.append(self.rows)


class ForwardSequencePool:
    """The sequences of all forward states of a runner.

    Attributes:
        dropped: sequences of collected states, whose pages are still to be freed.
    """

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self.dropped: deque[list[ForwardSequence]] = deque()
        self._held: dict[ForwardSequence, None] = {}  # sequences with pages, the least recently used first
        pages.forward_states = self

    @contextmanager
    def in_rows(self, state: ForwardSequences, num_rows: int, begin: int, end: int) -> Iterator[None]:
        """Put a state's sequences into the first rows of the caches for a block that runs positions begin .. end - 1.

        If its pages fit beside all others, none is copied. Otherwise the state is copied into the caches and out again,
        and the other sequences' pages to the host meanwhile. If the block fails, the state stays as it was.
        """
        self._give_back_dropped()
        for one in state.rows:
            self._held.pop(one, None)  # so that the call does not swap it out
        try:
            has_room = self._pages.make_room(self._counts(state.rows, num_rows, begin, end))
            with self._in_place(state, num_rows, end) if has_room else self._by_copies(state, num_rows, end):
                yield
        except BaseException:
            self._held.update(dict.fromkeys(one for one in state.rows if one.pages))
            raise

    def _counts(self, held: Sequence[ForwardSequence], num_rows: int, begin: int, end: int) -> list[int]:
        """Return how many pages of each table a call needs besides those that the state has."""
        num_swapped = sum(one.swapped is not None for one in held)
        counts = []
        for table in self._pages.tables:
            before = set(table.numbers(begin, begin)) if held else set[int]()
            missing = len(set(table.numbers(begin, end)) - before)
            counts.append(num_rows * min(table.reach, missing) + num_swapped * len(before))
        return counts

    @contextmanager
    def _in_place(self, state: ForwardSequences, num_rows: int, end: int) -> Iterator[None]:
        pages, tables, held = self._pages, self._pages.tables, state.rows
        # First: without memory for the copies, the rows still have their pages.
        other_states = [[cache.copy_out(row) for cache in pages.states] for row in range(num_rows)]
        others = [[table.exchange(row, {}) for table in tables] for row in range(num_rows)]
        found: list[ForwardSequence] = []
        try:
            for row, one in enumerate(held):
                self._put(row, one)
            yield
            for row in range(num_rows):
                found.append(self._taken(row, end))
        except BaseException:
            for row in range(num_rows):
                pages.free(row)
            for one in found:
                self._drop_pages(one)
            raise
        finally:
            for row, (own, states) in enumerate(zip(others, other_states, strict=True)):
                for table, numbers in zip(tables, own, strict=True):
                    table.exchange(row, numbers)
                pages.put_states(states, row)
        for one in held:
            self._drop_pages(one)
        state.rows[:] = found
        self._held.update(dict.fromkeys(found))

    def _put(self, row: int, one: ForwardSequence) -> None:
        """Let a row share a sequence's pages, or copy a swapped-out sequence into it."""
        if one.swapped is not None:
            has_room = self._pages.copy_in(row, one.swapped)
            assert has_room, "there was room for the pages"
            return
        for table, numbers in zip(self._pages.tables, one.pages, strict=True):
            table.share(row, numbers)
        self._pages.put_states(one.states.read(), row)

    def _taken(self, row: int, end: int) -> ForwardSequence:
        """Take a row's pages and states out of it."""
        self._pages.free_before_window(row, end)
        states = self._pages.to_host([one.copy_out(row) for one in self._pages.states])
        return ForwardSequence(end, [table.exchange(row, {}) for table in self._pages.tables], states)

    @contextmanager
    def _by_copies(self, state: ForwardSequences, num_rows: int, end: int) -> Iterator[None]:
        for one in state.rows:
            self._swap_out(one)
        with self._pages.lending(range(num_rows)):
            for row, one in enumerate(state.rows):
                assert one.swapped is not None, "all were swapped out"
                has_room = self._pages.copy_in(row, one.swapped)
                assert has_room, "the whole cache has room for a call's rows"
            yield
            kept = [self._pages.copy_out(row, end) for row in range(num_rows)]
        state.rows[:] = [ForwardSequence(end, (), HostCopies(()), one) for one in kept]

    def _swap_out(self, one: ForwardSequence) -> None:
        """Copy a sequence to the host and free its pages."""
        if one.swapped is not None:
            return
        paged: list[Copies] = []
        for table, pages in zip(self._pages.tables, one.pages, strict=True):
            paged += table.copies([pages[number] for number in table.numbers(one.tokens, one.tokens)])
        one.swapped = SwappedSequence(one.tokens, self._pages.to_host(paged) + one.states)
        self._drop_pages(one)

    def _drop_pages(self, one: ForwardSequence) -> None:
        for table, pages in zip(self._pages.tables, one.pages, strict=False):
            for page in pages.values():
                table.decref(page)
        one.pages, one.states = (), HostCopies(())
        self._held.pop(one, None)

    def _give_back_dropped(self) -> None:
        while self.dropped:
            for one in self.dropped.popleft():
                self._drop_pages(one)

    def num_evictable(self, table: PageTable) -> int:
        """Return how many pages of a table would be free if all sequences were swapped out."""
        self._give_back_dropped()
        index = self._pages.tables.index(table)
        return sum(len(one.pages[index]) for one in self._held)

    def evict(self, table: PageTable, count: int) -> None:
        """Swap sequences out, the least recently used first, until `count` more pages of a table are free."""
        target = table.num_free + count
        for one in list(self._held):
            if table.num_free >= target:
                return
            self._swap_out(one)
