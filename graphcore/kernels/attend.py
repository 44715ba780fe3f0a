"""Attention over a static KV cache, as one custom op: write the new keys and values, then attend what is live.

Legend: B batch, T tokens, H heads, K kv heads, E head dim, S cache slots, L live keys.

Slot of position p: p mod S. A layer without a window has a slot for every position, so its slots never wrap.

On the CPU the op reads the live length and slices the cache; the cost follows the context that is there. Elsewhere no
length may be read back, so it masks the whole buffer: `masked_attend` is also the plain statement of what is computed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from graphcore.kernels.native_attend import attend_natively

QUERY_BLOCK = 128  # queries that are attended together; against 64, faster at 256 tokens and even at 512

torch.library.define(
    "graphcore::attend",
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor starts, Tensor counts,"
    " int window, float scale, Tensor? sinks=None, str library='', float cap=0.0) -> Tensor",
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    library: str = "",
    cap: float = 0.0,
) -> Tensor:
    """Append keys and values to the cache and attend them and all that came before.

    Args:
        query: [B, T, H, E] compute dtype.
        key, value: [B, T, K, E] compute dtype.
        k_cache, v_cache: [B, K, S, E] cache dtype, written in place; positions 0 .. starts-1 are there already.
        starts: [B] int64.  counts: [B] int64, real tokens of this pass; what is returned for padding is unspecified.
        window: the last `window` keys are visible, the query's own included; 0 is all.
        scale: multiplies q . k.
        sinks: [H] float32, a score of each head that its softmax counts and no value answers to; not scaled.
        library: file of the C++ kernels, for the CPU; empty without.
        cap: what no score exceeds: s = cap * tanh(scale * q . k / cap), before the mask; sinks stay. 0 is none.

    Returns:
        [B, T, H, E] compute dtype.
    """
    op = torch.ops.graphcore.attend.default
    spans = (starts, counts, window, scale, sinks, library, cap)
    return op(query, key, value, k_cache, v_cache, *spans)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::attend")  # type: ignore[untyped-decorator]  # torch does not type it
def _attend_fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Scoring:
    """How products of queries and keys become weights; the fields are `attend`'s arguments."""

    window: int
    scale: float
    sinks: Tensor | None
    cap: float

    def scores(self, products: Tensor) -> Tensor:
        """Return products as scores, float32; float32 products are overwritten."""
        scores = products.float().mul_(self.scale)
        return scores.div_(self.cap).tanh_().mul_(self.cap) if self.cap else scores

    def weights(self, scores: Tensor) -> Tensor:
        """Return the softmax of [K, H/K, ..., L] over the last axis and the heads' sinks, whose weights are dropped."""
        if self.sinks is None:
            return scores.softmax(dim=-1)
        sinks = self.sinks.view(*scores.shape[:2], *(1 for _ in scores.shape[2:]))
        row = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        return row.softmax(dim=-1)[..., :-1]


def sliced_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    library: str = "",
    cap: float = 0.0,
) -> Tensor:
    """Implement `attend` sequence by sequence, in C++ where there is a library, else on slices of the live length."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    scoring = _Scoring(window, scale, sinks, cap)
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        if library:
            parts = (query[row, :count], key[row, :count], value[row, :count], k_cache[row], v_cache[row])
            attend_natively(library, parts, out[row, :count], start, window, scale, sinks, cap)
            continue
        new = query[row, :count], key[row, :count].transpose(0, 1), value[row, :count].transpose(0, 1)
        one = _attend_token if count == 1 else _attend_chunk
        out[row, :count] = one(*new, k_cache[row], v_cache[row], start, scoring)
    return out


def _attend_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    scoring: _Scoring,
) -> Tensor:
    """Write one key [K, 1, E] and attend the live slots; their order does not matter to a softmax.

    The H / K query heads of one kv head become rows of one matrix: a plain product instead of an expanded cache.
    """
    slots = k_cache.shape[1]
    k_cache[:, start % slots] = key[:, 0]
    v_cache[:, start % slots] = value[:, 0]
    visible = min(start + 1, slots, scoring.window or slots)
    live = slice(start + 1 - visible, start + 1) if start < slots else slice(0, slots)
    assert start < slots or visible == slots, f"a ring of {slots} slots serves a window of {visible}"
    kv_heads, head_dim = k_cache.shape[0], k_cache.shape[2]
    rows = query.view(1, kv_heads, -1, head_dim)  # [1, H, E] -> [1, K, H/K, E]
    keys, values = k_cache[None, :, live].to(query.dtype), v_cache[None, :, live].to(query.dtype)
    if scoring.sinks is None and not scoring.cap:
        return scaled_dot_product_attention(rows, keys, values, scale=scoring.scale).reshape(query.shape)
    scores = scoring.scores(rows[0] @ keys[0].transpose(1, 2))  # [K, H/K, L]
    weights = scoring.weights(scores).to(values.dtype)
    return (weights @ values[0]).reshape(query.shape)


def _attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    scoring: _Scoring,
) -> Tensor:
    """Attend the visible past and the chunk itself, then write the chunk (a ring may lose its past to it)."""
    slots, count = k_cache.shape[1], query.shape[0]
    first = max(0, start - scoring.window + 1) if scoring.window else 0
    past = torch.arange(first, start) % slots
    wraps = start > slots
    old_k = k_cache[:, past] if wraps else k_cache[:, first:start]
    old_v = v_cache[:, past] if wraps else v_cache[:, first:start]
    keys = torch.cat((old_k.to(key.dtype), key), dim=1)  # [K, L, E]
    values = torch.cat((old_v.to(value.dtype), value), dim=1)
    kept = min(count, slots)
    written = torch.arange(start + count - kept, start + count) % slots
    k_cache[:, written] = key[:, -kept:].to(k_cache.dtype)
    v_cache[:, written] = value[:, -kept:].to(v_cache.dtype)
    return _attend_blocks(query, keys, values, start - first, scoring)


def _attend_blocks(query: Tensor, keys: Tensor, values: Tensor, offset: int, scoring: _Scoring) -> Tensor:
    """Attend in blocks of queries, each against the keys that it may see and no others.

    Plain products of a block are twice as fast as the library's fused attention at these sizes (256 tokens of SmolLM2:
    0.46 ms a layer against 1.0), because half of the keys are never touched and kv heads are not expanded.

    Args:
        query: [T, H, E].
        keys, values: [K, L, E], query t's own at index offset + t.

    Returns:
        [T, H, E].
    """
    kv_heads, live, head_dim = keys.shape
    tokens, window = query.shape[0], scoring.window
    rows = query.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [K, H/K, T, E]
    out = torch.empty_like(query)
    positions = torch.arange(live)
    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        seen = slice(max(0, offset + begin - window + 1) if window else 0, offset + end)
        block = rows[:, :, begin:end].reshape(kv_heads, -1, head_dim)  # [K, H/K * block, E]
        distance = positions[offset + begin : offset + end, None] - positions[None, seen]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        scores = torch.bmm(block, keys[:, seen].transpose(1, 2)).view(kv_heads, -1, end - begin, distance.shape[1])
        scores = scoring.scores(scores).masked_fill_(hidden, float("-inf"))  # [K, H/K, block, L]
        weights = scoring.weights(scores).to(values.dtype)
        product = torch.bmm(weights.reshape(kv_heads, -1, distance.shape[1]), values[:, seen])
        out[begin:end] = product.view(kv_heads, -1, end - begin, head_dim).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def masked_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    _library: str = "",
    cap: float = 0.0,
) -> Tensor:
    """Implement `attend` without reading any length back: attend cache and chunk under a mask, then write."""
    slots, tokens = k_cache.shape[2], query.shape[1]
    offsets = torch.arange(tokens, device=query.device)
    queries = starts[:, None] + offsets  # [B, T] positions
    # slot j holds the largest position p < start with p mod S = j
    slot = torch.arange(slots, device=query.device)
    held = starts[:, None] - 1 - (starts[:, None] - 1 - slot).remainder(slots)  # [B, S], negative where empty
    new = torch.where(offsets < counts[:, None], queries, torch.iinfo(torch.int64).max)  # padding is never visible
    positions = torch.cat((held, new), dim=1)[:, None, :]  # [B, 1, L]
    distance = queries[:, :, None] - positions
    mask = (positions >= 0) & (distance >= 0)
    if window:
        mask &= distance < window
    mask[:, :, slots] |= ~mask.any(-1)  # a padded query sees one key, or its softmax would be 0 / 0
    is_empty = (held < 0)[:, None, :, None]  # what an earlier sequence left may be NaN, and 0 * NaN is NaN
    keys = torch.cat((k_cache.masked_fill(is_empty, 0).to(key.dtype), key.transpose(1, 2)), dim=2)  # [B, K, L, E]
    values = torch.cat((v_cache.masked_fill(is_empty, 0).to(value.dtype), value.transpose(1, 2)), dim=2)
    bias = mask[:, None]
    if sinks is not None:
        keys, values, bias = _with_sinks(keys, values, mask, sinks)
    group = query.shape[2] // key.shape[2]
    rows = query.transpose(1, 2)
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    if cap:
        out = _attend_capped(rows, keys, values, bias, _Scoring(window, scale, sinks, cap))
    else:
        out = scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=scale)
    _write_masked(key, value, k_cache, v_cache, starts, counts)
    return out.transpose(1, 2).contiguous()


def _attend_capped(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scoring: _Scoring) -> Tensor:
    """Return what torch's attention returns [B, H, T, E], from capped scores; a sink's key of zeros scores 0 still."""
    scores = scoring.scores(query @ keys.transpose(2, 3))  # [B, H, T, L]
    scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(dim=-1).to(values.dtype) @ values


def _with_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values with a last one of zeros, and what is added to the scores: a sink's is its own.

    Args:
        keys, values: [B, K, L, E].
        mask: [B, T, L], true where a query sees a key.
        sinks: [H].

    Returns:
        [B, K, L + 1, E] twice and [B, H, T, L + 1], all of the keys' dtype.
    """
    batch, tokens, _ = mask.shape
    shown = torch.zeros(mask.shape, dtype=keys.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    of_sinks = sinks.to(keys.dtype)[None, :, None, None].expand(batch, -1, tokens, 1)
    bias = torch.cat((shown[:, None].expand(-1, sinks.shape[0], -1, -1), of_sinks), dim=-1)
    return pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1)), bias


def _write_masked(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Write the last S real tokens at their slots; every other token repeats the last real one's write.

    A sequence with no real token (count 0) rewrites the slot of its next position with what is there.
    """
    slots, tokens = k_cache.shape[2], key.shape[1]
    offsets = torch.arange(tokens, device=key.device)[None, :]
    last = (counts - 1).clamp(min=0)[:, None]
    is_written = (offsets < counts[:, None]) & (offsets >= counts[:, None] - slots)
    chosen = torch.where(is_written, offsets, last)  # [B, T]
    slot = (starts[:, None] + chosen).remainder(slots)
    batch = torch.arange(key.shape[0], device=key.device)[:, None]
    is_real = (counts > 0)[:, None, None, None]
    for cache, new in ((k_cache, key), (v_cache, value)):
        rows = torch.where(is_real, new[batch, chosen].to(cache.dtype), cache[batch, :, slot])  # [B, T, K, E]
        cache[batch, :, slot] = rows


# Not as decorators: torch's would leave None under the functions' names.
torch.library.impl("graphcore::attend", "CPU", sliced_attend)
torch.library.impl("graphcore::attend", "CompositeExplicitAutograd", masked_attend)
