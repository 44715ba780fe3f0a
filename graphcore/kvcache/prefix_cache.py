"""The prefix cache: prompts with a common prefix share pages. A radix tree of pages, compared token by token.

    root -- page of tokens -- page -- page -- part of a page
                           \\- page -- ...

A prompt continues from the longest path that matches its tokens. Whole pages are shared; the last one is copied if only
a part of it matches. The tree holds a reference to each page, so pages outlive their sequences until memory is needed:
the least recently used pages are evicted first, leaves before their parents.

A prompt's keys and values do not depend on the request that computed them, as long as its chunks run the same kernels.
So a prompt continues only from positions where this holds (`Chunks`), with the same bits as without the cache. Keys and
values from decode steps, and everything computed on top of them, may differ in their last bits; only requests with
`reuse_cache` may continue from them. Recurrent states have no pages: extra rows of the state buffers hold a few
snapshots, and a prompt continues from one of them.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count as numbers_from
from itertools import islice

from graphcore.kvcache.chunks import Chunks, common
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.kvcache.page_table import PageTable

MOST_COMPARED = 64  # children of a node, the newest first, that a prompt is compared with token by token


@dataclass(eq=False)
class PrefixNode:
    """A node of the tree: a page of tokens, or the first tokens of a page, after those of its parents.

    Attributes:
        tokens: token ids of the node, at most a page of them.
        pages: page of each table; None if the node has none there.
        is_bit_exact: True if the bits of the pages equal those of a prefill with an empty cache.
        snapshot: row of the state buffers with the states after the last token; None if there is none.
        has_exact_states: True if the bits of the snapshot equal those of a prefill with an empty cache.
        last_used: value of the LRU clock at the last use of this node or of a descendant.
    """

    parent: "PrefixNode | None"
    tokens: tuple[int, ...]
    pages: list[int | None]
    is_bit_exact: bool
    snapshot: int | None = None
    has_exact_states: bool = False
    last_used: int = 0
    children: dict[tuple[int, ...], "PrefixNode"] = field(default_factory=dict)

    def below(self) -> Iterator["PrefixNode"]:
        """Yield all descendants of this node."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def prune(self) -> None:
        """Remove this node, then its ancestors, from the tree while they have no page, no snapshot and no children."""
        node = self
        while node.parent is not None and not node.children and node.snapshot is None and not any(node.pages):
            del node.parent.children[node.tokens]
            node = node.parent


@dataclass(frozen=True)
class PrefixHit:
    """A match in the prefix cache: the prefix of a prompt that does not run again.

    Attributes:
        length: number of tokens.
        path: nodes of the prefix in order; the last one may match only in its first tokens.
        is_bit_exact: True if the rest of the prompt gets the bits that it has in a prefill with an empty cache.
    """

    length: int
    path: Sequence[PrefixNode]
    is_bit_exact: bool


class PrefixCache:
    """Radix tree of cached prefixes.

    Args:
        pages: allocator of the pages; it evicts pages of this tree when none is free.
        chunks: chunk boundaries of prompts.
        snapshots: rows of the state buffers for snapshots.

    Attributes:
        no_hit: the hit of length 0, for prompts without a usable prefix.
        has_snapshots: True if there are rows for snapshots.
    """

    def __init__(self, pages: PageAllocator, chunks: Chunks, snapshots: Sequence[int]) -> None:
        self._pages, self._chunks = pages, chunks
        self._root = PrefixNode(None, (), [], is_bit_exact=True)
        self._page_size = pages.tables[0].page if pages.tables else chunks.size
        self._free_snapshots = list(snapshots)
        self.has_snapshots = bool(snapshots)
        self._clock = 0
        self._node_refs: list[Counter[int]] = [Counter() for _ in pages.tables]  # nodes of each page, by table
        self.no_hit = PrefixHit(0, (), is_bit_exact=True)
        pages.prefix_cache = self

    def find(self, prompt: Sequence[int], reuse_cache: bool) -> PrefixHit:
        """Return the longest cached prefix of a prompt that it may continue from: at most all but its last token.

        Args:
            reuse_cache: True to continue from keys and values of decode steps, too, and from any position.
        """
        path, parts = self._walk(prompt, reuse_cache)
        most = len(prompt) - 1
        for shared, part in parts:
            length = min(len(path) * self._page_size + shared, most)
            found = self._usable([*path, part], length, len(prompt), reuse_cache)
            if found.length:
                return found
        for count in range(len(path), 0, -1):
            found = self._usable(path[:count], min(count * self._page_size, most), len(prompt), reuse_cache)
            if found.length:
                return found
        return self.no_hit

    def _walk(self, prompt: Sequence[int], reuse_cache: bool) -> tuple[list[PrefixNode], list[tuple[int, PrefixNode]]]:
        """Return the nodes whose whole pages match a prompt, and then those that match only in their first tokens.

        The latter are pairs of the number of matching tokens and the node, the largest number first.
        """
        node, path = self._root, list[PrefixNode]()
        while True:
            key = tuple(prompt[len(path) * self._page_size :][: self._page_size])
            whole = node.children.get(key) if len(key) == self._page_size else None
            if whole is None or not (whole.is_bit_exact or reuse_cache):
                break
            path.append(whole)
            node = whole
        latest = islice(reversed(node.children.values()), MOST_COMPARED)
        parts = [(common(child.tokens, key), child) for child in latest if child.is_bit_exact or reuse_cache]
        return path, sorted((part for part in parts if part[0]), key=lambda part: -part[0])

    def _usable(self, path: Sequence[PrefixNode], length: int, total: int, reuse_cache: bool) -> PrefixHit:
        """Return the hit of a prompt of `total` tokens on a path that shares `length` tokens with it."""
        last, before = path[-1], (len(path) - 1) * self._page_size
        if not reuse_cache:
            length = self._chunks.start_within(length, total)
        if self._pages.has_states:
            ends = before + len(last.tokens)
            is_usable = last.snapshot is not None and ends <= length and (reuse_cache or last.has_exact_states)
            length = ends if is_usable and (reuse_cache or self._chunks.start_within(ends, total) == ends) else 0
        if length <= before:
            return self.no_hit
        # Sliding-window tables may have lost pages in the middle of a path; check those that the next token's window
        # needs.
        for index, table in enumerate(self._pages.tables):
            numbers = table.numbers(length, length) if table.is_ring else ()
            if any(path[number].pages[index] is None for number in numbers):
                return self.no_hit
        is_bit_exact = all(node.is_bit_exact for node in path) and self._chunks.start_within(length, total) == length
        return PrefixHit(length, tuple(path), is_bit_exact and (last.has_exact_states or not self._pages.has_states))

    def attach(self, row: int, hit: PrefixHit) -> bool:
        """Share the pages of a hit with a row that has none, and copy its recurrent state there.

        Returns:
            False if there is no free page to copy the last, partly matching page to; the row then has no pages.
        """
        if not hit.length:
            return True
        self._touch(hit.path[-1])
        has_part = hit.length % self._page_size != 0
        for index, table in enumerate(self._pages.tables):
            numbers = table.numbers(hit.length, hit.length)
            pages = {number: hit.path[number].pages[index] for number in numbers}
            table.share(row, {number: page for number, page in pages.items() if page is not None})
        if has_part and not self._pages.copy(row, hit.length // self._page_size):
            self._pages.free(row)
            return False
        snapshot = hit.path[-1].snapshot
        if self._pages.has_states and snapshot is not None:
            self._pages.copy_states(snapshot, row)
        return True

    def keep(self, row: int, ids: Sequence[int], *, is_bit_exact: bool, save_states: bool) -> None:
        """Insert the pages of a row into the tree.

        Args:
            ids: token ids that the pages hold, from the sequence's first one on.
            is_bit_exact: True if the bits of the pages equal those of a prefill with an empty cache.
            save_states: True to keep a snapshot of the row's recurrent states, too, which are those after `ids`.
        """
        page_maps = [table.rows[row] for table in self._pages.tables]
        put_states = partial(self._pages.copy_states, row) if save_states else None
        self.keep_pages(page_maps, ids, is_bit_exact=is_bit_exact, put_states=put_states)

    def keep_pages(
        self,
        page_maps: Sequence[Mapping[int, int]],
        ids: Sequence[int],
        *,
        is_bit_exact: bool,
        put_states: Callable[[int], None] | None = None,
    ) -> None:
        """Insert pages into the tree.

        Args:
            page_maps: for each table, logical page index -> physical page.
            ids, is_bit_exact: as for `keep`.
            put_states: function that writes the states after the last token to a row of the state buffers; None to keep
                no snapshot.
        """
        node = self._root
        for at in range(0, len(ids), self._page_size):
            tokens = tuple(ids[at : at + self._page_size])
            pages = [page_map.get(at // self._page_size) for page_map in page_maps]
            child = node.children.get(tokens)
            if child is None:
                child = PrefixNode(node, tokens, [None] * len(pages), is_bit_exact)
                node.children[tokens] = child
            self._adopt(child, pages, is_bit_exact)
            node = child
        self._touch(node)
        if put_states is not None and self._pages.has_states and node is not self._root:
            self._keep_states(put_states, node, is_bit_exact)
        node.prune()

    def path(self, ids: Sequence[int]) -> Sequence[PrefixNode]:
        """Return the nodes that `keep` made for these tokens; empty if it made none, or if one has been evicted."""
        node, path = self._root, list[PrefixNode]()
        for at in range(0, len(ids), self._page_size):
            child = node.children.get(tuple(ids[at : at + self._page_size]))
            if child is None:
                return ()
            path.append(child)
            node = child
        return path

    def _keep_states(self, put_states: Callable[[int], None], node: PrefixNode, is_bit_exact: bool) -> None:
        """Write a snapshot of states for a node, unless it already has one that is at least as exact."""
        if node.snapshot is not None and (node.has_exact_states or not is_bit_exact):
            return
        node.snapshot = self._free_snapshot() if node.snapshot is None else node.snapshot
        node.has_exact_states = is_bit_exact
        if node.snapshot is not None:
            put_states(node.snapshot)

    def _adopt(self, node: PrefixNode, pages: Sequence[int | None], is_bit_exact: bool) -> None:
        """Store pages in a node where it has none. Bit-exact pages replace all pages that are not.

        A bit-exact node never takes pages that are not.
        """
        is_better = is_bit_exact and not node.is_bit_exact
        node.is_bit_exact = node.is_bit_exact or is_bit_exact
        for index, page in enumerate(pages):
            old = node.pages[index]
            if page == old or not (is_better or (old is None and is_bit_exact == node.is_bit_exact)):
                continue
            if page is not None:
                self._incref(index, page)
            if old is not None:
                self._decref(index, old)
            node.pages[index] = page

    def _incref(self, index: int, page: int) -> None:
        self._node_refs[index][page] += 1
        if self._node_refs[index][page] == 1:
            self._pages.tables[index].incref(page)

    def _decref(self, index: int, page: int) -> None:
        self._node_refs[index][page] -= 1
        if not self._node_refs[index][page]:
            del self._node_refs[index][page]
            self._pages.tables[index].decref(page)

    def clear(self) -> None:
        """Free all pages and snapshots."""
        for node in list(self._root.below()):
            self._release(node)
        self._root.children.clear()

    def _touch(self, node: PrefixNode | None) -> None:
        self._clock += 1
        while node is not None:
            node.last_used = self._clock
            node = node.parent

    def num_evictable(self, table: PageTable) -> int:
        """Return the number of pages of a table that only the tree holds."""
        return sum(not table.is_shared(page) for page in self._node_refs[self._pages.tables.index(table)])

    def evict(self, table: PageTable, count: int) -> None:
        """Evict pages of a table that only the tree holds, the least recently used first, until `count` are freed."""
        index = self._pages.tables.index(table)
        order = numbers_from(0)  # breaks ties between nodes that were used together
        idle = [(node.last_used, next(order), node) for node in self._root.below() if self._is_idle(node, index, table)]
        heapq.heapify(idle)
        before = table.num_free
        while idle and table.num_free - before < count:
            node = heapq.heappop(idle)[-1]
            parent, page = node.parent, node.pages[index]
            assert parent is not None
            if table.is_ring and page is not None:
                self._decref(index, page)
                node.pages[index] = None
            else:
                self._release(node)
            node.prune()
            if not table.is_ring and parent is not self._root and self._is_idle(parent, index, table):
                heapq.heappush(idle, (parent.last_used, next(order), parent))
        if not table.is_ring and table.num_free - before < count:
            # Leaves in use by running rows block eviction of their ancestors, even those that only the tree references;
            # so drop the whole tree.
            self.clear()

    def _is_idle(self, node: PrefixNode, index: int, table: PageTable) -> bool:
        page = node.pages[index]
        if page is None or table.is_shared(page):
            return False
        return table.is_ring or not node.children

    def _release(self, node: PrefixNode) -> None:
        for index, page in enumerate(node.pages):
            if page is not None:
                self._decref(index, page)
        node.pages = [None] * len(node.pages)
        if node.snapshot is not None:
            self._free_snapshots.append(node.snapshot)
            node.snapshot = None

    def _free_snapshot(self) -> int | None:
        """Return a row for a snapshot, evicting the least recently used one if none is free; None without rows."""
        if not self._free_snapshots:
            holders = [node for node in self._root.below() if node.snapshot is not None]
            oldest = min(holders, key=lambda node: node.last_used, default=None)
            if oldest is None or oldest.snapshot is None:
                return None
            self._free_snapshots.append(oldest.snapshot)
            oldest.snapshot = None
            oldest.prune()
        return self._free_snapshots.pop()
