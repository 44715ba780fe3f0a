"""Splits weights into -1, 0, +1 and a scale.

Legend: N blocks, E elements per block.
"""

import torch

from graphcore.quant.bit_fields import inverse, round_half_away


def ternary_codes(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes 0, 1, 2 for -1, 0, +1, and each block's largest magnitude as scale, as libggml does.

    This is exact for ternary weights; others are rounded, and all below half the largest become 0.

    Args:
        dense: [N, E] float32.

    Returns:
        [N, E] uint8, [N, 1] float32.
    """
    scale = dense.abs().amax(1, keepdim=True)
    return round_half_away(dense * inverse(scale)).add_(1).to(torch.uint8), scale
