"""Caches whose pages lie in another order than the engine gives them."""

from collections.abc import Sequence

import torch

from graphcore.nn.layer_cache import KVCache, LayerCache


def shuffle_pages(caches: Sequence[LayerCache], seed: int = 0) -> None:
    """Give every sequence pages in random order, the same in all layers of one table; what the pages hold stays."""
    tables = {id(cache.table): cache.table for cache in caches if isinstance(cache, KVCache)}
    generator = torch.Generator().manual_seed(seed)
    for table in tables.values():
        order = torch.randperm(table.numel(), generator=generator)
        table.copy_(order.view_as(table))


def pages_of(tensor: torch.Tensor, cache: LayerCache, row: int) -> torch.Tensor:
    """Return what a cache's tensor holds of a sequence: its pages [N, K, G, E], or its state."""
    return tensor[cache.table[row]] if isinstance(cache, KVCache) else tensor[row]
