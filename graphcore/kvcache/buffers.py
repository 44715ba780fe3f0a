"""The layers' caches of keys and values or recurrent states: static buffers, allocated once.

Legend: B batch, P pages, N pages of a sequence, K kv heads, G positions of a page, E head dim, H value heads, C
channels and W width of the convolution.

    attention    KVCache      keys and values          [P, K, G, E] each, in the cache dtype, or [P, K, G, C, Z] codes
                                                       (kernels/ops/kv_formats.py)
                              table                    [B, N] int32, pages of each sequence
                 latent attention has one row for a position, in the keys' pool; its values' pool is empty (E is 0)
    delta rule   RecurrentCache   recurrent state      [B, H, Ek, Ev] float32
                              last inputs              [B, C, W - 1] float32, of the convolution
    convolution  the same     an empty recurrent state [B, 0], and the last inputs

    position p of sequence b:   page table[b, (p // G) mod N],  place p mod G

So a sequence has N G slots, and position p is in slot p mod N G. A full-attention layer has a page for each G positions
of the context. A sliding-window layer has a ring of pages: enough for the window beside all tokens of one pass, so that
no page that a query sees is overwritten by a later one. A recurrent state has no positions: padding leaves it as it is,
and a sequence continues only after its last token.

Layers with the same number of pages for a sequence share one table. Kernels find every key through it, in any order of
pages. Page 0 is the null page, the table's entry where a sequence has none. graphcore/kvcache/page_allocator.py
allocates and frees pages. Without it sequence b has pages 1 + b N to b N + N.

On a CPU the pools of some layers may be offloaded: they lie in files, which kernels read and write as memory
(graphcore/host_pages.py), and the system's page cache decides which of their pages are in RAM.

A sequence that starts at position 0 reads nothing that an earlier one left, so nothing has to be cleared.
"""

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from graphcore.host_pages import file_pages, zeros
from graphcore.kvcache.sizes import TABLE_DTYPE, CacheSizes, own_buffers, pool_pages, stored_shapes, windows_of_tables
from graphcore.nn.spec import AttentionSpec, ModelSpec, RecurrentSpec


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
        k, v: [P, K, G, E] cache dtype or [P, K, G, C, Z] codes, pools of pages; v is empty for latent attention.
        table: [B, N] int32, pages of each sequence.
        folder: folder of the file in which the pools lie; None if they lie in memory.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    folder: Path | None = None

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
        return replace(self, table=self.table[first : first + batch])

    def copy_out(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of pages [n] of keys and of values, [n, K, G, E] each; of pools in a file, in a file, too.

        Raises:
            OSError: the disk has no room.
        """
        if self.folder is None or not len(pages):
            return self.k[pages], self.v[pages]
        copies = _in_file([((len(pages), *pool.shape[1:]), pool.dtype) for pool in self.tensors], self.folder)
        for pool, copy in zip(self.tensors, copies, strict=True):
            torch.index_select(pool, 0, pages, out=copy)
        return copies

    def copy_in(self, pages: Tensor, kept: tuple[Tensor, Tensor]) -> None:
        """Write keys and values [n, K, G, E] into pages [n]."""
        self.k[pages], self.v[pages] = (each.to(self.k.device) for each in kept)


@dataclass(frozen=True)
class RecurrentCache(LayerCache):
    """The state of a recurrent layer: a delta rule, or a gated short convolution.

    Attributes:
        recurrent: [B, H, Ek, Ev] float32, further rows are snapshots; [B, 0] for a layer without a delta rule.
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
        """Write states to a sequence's row."""
        for tensor, state in zip(self.tensors, kept, strict=True):
            tensor[row].copy_(state)


TOUCHED_TOKENS = 4096  # positions of a sequence whose memory is taken at load: longer contexts take it as they fill


def _in_file(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], folder: Path) -> tuple[Tensor, Tensor]:
    """Return two zeroed tensors of these shapes and dtypes in a new file in a folder."""
    (first, first_kind), (second, second_kind) = shapes
    nbytes, more = (math.prod(shape) * kind.itemsize for shape, kind in shapes)
    begin = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = file_pages(begin + more, folder)
    k, v = pages[:nbytes].view(first_kind).view(first), pages[begin : begin + more].view(second_kind).view(second)
    return k, v


def allocate_cache(
    spec: ModelSpec,
    sizes: CacheSizes,
    device: torch.device,
    offloaded: Container[int] = (),
    folder: Path | None = None,
) -> tuple[LayerCache, ...]:
    """Return zeroed buffers for every layer, the same ones for layers that share them.

    Sequences have pages of their own, one after another, unless `sizes.tokens` makes them share a pool.

    Args:
        offloaded: layers whose pools lie in files.
        folder: folder of these files; needed if there are some.

    Raises:
        OSError: the folder cannot be written, or its disk has no room for the files.
    """
    own = own_buffers(spec, sizes)
    windows = windows_of_tables(spec, own)
    batch = sizes.batch
    tables: dict[int, Tensor] = {}

    def empty(layer: int, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> LayerCache:
        mixer = spec.blocks[layer].attention
        stored = stored_shapes(mixer, shapes, sizes.dtype)
        if isinstance(mixer, RecurrentSpec):
            rows = batch + sizes.snapshots
            return RecurrentCache(*(zeros((rows, *shape), kind, device) for shape, kind in stored))
        reach, _, page, _ = shapes[0]
        pages = pool_pages(reach, windows[reach], page, sizes)
        if reach not in tables:
            tables[reach] = first_pages(batch, reach, not sizes.tokens, device)
        if layer in offloaded:
            assert folder is not None, "offloaded pools have a folder"
            k, v = _in_file([((pages, *shape[1:]), kind) for shape, kind in stored], folder)
            return KVCache(k, v, tables[reach], folder)
        touched = 1 + batch * math.ceil(TOUCHED_TOKENS / page)  # page 0 is nobody's
        k, v = (zeros((pages, *shape[1:]), kind, device, touched) for shape, kind in stored)
        return KVCache(k, v, tables[reach])

    made = {layer: empty(layer, shapes) for layer, shapes in own.items()}
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
