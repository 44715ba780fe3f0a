"""Quantised KV cache: heads rotated by a Hadamard matrix, then stored as codes in blocks of 32 or as float8.

Legend: B batch, T tokens, H heads, K kv heads, E head dim, P pages, G positions of a page, C blocks of a head (E / 32),
Z bytes of a block.

    pool of codes      [P, K, G, C, Z] uint8
    any other pool     [P, K, G, E] of its dtype

One head of one page is G C Z bytes, stored in planes, so that kernels load codes in whole vectors and aligned scales:

    codes [G, C, 32 or 16]   |   fifth bits [G, C, 4], of q5_0 only   |   scales [G, C] float16

A block has the bits of the weight format of the same name (quant/formats/), rounded as in libggml.

A few outliers in a head would cost the other numbers their precision. So heads are first multiplied with a Hadamard
matrix, H[i][j] = (-1)^popcount(i & j) / sqrt(n), in blocks of n, the largest power of two that divides the head dim. H
is its own inverse: q' = H q and k' = H k have the same scores as q and k, and H is applied again to the attention
output, the weighted sum of H v. Values of latent attention are the last features of the keys' rows; they begin at a
multiple of n (engine/loading/kv_dtype.py), so that whole blocks are mixed back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.encodings import Planes
from graphcore.quant.registry import FORMATS

BLOCK = 32  # numbers that share a scale
CODED = ("q8_0", "q5_0", "q4_0")  # block formats that kernels support
FLOAT8 = torch.float8_e4m3fn
MOST_FLOAT8 = 448.0
_BY_NBYTES = {FORMATS[name].block_nbytes: name for name in CODED}

KVType = torch.dtype | str
"""Storage type of one pool of the KV cache: a dtype, or the name of a block format."""


class KVTypes(NamedTuple):
    """Storage types of the pools of keys and of values."""

    keys: KVType
    values: KVType

    @property
    def coded(self) -> bool:
        """True if keys or values have a block format."""
        return any(isinstance(kind, str) for kind in self)

    def __str__(self) -> str:
        names = list(dict.fromkeys("fp8" if kind is FLOAT8 else str(kind).removeprefix("torch.") for kind in self))
        return ",".join(names)


KVFormat = KVType | KVTypes
"""Storage type of the KV cache: one type for both pools, or one for each."""


def kv_types(kind: KVFormat) -> KVTypes:
    """Return the types of both pools; a single type applies to both."""
    return kind if isinstance(kind, KVTypes) else KVTypes(kind, kind)


def vector_shape(kind: KVType, head_dim: int) -> tuple[int, ...]:
    """Return the shape of a head's entry in a pool: [E], or [C, Z]."""
    if not isinstance(kind, str):
        return (head_dim,)
    assert head_dim % BLOCK == 0, f"heads of {head_dim} are not whole blocks"
    return head_dim // BLOCK, FORMATS[kind].block_nbytes


def pool_dtype(kind: KVType) -> torch.dtype:
    """Return the dtype of a pool's elements."""
    return torch.uint8 if isinstance(kind, str) else kind


def format_of(pool: Tensor) -> str | None:
    """Return the name of a pool's block format; None for a dense pool."""
    return _BY_NBYTES[pool.shape[-1]] if pool.dtype is torch.uint8 else None


def head_dim_of(pool: Tensor) -> int:
    """Return the head dim of a pool, E."""
    return pool.shape[3] * BLOCK if pool.dtype is torch.uint8 else pool.shape[3]


def is_mixed(pool: Tensor) -> bool:
    """Return whether a pool stores heads multiplied with the Hadamard matrix."""
    return pool.dtype in (torch.uint8, FLOAT8)


def mixed(heads: Tensor, head_dim: int = 0) -> Tensor:
    """Return heads [..., E] multiplied with the Hadamard matrix, float32; the matrix is its own inverse.

    Args:
        head_dim: head dim that the size of the matrix follows from; 0 for E.
    """
    width = head_dim or heads.shape[-1]
    size = width & -width
    found, step = heads.float().contiguous(), 1
    while step < size:
        first, second = found.view(*heads.shape[:-1], -1, 2, step).unbind(-2)
        found = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return found.mul(size**-0.5)


def like_heads_of(pool: Tensor, heads: Tensor) -> Tensor:
    """Return heads multiplied with the Hadamard matrix, in their own dtype, if the pool's heads are; else unchanged."""
    return mixed(heads, head_dim_of(pool)).to(heads.dtype) if is_mixed(pool) else heads


def entries(heads: Tensor, pool: Tensor) -> Tensor:
    """Return heads [..., E] as entries of a pool: [..., C, Z] uint8 codes, or [..., E] of the pool's dtype."""
    if not is_mixed(pool):
        return heads.to(pool.dtype)
    name, wide = format_of(pool), mixed(heads)
    if name is None:
        return wide.clamp(-MOST_FLOAT8, MOST_FLOAT8).to(FLOAT8)
    return FORMATS[name].quantize_blocks(wide.reshape(-1, BLOCK)).view(*heads.shape[:-1], *pool.shape[-2:])


def own_heads(heads: Tensor, kept: Tensor, pool: Tensor) -> Tensor:
    """Return the keys or values of the pass's own tokens for attention: dequantised from `kept` if quantised."""
    return heads_of(kept, heads.dtype) if is_mixed(pool) else heads


def heads_of(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Return entries dequantised, [..., E]; the Hadamard matrix is not undone."""
    if kept.dtype is not torch.uint8:
        return kept.to(dtype)
    name = _BY_NBYTES[kept.shape[-1]]
    dense = FORMATS[name].dequantize_blocks(kept.reshape(-1, kept.shape[-1]))
    return dense.view(*kept.shape[:-1], BLOCK).flatten(-2).to(dtype)


def code_planes(pool: Tensor) -> list[tuple[slice, Tensor]]:
    """Return views of a pool's planes, [..., G, C, z] uint8 each, with the byte range of each plane in a block.

    Args:
        pool: [..., G, C, Z] uint8 or [..., G, E], contiguous.
    """
    name = format_of(pool)
    if name is None:
        return [(slice(None), pool)]
    places = places_of(FORMATS[name].planes)
    page, blocks = pool.shape[-3:-1]
    parts = torch.split(pool.flatten(-3), [page * blocks * (place.stop - place.start) for place in places], -1)
    return [
        (place, part.view(*part.shape[:-1], page, blocks, place.stop - place.start))
        for place, part in zip(places, parts, strict=True)
    ]


def places_of(found: Planes | None) -> list[slice]:
    """Return the byte ranges of codes, of fifth bits (if any) and of scales in a block."""
    assert found is not None, "formats of caches have planes"
    return [slice(*place) for place in (found.low, found.high, found.scales) if place is not None]


def kept_at(pool: Tensor, pages: Tensor, places: Tensor | None = None) -> Tensor:
    """Return entries: those of whole pages, [..., K, G, entry], or of one position of each page, [..., K, entry]."""
    index = pages if places is None else (pages, slice(None), places)
    if pool.dtype is not torch.uint8:
        return pool[index]
    parts = [(place, plane[index]) for place, plane in code_planes(pool)]
    blocks = parts[0][1].new_empty(*parts[0][1].shape[:-1], pool.shape[-1])
    for place, part in parts:
        blocks[..., place] = part
    return blocks


def put_entries(pool: Tensor, pages: Tensor, places: Tensor, kept: Tensor) -> None:
    """Write entries [..., K, entry] to one position of each page."""
    for place, plane in code_planes(pool):
        plane[pages, :, places] = kept[..., place]
