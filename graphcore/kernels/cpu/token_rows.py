"""Norms, rotation and gated activations of many tokens in C++: what lies between the products of a prompt's chunk.

In plain torch each of them is several operations over the whole chunk, which together took a third of the time of a
prompt of 128 tokens. Numbers are rounded where the modules of nn/ round them.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.cpu import products
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS, KernelPacking
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, Matrix, open_library
from graphcore.kernels.cpu.products import Operand
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.packing import Packing

POINTER, INT = ctypes.c_void_p, ctypes.c_int32
SHARED_ELEMENTS = 1 << 15  # from this many numbers on, threads share the work


class NormRows(ctypes.Structure):
    """The struct of native/token_rows.h."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "y")),
        *((name, INT) for name in ("rows", "columns", "format", "out_format", "rounds_first")),
        ("eps", ctypes.c_float),
    )


class RotateRows(ctypes.Structure):
    """The struct of native/token_rows.h."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "rope", "y")),
        *((name, INT) for name in ("tokens", "heads", "head_dim", "width", "format")),
    )


class GateRows(ctypes.Structure):
    """The struct of native/token_rows.h."""

    _fields_ = (
        *((name, POINTER) for name in ("gate", "up", "y")),
        ("size", ctypes.c_int64),
        *((name, INT) for name in ("format", "activation")),
    )


class AddRows(ctypes.Structure):
    """The struct of native/token_rows.h."""

    _fields_ = (*((name, POINTER) for name in ("x", "added", "y")), ("size", ctypes.c_int64), ("format", INT))


def _norm_rows(
    x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype, rounds_first: bool, library: str
) -> Tensor:
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device="cpu")
    columns = x.shape[-1]
    pointers = x.data_ptr(), None if weight is None else weight.data_ptr(), y.data_ptr()
    formats = DTYPE_NUMBERS[x.dtype], DTYPE_NUMBERS[dtype]
    given = NormRows(*pointers, x.numel() // columns, columns, *formats, rounds_first, eps)
    open_library(library).graphcore_norm_rows(_threads(x), ctypes.byref(given))
    return y


def _rotate_rows(x: Tensor, rope: Tensor, library: str) -> Tensor:
    x, rope = x.contiguous(), rope.contiguous()
    y = torch.empty_like(x)
    heads, head_dim = x.shape[-2:]
    sizes = x.numel() // (heads * head_dim), heads, head_dim, 2 * rope.shape[-1]
    given = RotateRows(x.data_ptr(), rope.data_ptr(), y.data_ptr(), *sizes, DTYPE_NUMBERS[x.dtype])
    open_library(library).graphcore_rotate_rows(_threads(x), ctypes.byref(given))
    return y


def _gate_rows(gate: Tensor, up: Tensor | None, activation: int, library: str) -> Tensor:
    gate, up = gate.contiguous(), None if up is None else up.contiguous()
    y = torch.empty_like(gate)
    pointers = gate.data_ptr(), None if up is None else up.data_ptr(), y.data_ptr()
    given = GateRows(*pointers, gate.numel(), DTYPE_NUMBERS[gate.dtype], activation)
    open_library(library).graphcore_gate_rows(_threads(gate), ctypes.byref(given))
    return y


def _add_rows(x: Tensor, added: Tensor, library: str) -> Tensor:
    x, added = x.contiguous(), added.contiguous()
    y = torch.empty_like(x)
    given = AddRows(x.data_ptr(), added.data_ptr(), y.data_ptr(), x.numel(), DTYPE_NUMBERS[added.dtype])
    open_library(library).graphcore_add_rows(_threads(x), ctypes.byref(given))
    return y


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= SHARED_ELEMENTS else 1


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


norm_rows = register_custom_op(
    "norm_rows",
    _norm_rows,
    lambda x, dtype: torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format),
    dispatch_key="CPU",
)
rotate_rows = register_custom_op("rotate_rows", _rotate_rows, _empty, dispatch_key="CPU")
gate_rows = register_custom_op("gate_rows", _gate_rows, lambda gate: _empty(gate), dispatch_key="CPU")
add_rows = register_custom_op("add_rows", _add_rows, _empty, dispatch_key="CPU")


@dataclass(frozen=True)
class TokenRows:
    """The C++ kernels for rows of tokens on the CPU, in float32, fp16 and bf16.

    Attributes:
        library: path of the kernels' library.
    """

    library: str

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype, rounds_first: bool = False
    ) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight.

        Args:
            x: [..., D].
            weight: [D] float32; None for none.
            dtype: dtype of the result.
            rounds_first: True to round the normalised x and the weight to `dtype` before they are multiplied.

        Returns:
            [..., D].
        """
        return norm_rows(x, weight, eps, dtype, rounds_first, self.library)

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """Apply rotary position embeddings to heads [B, T, H, E], as `nn.rope.rotate` does.

        Args:
            rope: [B, T, 2, R/2] float32, cosines and sines; the features from R on stay.
        """
        return rotate_rows(x, rope, self.library)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, of one shape and dtype; the activation is rounded to the dtype."""
        return gate_rows(gate, up, int(activation), self.library)

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """Return x + added, float32, for `x` in float32 and `added` of the same shape in any of the dtypes."""
        return add_rows(x, added, self.library)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(x), elementwise, in x's dtype.

        torch's own functions compute the last numbers of a tensor, and of each thread's part, with other instructions.
        """
        return gate_rows(x, None, int(activation), self.library)

    def row_operand(self, weight: Tensor, bias: Tensor | None) -> Operand:
        """Return the operand of the kernel that multiplies dense rows [O, I] in float32, in one order for any batch.

        At 256 tokens it is a third slower than a library, so that it is for matrices of few rows.
        """
        matrix = Matrix(weight.data_ptr(), *weight.shape, DTYPE_NUMBERS[weight.dtype], 1.0)
        return Operand(matrix, weight, bias, "float", self.library)

    def operand(
        self, x: Tensor, weight: Tensor, packing: Packing | None, rounding: str, bias: Tensor | None
    ) -> Operand | None:
        """Return the operand of the C++ kernels (products.py) for a weight, or None if torch has to multiply it.

        Args:
            x: [..., I].
            weight: [O, I] of a dtype, or packed.
            packing: layout of the weight; None if it is dense.
            rounding: rounding of `x` for a packed weight.
            bias: [O], or None.
        """
        if packing is not None:
            return packing.operand(x, weight, bias, rounding) if isinstance(packing, KernelPacking) else None
        is_narrow = x.dtype is weight.dtype is torch.bfloat16
        is_whole = weight.is_contiguous() and x.shape[-1] % products.BLOCK_COLUMNS == 0
        is_long = x.numel() >= DENSE_TOKENS * x.shape[-1]
        if not (is_narrow and is_whole and is_long and products.has_panels(self.library)):
            return None
        matrix = Matrix(weight.data_ptr(), *weight.shape, DTYPE_NUMBERS[weight.dtype], 1.0)
        return Operand(matrix, weight, bias, products.PANELS, self.library)


def runs_now(x: Tensor) -> bool:
    """Return whether `x` is a CPU tensor in eager mode, not one that torch.fx or torch.compile traces."""
    is_plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in DTYPE_NUMBERS
    return is_plain and x.numel() > 0 and not torch.compiler.is_compiling()
