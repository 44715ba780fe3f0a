"""The prefix cache: prompts with a common prefix share pages. A radix tree of pages, compared token by token.

    root -- page of tokens -- page -- page -- part of a page
                           \\- page -- ...

A prompt continues from the longest path that matches its tokens. Whole pages are shared; the last one is copied if only
a part of it matches. The tree holds a reference to each page, so pages outlive their sequences until memory is needed:
the least recently used pages are evicted first, leaves before their parents.

A prompt's keys and values do not depend on the request that computed them, as long as its chunks run the same kernels.
So a prompt continues only from positions where this holds (`Chunks`), with the same bits as without the cache. Keys and
values of decode steps may have other bits: only requests with `reuse_cache` use them, or prompts that continued from
them. Recurrent states have no pages: extra rows of the state buffers hold a few snapshots, and a prompt continues from
one of them.
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
        is_prompt: True if the pages have the bits of a prompt that was computed alone.
        snapshot: row of the state buffers with the states after the last token; None if there is none.
        has_prompt_states: True if the snapshot has the bits of a prompt that was computed alone.
        used: number of the last use of this node or of a descendant, for LRU eviction.
    """

    parent: "PrefixNode | None"
    tokens: tuple[int, ...]
    pages: list[int | None]
    is_prompt: bool
    snapshot: int | None = None
    has_prompt_states: bool = False
    used: int = 0
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
        is_prompt: True if the rest of the prompt gets the bits that it has in a prompt computed alone.
    """

    length: int
    path: Sequence[PrefixNode]
    is_prompt: bool


class PrefixCache:
    """Radix tree of cached prefixes.

    Args:
        pages: allocator of the pages; it evicts pages of this tree when none is free.
        chunks: chunk boundaries of prompts.
        snapshots: rows of the state buffers for snapshots.

    Attributes:
        nothing: the hit of length 0, for prompts without a usable prefix.
        has_snapshots: True if there are rows for snapshots.
    """

    def __init__(self, pages: PageAllocator, chunks: Chunks, snapshots: Sequence[int]) -> None:
        self._pages, self._chunks = pages, chunks
        self._root = PrefixNode(None, (), [], is_prompt=True)
        self._page = pages.tables[0].page if pages.tables else chunks.size
        self._free_snapshots = list(snapshots)
        self.has_snapshots = bool(snapshots)
        self._uses = 0
        self._held: list[Counter[int]] = [Counter() for _ in pages.tables]  # number of nodes of each page, by table
        self.nothing = PrefixHit(0, (), is_prompt=True)
        pages.prefix_cache = self

    def find(self, prompt: Sequence[int], takes_answers: bool) -> PrefixHit:
        """Return the longest cached prefix of a prompt that it may continue from: at most all but its last token.

        Args:
            takes_answers: True to continue from keys and values of decode steps, too, and from any position.
        """
        path, parts = self._walk(prompt, takes_answers)
        most = len(prompt) - 1
        for shared, part in parts:
            found = self._usable([*path, part], min(len(path) * self._page + shared, most), len(prompt), takes_answers)
            if found.length:
                return found
        for count in range(len(path), 0, -1):
            found = self._usable(path[:count], min(count * self._page, most), len(prompt), takes_answers)
            if found.length:
                return found
        return self.nothing

    def _walk(
        self, prompt: Sequence[int], takes_answers: bool
    ) -> tuple[list[PrefixNode], list[tuple[int, PrefixNode]]]:
        """Return the nodes whose whole pages match a prompt, and then those that match only in their first tokens.

        The latter are pairs of the number of matching tokens and the node, the largest number first.
        """
        node, path = self._root, list[PrefixNode]()
        while True:
            key = tuple(prompt[len(path) * self._page :][: self._page])
            whole = node.children.get(key) if len(key) == self._page else None
            if whole is None or not (whole.is_prompt or takes_answers):
                break
            path.append(whole)
            node = whole
        latest = islice(reversed(node.children.values()), MOST_COMPARED)
        parts = [(common(child.tokens, key), child) for child in latest if child.is_prompt or takes_answers]
        return path, sorted((part for part in parts if part[0]), key=lambda part: -part[0])

    def _usable(self, path: Sequence[PrefixNode], length: int, total: int, takes_answers: bool) -> PrefixHit:
        """Return the hit of a prompt of `total` tokens on a path that shares `length` tokens with it."""
        last, before = path[-1], (len(path) - 1) * self._page
        if not takes_answers:
            length = self._chunks.start_within(length, total)
        if self._pages.has_states:
            ends = before + len(last.tokens)
            is_usable = last.snapshot is not None and ends <= length and (takes_answers or last.has_prompt_states)
            length = ends if is_usable and (takes_answers or self._chunks.start_within(ends, total) == ends) else 0
        if length <= before:
            return self.nothing
        for index, table in enumerate(self._pages.tables):  # only rings evict pages inside a path
            numbers = table.numbers(length, length) if table.is_ring else ()
            if any(path[number].pages[index] is None for number in numbers):
                return self.nothing
        is_prompt = all(node.is_prompt for node in path) and self._chunks.start_within(length, total) == length
        return PrefixHit(length, tuple(path), is_prompt and (last.has_prompt_states or not self._pages.has_states))

    def use(self, row: int, found: PrefixHit) -> bool:
        """Share the pages of a hit with a row that has none, and copy its recurrent state there.

        Returns:
            False if there is no free page to copy the last, partly matching page to; the row then has no pages.
        """
        if not found.length:
            return True
        self._use(found.path[-1])
        has_part = found.length % self._page != 0
        for index, table in enumerate(self._pages.tables):
            numbers = table.numbers(found.length, found.length)
            pages = {number: found.path[number].pages[index] for number in numbers}
            table.share(row, {number: page for number, page in pages.items() if page is not None})
        if has_part and not self._pages.copy(row, found.length // self._page):
            self._pages.free(row)
            return False
        snapshot = found.path[-1].snapshot
        if self._pages.has_states and snapshot is not None:
            self._pages.copy_states(snapshot, row)
        return True

    def keep(self, row: int, ids: Sequence[int], *, is_prompt: bool, has_states: bool) -> None:
        """Insert the pages of a row into the tree.

        Args:
            ids: token ids that the pages hold, from the sequence's first one on.
            is_prompt: True if the pages have the bits of a prompt that was computed alone.
            has_states: True to keep a snapshot of the row's recurrent states, too, which are those after `ids`.
        """
        held = [table.rows[row] for table in self._pages.tables]
        put_states = partial(self._pages.copy_states, row) if has_states else None
        self.keep_pages(held, ids, is_prompt=is_prompt, put_states=put_states)

    def keep_pages(
        self,
        held: Sequence[Mapping[int, int]],
        ids: Sequence[int],
        *,
        is_prompt: bool,
        put_states: Callable[[int], None] | None = None,
    ) -> None:
        """Insert pages into the tree.

        Args:
            held: pages of each table by number.
            ids, is_prompt: as for `keep`.
            put_states: function that writes the states after the last token to a row of the state buffers; None to keep
                no snapshot.
        """
        node = self._root
        for at in range(0, len(ids), self._page):
            tokens = tuple(ids[at : at + self._page])
            pages = [of_table.get(at // self._page) for of_table in held]
            child = node.children.get(tokens)
            if child is None:
                child = PrefixNode(node, tokens, [None] * len(pages), is_prompt)
                node.children[tokens] = child
            self._adopt(child, pages, is_prompt)
            node = child
        self._use(node)
        if put_states is not None and self._pages.has_states and node is not self._root:
            self._keep_states(put_states, node, is_prompt)
        node.prune()

    def path(self, ids: Sequence[int]) -> Sequence[PrefixNode]:
        """Return the nodes that `keep` made for these tokens; none if it did not, or if one has been evicted."""
        node, path = self._root, list[PrefixNode]()
        for at in range(0, len(ids), self._page):
            child = node.children.get(tuple(ids[at : at + self._page]))
            if child is None:
                return ()
            path.append(child)
            node = child
        return path

    def _keep_states(self, put_states: Callable[[int], None], node: PrefixNode, is_prompt: bool) -> None:
        """Write a snapshot of states for a node, unless it has one with the same bits or better ones."""
        if node.snapshot is not None and (node.has_prompt_states or not is_prompt):
            return
        node.snapshot = self._free_snapshot() if node.snapshot is None else node.snapshot
        node.has_prompt_states = is_prompt
        if node.snapshot is not None:
            put_states(node.snapshot)

    def _adopt(self, node: PrefixNode, pages: Sequence[int | None], is_prompt: bool) -> None:
        """Store pages in a node where it has none. Pages of a prompt replace all pages of decode steps.

        A node that serves prompts never takes pages of decode steps.
        """
        is_better = is_prompt and not node.is_prompt
        node.is_prompt = node.is_prompt or is_prompt
        for index, page in enumerate(pages):
            old = node.pages[index]
            if page == old or not (is_better or (old is None and is_prompt == node.is_prompt)):
                continue
            if page is not None:
                self._incref(index, page)
            if old is not None:
                self._decref(index, old)
            node.pages[index] = page

    def _incref(self, index: int, page: int) -> None:
        self._held[index][page] += 1
        if self._held[index][page] == 1:
            self._pages.tables[index].incref(page)

    def _decref(self, index: int, page: int) -> None:
        self._held[index][page] -= 1
        if not self._held[index][page]:
            del self._held[index][page]
            self._pages.tables[index].decref(page)

    def forget(self) -> None:
        """Free all pages and snapshots."""
        for node in list(self._root.below()):
            self._release(node)
        self._root.children.clear()

    def _use(self, node: PrefixNode | None) -> None:
        self._uses += 1
        while node is not None:
            node.used = self._uses
            node = node.parent

    def num_evictable(self, table: PageTable) -> int:
        """Return the number of pages of a table that only the tree holds."""
        return sum(not table.is_shared(page) for page in self._held[self._pages.tables.index(table)])

    def evict(self, table: PageTable, count: int) -> None:
        """Evict pages of a table that only the tree holds, the least recently used first, until `count` are freed."""
        index = self._pages.tables.index(table)
        order = numbers_from(0)  # breaks ties between nodes that were used together
        idle = [(node.used, next(order), node) for node in self._root.below() if self._is_idle(node, index, table)]
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
                heapq.heappush(idle, (parent.used, next(order), parent))
        if not table.is_ring and table.num_free - before < count:
            self.forget()  # leaves that rows share keep the tree's own pages before them from being evicted

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
            oldest = min(holders, key=lambda node: node.used, default=None)
            if oldest is None or oldest.snapshot is None:
                return None
            self._free_snapshots.append(oldest.snapshot)
            oldest.snapshot = None
            oldest.prune()
        return self._free_snapshots.pop()
