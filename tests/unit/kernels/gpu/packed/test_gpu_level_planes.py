"""Planes of IQ formats that a GPU's kernel makes of a file's blocks: those that the CPU makes, bit by bit."""

import gguf
import numpy as np
import pytest
import torch
from support.files.low_bit_files import LEVELS
from support.packed_matrices import golden_matrix, native_kernels, num_differing, put_iq1_m_scales, stored_matrix
from torch import Tensor

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.packed import level_planes
from graphcore.kernels.gpu.packed.level_planes import launch_write_planes
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.quant import FORMATS
from graphcore.quant.level_formats import LevelFormat, grid_tensor

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
GUARD = 64  # bytes before and after the planes
UNTOUCHED = 0xA5
# Rows, columns, and blocks of 256 weights that a program of the interpreter makes: a few, or all.
SHAPES = [(16, 256, 4096), (1, 256, 8), (37, 512, 8), (48, 768, 4096), (5, 2560, 8), (130, 1024, 4096)]
SPECIAL = np.array(
    [0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01, 0xFD55, 0x0001, 0x8000, 0x7BFF, 0x03FF], dtype="<u2"
)  # float16: infinities, quiet and signalling NaNs, the smallest and the largest numbers, -0


def made_on_device(rows: Tensor, packing: DevicePacking) -> Tensor:
    """Return the planes of a file's rows, [O, W] uint8, and check that nothing is written around them."""
    one = FORMATS[packing.format]
    assert isinstance(one, LevelFormat)
    assert isinstance(packing.on_link, StoredPacking)
    assert rows.numel() == packing.on_link.nbytes < packing.nbytes
    memory = torch.full((packing.nbytes + 2 * GUARD,), UNTOUCHED, dtype=torch.uint8)
    out = memory[GUARD : GUARD + packing.nbytes]
    launch_write_planes(rows.flatten(), grid_tensor(one.grid, CPU), out, packing)
    assert (memory[:GUARD] == UNTOUCHED).all()
    assert (memory[-GUARD:] == UNTOUCHED).all()
    return out


@pytest.mark.parametrize(("rows", "columns", "blocks"), SHAPES)
@pytest.mark.parametrize("name", LEVELS)
def test_planes_of_any_bytes_are_those_of_the_cpu(
    name: str, rows: int, columns: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C++ kernels, of any one instruction set, move d as it is, so that every float16 can be compared."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(level_planes, "INTERPRETED_BLOCKS", blocks)
    generator = torch.Generator().manual_seed(rows * columns)
    raw = torch.randint(0, 256, (rows, columns // 256 * FORMATS[name].block_nbytes), generator=generator)
    raw = raw.to(torch.uint8)
    packing = DevicePacking(name, rows, columns)
    expected = DevicePacking(name, rows, columns, native_kernels()).pack(raw)
    assert torch.equal(made_on_device(raw, packing), expected)


@pytest.mark.parametrize("name", LEVELS)
def test_every_kind_of_scale_keeps_its_bits(name: str) -> None:
    one = FORMATS[name]
    blocks = np.random.default_rng(7).integers(0, 256, (2 * len(SPECIAL), one.block_nbytes), dtype=np.uint8)
    if name == "iq1_m":
        put_iq1_m_scales(blocks, np.tile(SPECIAL, 2))
    else:
        blocks[:, :2] = np.tile(SPECIAL, 2)[:, None].view(np.uint8)
    raw = torch.from_numpy(blocks).view(len(SPECIAL), -1)
    packing = DevicePacking(name, len(SPECIAL), 512)
    planes = made_on_device(raw, packing)
    assert torch.equal(planes, DevicePacking(name, len(SPECIAL), 512, native_kernels()).pack(raw))
    supers = planes[-16 * 2 * 2 :].numpy()  # of sixteen rows of two blocks
    assert supers.tobytes()[: 4 * len(SPECIAL)] == np.tile(SPECIAL, 2).tobytes()
    assert not supers[4 * len(SPECIAL) :].any()


@pytest.mark.parametrize("name", LEVELS)
def test_golden_blocks_of_libggml_come_back(name: str) -> None:
    matrix = golden_matrix(name)
    packing = DevicePacking(name, *matrix.dense.shape)
    assert num_differing(packing.unpack(made_on_device(matrix.rows, packing), torch.float32), matrix.dense) == 0


@pytest.mark.parametrize("is_tame", [False, True])
@pytest.mark.parametrize("name", LEVELS)
def test_weights_are_those_of_gguf_py(name: str, is_tame: bool) -> None:
    matrix = stored_matrix(name, 21, 768, is_tame=is_tame)
    packing = DevicePacking(name, 21, 768)
    expected = gguf.quants.dequantize(matrix.rows.numpy(), gguf.GGMLQuantizationType[name.upper()])
    found = packing.unpack(made_on_device(matrix.rows, packing), torch.float32)
    assert num_differing(found, torch.from_numpy(expected)) == 0
