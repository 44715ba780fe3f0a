"""The 12 bytes of 6-bit scales and minimums that q4_k and q5_k share.

Legend: N blocks. Eight sub-blocks j of 32 elements have a 6-bit scale and a 6-bit minimum each.

    byte j     (0..3)   SSss ssss   ss ssss = scale j     SS = top bits of scale j + 4
    byte j + 4 (0..3)   MMmm mmmm   mm mmmm = minimum j   MM = top bits of minimum j + 4
    byte j + 8 (0..3)   mmmm ssss   low four bits of minimum j + 4 and of scale j + 4

Source: ggml/src/ggml-quants.c, get_scale_min_k4.
"""

import torch


def unpack_scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums, 0 to 63: [N, 12] uint8 -> two of [N, 8] uint8."""
    first_scales, first_minimums, low_bits = packed.view(-1, 3, 4).unbind(1)  # [N, 4] each
    last_scales = (low_bits & 15) | (first_scales >> 6 << 4)
    last_minimums = (low_bits >> 4) | (first_minimums >> 6 << 4)
    scales = torch.cat((first_scales & 63, last_scales), dim=1)
    minimums = torch.cat((first_minimums & 63, last_minimums), dim=1)
    return scales, minimums


def pack_scales_and_minimums(scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """Return the 12 bytes: two of [N, 8] uint8, 0 to 63 -> [N, 12] uint8."""
    first_scales, last_scales = scales.chunk(2, dim=1)  # [N, 4] each
    first_minimums, last_minimums = minimums.chunk(2, dim=1)
    low_bits = (last_scales & 15) | (last_minimums & 15) << 4
    return torch.cat((first_scales | last_scales >> 4 << 6, first_minimums | last_minimums >> 4 << 6, low_bits), dim=1)
