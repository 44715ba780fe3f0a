"""One new token's attention over a cache that holds its key and value already: split-KV decode, as one kernel.

Legend: B batch, H heads, K kv heads, E head dim, S cache slots, P splits.

    program (split, kv head, sequence): reads starts and counts, walks its share of the visible keys
    the last split of a kv head to arrive adds up what the others left, in their order: the bits do not depend on who
    is last

The H / K heads of a kv head are rows of one tile, so that a key is read once. The share is that of the live length,
in whole tiles: cost follows the context that is there, and splits that have nothing leave at once.
Source: split-KV as in Flash-Decoding (Dao et al. 2023); the last arrival as in CUDA's threadFenceReduction sample.
"""

import torch
import triton
from torch import Tensor

from graphcore.kernels.gpu.attend_tiles import precision_of
from graphcore.kernels.gpu.split_attend import attend_splits

TILE_NBYTES = 1 << 14  # of keys that a program reads at once, and as many of values: 64 of 128 in 16 bits
RESIDENT = 2  # programs that a processor holds at once; more splits than that would only be more to add up
REGISTERS = 43008  # for all programs of a processor, of 65536: without a bound ptxas saves some and spills
MERGED = 1 << 13  # float32 of other splits' sums that the last one holds at once: 64 registers of 128 threads
ABSENT_PROCESSORS = 132  # where there is no GPU to ask: an H100's or H200's

torch.library.define(
    "graphcore::attend_written",
    "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor starts, Tensor counts, int window, float scale,"
    " Tensor? sinks=None, Tensor(a!)? arrivals=None, float cap=0.0) -> Tensor",
)


def attend_written(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Attend one new token of each sequence, whose key and value are in the cache.

    Args:
        query: [B, 1, H, E] compute dtype; the last stride is 1.
        k_cache, v_cache: [B, K, S, E] cache dtype; position p in slot p mod S, positions 0 .. starts are there.
        starts: [B] int64, the new token's position.
        counts: [B] int64, 1, or 0 of a row without a token; that row's answer is zeros.
        window: the last `window` keys are visible, the new one included; 0 is all.
        scale: multiplies q . k.
        sinks: [H] float32, as in `attend`.
        arrivals: [B * K or more] int32 zeros, and zeros again afterwards; all layers of a stream may share one.
            Without it each call makes its own, which is one more fill on the stream.
        cap: as in `attend`.

    Returns:
        [B, 1, H, E] compute dtype, contiguous.
    """
    op = torch.ops.graphcore.attend_written.default
    return op(query, k_cache, v_cache, starts, counts, window, scale, sinks, arrivals, cap)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::attend_written")
def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def split_count(batch: int, kv_heads: int, visible: int, tile: int, processors: int) -> int:
    """Return into how many programs the keys of one kv head are split.

    Args:
        batch, kv_heads: what there are programs for anyway.
        visible: keys that a query may ever see: the buffer's slots, or the window.
        tile: keys of a tile; a split has one at least.
        processors: of the device; each holds RESIDENT programs, and one more would wait for all the others.
    """
    return max(1, min(RESIDENT * processors // (batch * kv_heads), -(-visible // tile)))


def tile_of(width: int, dtype: torch.dtype) -> int:
    """Return how many keys a tile has, of vectors of `width` elements as they are multiplied."""
    return max(16, min(128, TILE_NBYTES // (width * dtype.itemsize)))


def processors_of(device: torch.device) -> int:
    """Return how many streaming multiprocessors a device has."""
    if device.type != "cuda":
        return ABSENT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_attend_written(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
    cap: float = 0.0,
    tile: int = 0,
) -> Tensor:
    """Implement `attend_written`; tile: keys of a tile, 0 for what suits the head dim."""
    batch, tokens, heads, head_dim = query.shape
    kv_heads, slots = k_cache.shape[1:3]
    assert tokens == 1, f"{tokens} tokens of a sequence, this kernel takes one"
    assert query.stride(3) == k_cache.stride(3) == v_cache.stride(3) == 1, "vectors lie in one run"
    assert slots * max(k_cache.stride(2), v_cache.stride(2)) < 1 << 31, f"{slots} slots do not fit 32-bit offsets"
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    tile = tile or tile_of(width, query.dtype)
    splits = split_count(batch, kv_heads, min(slots, window or slots), tile, processors_of(query.device))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = states = None
    if splits > 1:
        parts = torch.empty(batch, kv_heads, splits, group, head_dim, dtype=torch.float32, device=query.device)
        states = torch.empty(batch, kv_heads, splits, group, 2, dtype=torch.float32, device=query.device)
        if arrivals is None:
            arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=query.device)
        assert arrivals.numel() >= batch * kv_heads, f"{arrivals.numel()} arrivals for {batch} x {kv_heads} kv heads"
    heads_width = triton.next_power_of_2(group)
    warps = 8 if query.dtype == torch.float32 else 4
    attend_splits[(splits, kv_heads, batch)](
        query, k_cache, v_cache, starts, counts, sinks, out, parts, states, arrivals if splits > 1 else None,
        query.stride(0), query.stride(2), *k_cache.stride()[:3], *v_cache.stride()[:3], slots, window, scale, cap,
        WINDOWED=window > 0, CAPPED=cap != 0, GROUP=group, HEADS=heads_width, ROWS=max(16, heads_width),
        HEAD_DIM=head_dim, WIDTH=width, TILE=tile, MERGED_SPLITS=max(1, MERGED // (heads_width * width)),
        PRECISION=precision_of(query.dtype), num_warps=warps, num_stages=3, enable_fp_fusion=True,
        maxnreg=REGISTERS // (RESIDENT * 32 * warps),
    )  # fmt: skip
    return out


# Not as a decorator: torch's would leave None under the function's name. Without a GPU the interpreter runs it.
torch.library.impl("graphcore::attend_written", "CompositeExplicitAutograd", launch_attend_written)
