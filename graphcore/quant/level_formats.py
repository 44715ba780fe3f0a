"""The base of formats whose weights are few levels, stored as numbers of entries in a fixed table (a grid).

Legend: N blocks of 256 weights, G scales of a block (8 or 16).

    file:     numbers of grid entries (of 4 or 8 magnitudes each), signs, scales, d
    kernels:  code = magnitude's number | sign << bits - 1        3 bits (iq1, iq2) or 4 bits (iq3) a weight
              y = d * (2 * scale + 1) * UNIT * levels[code]

All products are exact in float32: d has 11 bits, a scale 5, a level 6. So any order of them has libggml's bits.

Source: ggml/src/ggml-quants.c, dequantize_row_iq*; the grids are gguf-py's (gguf.quants), an entry a word of two or
three bits for each magnitude.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, levels_of, pack_planes, planes, runs
from graphcore.quant.block_slices import decode_in_slices, slices_of_blocks
from graphcore.quant.format import Format

IQ1 = (-7, 1, 9, 0, -9, -1, 7, 0)  # 8 * (-1, 0, 1), and 1 more or, with the sign bit, 1 less; codes 3 and 7 are unused
IQ2 = (8, 25, 43, 0, -8, -25, -43, 0)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
SIGNS = torch.tensor(  # eight signs from seven bits: the eighth makes their number even
    [bits | (bits.bit_count() % 2) << 7 for bits in range(128)], dtype=torch.uint8, device="cpu"
)


class LevelCodes(NamedTuple):
    """Blocks as kernels hold them.

    Attributes:
        codes: [N, 256] uint8, indices of levels.
        scales: [N, G] uint8, the stored scales of 256 / G weights each.
        unit: [N, 1] float32, d.
    """

    codes: Tensor
    scales: Tensor
    unit: Tensor


class LevelFormat(Format):
    """A format of levels.

    Attributes:
        unit: factor of all weights of all blocks, a power of two.
        grid: name of the format in gguf.quants that has the grid.
    """

    unit: ClassVar[float]
    grid: ClassVar[str]

    @abstractmethod
    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Return the codes of the file's blocks: [N, W] uint8."""

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Decode: [N, W] uint8 -> [N, 256] float32."""
        return self._weights(self.level_codes(blocks))

    def _weights(self, found: LevelCodes) -> Tensor:
        scales = found.unit * found.scales.to(torch.float32).mul_(2).add_(1).mul_(self.unit)
        levels = levels_of(self.levels, found.codes).view(len(scales), scales.shape[1], -1)
        return levels.mul_(scales.unsqueeze(2)).flatten(1)

    def planes_of(self, blocks: Tensor) -> list[Tensor | None]:
        """Return low codes, high codes, scales and supers of a GPU: [R, K, W] uint8 -> [R, K, bytes].

        Scales are 2 * scale + 1; codes of three bits are laid out as q3_k's, with a scale for each 16 weights. Blocks
        are looked up slice by slice: a look-up takes several bytes a weight meanwhile.
        """
        flat, places = blocks.flatten(0, 1), LEVEL_PLANES[self.bits].places
        joined = flat.new_empty(len(flat), max(place[1] for place in places if place is not None))
        for some in slices_of_blocks(len(flat), self.block_elements):
            torch.cat(self._slice_planes(flat[some]), dim=1, out=joined[some])
        rows = joined.view(*blocks.shape[:2], -1)
        return [None if place is None else rows[..., place[0] : place[1]] for place in places]

    def _slice_planes(self, blocks: Tensor) -> list[Tensor]:
        """Return the planes that there are, in their order: [n, W] uint8 -> [n, bytes]."""
        found = self.level_codes(blocks)
        scales, supers = found.scales * 2 + 1, found.unit.to(torch.float16).view(torch.uint8)
        if self.bits == 4:
            return [pack_planes(found.codes.view(-1, 8, 2, 16), bits=4).flatten(1), scales, supers]
        low = pack_planes((found.codes & 3).view(-1, 2, 4, 32), bits=2).flatten(1)
        high = pack_planes((found.codes >> 2).view(-1, 8, 32), bits=1)
        return [low, high, scales.repeat_interleave(16 // scales.shape[1], dim=1), supers]

    def weights_of_planes(
        self, parts: Sequence[Tensor], scale: float, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Return the dense tensor whose planes these are; the file's numbers of grid entries are not restored."""
        joined = torch.cat([part.flatten(0, 1) for part in parts], dim=1)
        return decode_in_slices(joined, self._weights_of_joined, self.block_elements, dtype).view(tuple(shape))

    def _weights_of_joined(self, blocks: Tensor) -> Tensor:
        """Return weights from planes side by side: [n, bytes] uint8 -> [n, 256] float32."""
        low, high, scales, supers = (
            None if place is None else field(blocks, place[0], place[1] - place[0])
            for place in LEVEL_PLANES[self.bits].places
        )
        assert low is not None, "both layouts have low codes, scales and supers"
        assert scales is not None
        assert supers is not None
        if high is None:
            codes = planes(low.view(-1, 8, 16), bits=4).flatten(1)
        else:
            codes = planes(low.view(-1, 2, 32), bits=2).flatten(1) | planes(high, bits=1).flatten(1) << 2
        return self._weights(LevelCodes(codes, scales >> 1, fp16(supers, 0)))

    def blocks_of(self, parts: Sequence[Tensor]) -> Tensor:
        """Fail: which grid entries a file had cannot be told from planes."""
        raise NotImplementedError(f"{self.name}: planes are not turned into blocks again; see weights_of_planes")


LEVEL_PLANES = {
    3: Planes((0, 64), (64, 96), (96, 112), (112, 114), scale="signed", group=16, step=32),
    4: Planes((0, 128), None, (128, 136), (136, 138), scale="signed", group=32),
}
"""Planes by bits of a code, as `LevelFormat.planes_of` makes them; the places are in no file's block."""


@cache
def grid_words(name: str) -> tuple[int, ...]:
    """Return the entries of a grid, each the numbers of its magnitudes, two or three bits each, the first lowest.

    Args:
        name: a format's class in gguf.quants, such as "IQ2_XXS".
    """
    from gguf import quants

    found = getattr(quants, name)
    found.init_grid()
    entries = found.grid.reshape(found.grid_shape)  # [entries, 4 or 8] float32
    numbers = np.searchsorted(np.array(found.grid_map, dtype=np.float32), entries)
    bits = 2 if len(found.grid_map) == 3 else 3
    words = (numbers.astype(np.int64) << (bits * np.arange(numbers.shape[1]))).sum(1)
    return tuple(words.tolist())


@cache
def grid_tensor(name: str, device: torch.device) -> Tensor:
    """Return `grid_words` on a device, [entries] int32."""
    return torch.tensor(grid_words(name), dtype=torch.int32, device=device)


@cache
def _grid_table(name: str, device: torch.device) -> Tensor:
    """Return a grid: [entries, 4 or 8] uint8, numbers of magnitudes."""
    words = grid_tensor(name, device)
    bits, length = (3, 4) if name.startswith("IQ3") else (2, 8)
    shifts = torch.arange(0, bits * length, bits, dtype=torch.int32, device=device)
    return ((words[:, None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


def magnitudes(name: str, entries: Tensor) -> Tensor:
    """Return the numbers of magnitudes of grid entries: [N, E] int -> [N, 256] uint8."""
    table = _grid_table(name, entries.device)
    return table.index_select(0, entries.flatten().to(torch.int32)).view(len(entries), -1)


def even_signs(sevens: Tensor) -> Tensor:
    """Return the signs that numbers of seven bits stand for: [N, B] int -> [N, 8 B] uint8, 1 for negative."""
    return runs(SIGNS.to(sevens.device).index_select(0, sevens.flatten().to(torch.int32)).view(sevens.shape), bits=1)


def int16s(blocks: Tensor, start: int, count: int) -> Tensor:
    """Return little-endian unsigned 16-bit fields: [N, W] uint8 -> [N, count] int32."""
    found = blocks[:, start : start + 2 * count].to(torch.int32).view(len(blocks), count, 2)
    return found[..., 0] | found[..., 1] << 8


def int32s(blocks: Tensor, start: int, count: int) -> Tensor:
    """Return little-endian unsigned 32-bit fields: [N, W] uint8 -> [N, count] int64."""
    halves = int16s(blocks, start, 2 * count).to(torch.int64).view(len(blocks), count, 2)
    return halves[..., 0] | halves[..., 1] << 16


def shifted(numbers: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Return several bit fields of each number, side by side: [N, B] int -> [N, B * len(shifts)], the same dtype."""
    by = torch.tensor(shifts, dtype=numbers.dtype, device=numbers.device)
    return ((numbers.unsqueeze(2) >> by) & mask).flatten(1)
