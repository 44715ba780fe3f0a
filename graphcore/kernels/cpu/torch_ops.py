"""Ops of compiled steps that torch's dispatcher calls in C++ (native/torch_ops.cpp), without Python in between.

A call of an op that Python implements costs about a tenth of a millisecond, and a decode step of a small model makes
hundreds. These ops do what `packed_linear` (kernel_packing.py) and `attend` (kernels/ops/attend.py) do, to the bit, for
arguments that need no choice at run time; their callers know from shapes whether an op fits.

The ops use torch's stable C interface as torch 2.13 has it; with an older torch they do not exist. A process has one
implementation of them, so only the first library that it opens has them.

Legend: B batch, T tokens, H heads, K kv heads, E head dim, P pages, N pages of a sequence, G positions of a page,
I columns, O rows of a matrix.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op

# The functions of torch's C interface that the ops call, in the order of native/torch_ops.cpp.
FUNCTIONS = (
    "aoti_torch_library_init_impl",
    "torch_library_impl",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_dtype",
    "torch_get_mutable_data_ptr",
    "aoti_torch_empty_strided",
    "aoti_torch_delete_tensor_object",
    "torch_delete_stable_ivalue",
    "torch_get_num_threads",
)

_implementing: list[str] = []  # the library whose functions the ops call, once there is one


def implement(library: ctypes.CDLL, path: str) -> None:
    """Make the library implement the ops, if torch has the interface and no other library does already.

    Args:
        path: the library's file, by which `are_implemented_by` knows it.
    """
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if _implementing or not torch_library.exists():
        return
    interface = ctypes.CDLL(str(torch_library))  # torch has loaded it
    addresses = [
        ctypes.cast(getattr(interface, name), ctypes.c_void_p) for name in FUNCTIONS if hasattr(interface, name)
    ]
    if len(addresses) == len(FUNCTIONS):
        table = (ctypes.c_void_p * len(FUNCTIONS))(*(one.value for one in addresses))
        if library.graphcore_implement_torch_ops(table) == 0:
            _implementing.append(path)


def are_implemented_by(path: str) -> bool:
    """Return whether the ops call this library."""
    return path in _implementing


def _linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, number: int, rows: int, columns: int, rounding: int
) -> Tensor:
    """Return x @ W.T (+ bias): [..., I] contiguous -> [..., O]; fewer tokens than `DENSE_TOKENS` (kernel_packing.py).

    Args:
        bias: [O] float32 contiguous, or None.
        number: number of the matrix's format, as in `FORMAT_NUMBERS`.
        rounding: rounding of x, as in `ROUNDINGS`.
    """
    raise NotImplementedError


def _attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    k_format: int,
    v_format: int,
    window: int,
    scale: float,
    sinks: Tensor | None,
    cap: float,
) -> Tensor:
    """Attend as `attend` does, with keys and values in pools of their own; all tensors are contiguous.

    Args:
        k_format, v_format: numbers of the pools' formats (`cache_number` in attention.py).
        sinks: [H] float32, or None.
    """
    raise NotImplementedError


native_linear = register_custom_op(
    "native_linear", _linear, lambda x, rows: x.new_empty((*x.shape[:-1], rows)), dispatch_key=None
)
native_attend = register_custom_op(
    "native_attend",
    _attend,
    lambda query: query.new_empty(query.shape),
    mutates_args=["k_cache", "v_cache"],
    dispatch_key=None,
)
