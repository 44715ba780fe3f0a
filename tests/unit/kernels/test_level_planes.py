"""Planes of the formats of levels for a GPU: the C++ kernels write what torch writes."""

from itertools import product as every_pair

import torch
from support.cases import in_case
from torch import Tensor

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.quant import FORMATS
from graphcore.quant.level_formats import LevelFormat

LEVELS = [name for name, one in FORMATS.items() if isinstance(one, LevelFormat)]
UNTOUCHED = 7
# Rows of the matrix, columns, and the row that the packed rows begin at.
SHAPES = [(16, 256, 0), (37, 512, 0), (37, 512, 32), (48, 768, 16), (5, 256, 0), (128, 4096, 0)]


def blocks_of(name: str, rows: int, columns: int) -> Tensor:
    """Return random rows whose scales are finite: torch would make quiet NaNs of signalling ones."""
    one = FORMATS[name]
    generator = torch.Generator().manual_seed(rows * columns)
    raw = torch.randint(0, 256, (rows, columns // 256, one.block_nbytes), dtype=torch.uint8, generator=generator)
    # The float16's highest exponent bit is in byte 1, or in the highest bits of byte 55.
    raw[..., 55 if name == "iq1_m" else 1] &= 0xBF
    return raw.flatten(1)


def test_the_kernels_write_the_planes_that_torch_writes(library: str) -> None:
    for (rows, columns, begin), name in every_pair(SHAPES, LEVELS):
        with in_case(rows, columns, begin, name):
            raw = blocks_of(name, rows, columns)[begin:]
            found = []
            for file in ("", library):
                packing = DevicePacking(name, rows, columns, file)
                planes = torch.full((packing.nbytes,), UNTOUCHED, dtype=torch.uint8)
                packing.pack_rows(raw, begin, planes)
                assert (planes[: packing.offset(begin)] == UNTOUCHED).all()
                found.append(planes)
            assert torch.equal(*found)


def test_rows_with_bytes_between_them_are_read_at_their_places(library: str) -> None:
    for name in LEVELS:
        with in_case(name):
            raw = blocks_of(name, 21, 512)
            wide = torch.full((21, raw.shape[1] + 13), 255, dtype=torch.uint8)
            wide[:, 5 : 5 + raw.shape[1]] = raw
            packing = DevicePacking(name, 21, 512, library)
            assert torch.equal(packing.pack(wide[:, 5 : 5 + raw.shape[1]]), packing.pack(raw))


def test_other_formats_do_not_need_the_kernels() -> None:
    """A library that cannot be opened would fail."""
    raw = torch.randint(0, 256, (16, 144), dtype=torch.uint8)
    planes = DevicePacking("q4_k", 16, 256, "no such library").pack(raw)
    assert torch.equal(planes, DevicePacking("q4_k", 16, 256).pack(raw))
