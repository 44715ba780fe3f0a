"""Attention of a chunk of one sequence by the C++ kernels.

Legend: T tokens, H heads, K kv heads, E head dim, S cache slots. The structure mirrors native/chunk.h.
"""

import ctypes

import torch
from torch import Tensor

from graphcore.kernels.library import open_library
from graphcore.kernels.packed import DTYPE_NUMBERS

POINTER, INT = ctypes.c_void_p, ctypes.c_int32


class Chunk(ctypes.Structure):
    """Arguments of one call."""

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
    library: str,
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    start: int,
    window: int,
    scale: float,
    sinks: Tensor | None,
    cap: float,
) -> None:
    """Attend and write the cache.

    Args:
        library: file of the kernels.
        parts: query [T, H, E], key and value [T, K, E], and the sequence's cache of keys and of values [K, S, E], the
            caches contiguous.
        out: [T, H, E], contiguous; written.
        start: tokens that the cache holds.
        window, scale, sinks, cap: as for `attend`.
    """
    query, key, value = (part.contiguous() for part in parts[:3])
    k_cache, v_cache = parts[3:]
    assert k_cache.is_contiguous(), "a sequence's cache is one run of memory"
    assert out.is_contiguous(), "the tokens of a sequence are one run of memory"
    wide = None if sinks is None else sinks.float().contiguous()
    tokens, heads, head_dim = query.shape
    chunk = Chunk(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        None if wide is None else wide.data_ptr(),
        start,
        tokens,
        heads,
        key.shape[1],
        head_dim,
        k_cache.shape[1],
        window,
        DTYPE_NUMBERS[query.dtype],
        DTYPE_NUMBERS[k_cache.dtype],
        scale,
        cap,
    )
    open_library(library).graphcore_attend_chunk(torch.get_num_threads(), ctypes.byref(chunk))
