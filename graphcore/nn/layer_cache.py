"""The memory that a layer keeps of each sequence: static buffers, allocated once, of one kind for each kind of layer.

Legend: B batch, K kv heads, S slots, E head dim, H value heads, C channels and W width of the convolution.

    attention    KVCache      keys and values          [B, K, S, E] each, in the cache dtype
    delta rule   DeltaCache   recurrent state          [B, H, Ek, Ev] float32
                              last inputs              [B, C, W - 1] float32, of the convolution

A full-attention layer has a slot for each position of the context. A sliding-window layer has a ring of `window` slots:
position p is in slot p mod S, and a new key overwrites the oldest one, which has just left the window. A ring that
later layers attend, too, has room for a pass's tokens beside the window, as they read it after those were written. A
ring that a decode step gives n consecutive tokens of a sequence has n - 1 slots beside the window, so that the last of
them overwrites no key that the first one sees. A recurrent state has no positions: padding leaves it as it is, and a
sequence goes on only after its last token.

A sequence that starts at position 0 reads nothing that an earlier one left, so nothing has to be cleared.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from graphcore.nn.spec import AttentionSpec, DeltaSpec, ModelSpec

STATE_DTYPE = torch.float32  # dtype of recurrent states: rounding would add up over a sequence's tokens
Snapshot = tuple[Tensor, ...]
"""A copy of all that the layers keep of one sequence."""


class LayerCache(ABC):
    """The interface of a layer's buffers."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The buffers in the order in which a block takes them, each with the sequences first."""

    @abstractmethod
    def can_go_back(self, tokens: int) -> bool:
        """Return whether a sequence of so many tokens can be continued after any of them, not only after the last."""

    def rows(self, batch: int, first: int = 0) -> Self:
        """Return the buffers of `batch` sequences, sharing memory; `first` is the row of the first of them."""
        return type(self)(*(tensor[first : first + batch] for tensor in self.tensors))


@dataclass(frozen=True)
class KVCache(LayerCache):
    """The keys and values of an attention layer, [B, K, S, E] each, in the cache dtype."""

    k: Tensor
    v: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.k, self.v

    def can_go_back(self, tokens: int) -> bool:
        """Return whether no key of so many tokens was overwritten: a ring that has wrapped can only go on."""
        return tokens <= self.k.shape[2]


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

    def can_go_back(self, tokens: int) -> bool:
        """Return False, as earlier states are overwritten, unless there is no token yet."""
        return tokens == 0


def cache_slots(spec: AttentionSpec, context: int, spare: int = 0) -> int:
    """Return how many positions an attention layer caches for a context of that many tokens.

    Args:
        spare: slots of a sliding layer's ring beside the window.
    """
    return min(spec.window + spare, context) if spec.window else context


def buffer_shapes(
    spec: AttentionSpec | DeltaSpec, context: int, spare: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a layer's two buffers for one sequence; `spare` as for `cache_slots`."""
    if isinstance(spec, DeltaSpec):
        return (spec.value_heads, spec.key_dim, spec.value_dim), (spec.channels, spec.width - 1)
    keys = (spec.kv_heads, cache_slots(spec, context, spare), spec.head_dim)
    return keys, keys


def own_buffers(
    spec: ModelSpec, context: int, chunk: int, together: int = 1
) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of the two buffers for one sequence, by layer, of the layers that share no other's.

    Args:
        chunk: most tokens of a sequence in one pass; 0 for as many as the context has.
        together: most tokens of a sequence in one decode step.
    """
    lending = spec.lending_layers

    def spare(layer: int) -> int:
        return max(together - 1, (chunk or context) if layer in lending else 0)

    layers = sorted(set(spec.cache_layers))
    return {layer: buffer_shapes(spec.blocks[layer].attention, context, spare(layer)) for layer in layers}


def buffers_nbytes(
    spec: ModelSpec, batch: int, context: int, dtype: torch.dtype, chunk: int = 0, together: int = 1
) -> tuple[int, ...]:
    """Return the bytes of each buffer of all layers.

    Args:
        dtype: dtype of keys and values.
        chunk, together: the same as in `own_buffers`.
    """
    return tuple(
        batch * prod(shape) * _dtype_of(spec.blocks[layer].attention, dtype).itemsize
        for layer, shapes in own_buffers(spec, context, chunk, together).items()
        for shape in shapes
    )


def cache_nbytes(
    spec: ModelSpec, batch: int, context: int, dtype: torch.dtype, chunk: int = 0, together: int = 1
) -> int:
    """Return the bytes of all layers' buffers; the arguments are those of `buffers_nbytes`."""
    return sum(buffers_nbytes(spec, batch, context, dtype, chunk, together))


def allocate_cache(
    spec: ModelSpec,
    batch: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk: int = 0,
    together: int = 1,
) -> tuple[LayerCache, ...]:
    """Return zeroed buffers for every layer, the same ones for layers that share them.

    Args:
        dtype: dtype of keys and values.
        chunk, together: the same as in `own_buffers`.
    """

    def empty(layer: AttentionSpec | DeltaSpec, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> LayerCache:
        kind = _dtype_of(layer, dtype)
        buffers = [torch.zeros(batch, *shape, dtype=kind, device=device) for shape in shapes]
        return DeltaCache(*buffers) if isinstance(layer, DeltaSpec) else KVCache(*buffers)

    own = own_buffers(spec, context, chunk, together)
    made = {layer: empty(spec.blocks[layer].attention, shapes) for layer, shapes in own.items()}
    return tuple(made[layer] for layer in spec.cache_layers)


def tokens_together(spec: ModelSpec, caches: Sequence[LayerCache], context: int) -> int:
    """Return the largest number of consecutive tokens of one sequence that a decode step can have in these caches.

    Only rings limit it, unless they have a slot for each position of the context.
    """
    rings = (
        (block.attention.window, cache.k.shape[2])
        for block, cache in zip(spec.blocks, caches, strict=True)
        if isinstance(block.attention, AttentionSpec) and block.attention.window and isinstance(cache, KVCache)
    )
    return min((1 + slots - window for window, slots in rings if slots < context), default=context)


def snapshot(caches: Sequence[LayerCache], row: int) -> Snapshot:
    """Return a copy of all that the layers keep of the sequence in a row."""
    return tuple(tensor[row].clone() for tensor in _distinct(caches))


def restore(caches: Sequence[LayerCache], row: int, kept: Snapshot) -> None:
    """Put a sequence back as it was when the snapshot was taken, into any row."""
    places = [tensor[row] for tensor in _distinct(caches)]
    for place, tensor in zip(places, kept, strict=True):
        place.copy_(tensor)


def _distinct(caches: Sequence[LayerCache]) -> Iterator[Tensor]:
    """Yield the buffers of all layers, those that layers share once."""
    return (tensor for cache in {id(cache): cache for cache in caches}.values() for tensor in cache.tensors)


def _dtype_of(spec: AttentionSpec | DeltaSpec, dtype: torch.dtype) -> torch.dtype:
    return STATE_DTYPE if isinstance(spec, DeltaSpec) else dtype
