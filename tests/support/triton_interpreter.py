"""Mends what Triton's interpreter (seen in 3.6 to 3.9) does to bfloat16, which it keeps as bits, and makes it faster.

`tl.dot` multiplies the bits as integers, and a cast from float32 cuts bits off where a GPU rounds to nearest even.
Triton 3.6 also makes a Python integer of an array with one axis, which NumPy 2.5 refuses.

Much of a small kernel's time is not its own: each call of a device function looks through all of `tl` for builtins
that nothing has replaced yet, and each sum of integers is checked for overflow by ten more operations. Here builtins
are found once, a function that a kernel calls finds them replaced, and the check is a few operations of NumPy.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

own_patch = interpreter._patch_lang_tensor
own_replacement = interpreter._patch_lang
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


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
    """Let products of bfloat16 be products of values, and casts to it round, at less cost; again is harmless."""
    InterpreterBuilder.create_dot = MendedBuilder.create_dot
    InterpreterBuilder.cast_impl = MendedBuilder.cast_impl
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = replace_language
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = check_overflow


def replace_language(function: Any) -> Any:
    """Replace the builtins that a kernel or a function sees, unless the kernel that calls it has done so."""
    is_replaced = all(language.static_range.__module__ == interpreter.__name__ for language in languages_of(function))
    return interpreter._LangPatchScope() if is_replaced else own_replacement(function)


@cache
def languages_of(function: Any) -> list[Any]:
    """Return the modules of Triton's language that a function can name."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


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


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name, member in builtins_of(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def builtins_of(package: Any) -> list[tuple[str, Any]]:
    """Return the builtins of a module or class of Triton, as they are before the first launch replaces them."""
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def check_overflow(left: Any, right: Any, operation: Any) -> None:
    """Raise an AssertionError if a sum, difference or product of integers does not fit in their type."""
    scalar = left.type.scalar
    if scalar.int_bitwidth < 64:
        wide = OPERATIONS[operation.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
        fits = scalar.get_int_min_value() <= wide.min() and wide.max() <= scalar.get_int_max_value()
        assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {operation.__name__}"
