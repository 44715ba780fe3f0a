"""Mends what Triton's interpreter (seen in 3.6 to 3.9) does to bfloat16, which it keeps as bits.

`tl.dot` multiplies the bits as integers, and a cast from float32 cuts bits off where a GPU rounds to nearest even.
Triton 3.6 also makes a Python integer of an array with one axis, which NumPy 2.5 refuses.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

own_patch = interpreter._patch_lang_tensor


class MendedBuilder:
    """What takes the place of the interpreter's own two functions."""

    own_dot = InterpreterBuilder.create_dot
    own_cast = InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return MendedBuilder.own_dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: TensorHandle, dtype: Any) -> TensorHandle:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return TensorHandle(rounded(source.data), tl.bfloat16)
        return MendedBuilder.own_cast(self, source, dtype)


def mend_interpreter() -> None:
    """Let products of bfloat16 be products of values, and casts to it round; again is harmless."""
    InterpreterBuilder.create_dot = MendedBuilder.create_dot
    InterpreterBuilder.cast_impl = MendedBuilder.cast_impl
    interpreter._patch_lang_tensor = patch_tensor


def patch_tensor(tensor: Any, scope: Any) -> None:
    own_patch(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


def widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the bits of bfloat16, rounded to nearest even."""
    bits = np.asarray(values, order="C").view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), nearest).astype(np.uint16)
