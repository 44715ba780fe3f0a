"""Caches whose pages lie in another order than the engine gives them, and copies of what they hold."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.engine.program_runner import ProgramRunner
from graphcore.kernels.ops.kv_formats import heads_of, kept_at
from graphcore.kvcache.buffers import KVCache, LayerCache, RecurrentCache
from graphcore.kvcache.page_allocator import PageAllocator

Snapshot = list[tuple[Tensor, Tensor]]


def shuffle_pages(caches: Sequence[LayerCache], seed: int = 0) -> None:
    """Give every sequence pages in random order, the same in all layers of one table; what the pages hold stays."""
    tables = {id(cache.table): cache.table for cache in caches if isinstance(cache, KVCache)}
    generator = torch.Generator().manual_seed(seed)
    for table in tables.values():
        order = 1 + torch.randperm(table.numel(), generator=generator)
        table.copy_(order.view_as(table))


def give_in_random_order(pages: PageAllocator, seed: int = 0) -> None:
    """Let free pages be given in random order."""
    for table in pages.tables:
        random.Random(seed).shuffle(table._free)


def snapshot(caches: Sequence[LayerCache], row: int) -> Snapshot:
    """Return a copy of what layers keep of a row: all pages that the tables name, or its states."""
    return [
        cache.copy_out(cache.table[row] if isinstance(cache, KVCache) else row)  # type: ignore[arg-type,attr-defined]
        for cache in {id(cache): cache for cache in caches}.values()
    ]


def same(one: Snapshot, other: Snapshot) -> bool:
    """Return whether two copies are equal to the bit."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def pages_of(tensor: Tensor, cache: LayerCache, row: int | slice) -> Tensor:
    """Return what a cache's tensor holds of a sequence, or of several: its pages [N, K, G, E], or its state."""
    return tensor[cache.table[row]] if isinstance(cache, KVCache) else tensor[row]


def heads_at(pool: Tensor, pages: list[int]) -> Tensor:
    """Return what pages hold, [n, K, G, E]; codes as the numbers that they mean."""
    kept = kept_at(pool, torch.tensor(pages))
    return kept if pool.dtype != torch.uint8 else heads_of(kept, torch.float32)


@torch.inference_mode()
def seen_by_next(runner: ProgramRunner, row: int, tokens: int) -> list[Tensor]:
    """Return what the caches hold of a row for its next token: keys and values [K, L, E] in order, and states."""
    found: list[Tensor] = []
    tables = {id(cache): table for table in runner.pages.tables for cache in table.caches}
    layers = zip(runner.builder.caches, runner.builder.decoder.spec.blocks, strict=True)
    for cache, block in {id(cache): (cache, block) for cache, block in layers}.values():
        if isinstance(cache, RecurrentCache):
            found += cache.copy_out(row)
            continue
        table = tables[id(cache)]
        numbers = table.numbers(tokens, tokens)
        held = [heads_at(each, [table.rows[row][number] for number in numbers]) for each in cache.tensors]
        window = getattr(block.attention, "window", 0) or 0  # layers with as many pages share a table
        first = max(0, tokens - window + 1) if window else 0
        begin = numbers.start * table.page
        found += [each.transpose(0, 1).flatten(1, 2)[:, first - begin : tokens - begin] for each in held]
    return found
