"""Some rows of a packed matrix: written to their place, and as a matrix of their own."""

from itertools import product
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from support.packed_matrices import KERNEL_FORMATS, native_kernels, stored_matrix

from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS, KernelPacking
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.packing import Packing
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.quant import FORMATS

FORMS = ("kernel", "stored", "device")
SPLIT_FORMATS = [name for name in KERNEL_FORMATS if name != "i2_s"]
ROWS = 53
BY_KERNELS = {"float": (1, 15), "wide": (1, 15), "block": (1, 40), "token": (1, 40)}  # numbers of tokens


def packing_of(form: str, name: str, rows: int, columns: int) -> Packing:
    if form == "kernel":
        return KernelPacking(name, rows, columns, native_kernels())
    if form == "device" and name not in DEVICE_LAYOUTS:
        pytest.skip(f"no GPU kernel reads {name}")
    return (DevicePacking if form == "device" else StoredPacking)(name, rows, columns)


def test_ranges_make_the_matrix_that_packing_it_whole_makes() -> None:
    for form, name in every_pair(FORMS, KERNEL_FORMATS):
        with in_case(form, name):
            matrix = stored_matrix(name, ROWS, 3 * FORMATS[name].block_elements, is_tame=False)
            packing = packing_of(form, name, *matrix.dense.shape)
            out = torch.full((packing.nbytes,), 0xA5, dtype=torch.uint8)
            for begin, end in ((32, ROWS), (0, 32)):
                packing.pack_rows(matrix.rows[begin:end], begin, out, threads=1)
            packing.write_scale(out, matrix.scale)
            assert torch.equal(out, packing.pack(matrix.rows, matrix.scale))


def test_a_part_is_those_rows() -> None:
    for form, name, end in every_pair(FORMS, SPLIT_FORMATS, [48, ROWS, 37]):
        with in_case(form, name, end):
            matrix = stored_matrix(name, ROWS, 3 * FORMATS[name].block_elements)
            packing = packing_of(form, name, *matrix.dense.shape)
            whole = packing.pack(matrix.rows, matrix.scale)
            part, offset = packing.part(16, end)
            packed = whole[offset : offset + part.nbytes]
            assert torch.equal(part.unpack(packed, torch.float32), matrix.dense[16:end])
            assert torch.equal(part.gather(torch.tensor([0, 20]), packed, torch.float32), matrix.dense[[16, 36]])


def test_a_product_with_a_part_is_the_rows_of_the_whole_product_bit_for_bit() -> None:
    """Dense products, of many tokens with float and wide, or with codes that are floats, have the library's order."""
    for name, rounding, tokens in [
        (name, rounding, tokens)
        for name, (rounding, counts) in product(SPLIT_FORMATS, BY_KERNELS.items())
        for tokens in counts
        if tokens < DENSE_TOKENS or not FORMATS[name].float_levels
    ]:
        with in_case(name, rounding, tokens):
            matrix = stored_matrix(name, ROWS, 3 * FORMATS[name].block_elements)
            packing = packing_of("kernel", name, *matrix.dense.shape)
            whole = packing.pack(matrix.rows, matrix.scale)
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(tokens, packing.columns, generator=generator)
            bias = torch.randn(ROWS, generator=generator)
            y = packing.linear(x, whole, bias, rounding)
            for begin, end in ((0, 16), (16, 48), (48, ROWS)):
                part, offset = packing.part(begin, end)
                rows = part.linear(x, whole[offset : offset + part.nbytes], bias[begin:end], rounding)
                assert torch.equal(rows, y[:, begin:end])


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_with_one_scale_for_all_rows_has_no_parts(form: str) -> None:
    packing = packing_of(form, "i2_s", ROWS, 256)
    assert not packing.can_split
    with pytest.raises(AssertionError, match="behind the last row"):
        packing.part(0, 16)
    assert packing_of(form, "q4_k", ROWS, 256).can_split
