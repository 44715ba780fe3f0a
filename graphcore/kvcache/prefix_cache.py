"""The prefix cache: prompts with a common prefix share pages. A radix tree of pages, compared token by token.

    root -- page of tokens -- page -- page -- part of a page
                           \\- page -- ...

A prompt continues from the longest path that matches its tokens. Whole pages are shared; the last one is copied if only
a part of it matches. The tree holds a reference to each page, so pages outlive their sequences until memory is needed.

Only idle pages are evicted, those that no row has, in the order in which rows have freed them: the least recently used
first. A row frees a prefix's last pages first, so leaves go before their parents. A node that has lost its page stays
as long as it has children; prompts continue only up to it, until a sequence brings the page again. Counting and
evicting pages costs O(1) for each page evicted, whatever the tree holds; finding and keeping a prefix costs O(1) for
each of its pages.

A prompt's keys and values do not depend on the request that computed them, as long as its chunks run the same kernels.
So a prompt continues only from positions where this holds (`Chunks`), with the same bits as without the cache. Keys and
values from decode steps, and everything computed on top of them, may differ in their last bits; only requests with
`reuse_cache` may continue from them. Recurrent states have no pages: extra rows of the state buffers hold a few
snapshots, and a prompt continues from one of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from graphcore.kvcache.chunks import Chunks, common
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.kvcache.page_table import PageTable

MOST_COMPARED = 64  # children of a node, the newest first, that a prompt is compared with token by token


@dataclass(eq=False)
class PrefixNode:
    """A node of the tree: a page of tokens, or the first tokens of a page, after those of its parents.

    Attributes:
        begin: number of tokens before the node.
        tokens: token ids of the node, at most a page of them.
        pages: page of each table; None if the node has none there.
        is_bit_exact: True if the bits of the pages equal those of a prefill with an empty cache.
        snapshot: row of the state buffers with the states after the last token; None if there is none.
        has_exact_states: True if the bits of the snapshot equal those of a prefill with an empty cache.
        is_removed: True if the node is no longer in the tree.
    """

    parent: "PrefixNode | None"
    begin: int
    tokens: tuple[int, ...]
    pages: list[int | None]
    is_bit_exact: bool
    snapshot: int | None = None
    has_exact_states: bool = False
    is_removed: bool = False
    children: dict[tuple[int, ...], "PrefixNode"] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Number of tokens up to the node's last one."""
        return self.begin + len(self.tokens)

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
            node.is_removed = True
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
        self._root = PrefixNode(None, 0, (), [], is_bit_exact=True)
        self._page_size = pages.tables[0].page if pages.tables else chunks.size
        self._free_snapshots = list(snapshots)
        self.has_snapshots = bool(snapshots)
        self._with_snapshot = OrderedDict[PrefixNode, None]()  # the least recently used snapshot first
        # The nodes of each page, by table. A page has several if prompts ended in it, each the beginning of the next.
        self._nodes: list[dict[int, list[PrefixNode]]] = [{} for _ in pages.tables]
        self._without_window = [index for index, table in enumerate(pages.tables) if not table.is_ring]
        self.no_hit = PrefixHit(0, (), is_bit_exact=True)
        pages.prefix_cache = self

    def find(self, prompt: Sequence[int], reuse_cache: bool) -> PrefixHit:
        """Return the longest cached prefix of a prompt that it may continue from: at most all but its last token.

        Args:
            reuse_cache: True to continue from keys and values of decode steps, too, and from any position.
        """
        path, parts = self._walk(prompt, reuse_cache)
        ends_in_part = ((len(path), part, shared) for shared, part in parts)
        ends_in_path = ((number, path[number], self._page_size) for number in reversed(range(len(path))))
        for number, last, shared in chain(ends_in_part, ends_in_path):
            length = min(number * self._page_size + shared, len(prompt) - 1)
            length = self._usable_length(path, last, length, len(prompt), reuse_cache)
            if length:
                nodes = (*path[:number], last)
                is_bit_exact = all(node.is_bit_exact for node in nodes)
                is_bit_exact &= self._chunks.start_within(length, len(prompt)) == length
                return PrefixHit(length, nodes, is_bit_exact and (last.has_exact_states or not self._pages.has_states))
        return self.no_hit

    def _walk(self, prompt: Sequence[int], reuse_cache: bool) -> tuple[list[PrefixNode], list[tuple[int, PrefixNode]]]:
        """Return the nodes whose whole pages match a prompt, and then those that match only in their first tokens.

        The latter are pairs of the number of matching tokens and the node, the largest number first.
        """
        node, path = self._root, list[PrefixNode]()
        while True:
            key = tuple(prompt[node.end : node.end + self._page_size])
            whole = node.children.get(key) if len(key) == self._page_size else None
            if whole is None or not self._may_use(whole, reuse_cache):
                break
            path.append(whole)
            node = whole
        latest = islice(reversed(node.children.values()), MOST_COMPARED)
        parts = [(common(child.tokens, key), child) for child in latest if self._may_use(child, reuse_cache)]
        return path, sorted((part for part in parts if part[0]), key=lambda part: -part[0])

    def _may_use(self, node: PrefixNode, reuse_cache: bool) -> bool:
        """Return whether a prompt may continue from a node or below it: it has its pages, unless a window passes."""
        if not (node.is_bit_exact or reuse_cache):
            return False
        return all(node.pages[index] is not None for index in self._without_window)

    def _usable_length(
        self, path: Sequence[PrefixNode], last: PrefixNode, length: int, total: int, reuse_cache: bool
    ) -> int:
        """Return how much of a prompt of `total` tokens can be taken from a path up to a node of it or after it.

        Args:
            length: number of tokens that the prompt shares with the path up to `last`.
        """
        if not reuse_cache:
            length = self._chunks.start_within(length, total)
        if self._pages.has_states:
            is_usable = last.snapshot is not None and last.end <= length and (reuse_cache or last.has_exact_states)
            is_usable = is_usable and (reuse_cache or self._chunks.start_within(last.end, total) == last.end)
            length = last.end if is_usable else 0
        if length <= last.begin:
            return 0
        # Sliding-window tables may have lost pages in the middle of a path; check those that the next token's window
        # needs.
        for index, table in enumerate(self._pages.tables):
            numbers = table.numbers(length, length) if table.is_ring else range(0)
            nodes = (last if number * self._page_size == last.begin else path[number] for number in numbers)
            if any(node.pages[index] is None for node in nodes):
                return 0
        return length

    def attach(self, row: int, hit: PrefixHit) -> bool:
        """Share the pages of a hit with a row that has none, and copy its recurrent state there.

        Pages of the hit are in use, so not evictable, from here on, and its snapshot has been copied before any page is
        evicted for the copy of the last one.

        Returns:
            False if something of the hit has been evicted since it was found, or if there is no free page to copy the
            last, partly matching page to; the row then has no pages.
        """
        if not hit.length:
            return True
        last = hit.path[-1]
        shared: list[dict[int, int]] = []
        for index, table in enumerate(self._pages.tables):
            numbers = table.numbers(hit.length, hit.length)
            shared.append({number: page for number in numbers if (page := hit.path[number].pages[index]) is not None})
            if len(shared[-1]) < len(numbers):
                return False
        if self._pages.has_states:
            if last.snapshot is None:
                return False
            self._pages.copy_states(last.snapshot, row)
            self._with_snapshot.move_to_end(last)
        for table, pages in zip(self._pages.tables, shared, strict=True):
            table.share(row, pages)
        if hit.length % self._page_size and not self._pages.copy(row, hit.length // self._page_size):
            self._pages.free(row)
            return False
        return True

    def keep(
        self,
        row: int,
        ids: Sequence[int],
        *,
        is_bit_exact: bool,
        save_states: bool,
        after: PrefixNode | None = None,
    ) -> PrefixNode | None:
        """Insert the pages of a row into the tree.

        Args:
            ids: token ids that the pages hold, from the sequence's first one on, or from the one after `after`.
            is_bit_exact: True if the bits of the pages equal those of a prefill with an empty cache.
            save_states: True to keep a snapshot of the row's recurrent states, too, which are those after `ids`.
            after: node that an earlier call returned for the sequence; the pages up to it are not visited again.

        Returns:
            The node of the last whole page; None if there is none, or if it has been pruned.
        """
        page_maps = [table.rows[row] for table in self._pages.tables]
        put_states = partial(self._pages.copy_states, row) if save_states else None
        return self.keep_pages(page_maps, ids, is_bit_exact=is_bit_exact, put_states=put_states, after=after)

    def keep_pages(
        self,
        page_maps: Sequence[Mapping[int, int]],
        ids: Sequence[int],
        *,
        is_bit_exact: bool,
        put_states: Callable[[int], None] | None = None,
        after: PrefixNode | None = None,
    ) -> PrefixNode | None:
        """Insert pages, which somebody else holds, too, into the tree. O(1) for each page of `ids`.

        Args:
            page_maps: for each table, logical page index -> physical page.
            ids, is_bit_exact, after: as for `keep`.
            put_states: function that writes the states after the last token to a row of the state buffers; None to keep
                no snapshot.

        Returns:
            The node of the last whole page; None if there is none, or if it has been pruned.
        """
        node = whole = after or self._root
        assert not node.is_removed, "a sequence goes on behind a node that is still in the tree"
        for at in range(0, len(ids), self._page_size):
            tokens = tuple(ids[at : at + self._page_size])
            pages = [page_map.get(whole.end // self._page_size) for page_map in page_maps]
            child = node.children.get(tokens)
            if child is None:
                child = PrefixNode(node, node.end, tokens, [None] * len(pages), is_bit_exact)
                node.children[tokens] = child
            self._adopt(child, pages, is_bit_exact)
            node = child
            whole = node if len(tokens) == self._page_size else whole
        if put_states is not None and self._pages.has_states and node is not self._root:
            self._keep_states(put_states, node, is_bit_exact)
        node.prune()
        return None if whole is self._root or whole.is_removed else whole

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
        if node.snapshot is None:
            oldest = None if self._free_snapshots else next(iter(self._with_snapshot), None)
            if oldest is not None:
                self._drop_snapshot(oldest)
            if not self._free_snapshots:  # there are no rows for snapshots
                return
            node.snapshot = self._free_snapshots.pop()
            self._with_snapshot[node] = None
            if oldest is not None:
                oldest.prune()  # not before: the node may be an ancestor of it, and have nothing but this snapshot
        else:
            self._with_snapshot.move_to_end(node)
            if node.has_exact_states or not is_bit_exact:
                return
        node.has_exact_states = is_bit_exact
        try:
            put_states(node.snapshot)
        except BaseException:  # nobody knows what the snapshot holds
            self._drop_snapshot(node)
            node.prune()
            raise

    def _drop_snapshot(self, node: PrefixNode) -> None:
        if node.snapshot is not None:
            self._free_snapshots.append(node.snapshot)
            del self._with_snapshot[node]
            node.snapshot = None

    def _adopt(self, node: PrefixNode, pages: Sequence[int | None], is_bit_exact: bool) -> None:
        """Store pages in a node where it has none. Bit-exact pages replace all pages that are not.

        A bit-exact node never takes pages that are not. Of two bit-exact pages, which hold the same, it takes the one
        that is in use: an idle one is then free without an eviction, and is never evicted before those below it.
        """
        is_better = is_bit_exact and not node.is_bit_exact
        node.is_bit_exact = node.is_bit_exact or is_bit_exact
        for index, page in enumerate(pages):
            old = node.pages[index]
            if page == old:
                continue
            has_gap = old is None and is_bit_exact == node.is_bit_exact
            is_idle = page is not None and is_bit_exact and old in self._pages.tables[index].idle
            if is_better or has_gap or is_idle:
                self._put_page(node, index, page)

    def _put_page(self, node: PrefixNode, index: int, page: int | None) -> None:
        """Set a node's page in one table. Nodes that share a page hold a single reference to it."""
        nodes, table, old = self._nodes[index], self._pages.tables[index], node.pages[index]
        node.pages[index] = page
        if page is not None:
            if page not in nodes:
                table.cache(page)
            nodes.setdefault(page, []).append(node)
        if old is not None:
            nodes[old].remove(node)
            if not nodes[old]:
                del nodes[old]
                table.uncache(old)

    def clear(self) -> None:
        """Free all pages and snapshots."""
        for node in list(self._root.below()):
            self._release(node)
            node.prune()

    def num_evictable(self, table: PageTable) -> int:
        """Return how many pages of a table no row uses, so that they can be evicted. O(1)."""
        return len(table.idle)

    def evict(self, table: PageTable, count: int) -> None:
        """Evict pages of a table that only the tree holds, the least recently used first, until `count` are freed.

        O(1) for each of them, and for each node that its removal leaves without pages and children.
        """
        index = self._pages.tables.index(table)
        for _ in range(min(count, len(table.idle))):
            page = next(iter(table.idle))
            for node in tuple(self._nodes[index][page]):
                if table.is_ring:  # only the windows that the page lies in are lost
                    self._put_page(node, index, None)
                else:
                    self._release(node)
                node.prune()

    def _release(self, node: PrefixNode) -> None:
        """Free what a node has. Without its pages it is not bit-exact, so it takes those of any sequence."""
        for index in range(len(node.pages)):
            self._put_page(node, index, None)
        self._drop_snapshot(node)
        node.is_bit_exact = False
