"""Sequences that grow pass by pass, and the attention over them in float64, of whole rows of scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Implementation = Callable[..., Tensor]
SPARE_PAGES = 3
SENTINEL = 777.0  # stands in slots that nothing has written: reading one shows in the result


@dataclass(frozen=True)
class Shape:
    """Sizes of one case; slots as nn.layer_cache makes them, unless the window has the whole context's.

    Attributes:
        page: positions of a page; 0 for one page of all slots.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    context: int = 32
    window: int = 0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    scale: float = 0.4
    is_ring: bool = True
    has_sinks: bool = False
    cap: float = 0.0
    page: int = 0

    @property
    def pages(self) -> int:
        slots = min(self.window, self.context) if self.window and self.is_ring else self.context
        return -(-slots // self.page) if self.page else 1

    @property
    def slots(self) -> int:
        slots = min(self.window, self.context) if self.window and self.is_ring else self.context
        return self.pages * self.page if self.page else slots


@dataclass
class Sequences:
    """The keys and values of every position of each row, and the buffers of the implementation under test.

    The rows' pages lie in random order, among some that are nobody's.
    """

    shape: Shape
    batch: int
    seed: int = 0
    keys: list[list[Tensor]] = field(init=False)
    values: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = [[] for _ in range(self.batch)]
        self.values = [[] for _ in range(self.batch)]
        used = self.batch * self.shape.pages
        order = torch.randperm(used + SPARE_PAGES, generator=torch.Generator().manual_seed(self.seed))
        self.table = order[:used].int().view(self.batch, -1)
        page = self.shape.slots // self.shape.pages
        size = (used + SPARE_PAGES, self.shape.kv_heads, page, self.shape.head_dim)
        self.k_cache = torch.full(size, SENTINEL, dtype=self.shape.cache_dtype)
        self.v_cache = torch.full(size, SENTINEL, dtype=self.shape.cache_dtype)
        self.generator = torch.Generator().manual_seed(self.seed)
        # Scores reach 10 here; sinks of the same size take from a little to most of a row.
        self.sinks = 3 * torch.randn(self.shape.heads, generator=self.generator) if self.shape.has_sinks else None

    def randn(self, tokens: int, heads: int) -> Tensor:
        x = torch.randn(self.batch, tokens, heads, self.shape.head_dim, generator=self.generator)
        return x.to(self.shape.dtype)

    def run(self, attend: Implementation, counts: Sequence[int], padding: int = 0) -> tuple[Tensor, Tensor]:
        """Append counts[b] tokens to each row; return what `attend` and what `attended` say, real tokens only."""
        query, out = self.step(attend, counts, padding)
        found, expected = [], []
        for row, count in enumerate(counts):
            found.append(out[row, :count].double().flatten(0, 1))
            expected.append(self.attended(row, query[row, :count]).flatten(0, 1))
        return torch.cat(found), torch.cat(expected)

    def step(self, attend: Implementation, counts: Sequence[int], padding: int = 0) -> tuple[Tensor, Tensor]:
        """Append counts[b] tokens to each row; return their queries and what `attend` says, [B, T, H, E]."""
        tokens = max(1, *counts) + padding
        query = self.randn(tokens, self.shape.heads)
        key, value = self.randn(tokens, self.shape.kv_heads), self.randn(tokens, self.shape.kv_heads)
        starts = torch.tensor([len(row) for row in self.keys])
        caches = (self.k_cache, self.v_cache, self.table)
        settings = (self.shape.window, self.shape.scale, self.sinks)
        out = attend(query, key, value, *caches, starts, torch.tensor(counts), *settings, cap=self.shape.cap)
        assert out.shape == query.shape
        assert out.dtype == query.dtype
        assert out.isfinite().all(), "padding may hold anything finite; a NaN is no key that a weight of 0 removes"
        for row, count in enumerate(counts):
            self.keys[row] += list(key[row, :count])
            self.values[row] += list(value[row, :count])
        return query, out

    def attended(self, row: int, query: Tensor) -> Tensor:
        """Return what the row's last tokens attend, [T, H, E] float64.

        Args:
            query: [T, H, E].
        """
        if not len(query):
            return query.double()
        keys, values = (torch.stack(entries[row]).double() for entries in (self.keys, self.values))
        sinks = None if self.sinks is None else self.sinks.to(self.shape.dtype).double()
        return attended(query.double(), keys, values, self.shape.window, self.shape.scale, sinks, self.shape.cap)

    def expected_caches(self) -> tuple[Tensor, Tensor]:
        """Return both pools as they must be: position p in slot p mod S, the latest wins, the rest never written."""
        caches = torch.full_like(self.k_cache, SENTINEL), torch.full_like(self.v_cache, SENTINEL)
        for cache, rows in zip(caches, (self.keys, self.values), strict=True):
            for row, entries in enumerate(rows):
                latest = range(max(0, len(entries) - self.shape.slots), len(entries))  # one for a slot
                if latest:
                    slots = torch.tensor(latest) % self.shape.slots
                    pages = self.table[row, slots // cache.shape[2]]
                    cache[pages, :, slots % cache.shape[2]] = torch.stack(entries[latest.start :]).to(cache.dtype)
        return caches


def attended(
    query: Tensor, keys: Tensor, values: Tensor, window: int, scale: float, sinks: Tensor | None, cap: float = 0.0
) -> Tensor:
    """Return softmax(capped(scale q . k)) v over the positions that each of a sequence's last tokens sees, and a sink.

    Args:
        query: [T, H, E] float64, of the last T of L positions.
        keys, values: [L, K, E] float64.
        sinks: [H] float64, logits beside the positions'.

    Returns:
        [T, H, E] float64.
    """
    group, seen = query.shape[1] // keys.shape[1], torch.arange(len(keys))
    keys, values = (entries.repeat_interleave(group, dim=1) for entries in (keys, values))  # [L, H, E]
    at = seen[len(keys) - len(query) :, None]  # [T, 1]
    is_hidden = (seen > at) | (seen <= at - window) if window else seen > at  # [T, L]
    scores = scale * torch.einsum("the,lhe->htl", query, keys)
    scores = (cap * (scores / cap).tanh() if cap else scores).masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), dim=2)
    return torch.einsum("htl,lhe->the", scores.softmax(2)[..., : len(keys)], values)


def beyond_the_cap(attend: Implementation, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `attend` makes of scores of 1e4 and of -1e4 under a cap of 2, and softmax of 2 and -2 in float64."""
    past, cap, head_dim = 37, 2.0, 8
    generator = torch.Generator().manual_seed(tokens)
    signs = torch.randint(0, 2, (past + tokens,), generator=generator) * 2.0 - 1
    keys, values = torch.zeros(past + tokens, head_dim), torch.randn(past + tokens, head_dim, generator=generator)
    keys[:, 0] = 1e4 * signs
    values = values.to(dtype)
    query = torch.zeros(1, tokens, 1, head_dim, dtype=dtype)
    query[..., 0] = 1
    caches = torch.zeros(2, 1, 1, 128, head_dim, dtype=dtype)
    for cache, rows in zip(caches, (keys, values), strict=True):
        cache[0, 0, :past] = rows[:past].to(dtype)
    new = [rows[past:].to(dtype)[None, :, None] for rows in (keys, values)]
    table = torch.zeros(1, 1, dtype=torch.int32)
    found = attend(query, *new, *caches, table, torch.tensor([past]), torch.tensor([tokens]), 0, 1.0, cap=cap)
    expected = [
        (cap * signs[:seen].double()).softmax(0) @ values[:seen].double() for seen in range(past + 1, past + tokens + 1)
    ]
    return found[0, :, 0].double(), torch.stack(expected)
