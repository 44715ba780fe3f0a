"""nvfp4: 64 four-bit floats (E2M1) in 4 groups of 16, each with an eight-bit float scale (unsigned E4M3).

Legend: N blocks.

    0 scales[4]  4 codes[32]
    codes, group s (8 bytes each), byte l: hhhh llll, low = element 16 * s + l, high = element 16 * s + 8 + l
    y = (0.5 * scale) * E2M1_DOUBLED[q]
    scale byte: .eee emmm, e = 0: m * 2^-9, else (1 + m / 8) * 2^(e - 7)
    bit 7 is ignored; the byte 0x7f, NaN in E4M3, is 0, yet 0xff is 480, as in ggml
A checkpoint has a second, per-tensor scale beside it, which applies to the matmul's result and not to the weights.
Source: ggml/src/ggml-impl.h, ggml_ue4m3_to_fp32.
"""

import torch

from graphcore.encodings import E2M1_DOUBLED, Planes
from graphcore.quant.bit_fields import field, levels_of, planes
from graphcore.quant.format import Format


def unsigned_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return the value of each scale byte: uint8 -> float32, same shape.

    The seven bits are moved to the top of float16's mantissa and the bottom of its exponent, where they read as the
    value times 2^-8, subnormals included.
    """
    as_float16 = ((codes & 0x7F).to(torch.int16) << 7).view(torch.float16)
    return as_float16.to(torch.float32).mul_(256).masked_fill_(codes == 0x7F, 0)


class Nvfp4Format(Format):
    """Four-bit floats in groups of 16."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 36] uint8 -> [N, 64] float32."""
        scales = unsigned_e4m3(field(blocks, 0, 4)).mul_(0.5)  # [N, 4]
        codes = planes(field(blocks, 4, 32).view(-1, 4, 8), bits=4).view(-1, 4, 16)  # [N, group, 16]
        return levels_of(E2M1_DOUBLED, codes).mul_(scales.unsqueeze(2)).flatten(1)


NVFP4 = Nvfp4Format(
    name="nvfp4",
    block_elements=64,
    block_nbytes=36,
    ggml_id=40,
    kernel_number=17,
    bits=4,
    levels=E2M1_DOUBLED,
    planes=Planes(low=(4, 36), scales=(0, 4), scale="e4m3", group=16, step=8),
)
