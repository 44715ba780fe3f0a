"""`graphcore::attend` on the CPU: with the C++ kernels, or with torch on the live keys.

Legend: T tokens, H heads, K kv heads, E head dim, P pages, N pages of a sequence, G positions of a page, L live keys.
kernels/ops/attend.py has the definition.

The lengths of the sequences are read on the host, so that the cost depends on the actual context.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphcore.kernels.cpu.library import DTYPE_NUMBERS, FORMAT_NUMBERS, open_library
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.kv_formats import (
    entries,
    format_of,
    heads_of,
    kept_at,
    like_heads_of,
    own_heads,
    put_entries,
)

POINTER, INT = ctypes.c_void_p, ctypes.c_int32
QUERY_BLOCK = 128  # queries of a block; 128 is faster than 64 at 256 tokens, and as fast at 512


def sliced_attend(
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
    """Run `attend` for one sequence after another, in C++ if there is a library, else with torch on the live keys.

    The arguments after `counts` are the fields of `AttentionParameters`.
    """
    lengths = counts.tolist()
    scoring = AttentionParameters(*how, **named)
    new = query.new_empty if all(count == query.shape[1] for count in lengths) else query.new_zeros
    out = new((*query.shape[:-1], query.shape[-1] - scoring.values_from))
    if scoring.values_from and key is not None and value is not None:
        key, value, v_cache = torch.cat((key, value), dim=-1), None, k_cache  # one row for each position
    for row, (start, count) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        if not count:
            continue
        place = k_cache, v_cache, table[row]
        parts = (
            query[row, :count],
            None if key is None else key[row, :count],
            None if value is None else value[row, :count],
        )
        if scoring.library:
            attend_natively(parts, place, out[row, :count], start, scoring)
            continue
        one = _attend_token if count == 1 else _attend_chunk
        mixed = like_heads_of(k_cache, parts[0]), *parts[1:]
        out[row, :count] = like_heads_of(v_cache, one(*mixed, place, start, scoring))
    return out


Place = tuple[Tensor, Tensor, Tensor]
"""Location of a sequence's keys and values: both pools [P, K, G, entry], and the sequence's pages [N]."""


def _attend_token(
    query: Tensor, key: Tensor | None, value: Tensor | None, place: Place, start: int, scoring: AttentionParameters
) -> Tensor:
    """Write one key [1, K, E] and value, if there are any, and attend the live ones.

    The H / K query heads of a kv head are the rows of one matrix, so that keys and values need not be repeated.
    """
    k_cache, v_cache, pages = place
    if key is not None:
        _write(entries(key, k_cache), k_cache, pages, start)
    if value is not None:
        _write(entries(value, v_cache), v_cache, pages, start)
    slots = len(pages) * k_cache.shape[2]
    first = start + 1 - min(start + 1, slots, scoring.window or slots)
    kv_heads, head_dim = k_cache.shape[1], query.shape[2]
    rows = query.reshape(1, kv_heads, -1, head_dim)  # [1, H, E] -> [1, K, H/K, E]
    keys, values = _both(lambda cache: _read(cache, pages, first, start + 1, query.dtype)[None], place, scoring)
    if scoring.sinks is None and not scoring.cap:
        out = scaled_dot_product_attention(rows, keys, values, scale=scoring.scale)
        return out.reshape(*query.shape[:2], -1)
    scores = scoring.scores(rows[0] @ keys[0].transpose(1, 2))  # [K, H/K, L]
    weights = scoring.weights(scores).to(values.dtype)
    return (weights @ values[0]).reshape(*query.shape[:2], -1)


def _both(read: Callable[[Tensor], Tensor], place: Place, scoring: AttentionParameters) -> tuple[Tensor, Tensor]:
    """Return the keys and the values [..., E] that `read` returns for a pool; values may be part of the keys."""
    keys = read(place[0])
    return keys, keys[..., scoring.values_from :] if scoring.values_from else read(place[1])


def _read(cache: Tensor, pages: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return the vectors of positions begin .. end - 1 of a sequence, [K, L, E], in their order."""
    page = cache.shape[2]
    blocks = torch.arange(begin // page, -(-end // page), dtype=torch.int64, device="cpu") % len(pages)
    whole = heads_of(kept_at(cache, pages[blocks]), dtype).transpose(0, 1).flatten(1, 2)  # [K, these pages' slots, E]
    first = begin // page * page
    return whole[:, begin - first : end - first]


def _write(kept: Tensor, cache: Tensor, pages: Tensor, start: int) -> None:
    """Write entries [L, K, entry] at the positions of a sequence from `start` on; L is at most its number of slots."""
    positions, page = torch.arange(start, start + len(kept), dtype=torch.int64, device="cpu"), cache.shape[2]
    put_entries(cache, pages[positions // page % len(pages)], positions % page, kept)


def _attend_chunk(
    query: Tensor, key: Tensor | None, value: Tensor | None, place: Place, start: int, scoring: AttentionParameters
) -> Tensor:
    """Attend visible earlier tokens and the chunk itself, then write the chunk, which may overwrite them in a ring.

    Args:
        key, value: [T, K, E], or None if the chunk is written already.
    """
    k_cache, v_cache, pages = place
    slots, count, dtype = len(pages) * k_cache.shape[2], query.shape[0], query.dtype
    first = max(0, start - scoring.window + 1) if scoring.window else 0
    if key is None:
        keys, values = _both(lambda cache: _read(cache, pages, first, start + count, dtype), place, scoring)
        return _attend_blocks(query, keys, values, start - first, scoring)
    seen: list[Tensor] = []
    for cache, new in ((k_cache, key), (v_cache, value)):
        if new is None:  # values are part of the keys
            seen.append(seen[0][..., scoring.values_from :])
            continue
        kept, last = entries(new, cache), min(count, slots)
        own = own_heads(new, kept, cache).transpose(0, 1)
        seen.append(torch.cat((_read(cache, pages, first, start, dtype), own), dim=1))  # [K, L, E]
        _write(kept[-last:], cache, pages, start + count - last)
    return _attend_blocks(query, seen[0], seen[1], start - first, scoring)


def _attend_blocks(query: Tensor, keys: Tensor, values: Tensor, offset: int, scoring: AttentionParameters) -> Tensor:
    """Attend in blocks of queries, each block only to the keys that are visible to it.

    Plain matrix products are twice as fast as torch's fused attention at these sizes (256 tokens of SmolLM2: 0.46 ms a
    layer against 1.0), because half of the keys are skipped and kv heads are not repeated.

    Args:
        query: [T, H, E].
        keys, values: [K, L, E]; the key of query t is at index offset + t. Values may have another width.

    Returns:
        [T, H, E], of the values' width.
    """
    kv_heads, live, head_dim = keys.shape
    tokens, window = query.shape[0], scoring.window
    rows = query.reshape(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [K, H/K, T, E]
    out = query.new_empty((*query.shape[:2], values.shape[2]))
    positions = torch.arange(live, dtype=torch.int64, device="cpu")
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
        out[begin:end] = product.view(kv_heads, -1, end - begin, values.shape[2]).permute(2, 0, 1, 3).flatten(1, 2)
    return out


class Chunk(ctypes.Structure):
    """Arguments of attention of one chunk; the fields mirror native/chunk.h."""

    _fields_ = (
        ("query", POINTER),
        ("key", POINTER),
        ("value", POINTER),
        ("out", POINTER),
        ("k_cache", POINTER),
        ("v_cache", POINTER),
        ("pages", POINTER),
        ("sinks", POINTER),
        ("start", ctypes.c_int64),
        ("tokens", INT),
        ("heads", INT),
        ("kv_heads", INT),
        ("head_dim", INT),
        ("page", INT),
        ("num_pages", INT),
        ("window", INT),
        ("format", INT),
        ("k_format", INT),
        ("v_format", INT),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("values_from", INT),
    )


def cache_number(pool: Tensor) -> int:
    """Return the kernels' number of a pool's dtype or block format."""
    name = format_of(pool)
    return DTYPE_NUMBERS[pool.dtype] if name is None else FORMAT_NUMBERS[name]


def attend_natively(
    parts: tuple[Tensor, Tensor | None, Tensor | None],
    place: Place,
    out: Tensor,
    start: int,
    scoring: AttentionParameters,
) -> None:
    """Attend a chunk of one sequence with the C++ kernels, and write it to the cache.

    Args:
        parts: query [T, H, E], key and value [T, K, E]; key and value are None if the chunk is already in the cache,
            and value is None, too, if it is part of the key.
        place: pools and pages, all contiguous; pages int32.
        out: [T, H, E], of the values' width, contiguous; written.
        start: number of tokens in the cache.
        scoring: fields of `AttentionParameters`, with a library.
    """
    query, key, value = (None if part is None else part.contiguous() for part in parts)
    assert query is not None, "a chunk has queries"
    k_cache, v_cache, pages = place
    assert all(one.is_contiguous() for one in place), "pools and a sequence's pages are runs of memory"
    assert pages.dtype == torch.int32, f"{pages.dtype} pages, the kernels read int32"
    assert out.is_contiguous(), "the tokens of a sequence are one run of memory"
    wide = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    tokens, heads, head_dim = query.shape
    pointers = (None if one is None else one.data_ptr() for one in (query, key, value, out, *place))
    sinks = None if wide is None else wide.data_ptr()
    chunk = Chunk(*pointers, sinks, start, tokens, heads, k_cache.shape[1], head_dim)
    chunk.page, chunk.num_pages, chunk.window = k_cache.shape[2], len(pages), scoring.window
    chunk.format, chunk.k_format, chunk.v_format = DTYPE_NUMBERS[query.dtype], *map(cache_number, (k_cache, v_cache))
    chunk.scale, chunk.cap, chunk.values_from = scoring.scale, scoring.cap, scoring.values_from
    open_library(scoring.library).graphcore_attend_chunk(torch.get_num_threads(), ctypes.byref(chunk))
