"""Static key and value buffers, one pair per layer, allocated once.

Legend: B batch, K kv heads, S slots, E head dim.

A full-attention layer has a slot for each position of the context. A sliding-window layer has a ring of `window` slots:
position p is in slot p mod S, and a new key overwrites the oldest one, which has just left the window.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.nn.spec import AttentionSpec, ModelSpec


@dataclass(frozen=True)
class LayerCache:
    """One layer's key and value buffers, [B, K, S, E] each, in the cache dtype."""

    k: Tensor
    v: Tensor

    def rows(self, batch: int) -> "LayerCache":
        """Return the buffers of the first `batch` sequences, sharing memory."""
        return LayerCache(self.k[:batch], self.v[:batch])


def cache_slots(spec: AttentionSpec, context: int) -> int:
    """Return how many positions a layer caches for a context of that many tokens."""
    return min(spec.window, context) if spec.window else context


def cache_nbytes(spec: ModelSpec, batch: int, context: int, dtype: torch.dtype) -> int:
    """Return the bytes of all layers' keys and values."""
    slots = sum(
        cache_slots(block.attention, context) * block.attention.kv_heads * block.attention.head_dim
        for block in spec.blocks
    )
    return 2 * batch * slots * dtype.itemsize


def allocate_cache(
    spec: ModelSpec, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> tuple[LayerCache, ...]:
    """Return zeroed buffers for every layer."""

    def zeros(attention: AttentionSpec) -> Tensor:
        slots = cache_slots(attention, context)
        return torch.zeros(batch, attention.kv_heads, slots, attention.head_dim, dtype=dtype, device=device)

    return tuple(LayerCache(zeros(block.attention), zeros(block.attention)) for block in spec.blocks)
