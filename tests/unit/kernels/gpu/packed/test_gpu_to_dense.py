"""Packed matrices made dense by GPU kernels, bit by bit.

Legend: O rows (output features), I columns (input features).
"""

import pytest
import torch
from support.packed_matrices import StoredMatrix, golden_matrix, num_differing, stored_matrix
from torch import Tensor

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.packed.to_dense import launch_rows, launch_unpack, tensor_scale_of
from graphcore.quant import FORMATS

pytestmark = pytest.mark.thorough

FORMATS_HERE = tuple(DEVICE_LAYOUTS)
OF_FOLDERS = [name for name in DEVICE_LAYOUTS if FORMATS[name].ggml_id is None]  # formats that GGUF files do not have


def packed(matrix: StoredMatrix) -> tuple[DevicePacking, Tensor]:
    packing = DevicePacking(matrix.format, *matrix.dense.shape)
    return packing, packing.pack(matrix.rows, matrix.scale)


@pytest.mark.parametrize("name", sorted(DEVICE_LAYOUTS))
def test_golden_blocks_come_back_bit_by_bit(name: str) -> None:
    matrix = golden_matrix(name)
    packing, planes = packed(matrix)
    assert num_differing(launch_unpack(planes, packing, torch.float32), matrix.dense) == 0


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in FORMATS_HERE), ("q4_k", torch.float16)]
)
def test_random_bytes_come_back_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    matrix = stored_matrix(name, 17, FORMATS[name].block_elements, is_tame=False)
    packing, planes = packed(matrix)
    assert num_differing(launch_unpack(planes, packing, dtype), matrix.dense.to(dtype)) == 0


@pytest.mark.parametrize("name", OF_FOLDERS)
@pytest.mark.parametrize("columns", [96, 160, 1312])
def test_columns_that_are_no_multiple_of_256_come_back_bit_by_bit(name: str, columns: int) -> None:
    """In float32, where a weight that is rounded twice would show."""
    matrix = stored_matrix(name, 37, columns, is_tame=columns != 160)
    packing, planes = packed(matrix)
    assert num_differing(launch_unpack(planes, packing, torch.float32), matrix.dense) == 0
    ids = torch.tensor([36, 0, 17])
    assert num_differing(launch_rows(ids, planes, packing, torch.float32), matrix.dense[ids]) == 0


@pytest.mark.parametrize("name", ["q4_k", "i2_s", "mxfp4", "affine4", "nf4"])
def test_gathered_rows_are_those_of_the_matrix_and_unknown_ids_give_zeros(name: str) -> None:
    matrix = stored_matrix(name, 37, 3 * FORMATS[name].block_elements)
    packing, planes = packed(matrix)
    ids = torch.tensor([[0, 36], [16, 15]])
    assert torch.equal(launch_rows(ids, planes, packing, torch.float32), matrix.dense[ids])
    assert not launch_rows(torch.tensor([-1, 37]), planes, packing, torch.float32).any()
    assert launch_rows(ids[:0], planes, packing, torch.float32).shape == (0, 2, packing.columns)


def test_some_rows_are_those_of_the_whole() -> None:
    matrix = stored_matrix("q5_k", 37, 512)
    packing, planes = packed(matrix)
    assert torch.equal(launch_unpack(planes, packing, torch.float32, begin=16, end=35), matrix.dense[16:35])


def test_a_ternary_matrix_comes_without_its_scale_too() -> None:
    matrix = stored_matrix("i2_s", 5, 128)
    packing, planes = packed(matrix)
    codes = launch_unpack(planes, packing, torch.float32, is_scaled=False)
    scale = tensor_scale_of(planes, packing)
    assert isinstance(scale, Tensor)
    assert scale.item() == matrix.scale
    assert torch.equal(codes * scale, matrix.dense)
