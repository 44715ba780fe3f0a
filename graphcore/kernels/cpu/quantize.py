"""Quantisation of dense weights in C++: the bytes that `Format.quantize` makes in torch, 10 to 20 times as fast."""

import ctypes

import torch
from torch import Tensor

from graphcore.kernels.cpu.library import DTYPE_NUMBERS, open_library
from graphcore.quant.format import Format
from graphcore.quant.packing_error import SquaredError, packing_error


class QuantizedSums(ctypes.Structure):
    """The kernels' struct of facts about quantised weights; the fields mirror native/quantize.h."""

    _fields_ = (("difference", ctypes.c_double), ("size", ctypes.c_double), ("largest", ctypes.c_float))


def quantize_weights(
    one: Format, dense: Tensor, library: str = "", threads: int | None = None
) -> tuple[Tensor, SquaredError]:
    """Return dense weights quantised to a format's blocks, and their squared error: in C++ if it has the format.

    Args:
        dense: [..., I] any float dtype, on the CPU; any device without a library.
        library: path of the kernels' file; empty for torch.
        threads: number of threads that the C++ kernels may use; None for torch's number.

    Returns:
        [nbytes] uint8, and the sums of `packing_error`.

    Raises:
        UnsupportedError: weights cannot be packed as this format.
        CheckpointError: rows are not a whole number of blocks, or a weight is infinite, NaN or too large.
    """
    if one.kernel_number is None or not library or not open_library(library).graphcore_can_quantize(one.kernel_number):
        raw = one.quantize(dense)
        return raw, packing_error(dense, raw, one, dense.shape)
    some = (dense if dense.dtype in DTYPE_NUMBERS else dense.to(torch.float32)).contiguous()
    raw, sums = torch.empty(one.nbytes(dense.shape), dtype=torch.uint8, device="cpu"), QuantizedSums()
    open_library(library).graphcore_quantize(
        torch.get_num_threads() if threads is None else threads,
        one.kernel_number,
        DTYPE_NUMBERS[some.dtype],
        some.numel(),
        some.data_ptr(),
        raw.data_ptr(),
        ctypes.byref(sums),
    )
    one.check_finite(sums.largest)
    one.check_range(raw.view(-1, one.block_nbytes), sums.largest)
    return raw, SquaredError(sums.difference, sums.size)
