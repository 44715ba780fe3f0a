"""Int8 quantisation of activations for BitNet's projections, with one scale per token.

Legend: I input features.

    scale = 127 / max(|x|, 1e-5)      codes = clip(round(x * scale), -128, 127), halves to even

Source: Ma et al. 2024 (b1.58), and `ActQuant` in transformers' integrations/bitnet.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_PEAK = 1e-5  # keeps the scale of a row of zeros finite


class Int8Rows(NamedTuple):
    """Rows of x quantised to int8; x is about codes / scale.

    Attributes:
        codes: [..., I] int8.
        scale: [..., 1] float32.
    """

    codes: Tensor
    scale: Tensor


def quantize_rows(x: Tensor) -> Int8Rows:
    """Return `x` [..., I], of any floating dtype, rounded to int8 row by row; computed in float32."""
    wide = x.float()
    scale = 127.0 / wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    return Int8Rows((wide * scale).round().clamp(-128, 127).to(torch.int8), scale)
