"""Attention over a paged KV cache, as one custom op: write the new keys and values, then attend to the live keys.

Legend: B batch, T tokens, H heads, K kv heads, E head dim, P pages, N pages of a sequence, G positions of a page, S
slots of a sequence (N G), L live keys.

Position p of sequence b: page table[b, (p // G) mod N], place p mod G. So its slot is p mod S. A layer without a window
has a slot for every position, so its slots never wrap.

`masked_attend` is the reference implementation: it reads no length on the host, and attends all pages under a mask. The
CPU gathers the live keys instead (kernels/cpu/attention.py), and a GPU's kernels register themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from graphcore.kernels.cpu.attention import sliced_attend
from graphcore.kernels.custom_ops import register_custom_op, register_implementation, schema_of
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.kv_formats import entries, heads_of, kept_at, like_heads_of, own_heads, put_entries

Caches = Sequence[Tensor]
"""Pools of keys and of values, or the only pool of latent attention."""


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    library: str = "",
    cap: float = 0.0,
    values_from: int = 0,
) -> Tensor:
    """Append keys and values to the cache, and attend them and all earlier keys.

    Args:
        query: [B, T, H, E] compute dtype.
        key, value: [B, T, K, E] compute dtype; None if another layer has appended its own to the cache in this pass.
            The cache then has slots for the pass's tokens in addition to the window, so that none has overwritten a
            visible key, and nothing is written.
        k_cache, v_cache: [P, K, G, E] cache dtype or [P, K, G, C, Z] codes (kernels/ops/kv_formats.py), written in
            place; positions 0 .. starts-1 are filled. In a quantised cache the chunk's own keys and values are
            quantised before they are attended, too, so that outputs do not depend on the chunking.
        table: [B, N] int32, pages of each sequence; no page is in two rows.
        starts: [B] int64.  counts: [B] int64, real tokens of this pass; the result for padding is unspecified.
        window: number of visible keys up to the query's own; 0 for all.
        scale: factor of q . k.
        sinks: [H] float32, attention sinks: an extra score of each head in the softmax, without a value; not scaled.
        library: file of the C++ kernels, for the CPU; empty if there is none.
        cap: bound of the scores, s = cap * tanh(scale * q . k / cap), before the mask; sinks are exempt. 0 for none.
        values_from: 0, or the number F of a key's features in latent attention, where a position has one row: the key
            [B, T, K, F], then the value [B, T, K, E - F]. The row is compared with the query and lies in k_cache;
            v_cache is empty.

    Returns:
        [B, T, H, E - F] compute dtype.
    """
    op = torch.ops.graphcore.attend.default
    spans = (starts, counts, window, scale, sinks, library, cap, values_from)
    return op(query, key, value, k_cache, v_cache, table, *spans)  # type: ignore[no-any-return]


def masked_attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    *how: Any,
    **named: Any,
) -> Tensor:
    """Implement `attend` without reading lengths on the host: attend cache and chunk under a mask, then write.

    The arguments after `counts` are the fields of `AttentionParameters`.
    """
    scoring = AttentionParameters(*how, **named)
    first = scoring.values_from
    caches: Caches = (k_cache,) if first else (k_cache, v_cache)
    if first:
        key, value = joined_rows(key, value), None
    kept, new = _own_rows(query, [one for one in (key, value) if one is not None], caches, table, starts, counts)
    slots = table.shape[1] * k_cache.shape[2]
    mask, is_empty = _visible(query.shape[1], slots, starts, counts, scoring.window)
    rows = [_all_rows(cache, table, own, is_empty) for cache, own in zip(caches, new, strict=True)]
    keys, values = rows[0], rows[-1][..., first:]
    bias = mask[:, None]
    if scoring.sinks is not None:
        keys, values, bias = _with_sinks(keys, values, mask, scoring.sinks)
    group = query.shape[2] // keys.shape[1]
    queries = like_heads_of(k_cache, query).transpose(1, 2)
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    if scoring.cap:
        out = _attend_capped(queries, keys, values, bias, scoring)
    else:
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scoring.scale)
    _write_masked(kept, caches, table, starts, counts)
    return like_heads_of(caches[-1], out.transpose(1, 2)).contiguous()


def _all_rows(cache: Tensor, table: Tensor, own: Tensor, is_empty: Tensor) -> Tensor:
    """Return the rows of all slots, zeros in empty ones, and the pass's own [B, T, K, E]: [B, K, S + T, E]."""
    old = heads_of(kept_at(cache, table), own.dtype).transpose(1, 2).flatten(2, 3)
    return torch.cat((old.masked_fill(is_empty, 0), own.transpose(1, 2)), dim=2)


def _own_rows(
    query: Tensor, given: list[Tensor], caches: Caches, table: Tensor, starts: Tensor, counts: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a pass's tokens have in the caches, and what is attended of it; `given` as for `attend`, or []."""
    if not given:
        kept = kept_of_pass(query.shape[1], caches, table, starts, counts)
        return kept, [heads_of(one, query.dtype) for one in kept]
    kept = [entries(one, cache) for one, cache in zip(given, caches, strict=True)]
    return kept, [own_heads(one, found, cache) for one, found, cache in zip(given, kept, caches, strict=True)]


def joined_rows(key: Tensor | None, value: Tensor | None) -> Tensor:
    """Return the rows [B, T, K, E] of latent attention, keys followed by values."""
    assert key is not None and value is not None, "each layer of latent attention has rows of its own"  # noqa: PT018
    return torch.cat((key, value), dim=-1)


def kept_of_pass(tokens: int, caches: Caches, table: Tensor, starts: Tensor, counts: Tensor) -> list[Tensor]:
    """Return the entries of a pass's tokens that are in the cache already; padding repeats the last real one."""
    span = torch.arange(tokens, device=starts.device, dtype=torch.int64)
    last = (counts - 1).clamp(min=0)
    pages, places = _places(starts[:, None] + torch.minimum(span, last[:, None]), table, caches[0].shape[2])  # [B, T]
    return [kept_at(cache, pages, places) for cache in caches]


def _visible(tokens: int, slots: int, starts: Tensor, counts: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return which keys each query sees, [B, T, S + T] with L = S + T, and which slots are empty, [B, 1, S, 1].

    An empty slot may hold NaN from an earlier sequence, and 0 * NaN is NaN.
    """
    offsets = torch.arange(tokens, device=starts.device, dtype=torch.int64)
    queries = starts[:, None] + offsets  # [B, T] positions
    # slot j holds the largest position p < start with p mod S = j
    slot = torch.arange(slots, device=starts.device, dtype=torch.int64)
    held = starts[:, None] - 1 - (starts[:, None] - 1 - slot).remainder(slots)  # [B, S], negative where empty
    new = torch.where(offsets < counts[:, None], queries, torch.iinfo(torch.int64).max)  # padding is never visible
    positions = torch.cat((held, new), dim=1)[:, None, :]  # [B, 1, L]
    distance = queries[:, :, None] - positions
    mask = (positions >= 0) & (distance >= 0)
    if window:
        mask &= distance < window
    mask[:, :, slots] |= ~mask.any(-1)  # a padded query sees one key, because its softmax would otherwise be 0 / 0
    return mask, (held < 0)[:, None, :, None]


def _attend_capped(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scoring: AttentionParameters) -> Tensor:
    """Return attention outputs [B, H, T, E] with capped scores; a sink's zero key keeps score 0 before its bias."""
    scores = scoring.scores(query @ keys.transpose(2, 3))  # [B, H, T, L]
    scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(dim=-1).to(values.dtype) @ values


def _with_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key and a value of zeros, and return them with a score bias that gives this key the sink's score.

    Args:
        keys, values: [B, K, L, E].
        mask: [B, T, L], true where a query sees a key.
        sinks: [H].

    Returns:
        Both as [B, K, L + 1, E], and the bias as [B, H, T, L + 1], all of the keys' dtype.
    """
    batch, tokens, _ = mask.shape
    shown = torch.zeros(mask.shape, dtype=keys.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    of_sinks = sinks.to(keys.dtype)[None, :, None, None].expand(batch, -1, tokens, 1)
    bias = torch.cat((shown[:, None].expand(-1, sinks.shape[0], -1, -1), of_sinks), dim=-1)
    return pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1)), bias


def _places(positions: Tensor, table: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return the page of each position [B, T], and its place in the page."""
    blocks = (positions // page).remainder(table.shape[1])
    return table.gather(1, blocks), positions.remainder(page)


def _write_masked(kept: Sequence[Tensor], caches: Caches, table: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Write entries of the last S real tokens to their slots; every other token repeats the last real one's write.

    A sequence without a real token (count 0) rewrites the slot of its next position with its old content.

    Args:
        kept: entries of keys and of values, [B, T, K, entry].
    """
    page, (batch, tokens) = caches[0].shape[2], kept[0].shape[:2]
    slots = page * table.shape[1]
    offsets = torch.arange(tokens, device=starts.device, dtype=torch.int64)[None, :]
    last = (counts - 1).clamp(min=0)[:, None]
    is_written = (offsets < counts[:, None]) & (offsets >= counts[:, None] - slots)
    chosen = torch.where(is_written, offsets, last)  # [B, T]
    pages, places = _places(starts[:, None] + chosen, table, page)
    rows = torch.arange(batch, device=starts.device, dtype=torch.int64)[:, None]
    is_real = counts > 0  # [B]
    for cache, new in zip(caches, kept, strict=True):
        old = kept_at(cache, pages, places)  # [B, T, K, entry]
        put_entries(
            cache, pages, places, torch.where(is_real.view(-1, *(1,) * (old.dim() - 1)), new[rows, chosen], old)
        )


register_custom_op(
    "attend",
    masked_attend,
    lambda query, values_from: query.new_empty((*query.shape[:-1], query.shape[-1] - values_from)),
    schema=schema_of(attend, ["k_cache", "v_cache"]),
)
register_implementation("attend", "CPU", sliced_attend)
