"""Mends Triton's interpreter, which keeps bfloat16 as its bits and multiplies them in `tl.dot` as if they were integers.

Seen in Triton 3.6 to 3.9; casts and single products are right there.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def mend_dot() -> None:
    """Let `tl.dot` of bfloat16 operands be the product of their values; again is harmless."""
    if InterpreterBuilder.create_dot.__name__ == "dot_of_values":
        return
    dot_of_bits = InterpreterBuilder.create_dot

    def dot_of_values(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return dot_of_bits(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = dot_of_values


def widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
