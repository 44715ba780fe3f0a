"""q3_k: 256 signed three-bit weights in 16 groups of 16, each with a signed six-bit scale.

Legend: N blocks; R rows, K blocks of a row.

    0 third_bits[32]  32 codes[64]  96 scales[12]  108 d[2]
    third_bits byte l: bit k = element 32 * k + l
    codes, half h (32 bytes each), byte l: 3322 1100, two bits s = element 128 * h + 32 * s + l
    scales byte i (0..7): hhhh llll, low four bits of scale i (l) and of scale i + 8 (h)
    scales byte 8 + i (0..3): ddcc bbaa, top two bits of scales i (a), i + 4 (b), i + 8 (c), i + 12 (d)
    y = (d * (scale - 32)) * ((third_bit << 2 | q) - 4)
"""

import torch

from graphcore.quant.bit_packing import fp16_bytes, pack_planes
from graphcore.quant.bits import field, fp16, planes
from graphcore.quant.format import Change, Format
from graphcore.quant.k_search import as_columns, as_rows, fit_symmetric, refine_symmetric, round_scales


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """Return the 16 scales, 0 to 63: [N, 12] uint8 -> [N, 16] uint8."""
    low = planes(packed[:, :8], bits=4).flatten(1)  # [N, 16]
    high = planes(packed[:, 8:], bits=2).flatten(1)  # [N, 16]
    return low | high << 4


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the 12 bytes of 16 scales, 0 to 63: [N, 16] uint8 -> [N, 12] uint8."""
    low = pack_planes((scales & 15).view(-1, 2, 8), bits=4)
    return torch.cat((low, pack_planes((scales >> 4).view(-1, 4, 4), bits=2)), dim=1)


def widen_scales(packed: torch.Tensor) -> torch.Tensor:
    """Return a GPU's int8 scales, 32 taken off: [R, K, 12] -> [R, K, 16]; modulo 256, the bytes are those of int8."""
    return (unpack_scales(packed.reshape(-1, 12)) - 32).view(*packed.shape[:2], 16)


def narrow_scales(wide: torch.Tensor) -> torch.Tensor:
    """Undo `widen_scales`."""
    return pack_scales((wide + 32).reshape(-1, 16)).view(*wide.shape[:2], 12)


STRETCHES = (0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9)  # see k_search.fit_symmetric


class Q3KFormat(Format):
    """Three bits, symmetric."""

    scale_change = Change(widen_scales, narrow_scales)

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 110] uint8 -> [N, 256] float32."""
        scales = fp16(blocks, 108) * unpack_scales(field(blocks, 96, 12)).to(torch.float32).sub_(32)  # [N, 16]
        codes = planes(field(blocks, 32, 64).view(-1, 2, 32), bits=2).flatten(1)  # [N, 256]
        codes |= planes(field(blocks, 0, 32), bits=1).flatten(1) << 2
        signed = codes.to(torch.float32).sub_(4).view(-1, 16, 16)  # [N, g, 16]
        return signed.mul_(scales.unsqueeze(2)).flatten(1)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 256] float32 -> [N, 110] uint8; scales by search, see k_search."""
        groups = as_columns(dense, num_groups=16)
        scales = round_scales(fit_symmetric(groups, -4, STRETCHES).view(-1, 16), -32, 31)  # [N, 16]
        codes = as_rows(refine_symmetric(groups, scales, -4, -32).add_(4), len(dense))  # [N, 256], 0 to 7
        third_bits = pack_planes((codes >> 2).view(-1, 8, 32), bits=1)
        low = pack_planes((codes & 3).view(-1, 2, 4, 32), bits=2).flatten(1)
        packed_scales = pack_scales((scales.codes + 32).to(torch.uint8))
        return torch.cat((third_bits, low, packed_scales, fp16_bytes(scales.unit)), dim=1)


Q3_K = Q3KFormat.of("q3_k")
