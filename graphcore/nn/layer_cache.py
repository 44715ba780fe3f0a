"""The memory that a layer keeps of each sequence: static buffers, allocated once, of one kind for each kind of layer.

Legend: B batch, P pages, N pages of a sequence, K kv heads, G positions of a page, E head dim, H value heads, C
channels and W width of the convolution.

    attention    KVCache      keys and values          [P, K, G, E] each, in the cache dtype, or [P, K, G, C, Z] codes
                                                       (kernels/cache_codes.py)
                              table                    [B, N] int32, pages of each sequence
    delta rule   DeltaCache   recurrent state          [B, H, Ek, Ev] float32
                              last inputs              [B, C, W - 1] float32, of the convolution

    position p of sequence b:   page table[b, (p // G) mod N],  place p mod G

So a sequence has N G slots, and position p is in slot p mod N G. A full-attention layer has a slot for each position of
the context. A sliding-window layer has a ring of at least `window` slots: a new key overwrites the oldest one, which
has left the window. A ring that later layers attend, too, has room for a pass's tokens beside the window, as they read
it after those were written. A ring that a decode step gives n consecutive tokens of a sequence has n - 1 slots beside
the window, so that the last of them overwrites no key that the first one sees. A recurrent state has no positions:
padding leaves it as it is, and a sequence goes on only after its last token.

Layers with as many pages share one table. Kernels find every key through it, in any order of pages; sequence b now has
pages b N to b N + N - 1.

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
Snapshot = tuple[Tensor, ...]
"""A copy of all that the layers keep of one sequence."""


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
    def can_go_back(self, tokens: int) -> bool:
        """Return whether a sequence of so many tokens can be continued after any of them, not only after the last."""

    @abstractmethod
    def rows(self, batch: int, first: int = 0) -> Self:
        """Return the cache of `batch` sequences, sharing memory; `first` is the row of the first of them."""

    @abstractmethod
    def snapshot(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a copy of what the layer keeps of the sequence in a row."""

    @abstractmethod
    def restore(self, row: int, kept: tuple[Tensor, Tensor]) -> None:
        """Put a sequence back as it was when the snapshot was taken, into any row."""


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

    def can_go_back(self, tokens: int) -> bool:
        """Return whether no key of so many tokens was overwritten: a ring that has wrapped can only go on."""
        return tokens <= self.slots

    def rows(self, batch: int, first: int = 0) -> Self:
        """Return the cache of `batch` sequences: all pages, and these sequences' rows of the table."""
        return type(self)(self.k, self.v, self.table[first : first + batch])

    def snapshot(self, row: int) -> tuple[Tensor, Tensor]:
        """Return copies of a sequence's pages of keys and of values, [N, K, G, E] each."""
        return self.k[self.table[row]], self.v[self.table[row]]

    def restore(self, row: int, kept: tuple[Tensor, Tensor]) -> None:
        """Copy pages into those of a sequence."""
        self.k[self.table[row]], self.v[self.table[row]] = (pages.to(self.k.device) for pages in kept)


@dataclass(frozen=True)
class DeltaCache(LayerCache):
    """The state of a delta layer.

    Attributes:
        recurrent: [B, H, Ek, Ev] float32.
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

    def can_go_back(self, tokens: int) -> bool:
        """Return False, as earlier states are overwritten, unless there is no token yet."""
        return tokens == 0

    def rows(self, batch: int, first: int = 0) -> Self:
        """Return the states of `batch` sequences."""
        return type(self)(*(tensor[first : first + batch] for tensor in self.tensors))

    def snapshot(self, row: int) -> tuple[Tensor, Tensor]:
        """Return copies of a sequence's states."""
        return self.recurrent[row].clone(), self.convolution[row].clone()

    def restore(self, row: int, kept: tuple[Tensor, Tensor]) -> None:
        """Copy states into those of a sequence."""
        for tensor, state in zip(self.tensors, kept, strict=True):
            tensor[row].copy_(state)


def cache_slots(spec: AttentionSpec, context: int, spare: int = 0) -> int:
    """Return how many positions an attention layer caches for a context of that many tokens.

    Args:
        spare: slots of a sliding layer's ring beside the window.
    """
    return min(spec.window + spare, context) if spec.window else context


def buffer_shapes(
    spec: AttentionSpec | DeltaSpec, context: int, spare: int = 0, page: int = PAGE
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a layer's two buffers for one sequence, keys and values as [N, K, G, E].

    Args:
        spare: the same as for `cache_slots`.
        page: most positions of a page.
    """
    if isinstance(spec, DeltaSpec):
        return (spec.value_heads, spec.key_dim, spec.value_dim), (spec.channels, spec.width - 1)
    slots = cache_slots(spec, context, spare)
    page = min(page, slots)
    keys = (-(-slots // page), spec.kv_heads, page, spec.head_dim)
    return keys, keys


def own_buffers(
    spec: ModelSpec, context: int, chunk: int, together: int = 1, page: int = PAGE
) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of the two buffers for one sequence, by layer, of the layers that share no other's.

    Args:
        chunk: most tokens of a sequence in one pass; 0 for as many as the context has.
        together: most tokens of a sequence in one decode step.
        page: most positions of a page.
    """
    lending = spec.lending_layers

    def spare(layer: int) -> int:
        return max(together - 1, (chunk or context) if layer in lending else 0)

    layers = sorted(set(spec.cache_layers))
    return {layer: buffer_shapes(spec.blocks[layer].attention, context, spare(layer), page) for layer in layers}


def buffers_nbytes(
    spec: ModelSpec,
    batch: int,
    context: int,
    dtype: Kept,
    chunk: int = 0,
    together: int = 1,
    page: int = PAGE,
) -> tuple[int, ...]:
    """Return the bytes of each buffer of all layers, and of each table of pages.

    Args:
        dtype: what keys and values are kept as.
        chunk, together, page: the same as in `own_buffers`.
    """
    own = own_buffers(spec, context, chunk, together, page)
    buffers = (
        batch * prod(shape) * kind.itemsize
        for layer, shapes in own.items()
        for shape, kind in _stored(spec.blocks[layer].attention, shapes, dtype)
    )
    return *buffers, *(batch * pages * TABLE_DTYPE.itemsize for pages in _table_widths(spec, own))


def cache_nbytes(
    spec: ModelSpec,
    batch: int,
    context: int,
    dtype: Kept,
    chunk: int = 0,
    together: int = 1,
    page: int = PAGE,
) -> int:
    """Return the bytes of all layers' buffers and tables; the arguments are those of `buffers_nbytes`."""
    return sum(buffers_nbytes(spec, batch, context, dtype, chunk, together, page))


def allocate_cache(
    spec: ModelSpec,
    batch: int,
    context: int,
    dtype: Kept,
    device: torch.device,
    chunk: int = 0,
    together: int = 1,
    page: int = PAGE,
) -> tuple[LayerCache, ...]:
    """Return zeroed buffers for every layer, the same ones for layers that share them.

    Args:
        dtype: what keys and values are kept as.
        chunk, together, page: the same as in `own_buffers`.
    """
    own = own_buffers(spec, context, chunk, together, page)
    tables = {
        pages: torch.arange(batch * pages, dtype=TABLE_DTYPE, device=device).view(batch, pages)
        for pages in _table_widths(spec, own)
    }

    def empty(layer: AttentionSpec | DeltaSpec, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> LayerCache:
        stored = _stored(layer, shapes, dtype)
        if isinstance(layer, DeltaSpec):
            return DeltaCache(*(torch.zeros(batch, *shape, dtype=kind, device=device) for shape, kind in stored))
        k, v = (torch.zeros(batch * shape[0], *shape[1:], dtype=kind, device=device) for shape, kind in stored)
        return KVCache(k, v, tables[shapes[0][0]])

    made = {layer: empty(spec.blocks[layer].attention, shapes) for layer, shapes in own.items()}
    return tuple(made[layer] for layer in spec.cache_layers)


def _table_widths(spec: ModelSpec, own: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    """Return the pages of a sequence in each table: layers with as many pages share one."""
    is_attention = {layer: isinstance(spec.blocks[layer].attention, AttentionSpec) for layer in own}
    return list(dict.fromkeys(shapes[0][0] for layer, shapes in own.items() if is_attention[layer]))


def tokens_together(spec: ModelSpec, caches: Sequence[LayerCache], context: int) -> int:
    """Return the largest number of consecutive tokens of one sequence that a decode step can have in these caches.

    Only rings limit it, unless they have a slot for each position of the context.
    """
    rings = (
        (block.attention.window, cache.slots)
        for block, cache in zip(spec.blocks, caches, strict=True)
        if isinstance(block.attention, AttentionSpec) and block.attention.window and isinstance(cache, KVCache)
    )
    return min((1 + slots - window for window, slots in rings if slots < context), default=context)


def snapshot(caches: Sequence[LayerCache], row: int) -> Snapshot:
    """Return a copy of all that the layers keep of the sequence in a row."""
    return tuple(tensor for cache in _distinct(caches) for tensor in cache.snapshot(row))


def restore(caches: Sequence[LayerCache], row: int, kept: Snapshot) -> None:
    """Put a sequence back as it was when the snapshot was taken, into any row."""
    for cache, first, second in zip(_distinct(caches), kept[::2], kept[1::2], strict=True):
        cache.restore(row, (first, second))


def _distinct(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Return the caches of all layers, those that layers share once."""
    return list({id(cache): cache for cache in caches}.values())


def _stored(
    spec: AttentionSpec | DeltaSpec, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: Kept
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the dtype of each of a layer's buffers, given what `buffer_shapes` says."""
    if isinstance(spec, DeltaSpec):
        return [(shape, STATE_DTYPE) for shape in shapes]
    kinds = zip(shapes, kv_types(dtype), strict=True)
    return [((*shape[:-1], *vector_shape(kind, shape[-1])), pool_dtype(kind)) for shape, kind in kinds]
