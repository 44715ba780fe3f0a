"""The memory that a layer keeps of each sequence: static buffers, allocated once, of one kind for each kind of layer.

Legend: B batch, P pages, N pages of a sequence, K kv heads, G positions of a page, E head dim, H value heads, C
channels and W width of the convolution.

    attention    KVCache      keys and values          [P, K, G, E] each, in the cache dtype, or [P, K, G, C, Z] codes
                                                       (kernels/cache_codes.py)
                              table                    [B, N] int32, pages of each sequence
    delta rule   DeltaCache   recurrent state          [B, H, Ek, Ev] float32
                              last inputs              [B, C, W - 1] float32, of the convolution

    position p of sequence b:   page table[b, (p // G) mod N],  place p mod G

So a sequence has N G slots, and position p is in slot p mod N G. A full-attention layer has a page for each G positions
of the context. A sliding-window layer has a ring of pages: enough for the window beside all tokens of one pass, so that
no page that a query sees has given its place to a later one. A recurrent state has no positions: padding leaves it as
it is, and a sequence goes on only after its last token.

Layers with as many pages share one table. Kernels find every key through it, in any order of pages. Page 0 is nobody's:
tables name it where a sequence has no page. graphcore/engine/cache_pages.py says who gets which page, and when a ring
gives pages back. Without it sequence b has pages 1 + b N to b N + N.

A sequence that starts at position 0 reads nothing that an earlier one left, so nothing has to be cleared.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from graphcore.kernels.cache_codes import Kept, kv_types, pool_dtype, vector_shape
from graphcore.nn.spec import AttentionSpec, DeltaSpec, ModelSpec

PAGE = 64  # positions of a page; a layer with fewer slots has one page of all of them
TABLE_DTYPE = torch.int32
STATE_DTYPE = torch.float32  # dtype of recurrent states: rounding would add up over a sequence's tokens


class LayerCache(ABC):
    """The interface of a layer's buffers."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The buffers in the order in which a block takes them."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arguments of a block's forward: both buffers, and the table of pages if there is one."""

    @abstractmethod
    def rows(self, batch: int, first: int = 0) -> Self:
        """Return the cache of `batch` sequences, sharing memory; `first` is the row of the first of them."""


@dataclass(frozen=True)
class KVCache(LayerCache):
    """The keys and values of an attention layer.

    Attributes:
        k, v: [P, K, G, E] cache dtype or [P, K, G, C, Z] codes, pools of pages.
        table: [B, N] int32, pages of each sequence.
    """

    k: Tensor
    v: Tensor
    table: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.k, self.v

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and table."""
        return self.k, self.v, self.table

    @property
    def slots(self) -> int:
        """Positions that all pages of a sequence hold."""
        return self.table.shape[1] * self.k.shape[2]

    def rows(self, batch: int, first: int = 0) -> Self:
        """Return the cache of `batch` sequences: all pages, and these sequences' rows of the table."""
        return type(self)(self.k, self.v, self.table[first : first + batch])

    def copy_out(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of pages [n] of keys and of values, [n, K, G, E] each."""
        return self.k[pages], self.v[pages]

    def copy_in(self, pages: Tensor, kept: tuple[Tensor, Tensor]) -> None:
        """Write keys and values [n, K, G, E] into pages [n]."""
        self.k[pages], self.v[pages] = (each.to(self.k.device) for each in kept)


@dataclass(frozen=True)
class DeltaCache(LayerCache):
    """The state of a delta layer.

    Attributes:
        recurrent: [B, H, Ek, Ev] float32, further rows are snapshots.
        convolution: [B, C, W - 1] float32, the last inputs of the convolution, oldest first.
    """

    recurrent: Tensor
    convolution: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Recurrent state and inputs of the convolution."""
        return self.recurrent, self.convolution

    @property
    def inputs(self) -> tuple[Tensor, Tensor, None]:
        """Recurrent state and inputs of the convolution, in order of the sequences."""
        return self.recurrent, self.convolution, None

    def rows(self, batch: int, first: int = 0) -> Self:
        """Return the states of `batch` sequences."""
        return type(self)(*(tensor[first : first + batch] for tensor in self.tensors))

    def copy_out(self, row: int) -> tuple[Tensor, Tensor]:
        """Return copies of a sequence's states."""
        return self.recurrent[row].clone(), self.convolution[row].clone()

    def copy_in(self, row: int, kept: tuple[Tensor, Tensor]) -> None:
        """Write states to those of a sequence."""
        for tensor, state in zip(self.tensors, kept, strict=True):
            tensor[row].copy_(state)


def page_size(context: int) -> int:
    """Return the positions of a page for contexts of that many tokens: short ones have small pages, at least four."""
    return min(PAGE, 1 << max(0, (context // 4).bit_length() - 1))


def touched_pages(positions: int, page: int) -> int:
    """Return the largest number of pages in which so many consecutive positions can lie."""
    return (positions + page - 2) // page + 1


def buffer_shapes(
    spec: AttentionSpec | DeltaSpec, context: int, passed: int = 1, page: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a layer's two buffers for one sequence, keys and values as [N, K, G, E].

    Args:
        passed: most tokens of a sequence in one pass.
        page: positions of a page; 0 for those of `page_size`.
    """
    if isinstance(spec, DeltaSpec):
        return (spec.value_heads, spec.key_dim, spec.value_dim), (spec.channels, spec.width - 1)
    page = page or page_size(context)
    pages = -(-context // page)
    if spec.window:
        pages = min(pages, touched_pages(spec.window - 1 + passed, page))
    keys = (pages, spec.kv_heads, page, spec.head_dim)
    return keys, keys


def own_buffers(
    spec: ModelSpec, context: int, chunk: int, together: int = 1, page: int = 0
) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of the two buffers for one sequence, by layer, of the layers that share no other's.

    Args:
        chunk: most tokens of a sequence in one pass; 0 for as many as the context has.
        together: most tokens of a sequence in one decode step.
        page: positions of a page; 0 for those of `page_size`.
    """
    passed = max(chunk or context, together)
    layers = sorted(set(spec.cache_layers))
    return {layer: buffer_shapes(spec.blocks[layer].attention, context, passed, page) for layer in layers}


def windows_of_tables(spec: ModelSpec, own: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[int, int]:
    """Return the window of each table, by its pages for a sequence: the longest of its layers, 0 where one sees all."""
    windows: dict[int, int] = {}
    for layer, (keys, _) in own.items():
        attention = spec.blocks[layer].attention
        if isinstance(attention, AttentionSpec):
            known = windows.get(keys[0], 1)
            windows[keys[0]] = max(known, attention.window) if known and attention.window else 0
    return windows


def pool_pages(reach: int, window: int, page: int, batch: int, context: int, tokens: int) -> int:
    """Return the pages of a pool, the one that is nobody's included.

    Args:
        reach: pages that one sequence may have.
        window: the layers' window, 0 for none.
        tokens: positions of all sequences together; 0 for all pages that they could have.
    """
    if not tokens:
        return 1 + batch * reach
    whole, rest = divmod(tokens, context)
    pages = whole * -(-context // page) + -(-rest // page)
    if window:  # between passes a ring has its window's pages; one prompt at a time has those of a chunk, too
        pages = min(pages, (batch - 1) * min(touched_pages(window, page), reach) + reach)
    return 1 + pages


def buffers_nbytes(
    spec: ModelSpec,
    batch: int,
    context: int,
    dtype: Kept,
    chunk: int = 0,
    together: int = 1,
    page: int = 0,
    tokens: int = 0,
    snapshots: int = 0,
) -> tuple[int, ...]:
    """Return the bytes of each buffer of all layers, and of each table of pages.

    Args:
        dtype: what keys and values are kept as.
        chunk, together, page: the same as in `own_buffers`.
        tokens: positions of all sequences together; 0 for all pages that they could have.
        snapshots: states beside those of the sequences.
    """
    own = own_buffers(spec, context, chunk, together, page)
    windows = windows_of_tables(spec, own)

    def rows(layer: int, keys: tuple[int, ...]) -> int:
        if isinstance(spec.blocks[layer].attention, DeltaSpec):
            return batch + snapshots
        return pool_pages(keys[0], windows[keys[0]], keys[2], batch, context, tokens)

    buffers = (
        rows(layer, own_shapes[0])
        * prod(shape[1:] if isinstance(spec.blocks[layer].attention, AttentionSpec) else shape)
        * kind.itemsize
        for layer, own_shapes in own.items()
        for shape, kind in _stored(spec.blocks[layer].attention, own_shapes, dtype)
    )
    return *buffers, *(batch * pages * TABLE_DTYPE.itemsize for pages in windows)


def cache_nbytes(
    spec: ModelSpec,
    batch: int,
    context: int,
    dtype: Kept,
    chunk: int = 0,
    together: int = 1,
    page: int = 0,
    tokens: int = 0,
    snapshots: int = 0,
) -> int:
    """Return the bytes of all layers' buffers and tables; the arguments are those of `buffers_nbytes`."""
    return sum(buffers_nbytes(spec, batch, context, dtype, chunk, together, page, tokens, snapshots))


def allocate_cache(
    spec: ModelSpec,
    batch: int,
    context: int,
    dtype: Kept,
    device: torch.device,
    chunk: int = 0,
    together: int = 1,
    page: int = 0,
    tokens: int = 0,
    snapshots: int = 0,
) -> tuple[LayerCache, ...]:
    """Return zeroed buffers for every layer, the same ones for layers that share them.

    Sequences have pages of their own, one after another, unless `tokens` says that they share.

    Args:
        dtype: what keys and values are kept as.
        chunk, together, page, tokens, snapshots: the same as in `buffers_nbytes`.
    """
    own = own_buffers(spec, context, chunk, together, page)
    windows = windows_of_tables(spec, own)
    tables: dict[int, Tensor] = {}

    def empty(layer: AttentionSpec | DeltaSpec, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> LayerCache:
        stored = _stored(layer, shapes, dtype)
        if isinstance(layer, DeltaSpec):
            return DeltaCache(
                *(torch.zeros(batch + snapshots, *shape, dtype=kind, device=device) for shape, kind in stored)
            )
        reach, _, size, _ = shapes[0]
        pages = pool_pages(reach, windows[reach], size, batch, context, tokens)
        if reach not in tables:
            tables[reach] = first_pages(batch, reach, not tokens, device)
        k, v = (torch.zeros(pages, *shape[1:], dtype=kind, device=device) for shape, kind in stored)
        return KVCache(k, v, tables[reach])

    made = {layer: empty(spec.blocks[layer].attention, shapes) for layer, shapes in own.items()}
    return tuple(made[layer] for layer in spec.cache_layers)


def first_pages(batch: int, reach: int, has_own: bool, device: torch.device) -> Tensor:
    """Return a table [B, N] in which sequences have pages of their own, one after another, or none."""
    if not has_own:
        return torch.zeros(batch, reach, dtype=TABLE_DTYPE, device=device)
    return torch.arange(1, batch * reach + 1, dtype=TABLE_DTYPE, device=device).view(batch, reach)


def tokens_together(spec: ModelSpec, caches: Sequence[LayerCache], context: int) -> int:
    """Return the largest number of consecutive tokens of one sequence that a decode step can have in these caches.

    Only rings limit it, unless they have a slot for each position of the context.
    """
    rings = (
        (block.attention.window, cache.slots, cache.k.shape[2])
        for block, cache in zip(spec.blocks, caches, strict=True)
        if isinstance(block.attention, AttentionSpec) and block.attention.window and isinstance(cache, KVCache)
    )
    return min((slots - page + 2 - window for window, slots, page in rings if slots < context), default=context)


def _stored(
    spec: AttentionSpec | DeltaSpec, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: Kept
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the dtype of each of a layer's buffers, given what `buffer_shapes` says."""
    if isinstance(spec, DeltaSpec):
        return [(shape, STATE_DTYPE) for shape in shapes]
    kinds = zip(shapes, kv_types(dtype), strict=True)
    return [((*shape[:-1], *vector_shape(kind, shape[-1])), pool_dtype(kind)) for shape, kind in kinds]
