"""tq1_0: 256 ternary weights, five base-3 digits to a byte, and a scale.

Legend: N blocks.

    0 codes[48]  48 last_codes[4]  52 d[2]
    a byte is ceil(256 * v / 243) for the five-digit base-3 number v: digit n (most significant first) is the carry
    over 256 when the byte times 3^n, modulo 256, is multiplied by 3 once more
    elements   0..159: codes  0..31, digit n = elements 32 * n + l
    elements 160..239: codes 32..47, digit n = elements 160 + 16 * n + l
    elements 240..255: last_codes, digit n (0..3) = elements 240 + 4 * n + l
    y = (digit - 1) * d
"""

import torch

from graphcore.quant.bit_fields import field, fp16, fp16_bytes
from graphcore.quant.format import Format
from graphcore.quant.ternary import ternary_codes


def base3_digits(codes: torch.Tensor, num_digits: int) -> torch.Tensor:
    """Return the leading digits, most significant first: [N, n] uint8 -> [N, num_digits * n] uint8 in 0..2."""
    fractions = torch.stack([codes * 3**digit for digit in range(num_digits)], dim=1)  # uint8: modulo 256
    return (fractions.to(torch.int16) * 3 >> 8).to(torch.uint8).flatten(1)


def base3_bytes(digits: torch.Tensor) -> torch.Tensor:
    """Return the bytes whose leading digits these are, missing ones 0: [N, num_digits, n] uint8 -> [N, n] uint8."""
    num_digits = digits.shape[1]
    weights = torch.tensor([3 ** (4 - digit) for digit in range(num_digits)], dtype=torch.int32, device=digits.device)
    numbers = (digits.to(torch.int32) * weights[:, None]).sum(1)
    return ((numbers * 256 + 242) // 243).to(torch.uint8)


class Tq10Format(Format):
    """Ternary, 1.6875 bits per weight."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 54] uint8 -> [N, 256] float32."""
        parts = (
            base3_digits(field(blocks, 0, 32), num_digits=5),
            base3_digits(field(blocks, 32, 16), num_digits=5),
            base3_digits(field(blocks, 48, 4), num_digits=4),
        )
        return torch.cat(parts, dim=1).to(torch.float32).sub_(1).mul_(fp16(blocks, 52))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 256] float32 -> [N, 54] uint8."""
        codes, scale = ternary_codes(dense)
        first, second, last = codes[:, :160], codes[:, 160:240], codes[:, 240:]
        parts = (first.view(-1, 5, 32), second.view(-1, 5, 16), last.view(-1, 4, 4))
        return torch.cat((*(base3_bytes(part) for part in parts), fp16_bytes(scale)), dim=1)


TQ1_0 = Tq10Format(
    name="tq1_0",
    block_elements=256,
    block_nbytes=54,
    ggml_id=34,
    file_type=36,
    is_ternary=True,
    narrower="q4_0",
)
