"""`graphcore::attend` on the CPU: with the C++ kernels, or with torch on the live keys.

Legend: T tokens, H heads, K kv heads, E head dim, P pages, N pages of a sequence, G positions of a page, L live keys.
kernels/attend.py says what is computed.

The host reads the length of each sequence, so the cost depends on the actual context.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphcore.kernels.kernel_packing import DTYPE_NUMBERS
from graphcore.kernels.library import open_library
from graphcore.kernels.scoring import Scoring

POINTER, INT = ctypes.c_void_p, ctypes.c_int32
QUERY_BLOCK = 128  # queries that are attended together; 128 are faster than 64 at 256 tokens, and equal at 512


def sliced_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    *how: Any,
    **named: Any,
) -> Tensor:
    """Run `attend` for one sequence after another, in C++ if there is a library, else with torch on the live keys.

    The arguments after `counts` are the fields of `Scoring`.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    scoring = Scoring(*how, **named)
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        place = k_cache, v_cache, table[row]
        if scoring.library:
            parts = (query[row, :count], key[row, :count], value[row, :count])
            attend_natively(parts, place, out[row, :count], start, scoring)
            continue
        new = query[row, :count], key[row, :count].transpose(0, 1), value[row, :count].transpose(0, 1)
        one = _attend_token if count == 1 else _attend_chunk
        out[row, :count] = one(*new, place, start, scoring)
    return out


Place = tuple[Tensor, Tensor, Tensor]
"""Where a sequence's keys and values lie: pools of keys and of values [P, K, G, E], and the sequence's pages [N]."""


def _attend_token(query: Tensor, key: Tensor, value: Tensor, place: Place, start: int, scoring: Scoring) -> Tensor:
    """Write one key [K, 1, E] and attend the live ones.

    The H / K query heads of one kv head become rows of one matrix: a plain product instead of a repeated cache.
    """
    k_cache, v_cache, pages = place
    _write(key, k_cache, pages, start)
    _write(value, v_cache, pages, start)
    slots = len(pages) * k_cache.shape[2]
    first = start + 1 - min(start + 1, slots, scoring.window or slots)
    kv_heads, head_dim = key.shape[0], key.shape[2]
    rows = query.view(1, kv_heads, -1, head_dim)  # [1, H, E] -> [1, K, H/K, E]
    keys, values = (_read(cache, pages, first, start + 1)[None].to(query.dtype) for cache in (k_cache, v_cache))
    if scoring.sinks is None and not scoring.cap:
        return scaled_dot_product_attention(rows, keys, values, scale=scoring.scale).reshape(query.shape)
    scores = scoring.scores(rows[0] @ keys[0].transpose(1, 2))  # [K, H/K, L]
    weights = scoring.weights(scores).to(values.dtype)
    return (weights @ values[0]).reshape(query.shape)


def _read(cache: Tensor, pages: Tensor, begin: int, end: int) -> Tensor:
    """Return the vectors of positions begin .. end - 1 of a sequence, [K, L, E], in their order."""
    page = cache.shape[2]
    blocks = torch.arange(begin // page, -(-end // page)) % len(pages)
    whole = cache[pages[blocks]].transpose(0, 1).flatten(1, 2)  # [K, positions of these pages, E]
    first = begin // page * page
    return whole[:, begin - first : end - first]


def _write(new: Tensor, cache: Tensor, pages: Tensor, start: int) -> None:
    """Write vectors [K, L, E] at the positions of a sequence from `start` on, no more than it has slots."""
    positions, page = torch.arange(start, start + new.shape[1]), cache.shape[2]
    cache[pages[positions // page % len(pages)], :, positions % page] = new.transpose(0, 1).to(cache.dtype)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, place: Place, start: int, scoring: Scoring) -> Tensor:
    """Attend the visible past and the chunk itself, then write the chunk, which in a ring may overwrite the past."""
    k_cache, v_cache, pages = place
    slots, count = len(pages) * k_cache.shape[2], query.shape[0]
    first = max(0, start - scoring.window + 1) if scoring.window else 0
    keys = torch.cat((_read(k_cache, pages, first, start).to(key.dtype), key), dim=1)  # [K, L, E]
    values = torch.cat((_read(v_cache, pages, first, start).to(value.dtype), value), dim=1)
    kept = min(count, slots)
    _write(key[:, -kept:], k_cache, pages, start + count - kept)
    _write(value[:, -kept:], v_cache, pages, start + count - kept)
    return _attend_blocks(query, keys, values, start - first, scoring)


def _attend_blocks(query: Tensor, keys: Tensor, values: Tensor, offset: int, scoring: Scoring) -> Tensor:
    """Attend in blocks of queries, each block only against the keys that it may see.

    Plain products of a block are twice as fast as the library's fused attention at these sizes (256 tokens of SmolLM2:
    0.46 ms a layer against 1.0), because half of the keys are skipped and kv heads are not repeated.

    Args:
        query: [T, H, E].
        keys, values: [K, L, E]; the key of query t is at index offset + t.

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


class Chunk(ctypes.Structure):
    """Arguments of one call of the kernels; its fields mirror native/chunk.h."""

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
        ("cache_format", INT),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


def attend_natively(
    parts: tuple[Tensor, Tensor, Tensor],
    place: Place,
    out: Tensor,
    start: int,
    scoring: Scoring,
) -> None:
    """Attend a chunk of one sequence with the C++ kernels, and write it to the cache.

    Args:
        parts: query [T, H, E], key and value [T, K, E].
        place: pools and pages, all contiguous; pages int32.
        out: [T, H, E], contiguous; written.
        start: number of tokens in the cache.
        scoring: fields of `Scoring`, with a library.
    """
    query, key, value = (part.contiguous() for part in parts)
    k_cache, _, pages = place
    assert all(one.is_contiguous() for one in place), "pools and a sequence's pages are runs of memory"
    assert pages.dtype == torch.int32, f"{pages.dtype} pages, the kernels read int32"
    assert out.is_contiguous(), "the tokens of a sequence are one run of memory"
    wide = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    tokens, heads, head_dim = query.shape
    pointers = (one.data_ptr() for one in (query, key, value, out, *place))
    chunk = Chunk(*pointers, None if wide is None else wide.data_ptr(), start, tokens, heads, key.shape[1], head_dim)
    chunk.page, chunk.num_pages, chunk.window = k_cache.shape[2], len(pages), scoring.window
    chunk.format, chunk.cache_format = DTYPE_NUMBERS[query.dtype], DTYPE_NUMBERS[k_cache.dtype]
    chunk.scale, chunk.cap = scoring.scale, scoring.cap
    open_library(scoring.library).graphcore_attend_chunk(torch.get_num_threads(), ctypes.byref(chunk))
