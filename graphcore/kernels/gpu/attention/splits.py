"""The split of a sequence's keys among programs in split-KV decode: how many programs, and which keys each takes.

Legend: B batch, K kv heads, P splits of a sequence, in tiles of N keys.

    rounds = min(tiles / few / MOST_SHARE, most / few)        share = tiles / (few * rounds)        P = tiles / share

each rounded up, but for most / few. `few` splits of each sequence fill the device once if all of the batch are equally
long. A longer sequence has whole multiples of that, up to `most`: if all are long, the device is filled so many times,
and if one is, it does not keep a few programs busy while all others have ended.
P depends only on the sequence's own length and on B, so its sums do not depend on the other sequences. The splits of
all sequences are numbered without gaps: unneeded programs have the highest numbers, start last, and exit at once.
"""

import torch
import triton
import triton.language as tl

from graphcore.kernels import limits

TILE_NBYTES = 1 << 14  # bytes of keys that a program reads at once, and as many of values: 64 keys of 128 in 16 bits
ALONE_TILES = 2  # most tiles of a sequence that one split takes alone: adding up splits takes as long as walking more
MOST_SHARE = tl.constexpr(32)  # tiles: preparing and adding up take as long as one to four of them
ABSENT_PROCESSORS = 132  # multiprocessors to assume without a GPU: those of an H100 or H200


@triton.jit
def visible_keys(starts, counts, batch, slots, window, WINDOWED: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Return each sequence's first visible position and the number of visible ones, both int32 [ALL_ROWS]."""
    row = tl.arange(0, ALL_ROWS)
    start = tl.load(starts + row, mask=row < batch, other=0).to(tl.int32)
    visible = tl.minimum(start + 1, slots)
    if WINDOWED:
        visible = tl.minimum(visible, window)
    visible = tl.where(tl.load(counts + row, mask=row < batch, other=0) > 0, visible, 0)
    return start + 1 - visible, visible


@triton.jit
def shares_of(visible, few, most, TILE: tl.constexpr, ALONE: tl.constexpr):
    """Return the keys of a split of each sequence: whole tiles, and of a short one all."""
    tiles = tl.cdiv(visible, TILE)
    rounds = tl.maximum(tl.minimum(tl.cdiv(tl.cdiv(tiles, few), MOST_SHARE), most // few), 1)
    return tl.where(tiles <= ALONE, ALONE, tl.cdiv(tiles, few * rounds)) * TILE


@triton.jit
def of_row(values, row, ALL_ROWS: tl.constexpr):
    """Return one of [ALL_ROWS] numbers."""
    return tl.sum(tl.where(tl.arange(0, ALL_ROWS) == row, values, 0), 0)


def split_count(batch: int, kv_heads: int, visible: int, tile: int, processors: int) -> int:
    """Return the splits of each kv head's keys that fill the device if all sequences are as long as they may be.

    Args:
        batch, kv_heads: numbers of sequences and kv heads, each pair with splits of its own.
        visible: keys that a query may ever see: the buffer's slots, or the window.
        tile: keys of a tile; a split has at least one tile.
        processors: multiprocessors of the device; each runs SPLIT_PROGRAMS programs.
    """
    return max(1, min(limits.SPLIT_PROGRAMS * processors // (batch * kv_heads), -(-visible // tile)))


def most_splits(batch: int, kv_heads: int, visible: int, tile: int, processors: int) -> int:
    """Return the most splits of a long sequence among short ones; arguments as for `split_count`.

    They are as many as for a batch of one, but all sequences' splits fill the device at most SPLIT_ROUNDS times.
    """
    alone = split_count(1, kv_heads, visible, tile, processors)
    return max(
        split_count(batch, kv_heads, visible, tile, processors),
        min(alone, limits.SPLIT_ROUNDS * limits.SPLIT_PROGRAMS * processors // (batch * kv_heads)),
    )


def keys_of_tile(width: int, dtype: torch.dtype) -> int:
    """Return the number of keys of a tile, for vectors padded to `width` elements in the product's dtype."""
    return max(16, min(128, TILE_NBYTES // (width * dtype.itemsize)))


def processors_of(device: torch.device) -> int:
    """Return the number of a device's streaming multiprocessors."""
    if device.type != "cuda":
        return ABSENT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
