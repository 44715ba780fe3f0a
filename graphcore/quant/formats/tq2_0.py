"""tq2_0: 256 ternary weights, two bits each, and a scale.

Legend: N blocks.

    0 codes[64]  64 d[2]
    codes, half h (32 bytes each), byte l: 3322 1100, two bits s = element 128 * h + 32 * s + l
    y = (q - 1) * d
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, fp16_bytes, pack_planes, planes
from graphcore.quant.format import Format
from graphcore.quant.ternary import ternary_codes


class Tq20Format(Format):
    """Ternary, 2.0625 bits per weight; code 3, which no writer emits, is +2 as in ggml."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 66] uint8 -> [N, 256] float32."""
        codes = planes(field(blocks, 0, 64).view(-1, 2, 32), bits=2).flatten(1)  # [N, 256]
        return codes.to(torch.float32).sub_(1).mul_(fp16(blocks, 64))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 256] float32 -> [N, 66] uint8."""
        codes, scale = ternary_codes(dense)
        return torch.cat((pack_planes(codes.view(-1, 2, 4, 32), bits=2).flatten(1), fp16_bytes(scale)), dim=1)


TQ2_0 = Tq20Format(
    name="tq2_0",
    block_elements=256,
    block_nbytes=66,
    ggml_id=35,
    file_type=37,
    kernel_number=15,
    bits=2,
    zero=1,
    is_ternary=True,
    narrower="q4_0",
    planes=Planes(low=(0, 64), scales=(64, 66), group=256, step=32),
)
