"""Snapshots of cached prefixes, copied out of the caches and back into them: the content of a saved cache.

Only tokens whose bits are the same in every longer prompt are copied. Pages and snapshots of the prefix cache are never
written again, so running sequences need not wait for the copy. Prompts find a prefix that was copied back as if it had
just been computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from graphcore.errors import ConfigError
from graphcore.kvcache.chunks import Chunks
from graphcore.kvcache.host_copies import Copies
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.kvcache.page_table import PageTable
from graphcore.kvcache.prefix_cache import PrefixCache, PrefixNode


@dataclass(frozen=True)
class SnapshotShape:
    """The tokens, pages and recurrent states that a snapshot holds.

    Attributes:
        tokens: number of tokens of the prefix.
        firsts: number of the first page of each table; a ring has only the last ones.
        positions: numbers of tokens after which the snapshot has the recurrent states, ascending.
    """

    tokens: int
    firsts: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class PrefixSnapshot:
    """A copy of a cached prefix in host memory.

    Attributes:
        ids: token ids of the prefix.
        parts: copies, first the pages of each table's caches, then the states after each position.
    """

    shape: SnapshotShape
    ids: tuple[int, ...]
    parts: Sequence[Copies]


class PrefixSnapshots:
    """Copies prefixes out of the prefix cache and back into it, between two passes.

    Attributes:
        context: most tokens of a sequence.
    """

    def __init__(self, pages: PageAllocator, prefixes: PrefixCache, chunks: Chunks, context: int) -> None:
        self._pages, self._prefixes, self._chunks, self.context = pages, prefixes, chunks, context

    def length(self, tokens: int) -> int:
        """Return how many first tokens of a prompt of that length can be copied.

        Raises:
            ConfigError: the prompt is too short, or there are no rows for snapshots of recurrent states.
        """
        chunk, has_states = self._chunks.size, self._pages.has_states
        self.check_snapshots()
        length = tokens // chunk * chunk if has_states else self._chunks.invariant_length(tokens)
        if not length:
            what = (
                "whole chunks" if has_states else f"prompts of {min(self._chunks.min_invariant, chunk)} tokens or more"
            )
            advice = f"; set prefill_chunk to at most {tokens}" if has_states and tokens > 1 else ""
            raise ConfigError(
                f"a prompt of {tokens} tokens is too short to be saved: only {what} have the same bits in every longer "
                f"prompt (prefill_chunk={chunk}){advice}"
            )
        return length

    def check_snapshots(self) -> None:
        """Check that recurrent states can be kept.

        Raises:
            ConfigError: the model is recurrent, and batching.snapshots is 0.
        """
        if self._pages.has_states and not self._prefixes.has_snapshots:
            raise ConfigError(
                "batching.snapshots=0 keeps no recurrent states, and without them nothing of a prompt can be saved or "
                "loaded; set 1 or more"
            )

    @torch.inference_mode()
    def copy_out(self, prompt: Sequence[int]) -> PrefixSnapshot | None:
        """Return a copy of a prompt's prefix; None if the prefix cache does not hold all of it (any more)."""
        length = self.length(len(prompt))
        path = self._prefixes.path(prompt[:length])
        if not path or not all(node.is_bit_exact for node in path):
            return None
        firsts = [self._first(path, index, table) for index, table in enumerate(self._pages.tables)]
        if any(first > table.first_seen(length) for first, table in zip(firsts, self._pages.tables, strict=True)):
            return None
        states = dict(self._states(prompt[:length], path))
        if self._pages.has_states and length not in states:
            return None
        parts: list[Copies] = []
        for index, (table, first) in enumerate(zip(self._pages.tables, firsts, strict=True)):
            copies = table.copies([page for node in path[first:] if (page := node.pages[index]) is not None])
            for tensor in chain.from_iterable(copies):  # what another prompt left behind the end is nobody's to keep
                tensor[-1, :, length - path[-1].begin :] = 0
            parts += copies
        parts += [part for copies in states.values() for part in copies]
        shape, on_host = SnapshotShape(length, tuple(firsts), tuple(states)), self._pages.to_host(parts)
        return PrefixSnapshot(shape, tuple(prompt[:length]), on_host.read())

    def _first(self, path: Sequence[PrefixNode], index: int, table: PageTable) -> int:
        """Return where the last pages of a path begin that a table has without a gap, at most as many as a row's."""
        first = len(path)
        while first > max(0, len(path) - table.reach) and path[first - 1].pages[index] is not None:
            first -= 1
        return first

    def _states(self, ids: Sequence[int], path: Sequence[PrefixNode]) -> Iterator[tuple[int, Sequence[Copies]]]:
        """Yield the positions whose snapshot prompts may continue from, and copies of these states."""
        ends = {node.end: node for node in path}
        for position in range(self._chunks.size, len(ids) + 1, self._chunks.size) if self._pages.has_states else ():
            nodes = [ends[position]] if position in ends else self._prefixes.path(ids[:position])[-1:]  # inside a page
            for node in nodes:
                if node.has_exact_states and node.snapshot is not None:
                    yield position, [cache.copy_out(node.snapshot) for cache in self._pages.states]

    @torch.inference_mode()
    def copy_in(self, copy: PrefixSnapshot) -> bool:
        """Put a snapshot into the prefix cache; False if running sequences leave too few pages for it."""
        shape, parts = copy.shape, list(copy.parts)
        taken = self._pages.allocate(self._counts(shape))
        if taken is None:
            return False
        try:
            page_maps: list[Mapping[int, int]] = []
            for table, first, pages in zip(self._pages.tables, shape.firsts, taken, strict=True):
                table.put(pages, [parts.pop(0) for _ in table.caches])
                page_maps.append(dict(enumerate(pages, start=first)))
            kept = None
            for position in shape.positions or (shape.tokens,):
                states = [parts.pop(0) for _ in self._pages.states]
                new = copy.ids[kept.end if kept else 0 : position]
                kept = self._prefixes.keep_pages(
                    page_maps, new, is_bit_exact=True, put_states=partial(self._pages.put_states, states), after=kept
                )
        finally:
            for table, pages in zip(self._pages.tables, taken, strict=True):
                for page in reversed(pages):  # the last ones are evicted first, as those that a row has freed
                    table.decref(page)
        return True

    def _counts(self, shape: SnapshotShape) -> list[int]:
        """Return the number of pages of each table in a snapshot."""
        ends = [-(-shape.tokens // table.page) for table in self._pages.tables]
        return [end - first for end, first in zip(ends, shape.firsts, strict=True)]

    def is_possible(self, shape: SnapshotShape) -> bool:
        """Return whether these caches could have a snapshot of this shape."""
        tables, positions = self._pages.tables, shape.positions
        if not 1 <= shape.tokens <= self.context or len(shape.firsts) != len(tables):
            return False
        for first, table, count in zip(shape.firsts, tables, self._counts(shape), strict=False):
            if not 0 <= first <= table.first_seen(shape.tokens) or not 0 < count <= table.reach:
                return False
        borders = range(self._chunks.size, shape.tokens + 1, self._chunks.size)
        if self._pages.has_states:
            is_ascending = [*positions] == sorted(set(positions))
            return is_ascending and set(positions) <= set(borders) and positions[-1:] == (shape.tokens,)
        return not positions and self._chunks.invariant_length(shape.tokens) == shape.tokens

    def layout(self, shape: SnapshotShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of each tensor of a snapshot by name, two for each of its parts, in order."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for index, (table, count) in enumerate(zip(self._pages.tables, self._counts(shape), strict=True)):
            for number, cache in enumerate(table.caches):
                for name, tensor in (("keys", cache.k), ("values", cache.v)):
                    found[f"pages.{index}.{number}.{name}"] = tensor.dtype, (count, *tensor.shape[1:])
        for position in shape.positions:
            for number, states in enumerate(self._pages.states):
                for name, tensor in zip(("recurrent", "convolution"), states.tensors, strict=True):
                    found[f"states.{position}.{number}.{name}"] = tensor.dtype, tuple(tensor.shape[1:])
        return found
