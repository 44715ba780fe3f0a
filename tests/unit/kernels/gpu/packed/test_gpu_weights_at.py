"""Single weights of packed matrices, as kernels read them that have no vectors of codes, bit by bit."""

import pytest
import torch
import triton
import triton.language as tl
from support.packed_matrices import num_differing, stored_matrix

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.experts.grouped import tile_at
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.packed.planes import weights_at
from graphcore.quant import FORMATS

pytestmark = pytest.mark.thorough

ROWS = 32


@triton.jit
def _read_weights(matrix, out, columns, L: tl.constexpr, IS_TILE: tl.constexpr, R: tl.constexpr):
    """Store all weights of R rows, 32 columns at a time."""
    rows = tl.arange(0, R)
    for begin in range(0, columns, 32):
        at = begin + tl.arange(0, 32)
        if IS_TILE:
            tile = tile_at(matrix, rows, begin, columns, L, 32)
        else:
            tile = weights_at(matrix, rows[:, None], at[None, :], columns, L)
        tl.store(out + rows[:, None] * columns + at[None, :], tile)


@pytest.mark.parametrize("is_tile", [False, True], ids=["single", "tile"])
@pytest.mark.parametrize("name", list(DEVICE_LAYOUTS))
def test_weights_read_one_by_one_are_the_formats(name: str, is_tile: bool) -> None:
    matrix = stored_matrix(name, ROWS, 3 * FORMATS[name].block_elements)
    packing = DevicePacking(name, *matrix.dense.shape)
    out = torch.empty_like(matrix.dense)
    packed = packing.pack(matrix.rows, matrix.scale)
    _read_weights[(1,)](packed, out, packing.columns, DEVICE_LAYOUTS[name], is_tile, ROWS, enable_fp_fusion=False)
    if name == "mxfp4" and is_tile:
        out += 0.0  # tiles may have negative zeros
    assert num_differing(out, matrix.dense / matrix.scale) == 0
