"""Gate and up, multiplied apart, become the hidden features: where their matrices do not fit into one launch.

Legend: N tokens, F hidden features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.epilogue import activated

BLOCK = 256


@triton.jit
def _gate(both, out, hidden, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < hidden
    gate = tl.load(both + token * 2 * hidden + at, mask=is_there)
    up = tl.load(both + token * 2 * hidden + hidden + at, mask=is_there)
    values = activated(gate, ACTIVATION) * up
    tl.store(out + token * hidden + at, values.to(out.dtype.element_ty), mask=is_there)


def launch_gate(both: Tensor, activation: str, out: Tensor) -> None:
    """Store act(gate) * up.

    Args:
        both: [N, 2 F] float32, gate before up.
        activation: as epilogue.py calls it.
        out: [N, F] contiguous.
    """
    assert both.dtype is torch.float32, "products that are not rounded yet"
    tokens, hidden = out.shape
    _gate[(triton.cdiv(hidden, BLOCK), tokens)](
        both, out, hidden, ACTIVATION=activation, BLOCK=BLOCK, num_warps=2, enable_fp_fusion=True
    )
