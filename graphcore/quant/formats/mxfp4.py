"""mxfp4: 32 four-bit floats (E2M1) and a power-of-two scale (E8M0).

Legend: N blocks.

    0 exponent[1]  1 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = 2^(exponent - 128) * E2M1_DOUBLED[q]
    exponent 255 is 2^127 in ggml (NaN in OCP); exponents 0 and 1 give subnormal scales
Source: OCP Microscaling Formats v1.0; ggml/src/ggml-impl.h, ggml_e8m0_to_fp32_half.
"""

import torch

from graphcore.encodings import E2M1_DOUBLED, Planes
from graphcore.quant.bit_fields import field, levels_of, pack_planes, planes
from graphcore.quant.format import Format

# Midpoints between the magnitudes 0, 1, 2, 3, 4, 6, 8, 12: a weight on one takes the smaller magnitude.
MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
LARGEST_EXPONENT_OF_CODE = 2  # 6 = 1.5 * 2^2 is the largest E2M1 value
FLOAT64_BIAS = 1023
FLOAT64_MANTISSA_BITS = 52


def half_power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 128), subnormals included: uint8 -> float32, same shape.

    The bits of a float64 are set, because all these powers are normal there; narrowing them is exact.
    """
    biased = exponents.to(torch.int64) + (FLOAT64_BIAS - 128)
    return (biased << FLOAT64_MANTISSA_BITS).view(torch.float64).to(torch.float32)


class Mxfp4Format(Format):
    """Four-bit floats in blocks of 32."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 17] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 1, 16), bits=4).flatten(1)  # [N, 32]
        return levels_of(E2M1_DOUBLED, codes).mul_(half_power_of_two(field(blocks, 0, 1)))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 32] float32 -> [N, 17] uint8.

        Blocks whose largest weight is below 2^-125 differ: their exponent is 0, where libggml's wraps around.
        """
        largest = dense.abs().amax(1, keepdim=True)  # [N, 1]
        power = largest.to(torch.float64).log2().to(torch.float32).floor()  # -inf for 0
        exponents = (power + (127 - LARGEST_EXPONENT_OF_CODE)).clamp_(min=0).to(torch.uint8)
        steps = half_power_of_two(exponents).to(torch.float64)
        midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64, device=dense.device)
        codes = torch.bucketize(dense.abs() / steps, midpoints).to(torch.uint8)  # [N, 32], 0 to 7
        codes |= ((dense < 0) & (codes > 0)).to(torch.uint8) << 3
        return torch.cat((exponents, pack_planes(codes.view(-1, 2, 16), bits=4)), dim=1)


MXFP4 = Mxfp4Format(
    name="mxfp4",
    block_elements=32,
    block_nbytes=17,
    ggml_id=39,
    file_type=38,
    kernel_number=16,
    bits=4,
    levels=E2M1_DOUBLED,
    head="q8_0",
    planes=Planes(low=(1, 17), scales=(0, 1), scale="e8m0"),
)
