"""Matrices packed for a GPU (kernels/device_layout.py) as custom ops: multiplied with, unpacked, gathered from.

Legend: O rows (output features), I columns (input features).

The ops are known wherever torch is, so that a graph may be traced anywhere; Triton is imported when one runs.
"""

import torch
from torch import Tensor

from graphcore.kernels.device_layout import DeviceForm

torch.library.define(
    "graphcore::device_linear",
    "(Tensor x, Tensor packed, Tensor? bias, str format, int rows, bool rounds) -> Tensor",
)
torch.library.define(
    "graphcore::device_rows",
    "(Tensor ids, Tensor packed, str format, int rows, int columns, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "graphcore::device_matrix", "(Tensor packed, str format, int rows, int columns, ScalarType dtype) -> Tensor"
)


def device_linear(x: Tensor, packed: Tensor, bias: Tensor | None, form: DeviceForm, rounds: bool) -> Tensor:
    """Return x @ W.T (+ bias), summed in float32.

    Args:
        x: [..., I] float32, fp16 or bf16.
        packed: [nbytes] uint8.
        bias: [O] x's dtype, or None.
        rounds: x is rounded to int8 codes, one scale for each row; the products of codes are exact.

    Returns:
        [..., O] x's dtype.
    """
    op = torch.ops.graphcore.device_linear.default
    return op(x, packed, bias, form.format, form.rows, rounds)  # type: ignore[no-any-return]


def device_rows(ids: Tensor, packed: Tensor, form: DeviceForm, dtype: torch.dtype) -> Tensor:
    """Return rows of the matrix, bit-exact: [...] int64 -> [..., I] dtype; zeros for ids that are none."""
    op = torch.ops.graphcore.device_rows.default
    return op(ids, packed, form.format, form.rows, form.columns, dtype)  # type: ignore[no-any-return]


def device_matrix(packed: Tensor, form: DeviceForm, dtype: torch.dtype) -> Tensor:
    """Return the whole matrix, bit-exact: [nbytes] uint8 -> [O, I] dtype."""
    op = torch.ops.graphcore.device_matrix.default
    return op(packed, form.format, form.rows, form.columns, dtype)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::device_linear")  # type: ignore[untyped-decorator]  # torch does not type it
def _linear_fake(x: Tensor, _packed: Tensor, _bias: Tensor | None, _name: str, rows: int, _rounds: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.register_fake("graphcore::device_rows")  # type: ignore[untyped-decorator]  # torch does not type it
def _rows_fake(ids: Tensor, packed: Tensor, _name: str, _rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*ids.shape, columns), dtype=dtype)


@torch.library.register_fake("graphcore::device_matrix")  # type: ignore[untyped-decorator]  # torch does not type it
def _matrix_fake(packed: Tensor, _name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((rows, columns), dtype=dtype)


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, name: str, rows: int, rounds: bool) -> Tensor:
    from graphcore.kernels.gpu.packed_linear import launch_packed_linear

    return launch_packed_linear(x, packed, bias, DeviceForm(name, rows, x.shape[-1]), rounds)


def _rows(ids: Tensor, packed: Tensor, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    from graphcore.kernels.gpu.unpack import launch_rows

    return launch_rows(ids, packed, DeviceForm(name, rows, columns), dtype)


def _matrix(packed: Tensor, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    from graphcore.kernels.gpu.unpack import launch_unpack

    return launch_unpack(packed, DeviceForm(name, rows, columns), dtype)


# Not as decorators: torch's would leave None under the functions' names. quant/device_packing.py has the CPU's.
torch.library.impl("graphcore::device_linear", "CUDA", _linear)
torch.library.impl("graphcore::device_rows", "CUDA", _rows)
torch.library.impl("graphcore::device_matrix", "CUDA", _matrix)
