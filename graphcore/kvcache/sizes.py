"""Sizes of the layers' caches: pages of one sequence, pages of a pool, and bytes.

Legend: B batch, P pages, N pages of a sequence, K kv heads, G positions of a page, E head dim. kvcache/buffers.py says
how pages are found.
"""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod

import torch

from graphcore.kernels.ops.kv_formats import KVFormat, kv_types, pool_dtype, vector_shape
from graphcore.nn.spec import AttentionSpec, ConvSpec, DeltaSpec, MixerSpec, ModelSpec, RecurrentSpec

PAGE = 64  # positions of a page; short contexts have smaller ones
TABLE_DTYPE = torch.int32
STATE_DTYPE = torch.float32  # dtype of recurrent states: rounding would add up over a sequence's tokens


@dataclass(frozen=True)
class CacheSizes:
    """The limits and the storage type that the sizes of a model's caches follow from.

    Attributes:
        batch: number of sequences.
        context: most tokens of a sequence.
        dtype: storage type of keys and values.
        chunk: most tokens of a sequence in one pass; 0 for the whole context.
        together: most tokens of a sequence in one decode step.
        page: positions of a page; 0 for `page_size` of the context.
        tokens: positions that all sequences share; 0 for a full context for each.
        snapshots: number of recurrent states for snapshots, besides those of the sequences.
        layers: layers whose buffers are here; None for all. The others' have no bytes, but the same pages and rows, so
            that all processes of a ring allocate and evict alike.
    """

    batch: int
    context: int
    dtype: KVFormat
    chunk: int = 0
    together: int = 1
    page: int = 0
    tokens: int = 0
    snapshots: int = 0
    layers: Container[int] | None = None

    def has(self, layer: int) -> bool:
        """Return whether a layer's buffers are here."""
        return self.layers is None or layer in self.layers


def page_size(context: int) -> int:
    """Return the positions of a page for a context in tokens: fewer than PAGE if that makes less than four pages."""
    return min(PAGE, 1 << max(0, (context // 4).bit_length() - 1))


def touched_pages(positions: int, page: int) -> int:
    """Return the largest number of pages in which so many consecutive positions can lie."""
    return (positions + page - 2) // page + 1


def buffer_shapes(
    spec: MixerSpec, context: int, passed: int = 1, page: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a layer's two buffers for one sequence, keys and values as [N, K, G, E].

    With latent attention values are part of the keys' rows, and their buffer is empty (E is 0).

    Args:
        passed: most tokens of a sequence in one pass.
        page: positions of a page; 0 for `page_size` of the context.
    """
    if isinstance(spec, DeltaSpec):
        return (spec.value_heads, spec.key_dim, spec.value_dim), (spec.channels, spec.width - 1)
    if isinstance(spec, ConvSpec):
        return (0,), (spec.channels, spec.width - 1)
    page = page or page_size(context)
    pages = -(-context // page)
    if spec.window:
        pages = min(pages, touched_pages(spec.window - 1 + passed, page))
    keys = (pages, spec.kv_heads, page, spec.head_dim)
    return keys, (*keys[:-1], 0) if spec.latent is not None else keys


def own_buffers(spec: ModelSpec, sizes: CacheSizes) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of the two buffers for one sequence, by layer, without layers that share another's cache."""
    passed = max(sizes.chunk or sizes.context, sizes.together)
    layers = sorted(set(spec.cache_layers))
    whole = {layer: buffer_shapes(spec.blocks[layer].attention, sizes.context, passed, sizes.page) for layer in layers}
    return {layer: shapes if sizes.has(layer) else _without_bytes(shapes) for layer, shapes in whole.items()}


def _without_bytes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of buffers of as many pages, of no heads; or of a recurrent state without numbers."""
    first, second = ((shape[0], 0, *shape[2:]) if len(shape) == len("NKGE") else (0, *shape[1:]) for shape in shapes)
    return first, second


def windows_of_tables(spec: ModelSpec, own: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[int, int]:
    """Return the longest window of each table's layers, 0 if one has none, by the table's pages for one sequence."""
    windows: dict[int, int] = {}
    for layer, (keys, _) in own.items():
        attention = spec.blocks[layer].attention
        if isinstance(attention, AttentionSpec):
            known = windows.get(keys[0], 1)
            windows[keys[0]] = max(known, attention.window) if known and attention.window else 0
    return windows


def pool_pages(reach: int, window: int, page: int, sizes: CacheSizes) -> int:
    """Return the number of pages of a pool, including the null page.

    Args:
        reach: pages that one sequence may have.
        window: the layers' window, 0 for none.
        page: positions of a page.
    """
    if not sizes.tokens:
        return 1 + sizes.batch * reach
    whole, rest = divmod(sizes.tokens, sizes.context)
    pages = whole * -(-sizes.context // page) + -(-rest // page)
    if window:  # between passes a ring has its window's pages; one prompt at a time has those of a chunk, too
        pages = min(pages, (sizes.batch - 1) * min(touched_pages(window, page), reach) + reach)
    return 1 + pages


def buffers_nbytes(spec: ModelSpec, sizes: CacheSizes) -> tuple[int, ...]:
    """Return the bytes of each buffer of all layers, and of each table of pages."""
    own = own_buffers(spec, sizes)
    windows = windows_of_tables(spec, own)

    def rows(layer: int, keys: tuple[int, ...]) -> int:
        if isinstance(spec.blocks[layer].attention, RecurrentSpec):
            return sizes.batch + sizes.snapshots
        return pool_pages(keys[0], windows[keys[0]], keys[2], sizes)

    buffers = (
        rows(layer, own_shapes[0])
        * prod(shape[1:] if isinstance(spec.blocks[layer].attention, AttentionSpec) else shape)
        * kind.itemsize
        for layer, own_shapes in own.items()
        for shape, kind in stored_shapes(spec.blocks[layer].attention, own_shapes, sizes.dtype)
    )
    return *buffers, *(sizes.batch * pages * TABLE_DTYPE.itemsize for pages in windows)


def cache_nbytes(spec: ModelSpec, sizes: CacheSizes) -> int:
    """Return the bytes of all layers' buffers and tables."""
    return sum(buffers_nbytes(spec, sizes))


@dataclass(frozen=True)
class PoolSizes:
    """The bytes of a layer's pools of keys and values.

    Attributes:
        nbytes: bytes of both pools.
        read_nbytes: bytes that a step of one sequence reads at the end of its context, in all layers that share the
            pools.
    """

    nbytes: int
    read_nbytes: int


def pool_sizes(spec: ModelSpec, sizes: CacheSizes) -> Mapping[int, PoolSizes]:
    """Return the bytes of the pools of each layer that has some, by layer."""
    own, readers = own_buffers(spec, sizes), Counter(spec.cache_layers)
    windows = windows_of_tables(spec, own)
    found: dict[int, PoolSizes] = {}
    for layer, shapes in own.items():
        attention = spec.blocks[layer].attention
        if isinstance(attention, AttentionSpec) and sizes.has(layer):
            stored = stored_shapes(attention, shapes, sizes.dtype)
            page_nbytes = sum(prod(shape[1:]) * kind.itemsize for shape, kind in stored)
            reach, _, page, _ = shapes[0]
            pages = pool_pages(reach, windows[reach], page, sizes)
            found[layer] = PoolSizes(pages * page_nbytes, readers[layer] * reach * page_nbytes)
    return found


def stored_shapes(
    spec: MixerSpec, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: KVFormat
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the dtype of each of a layer's buffers, from the shapes of `buffer_shapes`."""
    if isinstance(spec, RecurrentSpec):
        return [(shape, STATE_DTYPE) for shape in shapes]
    kinds = zip(shapes, kv_types(dtype), strict=True)
    return [((*shape[:-1], *vector_shape(kind, shape[-1])), pool_dtype(kind)) for shape, kind in kinds]
