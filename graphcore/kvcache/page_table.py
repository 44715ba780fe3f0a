"""A page table: the pages of each row, their reference counts, and the free list.

Legend: B rows, P pages, N pages of a sequence, G positions of a page, K kv heads, E head dim.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.device import on_device
from graphcore.kvcache.buffers import KVCache
from graphcore.kvcache.host_copies import Copies, HostCopies, ToHost
from graphcore.kvcache.sizes import TABLE_DTYPE

NULL_PAGE = 0  # the entry of a table where a sequence has no page


@dataclass(frozen=True)
class PageUse:
    """Usage of a table's pages at one moment.

    Attributes:
        pages: pages that sequences may have.
        free: pages on the free list.
        shared: pages that several rows hold.
        prefix_only: pages that no row holds, but the prefix cache, or a state of `Engine.forward`.
    """

    pages: int
    free: int
    shared: int
    prefix_only: int


class PageTable:
    """The pages of the layers that share a table.

    Args:
        caches: the layers' caches.
        window: keys that a query sees in these layers; 0 for all.

    Attributes:
        caches: the layers' caches.
        page: int, positions of a page.
        num_pages: int, pages that sequences may have.
        rows: each row's pages by number: page n holds positions n G to n G + G - 1 of its sequence.
        idle: pages that only the prefix cache holds, the one that was released first before the others.
    """

    def __init__(self, caches: Sequence[KVCache], window: int) -> None:
        self.caches, self._window, self._table = caches, window, caches[0].table
        self.page, self.num_pages = caches[0].k.shape[2], len(caches[0].k) - 1
        self.rows: list[dict[int, int]] = [{} for _ in range(len(self._table))]
        self._free = list(range(1, 1 + self.num_pages))  # a heap, so that a sequence's pages are often neighbours
        self._refs: dict[int, int] = {}  # reference count of each page that is not free
        self._cached = set[int]()  # pages that the prefix cache holds, with one reference each
        self.idle = OrderedDict[int, None]()  # not a dict: the first key of one is slow to find after many deletions
        self._lendable: list[int] = []
        self._lent: list[tuple[list[int], HostCopies]] = []
        self._to_host: ToHost = HostCopies
        with torch.inference_mode():
            self._table.fill_(NULL_PAGE)
        self._entries = self._table.numpy() if self._table.device.type == "cpu" else None  # the same memory

    @property
    def window(self) -> int:
        """Keys that a query sees in these layers; 0 for all."""
        return self._window

    @property
    def is_ring(self) -> bool:
        """Whether the layers have a window, so that rows free pages while they run."""
        return self._window > 0

    @property
    def reach(self) -> int:
        """Most pages of one row at a time."""
        return self._table.shape[1]

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free) + len(self._lendable)

    def first_seen(self, position: int) -> int:
        """Return the number of the first page that a token at a position sees."""
        return max(0, position - self._window + 1) // self.page if self._window else 0

    def use(self) -> PageUse:
        """Return the current page usage. Thread-safe."""
        rows = Counter(page for held in self.rows for page in list(held.values()))
        free = self.num_free
        return PageUse(
            self.num_pages, free, sum(count > 1 for count in rows.values()), max(0, self.num_pages - free - len(rows))
        )

    def num_shared(self, row: int) -> int:
        """Return how many pages of a row are shared with other rows. Thread-safe.

        A shared page has the same logical number in every row. Pages shared only with the prefix cache do not count.
        """
        others = [held for at, held in enumerate(self.rows) if at != row]
        candidates = [(number, page) for number, page in list(self.rows[row].items()) if self._refs.get(page, 0) > 1]
        return sum(any(held.get(number) == page for held in others) for number, page in candidates)

    def is_ready(self, row: int, begin: int, end: int) -> bool:
        """Return whether a row has all pages for tokens at positions begin .. end - 1, and no others.

        A row's pages have numbers without a gap.
        """
        held, last = self.rows[row], (end - 1) // self.page
        return last in held and last + 1 not in held and self.first_seen(begin) - 1 not in held

    def missing(self, row: int, begin: int, end: int) -> list[int]:
        """Return which of the pages `numbers(begin, end)` a row does not have."""
        held = self.rows[row]
        return [number for number in self.numbers(begin, end) if number not in held]

    def numbers(self, begin: int, end: int) -> range:
        """Return the numbers of the pages that tokens at positions begin .. end - 1 write or see."""
        return range(self.first_seen(begin), -(-end // self.page))

    def assign(self, row: int, numbers: Sequence[int]) -> None:
        """Allocate pages for a row, by number; there must be enough free ones."""
        self.rows[row].update(zip(numbers, self.allocate(len(numbers)), strict=True))
        self._put(row, numbers)

    def allocate(self, count: int) -> list[int]:
        """Take pages from the free list, which must hold enough; each has a reference count of one, the caller's."""
        pages = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        if len(pages) < count:
            pages += self._lend(count - len(pages))
        self._refs.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, row: int, pages: dict[int, int]) -> None:
        """Let a row share pages, by number, and increment their reference counts."""
        for number, page in pages.items():
            self.incref(page)
            self.rows[row][number] = page
        self._put(row, list(pages))

    def exchange(self, row: int, pages: dict[int, int]) -> dict[int, int]:
        """Replace a row's pages, by number, and return the old ones; reference counts stay."""
        before, self.rows[row] = self.rows[row], pages
        self._put(row, list(before))
        self._put(row, list(pages))
        return before

    def copy(self, row: int, number: int) -> None:
        """Replace a page that a row shares by a copy of its own (copy on write); there must be a free page."""
        shared = self.rows[row][number]
        copies = self.copies([shared])  # before all else: without memory for them, the row still holds what it shares
        self.assign(row, [number])
        self.put([self.rows[row][number]], copies)
        self.decref(shared)

    def incref(self, page: int) -> None:
        """Increment a page's reference count."""
        self._refs[page] += 1
        self.idle.pop(page, None)

    def decref(self, page: int) -> None:
        """Decrement a page's reference count; free the page at zero. One that only the cache holds then is idle."""
        self._refs[page] -= 1
        if not self._refs[page]:
            del self._refs[page]
            heapq.heappush(self._free, page)
        elif self._refs[page] == 1 and page in self._cached:
            self.idle[page] = None

    def cache(self, page: int) -> None:
        """Let the prefix cache hold a page, which has a holder, until `uncache`."""
        self.incref(page)
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        """Take a page from the prefix cache; free it if no row has it."""
        self._cached.remove(page)
        self.idle.pop(page, None)
        self.decref(page)

    def is_shared(self, page: int) -> bool:
        """Return whether a page's reference count is above one."""
        return self._refs[page] > 1

    def free_others(self, row: int, needed: range) -> None:
        """Free all pages of a row but those with the given numbers.

        Idle pages are evicted in the order in which they are freed here. A prefix is of no use without its first pages,
        so these are freed last; those of a ring are used apart from each other, and the first ones are least useful.
        """
        held = self.rows[row]
        others = sorted((number for number in held if number not in needed), reverse=not self.is_ring)
        for number in others:
            self.decref(held.pop(number))
        if others:
            self._put(row, others)

    def kept(self, row: int, tokens: int) -> list[Copies]:
        """Return copies, for each cache, of the pages that the token at position `tokens` sees, in order."""
        return self.copies([self.rows[row][number] for number in self.numbers(tokens, tokens)])

    def copies(self, pages: Sequence[int]) -> list[Copies]:
        """Return copies of pages, for each cache."""
        places = self.indices(pages)
        return [cache.copy_out(places) for cache in self.caches]

    def fill(self, row: int, tokens: int, kept: Sequence[Copies]) -> None:
        """Write copies that `kept` returned into a row that has the pages for them."""
        self.put([self.rows[row][number] for number in self.numbers(tokens, tokens)], kept)

    def put(self, pages: Sequence[int], kept: Sequence[Copies]) -> None:
        """Write copies, one for each cache, into pages."""
        places = self.indices(pages)
        for cache, each in zip(self.caches, kept, strict=True):
            cache.copy_in(places, each)

    @contextmanager
    def lending(self, to_host: ToHost) -> Iterator[None]:
        """Let the block use all pages, with empty rows; afterwards the table and the pages hold what they held before.

        Free pages are used first; the others are copied to the host before they are used.

        Args:
            to_host: function that brings the copies to the host.
        """
        before = self.rows, self._free, self._refs, self._cached, self.idle
        self.rows, self._refs, self._cached, self.idle = [{} for _ in self.rows], {}, set(), OrderedDict()
        self._free, self._lendable, self._to_host = list(self._free), list(before[2]), to_host
        self._put_all()
        try:
            yield
        finally:
            for pages, kept in self._lent:
                self.put(pages, kept.read())
            self.rows, self._free, self._refs, self._cached, self.idle = before
            self._lendable, self._lent = [], []
            self._put_all()

    def _lend(self, count: int) -> list[int]:
        pages = [self._lendable.pop() for _ in range(count)]
        self._lent.append((pages, self._to_host(self.copies(pages))))
        return pages

    def indices(self, pages: Sequence[int]) -> Tensor:
        """Return pages as an index on the caches' device."""
        return on_device(pages, self._table.device)

    def _put(self, row: int, numbers: Sequence[int]) -> None:
        """Write a row's entries of some numbers to the table that kernels read: its pages, or the null page."""
        held, reach = self.rows[row], self.reach
        if self._entries is not None:
            for number in numbers:
                self._entries[row, number % reach] = held.get(number, NULL_PAGE)
            return
        if len(numbers) == 1:  # what a decode step adds or frees; a fill allocates nothing
            self._table[row, numbers[0] % reach].fill_(held.get(numbers[0], NULL_PAGE))
            return
        places = on_device([number % reach for number in numbers], self._table.device)
        pages = on_device([held.get(number, NULL_PAGE) for number in numbers], self._table.device, TABLE_DTYPE)
        self._table[row].index_copy_(0, places, pages)

    def _put_all(self) -> None:
        self._table.fill_(NULL_PAGE)
        for row, held in enumerate(self.rows):
            if held:
                self._put(row, list(held))
