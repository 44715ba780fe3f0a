"""`graphcore::attend` on the CPU: with the C++ kernels, or with torch on slices of the live length.

Legend: T tokens, H heads, K kv heads, E head dim, S cache slots, L live keys. kernels/attend.py says what is computed.

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
    starts: Tensor,
    counts: Tensor,
    *how: Any,
    **named: Any,
) -> Tensor:
    """Run `attend` for one sequence after another, in C++ if there is a library, else on slices of the live length.

    The arguments after `counts` are the fields of `Scoring`.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    scoring = Scoring(*how, **named)
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        if scoring.library:
            parts = (query[row, :count], key[row, :count], value[row, :count], k_cache[row], v_cache[row])
            attend_natively(parts, out[row, :count], start, scoring)
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
    scoring: Scoring,
) -> Tensor:
    """Write one key [K, 1, E] and attend the live slots; their order does not matter to a softmax.

    The H / K query heads of one kv head become rows of one matrix: a plain product instead of a repeated cache.
    """
    slots = k_cache.shape[1]
    k_cache[:, start % slots] = key[:, 0]
    v_cache[:, start % slots] = value[:, 0]
    visible = min(start + 1, slots, scoring.window or slots)
    live = _live(start + 1 - visible, start + 1, slots)
    kv_heads, head_dim = k_cache.shape[0], k_cache.shape[2]
    rows = query.view(1, kv_heads, -1, head_dim)  # [1, H, E] -> [1, K, H/K, E]
    keys, values = k_cache[None, :, live].to(query.dtype), v_cache[None, :, live].to(query.dtype)
    if scoring.sinks is None and not scoring.cap:
        return scaled_dot_product_attention(rows, keys, values, scale=scoring.scale).reshape(query.shape)
    scores = scoring.scores(rows[0] @ keys[0].transpose(1, 2))  # [K, H/K, L]
    weights = scoring.weights(scores).to(values.dtype)
    return (weights @ values[0]).reshape(query.shape)


def _live(begin: int, end: int, slots: int) -> slice | Tensor:
    """Return the slots of positions begin .. end - 1, in any order: a slice where they are one run or all slots."""
    if end <= slots:
        return slice(begin, end)
    return slice(0, slots) if end - begin == slots else torch.arange(begin, end) % slots


def _attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    scoring: Scoring,
) -> Tensor:
    """Attend the visible past and the chunk itself, then write the chunk, which in a ring may overwrite the past."""
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
        ("sinks", POINTER),
        ("start", ctypes.c_int64),
        ("tokens", INT),
        ("heads", INT),
        ("kv_heads", INT),
        ("head_dim", INT),
        ("slots", INT),
        ("window", INT),
        ("format", INT),
        ("cache_format", INT),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


def attend_natively(
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    start: int,
    scoring: Scoring,
) -> None:
    """Attend a chunk of one sequence with the C++ kernels, and write it to the cache.

    Args:
        parts: query [T, H, E], key and value [T, K, E], and the sequence's key cache and value cache [K, S, E], both
            contiguous.
        out: [T, H, E], contiguous; written.
        start: number of tokens in the cache.
        scoring: fields of `Scoring`, with a library.
    """
    query, key, value = (part.contiguous() for part in parts[:3])
    k_cache, v_cache = parts[3:]
    assert k_cache.is_contiguous(), "a sequence's cache is one run of memory"
    assert out.is_contiguous(), "the tokens of a sequence are one run of memory"
    wide = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    tokens, heads, head_dim = query.shape
    pointers = (one.data_ptr() for one in (query, key, value, out, k_cache, v_cache))
    chunk = Chunk(*pointers, None if wide is None else wide.data_ptr(), start, tokens, heads, key.shape[1], head_dim)
    chunk.slots, chunk.window = k_cache.shape[1], scoring.window
    chunk.format, chunk.cache_format = DTYPE_NUMBERS[query.dtype], DTYPE_NUMBERS[k_cache.dtype]
    chunk.scale, chunk.cap = scoring.scale, scoring.cap
    open_library(scoring.library).graphcore_attend_chunk(torch.get_num_threads(), ctypes.byref(chunk))
