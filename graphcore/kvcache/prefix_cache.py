"""The prefix cache: prompts with a common prefix share pages. A radix tree of pages, compared token by token.

    root -- page of tokens -- page -- page -- part of a page
                           \\- page -- ...

A prompt continues from the longest path that matches its tokens. Whole pages are shared; the last one is copied if only
a part of it matches. The tree holds a reference to each page, so pages outlive their sequences until memory is needed:
the least recently used pages are evicted first, leaves before their parents.

Keys and values of a prompt do not depend on the request that computed them, as long as chunks of prompts choose the
same kernels. So a prompt continues only from positions where this holds (`Chunks`), with the bits that it would get
alone. Tokens that decode steps made may have other bits: they serve only a request that says so (`reuse_cache`), as do
prompts that went on from them. Recurrent states have no pages: a few snapshots lie beside the sequences' states, and a
prompt goes on from one.
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

MOST_COMPARED = 64  # pages that may follow one page and are compared token by token


@dataclass(eq=False)
class PrefixNode:
    """A node of the tree: a page of tokens, or the first tokens of a page, after those of its parents.

    Attributes:
        tokens: its tokens, at most a page of them.
        pages: the page of each table; None where it was given back.
        is_prompt: whether its bits are those of a prompt that was computed alone.
        snapshot: row of the states after its last token; None if there is none.
        has_prompt_states: whether the snapshot has the bits of a prompt that was computed alone.
        used: number of the last use of any prefix that was one of this.
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
        """Take this prefix, and those before it, out of the tree if they hold nothing and lead nowhere."""
        node = self
        while node.parent is not None and not node.children and node.snapshot is None and not any(node.pages):
            del node.parent.children[node.tokens]
            node = node.parent


@dataclass(frozen=True)
class PrefixHit:
    """A match in the prefix cache: the prefix of a prompt that need not run again.

    Attributes:
        length: its tokens.
        path: its pages in order; of the last one only a part may be its own.
        is_prompt: whether what follows gets the bits that it has in a prompt that is computed alone.
    """

    length: int
    path: Sequence[PrefixNode]
    is_prompt: bool


class PrefixCache:
    """Radix tree of cached prefixes.

    Args:
        pages: pages of the caches, which ask here when none is free.
        chunks: chunks of prompts.
        snapshots: rows of the states that hold no sequence.

    Attributes:
        nothing: the hit of length 0, for prompts without a usable prefix.
        has_snapshots: whether there are rows for snapshots.
    """

    def __init__(self, pages: PageAllocator, chunks: Chunks, snapshots: Sequence[int]) -> None:
        self._pages, self._chunks = pages, chunks
        self._root = PrefixNode(None, (), [], is_prompt=True)
        self._page = pages.tables[0].page if pages.tables else chunks.size
        self._free_snapshots = list(snapshots)
        self.has_snapshots = bool(snapshots)
        self._uses = 0
        self._held: list[Counter[int]] = [Counter() for _ in pages.tables]  # prefixes that have a page of each table
        self.nothing = PrefixHit(0, (), is_prompt=True)
        pages.reclaim, pages.reclaimable = self._evict, self._num_idle

    def find(self, prompt: Sequence[int], takes_answers: bool) -> PrefixHit:
        """Return the longest cached prefix of a prompt that it may continue from: at most all but its last token.

        Args:
            takes_answers: True to go on from what decode steps made, too, and from any position.
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
        """Return the whole pages along a prompt, and those of which only first tokens are the prompt's next ones.

        The latter have the number of these tokens with them, and come with the largest number first.
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
        """Return what a prompt of `total` tokens can use of a path that shares so many tokens with it."""
        last, before = path[-1], (len(path) - 1) * self._page
        if not takes_answers:
            length = self._chunks.start_within(length, total)
        if self._pages.has_states:
            ends = before + len(last.tokens)
            is_usable = last.snapshot is not None and ends <= length and (takes_answers or last.has_prompt_states)
            length = ends if is_usable and (takes_answers or self._chunks.start_within(ends, total) == ends) else 0
        if length <= before:
            return self.nothing
        for index, table in enumerate(self._pages.tables):  # only rings give back pages that are not at an end
            numbers = table.numbers(length, length) if table.is_ring else ()
            if any(path[number].pages[index] is None for number in numbers):
                return self.nothing
        is_prompt = all(node.is_prompt for node in path) and self._chunks.start_within(length, total) == length
        return PrefixHit(length, tuple(path), is_prompt and (last.has_prompt_states or not self._pages.has_states))

    def use(self, row: int, found: PrefixHit) -> bool:
        """Share the pages of a hit with a row that has none, and copy its recurrent state there.

        Returns:
            False if there is no free page for the one that has to be copied; the row then has none.
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
        """Keep the pages of a row, which hold so many tokens and all that precede them.

        Args:
            ids: tokens from the sequence's first one on.
            is_prompt: whether their bits are those of a prompt that was computed alone.
            has_states: whether the row's states are those after the last of them, and are to be kept, too.
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
        """Keep pages that hold so many tokens and all that precede them.

        Args:
            held: pages of each table by number.
            ids, is_prompt: the same as of `keep`.
            put_states: function that writes the states after the last token to a row of the states; None for none.
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
        """Return the prefixes of these tokens as `keep` made them; none if they were not kept, or not all are left."""
        node, path = self._root, list[PrefixNode]()
        for at in range(0, len(ids), self._page):
            child = node.children.get(tuple(ids[at : at + self._page]))
            if child is None:
                return ()
            path.append(child)
            node = child
        return path

    def _keep_states(self, put_states: Callable[[int], None], node: PrefixNode, is_prompt: bool) -> None:
        """Write states beside a prefix, unless it has some that are as good."""
        if node.snapshot is not None and (node.has_prompt_states or not is_prompt):
            return
        node.snapshot = self._free_snapshot() if node.snapshot is None else node.snapshot
        node.has_prompt_states = is_prompt
        if node.snapshot is not None:
            put_states(node.snapshot)

    def _adopt(self, node: PrefixNode, pages: Sequence[int | None], is_prompt: bool) -> None:
        """Let a prefix have pages where it has none, or none but these where they are a prompt's for the first time.

        Pages of an answer are never those of a prefix that serves prompts.
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

    def _num_idle(self, table: PageTable) -> int:
        """Return how many pages of a table only the tree holds."""
        return sum(not table.is_shared(page) for page in self._held[self._pages.tables.index(table)])

    def _evict(self, table: PageTable, count: int) -> None:
        """Evict pages of a table that only the tree holds, at most so many."""
        index = self._pages.tables.index(table)
        order = numbers_from(0)  # of nodes that were used last together
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
            self.forget()  # rows have the ends of paths whose beginnings only the tree has

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
        """Return a row for a snapshot, if need be that of the one that was not used for longest."""
        if not self._free_snapshots:
            holders = [node for node in self._root.below() if node.snapshot is not None]
            oldest = min(holders, key=lambda node: node.used, default=None)
            if oldest is None or oldest.snapshot is None:
                return None
            self._free_snapshots.append(oldest.snapshot)
            oldest.snapshot = None
            oldest.prune()
        return self._free_snapshots.pop()
