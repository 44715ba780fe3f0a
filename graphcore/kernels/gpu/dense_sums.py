"""The sums of a few rows of a dense matrix times a few tokens, in one program.

Legend: N tokens, I input features, R rows, G groups of V columns.

    multiplied   one or two tokens: threads read rows side by side, V columns each (16 bytes), so a tile of the matrix
                 is [R, G, V] with G the number of threads; the sum over V stays in a thread, the sum over G comes
                 once, at the end. The next tile is on its way while one is multiplied.
    dotted       more tokens: tensor cores; tiles come through shared memory, several on their way at once. At eight
                 tokens the other way would take twenty instructions for a weight, and memory would wait for them.

Weights are read once and do not displace x, which all programs read.
"""

import triton
import triton.language as tl


@triton.jit
def multiplied_sums(
    x, weight, start, rows, tokens, columns,
    N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return x @ weight[start : start + R].T, [N, R] float32; rows and tokens behind the last repeat it.

    Args:
        x: pointer to [tokens, columns]; bf16 where rows are whole pairs comes as int32, and columns count pairs.
        weight: pointer to [rows, columns] of the same type.
        IS_EVEN: columns are whole tiles.
    """
    token = tl.minimum(tl.arange(0, N), tokens - 1)[:, None, None, None]
    row = tl.minimum(start + tl.arange(0, R), rows - 1)[None, :, None, None].to(tl.int64)
    at = tl.arange(0, G)[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]
    sums = tl.zeros((N, R, G), tl.float32)
    following = _weights(weight, row, at, columns, IS_EVEN)
    for begin in range(0, columns, G * V):
        tile = following
        following = _weights(weight, row, begin + G * V + at, columns, IS_EVEN)
        sums += _partial_sums(tile, _tokens(x, token, begin + at, columns, IS_EVEN))
    return tl.sum(sums, axis=2)


@triton.jit
def _weights(weight, row, at, columns, IS_EVEN: tl.constexpr):
    """Return a tile of a matrix, nothing behind its end; row and at broadcast to the tile's shape."""
    if IS_EVEN:  # what is behind the end is never multiplied
        tile = tl.load(weight + row * columns + at, mask=at < columns, eviction_policy="evict_first")
    else:
        tile = tl.load(weight + row * columns + at, mask=at < columns, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _tokens(x, token, at, columns, IS_EVEN: tl.constexpr):
    """Return a tile of x, zeros behind its end; token and at broadcast to the tile's shape."""
    if IS_EVEN:
        tile = tl.load(x + token * columns + at, eviction_policy="evict_last")
    else:
        tile = tl.load(x + token * columns + at, mask=at < columns, other=0, eviction_policy="evict_last")
    return tile


@triton.jit
def _partial_sums(tile, fed):
    """Return the sums over V: [1, R, G, V] and [N, 1, G, V] to [N, R, G] float32.

    Pairs of bf16 come as int32: a shift and a mask make both float32, where a conversion of each takes twice as many.
    """
    if tile.dtype == tl.int32:
        low = (tile << 16).to(tl.float32, bitcast=True) * (fed << 16).to(tl.float32, bitcast=True)
        high = (tile & -65536).to(tl.float32, bitcast=True) * (fed & -65536).to(tl.float32, bitcast=True)
        products = low + high
    else:
        products = tile.to(tl.float32) * fed.to(tl.float32)
    return tl.sum(products, axis=3)


@triton.jit
def dotted_sums(
    x, weight, start, rows, tokens, columns,
    N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return the same as `multiplied_sums` for 16 bits, of rows in G groups of V columns, a warp for each group.

    A warp that had a whole row would wait for each product before the next; tokens behind the last are zeros.
    """
    token = tl.arange(0, N)[None, :, None]
    row = tl.minimum(start + tl.arange(0, R), rows - 1)[None, :, None].to(tl.int64)
    at = tl.arange(0, G)[:, None, None] * V + tl.arange(0, V)[None, None, :]
    sums = tl.zeros((G, R, N), tl.float32)
    for begin in range(0, columns, G * V):
        if IS_EVEN:
            tile = tl.load(weight + row * columns + begin + at, eviction_policy="evict_first")
        else:
            tile = tl.load(weight + row * columns + begin + at, mask=begin + at < columns, other=0.0)
        is_there = (token < tokens) & (begin + at < columns)
        fed = tl.load(x + token * columns + begin + at, mask=is_there, other=0.0)
        sums = tl.dot(tile, tl.permute(fed, (0, 2, 1)), sums)
    return tl.trans(tl.sum(sums, axis=0))
