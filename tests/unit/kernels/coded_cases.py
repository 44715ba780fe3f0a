"""Sequences whose keys and values are kept in codes, and attention over what the codes stand for, in float64."""

import torch
from attend_cases import Implementation, attended
from torch import Tensor

from graphcore.kernels.ops.kv_formats import (
    CODED,
    FLOAT8,
    KVType,
    entries,
    format_of,
    heads_of,
    pool_dtype,
    vector_shape,
)

BATCH, KV_HEADS, CONTEXT, SCALE = 2, 2, 96, 0.3
PAIRS = [(name, name) for name in CODED] + [("q8_0", "q4_0"), ("q5_0", torch.float32), (torch.float32, "q8_0")]
PASSES = [[5, 1], [2, 7], [1, 1], [0, 1], [19, 4], [1, 1], [33, 40], [1, 1]]


def hadamard(size: int) -> Tensor:
    """Return the orthonormal matrix by its recursion, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def pool(kind: KVType, head_dim: int, page: int, pages: int) -> Tensor:
    """Return a pool full of what no kernel may read: codes whose scales are NaN, or NaN."""
    shape = (pages, KV_HEADS, page, *vector_shape(kind, head_dim))
    return torch.full(shape, 255 if isinstance(kind, str) else float("nan"), dtype=pool_dtype(kind))


class Grown:
    """Sequences that grow pass by pass, with codes of each position."""

    def __init__(self, kinds: tuple[KVType, KVType], head_dim: int, window: int = 0, page: int = 16, heads: int = 6):
        slots = min(window + 40, CONTEXT) if window else CONTEXT
        blocks = -(-slots // page)
        self.generator = torch.Generator().manual_seed(7)
        order = torch.randperm(BATCH * blocks + 2, generator=self.generator)
        self.table = order[: BATCH * blocks].int().view(BATCH, blocks)
        self.pools = [pool(kind, head_dim, page, BATCH * blocks + 2) for kind in kinds]
        self.heads, self.head_dim, self.window = heads, head_dim, window
        self.sinks = torch.randn(heads, generator=self.generator)
        self.seen: list[list[list[Tensor]]] = [[[] for _ in range(BATCH)] for _ in range(2)]  # as they are attended

    def run(self, attend: Implementation, counts: list[int]) -> tuple[Tensor, Tensor]:
        tokens = max(1, *counts)
        query, key, value = (
            torch.randn(BATCH, tokens, heads, self.head_dim, generator=self.generator)
            for heads in (self.heads, KV_HEADS, KV_HEADS)
        )
        starts = torch.tensor([len(row) for row in self.seen[0]])
        for cache, rows, new in zip(self.pools, self.seen, (key, value), strict=True):
            kept = heads_of(entries(new, cache), torch.float64)
            wide = mixed_back(kept) if format_of(cache) or cache.dtype is FLOAT8 else kept
            for row, count in enumerate(counts):
                rows[row] += list(wide[row, :count])
        where = (*self.pools, self.table, starts, torch.tensor(counts))
        out = attend(query, key, value, *where, self.window, SCALE, self.sinks)
        found, expected = [], []
        for row, count in enumerate(counts):
            found.append(out[row, :count].double().flatten(0, 1))
            if count:
                keys, values = (torch.stack(rows[row]) for rows in self.seen)  # [L, K, E]
                of_row = query[row, :count].double(), keys, values, self.window, SCALE, self.sinks.double()
                expected.append(attended(*of_row).flatten(0, 1))
        return torch.cat(found), torch.cat(expected)


def mixed_back(heads: Tensor) -> Tensor:
    """Undo the Hadamard matrix in float64."""
    size = heads.shape[-1] & -heads.shape[-1]
    return (heads.unflatten(-1, (-1, size)) @ hadamard(size)).flatten(-2)
