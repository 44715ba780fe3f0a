"""Packs weight matrices for the C++ kernels, and unpacks them, gathers their rows and multiplies with them.

Legend: O rows (output features), I columns (input features), T tokens.

Sixteen rows are interleaved, scales first, then codes (native/codes.h and native/formats.h show the layout;
native/stored.h reads the file's blocks). Rows are padded to a multiple of sixteen; apart from that the size is about
that in the file, and more for formats of levels (quant/level_formats.py).

    rounding    x is                                  relative RMS error of x @ W.T
    float       float32                               1e-6 (float32 result), 4e-3 (bf16 result)
    wide        rounded to 16 bits per 32 columns     1e-4, plus the rounding of the result's dtype
    block       rounded to 8 bits per 32 columns      at most 1 %
    token       rounded to 8 bits per row             exact products for ternary weights, as in BitNet

For many tokens, float and, except with AVX2, wide unpack the matrix once and multiply it densely: bf16 in panels
(products.py) if the processor has AVX512-BF16 and no AMX, else by torch, in x's dtype or, if the processor has no fast
products in that dtype, in float32. The others multiply the packed codes, which is faster.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.device import product_dtype
from graphcore.kernels.cpu import products
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, FORMAT_NUMBERS, ROUNDINGS, Matrix, open_library
from graphcore.kernels.cpu.products import Operand
from graphcore.kernels.cpu.quantize import quantize_weights
from graphcore.kernels.cpu.torch_ops import are_implemented_by, native_linear
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.packing import GROUP_ROWS, Packing, empty_matrix, empty_product, empty_rows, write_tail
from graphcore.quant.packing_error import SquaredError
from graphcore.quant.registry import FORMATS

TAIL_NBYTES = 64  # bytes after the last group, if the tensor has a float32 scale
SLICE_ELEMENTS = 1 << 20  # weights unpacked at a time: 2 MiB in bf16, 4 MiB in float32
DENSE_TOKENS = 16  # from this many tokens on, a dense product of the unpacked matrix is faster than float kernels


@dataclass(frozen=True)
class KernelPacking(Packing):
    """A matrix in groups of sixteen rows, in the C++ kernels' layout.

    Attributes:
        format: name of a stored format that the kernels support.
        library: path of the kernels' library.
    """

    library: str

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        codes = open_library(self.library).graphcore_packed_nbytes(*self.numbers)
        return int(codes) + (TAIL_NBYTES if not self.can_split else 0)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The format's number, rows and columns, as arguments of the library's functions."""
        return FORMAT_NUMBERS[self.format], self.rows, self.columns

    def quantize(self, dense: Tensor, *, threads: int | None = None) -> tuple[Tensor, SquaredError]:
        """Return dense rows as the file would have them, and their error; computed in C++."""
        return quantize_weights(FORMATS[self.format], dense, self.library, threads)

    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Write some rows to the packed matrix, in the kernels' layout.

        Several threads may write different ranges at the same time, each with `threads=1`.
        """
        self.check_place(raw_rows, begin, out)
        assert raw_rows.stride(1) == 1, f"strides {raw_rows.stride()}, a row is one run"
        open_library(self.library).graphcore_pack(
            torch.get_num_threads() if threads is None else threads,
            FORMAT_NUMBERS[self.format],
            len(raw_rows),
            self.columns,
            raw_rows.data_ptr(),
            raw_rows.stride(0),
            out.data_ptr() + self.offset(begin),
        )

    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the tensor's scale after the rows."""
        if not self.can_split:
            write_tail(out, TAIL_NBYTES, scale)

    def offset(self, row: int) -> int:
        """Return the offset in bytes of a row's group."""
        return int(open_library(self.library).graphcore_packed_nbytes(FORMAT_NUMBERS[self.format], row, self.columns))

    def matrix(self, packed: Tensor) -> Matrix:
        """Return the kernels' struct of the matrix, which points to the tensor's memory; a meta tensor is allowed."""
        assert packed.is_contiguous(), f"strides {packed.stride()}, the kernels read one run"
        assert packed.numel() == self.nbytes, f"{packed.shape} is no {self}"
        scale = 1.0
        if not self.can_split and not packed.is_meta:
            scale = ctypes.c_float.from_address(packed.data_ptr() + packed.numel() - TAIL_NBYTES).value
        number, rows, columns = self.numbers
        return Matrix(packed.data_ptr(), rows, columns, number, scale)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix, bit-exact with the format, computed by a custom op."""
        return packed_matrix(packed, self, dtype)

    def unpack_rows(self, packed: Tensor, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        """Return rows begin .. end - 1 of the whole matrix, dense; `begin` is a multiple of GROUP_ROWS."""
        assert begin % GROUP_ROWS == 0, f"rows lie in groups of {GROUP_ROWS}, asked for {begin}"
        matrix = self.matrix(packed)
        matrix.rows = end - begin
        matrix.bytes += self.offset(begin)
        dense = torch.empty(matrix.rows, self.columns, dtype=dtype, device="cpu")
        library = open_library(self.library)
        library.graphcore_unpack(torch.get_num_threads(), ctypes.byref(matrix), DTYPE_NUMBERS[dtype], dense.data_ptr())
        return dense

    def unpacks(self, rounding: str) -> bool:
        """Return whether a batch of at least `DENSE_TOKENS` tokens is multiplied with the unpacked (dense) weight.

        Codes that are floats are never multiplied with rounded x.
        """
        return bool(FORMATS[self.format].float_levels) or bool(
            open_library(self.library).graphcore_unpacks(ROUNDINGS[rounding])
        )

    def is_batch_invariant(self, dtype: torch.dtype, rounding: str) -> bool:
        """Return whether C++ kernels, which add in one order, multiply `DENSE_TOKENS` tokens or more."""
        return not self.unpacks(rounding) or (dtype is torch.bfloat16 and products.has_panels(self.library))

    def operand(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Operand | None:
        """Return the operand of the C++ kernels for `x` [..., I]; None if torch multiplies the unpacked weight."""
        tokens, method = x.numel() // x.shape[-1] if x.numel() else 0, rounding
        if tokens >= DENSE_TOKENS:
            if not self.is_batch_invariant(x.dtype, rounding):
                return None
            method = products.PANELS if self.unpacks(rounding) else rounding
        return Operand(self.matrix(packed), packed, bias, method, self.library)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Multiply without unpacking; `rounding` is "float", "wide", "block" or "token", as at the top of this file."""
        if torch.compiler.is_compiling() and are_implemented_by(self.library) and _are_few(x):
            wide, how = None if bias is None else bias.float(), ROUNDINGS[rounding]
            return native_linear(x.contiguous(), packed, wide, *self.numbers, how)
        return packed_linear(x, packed, bias, self, rounding)

    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows, dense."""
        return packed_rows(ids, packed, self, dtype)


def _are_few(x: Tensor) -> bool:
    """Return whether `x` [..., I] is statically known (no guard on a symbolic size) to have few tokens, but some."""
    sizes = x.shape[:-1]
    return all(isinstance(size, int) for size in sizes) and 0 < sizes.numel() < DENSE_TOKENS


def _matrix_cpu(packed: Tensor, packing: KernelPacking, dtype: torch.dtype) -> Tensor:
    return packing.unpack_rows(packed, dtype, 0, packing.rows)


def _linear_cpu(x: Tensor, packed: Tensor, bias: Tensor | None, packing: KernelPacking, rounding: str) -> Tensor:
    operand = packing.operand(x, packed, bias, rounding)
    return _dense_product(x, packed, bias, packing) if operand is None else products.multiply(x, [operand])[0]


def _dense_product(x: Tensor, packed: Tensor, bias: Tensor | None, packing: KernelPacking) -> Tensor:
    """Unpack some rows at a time and multiply with them: [..., I] -> [..., O].

    A slice fits in the CPU's cache and reuses memory of the allocator. Unpacking a large matrix whole needs new memory,
    whose page faults take as long as the product for a hundred tokens.
    """
    step = max(GROUP_ROWS, SLICE_ELEMENTS // packing.columns // GROUP_ROWS * GROUP_ROWS)
    dtype = product_dtype(x.dtype)
    wide, wide_bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if step >= packing.rows:
        return torch.nn.functional.linear(wide, packing.unpack_rows(packed, dtype, 0, packing.rows), wide_bias).to(
            x.dtype
        )
    y = empty_product(x, packing)
    for begin in range(0, packing.rows, step):
        end = min(begin + step, packing.rows)
        part = None if wide_bias is None else wide_bias[begin:end]
        y[..., begin:end] = torch.nn.functional.linear(wide, packing.unpack_rows(packed, dtype, begin, end), part)
    return y


def _rows_cpu(ids: Tensor, packed: Tensor, packing: KernelPacking, dtype: torch.dtype) -> Tensor:
    packing.check_rows(ids)
    ids = ids.contiguous()
    dense = torch.empty((*ids.shape, packing.columns), dtype=dtype, device="cpu")
    open_library(packing.library).graphcore_rows(
        ctypes.byref(packing.matrix(packed)), ids.data_ptr(), ids.numel(), DTYPE_NUMBERS[dtype], dense.data_ptr()
    )
    return dense


packed_linear = register_custom_op("packed_linear", _linear_cpu, empty_product, dispatch_key="CPU")
packed_rows = register_custom_op("packed_rows", _rows_cpu, empty_rows, dispatch_key="CPU")
packed_matrix = register_custom_op("packed_matrix", _matrix_cpu, empty_matrix, dispatch_key="CPU")
