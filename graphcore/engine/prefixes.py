"""Beginnings of prompts that the caches still hold: a tree of pages, whose tokens are compared one by one.

    root -- page of tokens -- page -- page -- part of a page
                           \\- page -- ...

A prompt goes on from the longest path whose tokens are its own. Whole pages are shared, the last one is copied if only
a part of it is. The tree counts as one who has a page, so pages outlive their sequences until someone needs the memory:
the pages that were not used for longest go first, ends before beginnings.

Keys and values of a prompt do not depend on who computed them, as long as chunks of prompts choose the same kernels.
So a prompt goes on only from where this holds (`Chunks`), and gets the bits that it would get alone. Tokens that decode
steps made may have other bits: they serve only a request that says so (`reuse_cache`), as do prompts that went on from
them. Recurrent states have no pages: a few snapshots lie beside the sequences' states, and a prompt goes on from one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from graphcore.engine.cache_pages import CachePages
from graphcore.engine.page_table import PageTable

BLOCK = 64  # tokens that are compared at once
MOST_COMPARED = 64  # pages that may follow one page and are compared token by token


@dataclass(frozen=True)
class Chunks:
    """Where a prompt's chunks begin and end, and from where it may go on with the bits of a whole one.

    Attributes:
        size: most tokens of a chunk; borders lie at its multiples.
        alike: fewest tokens of a chunk whose rows have the same bits in any longer chunk.
    """

    size: int
    alike: int

    def end(self, begin: int, length: int) -> int:
        """Return where the chunk ends that begins at a position of a prompt of that length."""
        return min(begin // self.size * self.size + self.size, length)

    def start_within(self, position: int, length: int) -> int:
        """Return the last position up to this one from which a prompt can go on without another choice of kernels."""
        border = position // self.size * self.size
        last = self.end(position, length) - self.alike
        return max(border, min(position, last))

    def sure(self, length: int) -> int:
        """Return how many of a prompt's first tokens have the bits that they have in every longer prompt."""
        border = length // self.size * self.size
        return length if length - border >= self.alike else border


@dataclass(eq=False)
class Prefix:
    """A page of tokens after others, or the beginning of a page.

    Attributes:
        tokens: its tokens, at most a page of them.
        pages: the page of each table; None where it was given back.
        is_prompt: whether its bits are those of a prompt that was computed alone.
        snapshot: row of the states after its last token; None if there is none.
        used: number of the last use of any prefix that was one of this.
    """

    parent: "Prefix | None"
    tokens: tuple[int, ...]
    pages: list[int | None]
    is_prompt: bool
    snapshot: int | None = None
    used: int = 0
    children: dict[tuple[int, ...], "Prefix"] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The beginning of a prompt that need not run again.

    Attributes:
        length: its tokens.
        path: its pages in order; of the last one only a part may be its own.
        is_prompt: whether all of it has the bits of a prompt that was computed alone.
    """

    length: int
    path: Sequence[Prefix]
    is_prompt: bool


class Prefixes:
    """The beginnings that the caches hold besides what rows need.

    Args:
        pages: pages of the caches, which ask here when none is free.
        chunks: chunks of prompts.
        snapshots: rows of the states that hold no sequence.

    Attributes:
        nothing: what is found where nothing can be used.
    """

    def __init__(self, pages: CachePages, chunks: Chunks, snapshots: Sequence[int]) -> None:
        self._pages, self._chunks = pages, chunks
        self._root = Prefix(None, (), [], is_prompt=True)
        self._page = pages.tables[0].page if pages.tables else chunks.size
        self._free_snapshots = list(snapshots)
        self._uses = 0
        self.nothing = Found(0, (), is_prompt=True)
        pages.reclaim = self._evict

    def find(self, prompt: Sequence[int], takes_answers: bool) -> Found:
        """Return the longest beginning of a prompt, all but its last token at most, that it may go on from.

        Args:
            takes_answers: True to go on from what decode steps made, too, and from any position.
        """
        path: list[Prefix] = []
        best = self.nothing
        for node, length in self._walk(prompt, takes_answers):
            path.append(node)
            found = self._usable(path, min(length, len(prompt) - 1), len(prompt), takes_answers)
            best = found if found.length > best.length else best
        return best

    def _walk(self, prompt: Sequence[int], takes_answers: bool) -> Iterator[tuple[Prefix, int]]:
        """Yield the prefixes along a prompt, with the prompt's tokens up to the last one that they share."""
        node, at = self._root, 0
        while at < len(prompt):
            key = tuple(prompt[at : at + self._page])
            whole = node.children.get(key)
            if whole is not None and len(key) == self._page and (whole.is_prompt or takes_answers):
                node, at = whole, at + self._page
                yield node, at
                continue
            latest = islice(reversed(node.children.values()), MOST_COMPARED)
            parts = [(common(child.tokens, key), child) for child in latest if child.is_prompt or takes_answers]
            shared, child = max(parts, key=lambda part: part[0], default=(0, node))
            if shared:
                yield child, at + shared
            return

    def _usable(self, path: Sequence[Prefix], length: int, total: int, takes_answers: bool) -> Found:
        """Return what a prompt of `total` tokens can use of a path that shares so many tokens with it."""
        before = (len(path) - 1) * self._page
        if not takes_answers:
            length = self._chunks.start_within(length, total)
        if self._pages.has_states:
            ends = before + len(path[-1].tokens)
            usable = path[-1].snapshot is not None and ends <= length
            length = ends if usable and (takes_answers or self._chunks.start_within(ends, total) == ends) else 0
        if length <= before:
            return self.nothing
        for index, table in enumerate(self._pages.tables):
            if any(path[number].pages[index] is None for number in table.numbers(length, length)):
                return self.nothing
        return Found(length, tuple(path), all(node.is_prompt for node in path))

    def give(self, row: int, found: Found) -> bool:
        """Share the pages of a beginning with a row that has none, and put its state there.

        Returns:
            False if the page that would have to be copied finds no free one; the row is then given none.
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
        node = self._root
        for at in range(0, len(ids), self._page):
            tokens = tuple(ids[at : at + self._page])
            pages = [table.rows[row].get(at // self._page) for table in self._pages.tables]
            child = node.children.get(tokens)
            if child is None:
                child = Prefix(node, tokens, [None] * len(pages), is_prompt)
                node.children[tokens] = child
            self._adopt(child, pages, is_prompt)
            node = child
        self._use(node)
        if has_states and self._pages.has_states and node.snapshot is None and node is not self._root:
            node.snapshot = self._free_snapshot()
            if node.snapshot is not None:
                self._pages.copy_states(row, node.snapshot)

    def _adopt(self, node: Prefix, pages: Sequence[int | None], is_prompt: bool) -> None:
        """Let a prefix have pages where it has none, or all of them where they are a prompt's for the first time."""
        is_better = is_prompt and not node.is_prompt
        node.is_prompt = node.is_prompt or is_prompt
        for index, (table, page) in enumerate(zip(self._pages.tables, pages, strict=True)):
            old = node.pages[index]
            if page is None or page == old or (old is not None and not is_better):
                continue
            table.hold(page)
            node.pages[index] = page
            if old is not None:
                table.drop(old)

    def forget(self) -> None:
        """Give back all pages and snapshots."""
        for node in list(self._nodes()):
            self._release(node)
        self._root.children.clear()

    def _use(self, node: Prefix | None) -> None:
        self._uses += 1
        while node is not None:
            node.used = self._uses
            node = node.parent

    def _evict(self, table: PageTable, count: int) -> None:
        """Give back pages of a table that only the tree has, at most so many."""
        index = self._pages.tables.index(table)
        while count > 0:
            idle = [node for node in self._nodes() if self._is_idle(node, index, table)]
            if not idle:
                return
            for node in sorted(idle, key=lambda node: node.used)[:count]:
                page = node.pages[index]
                assert page is not None, "an idle prefix has a page"
                table.drop(page)
                node.pages[index] = None
                if not table.is_ring:
                    self._release(node)
                self._prune(node)
                count -= 1

    def _is_idle(self, node: Prefix, index: int, table: PageTable) -> bool:
        page = node.pages[index]
        if page is None or table.is_shared(page):
            return False
        return table.is_ring or not node.children

    def _nodes(self) -> Iterator[Prefix]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def _prune(self, node: Prefix) -> None:
        """Forget a prefix, and those before it, that hold nothing and lead nowhere."""
        while node.parent is not None and not node.children and node.snapshot is None and not any(node.pages):
            del node.parent.children[node.tokens]
            node = node.parent

    def _release(self, node: Prefix) -> None:
        for table, page in zip(self._pages.tables, node.pages, strict=True):
            if page is not None:
                table.drop(page)
        node.pages = [None] * len(node.pages)
        if node.snapshot is not None:
            self._free_snapshots.append(node.snapshot)
            node.snapshot = None

    def _free_snapshot(self) -> int | None:
        """Return a row for a snapshot, if need be that of the one that was not used for longest."""
        if not self._free_snapshots:
            holders = [node for node in self._nodes() if node.snapshot is not None]
            oldest = min(holders, key=lambda node: node.used, default=None)
            if oldest is None or oldest.snapshot is None:
                return None
            self._free_snapshots.append(oldest.snapshot)
            oldest.snapshot = None
            self._prune(oldest)
        return self._free_snapshots.pop()


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    most, at = min(len(tokens), len(others)), 0
    while at < most and tokens[at : at + BLOCK] == others[at : at + BLOCK]:  # a block at a time is compared in C
        at += BLOCK
    return next((place for place in range(at, most) if tokens[place] != others[place]), most)
