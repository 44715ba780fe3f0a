"""One table of pages: which page each row has, which are free, and who else has one.

Legend: B rows, P pages, N pages of a sequence, G positions of a page, K kv heads, E head dim.
"""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from graphcore.graph.state import on_device
from graphcore.nn.cache_sizes import TABLE_DTYPE
from graphcore.nn.layer_cache import KVCache

NOBODYS = 0  # the page that a table names where a sequence has none
Copies = tuple[Tensor, Tensor]
"""Copies of what both of a layer's buffers hold: of some pages [n, K, G, ...], or of a sequence's state."""


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
        self._lent: dict[int, list[Copies]] = {}
        with torch.inference_mode():
            self._table.fill_(NOBODYS)
        self._entries = self._table.numpy() if self._table.device.type == "cpu" else None  # the same memory

    @property
    def is_ring(self) -> bool:
        """Whether rows give pages back while they run."""
        return self._window > 0

    @property
    def reach(self) -> int:
        """Most pages of one row at a time."""
        return self._table.shape[1]

    @property
    def num_free(self) -> int:
        """Pages that can be given."""
        return len(self._free) + len(self._lendable)

    def first_seen(self, position: int) -> int:
        """Return the number of the first page that a token at a position sees."""
        return max(0, position - self._window + 1) // self.page if self._window else 0

    def is_ready(self, row: int, begin: int, end: int) -> bool:
        """Return whether a row has all pages for tokens at positions begin .. end - 1, and none besides.

        A row's pages have numbers without a gap.
        """
        held, last = self.rows[row], (end - 1) // self.page
        return last in held and last + 1 not in held and self.first_seen(begin) - 1 not in held

    def missing(self, row: int, begin: int, end: int) -> list[int]:
        """Return the numbers of the pages that a row lacks, of those that `numbers` names."""
        held = self.rows[row]
        return [number for number in self.numbers(begin, end) if number not in held]

    def numbers(self, begin: int, end: int) -> range:
        """Return the numbers of the pages for tokens at positions begin .. end - 1, and what they see."""
        return range(self.first_seen(begin), -(-end // self.page))

    def give(self, row: int, numbers: Sequence[int]) -> None:
        """Give a row free pages, of which there must be enough."""
        self.rows[row].update(zip(numbers, self.take(len(numbers)), strict=True))
        self._put(row, numbers)

    def take(self, count: int) -> list[int]:
        """Return so many free pages, of which there must be enough; the caller has them until it calls `drop`."""
        pages = [heapq.heappop(self._free) if self._free else self._lend() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, row: int, pages: dict[int, int]) -> None:
        """Give a row pages that others have, too, by number."""
        for number, page in pages.items():
            self.hold(page)
            self.rows[row][number] = page
        self._put(row, list(pages))

    def exchange(self, row: int, pages: dict[int, int]) -> dict[int, int]:
        """Let a row name other pages by number, and return those that it named; nobody has one more or less."""
        before, self.rows[row] = self.rows[row], pages
        self._put(row, list(before))
        self._put(row, list(pages))
        return before

    def copy(self, row: int, number: int) -> None:
        """Give a row a copy of a page that it shares, in its place; there must be a free page."""
        shared = self.rows[row].pop(number)
        self.give(row, [number])
        self.put([self.rows[row][number]], self.copies([shared]))
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

    def take_back(self, row: int, needed: range) -> None:
        """Take from a row all pages but those of some numbers."""
        held = self.rows[row]
        others = [number for number in held if number not in needed]
        for number in others:
            self.drop(held.pop(number))
        if others:
            self._put(row, others)

    def kept(self, row: int, tokens: int) -> list[Copies]:
        """Return copies of what the token after so many will see, for each cache, by the pages' numbers."""
        return self.copies([self.rows[row][number] for number in self.numbers(tokens, tokens)])

    def copies(self, pages: Sequence[int]) -> list[Copies]:
        """Return copies of pages, for each cache."""
        places = self.indices(pages)
        return [cache.copy_out(places) for cache in self.caches]

    def fill(self, row: int, tokens: int, kept: Sequence[Copies]) -> None:
        """Write copies into the pages of a row that has them all."""
        self.put([self.rows[row][number] for number in self.numbers(tokens, tokens)], kept)

    def put(self, pages: Sequence[int], kept: Sequence[Copies]) -> None:
        """Write copies, one for each cache, into pages."""
        places = self.indices(pages)
        for cache, each in zip(self.caches, kept, strict=True):
            cache.copy_in(places, each)

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
                self.put([page], kept)
            self.rows, self._free, self._users = before
            self._lendable, self._lent = [], {}
            self._put_all()

    def _lend(self) -> int:
        page = self._lendable.pop()
        self._lent[page] = [(k.cpu(), v.cpu()) for k, v in self.copies([page])]
        return page

    def indices(self, pages: Sequence[int]) -> Tensor:
        """Return pages as an index on the caches' device."""
        return on_device(pages, self._table.device)

    def _put(self, row: int, numbers: Sequence[int]) -> None:
        """Write a row's pages of some numbers, or that it has none, to where kernels read them."""
        held, reach = self.rows[row], self.reach
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
