"""The mended interpreter (tests/support/triton_interpreter.py) still checks what Triton's own does."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.thorough

LARGEST = 2**31 - 1


@triton.jit
def sum_of(x, y):
    return x + y


@triton.jit
def add(out, x, y):
    tl.store(out, sum_of(tl.load(x), tl.load(y)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU wraps around")
def test_a_sum_of_integers_that_does_not_fit_is_an_error() -> None:
    out, x, one = (torch.tensor([value], dtype=torch.int32) for value in (0, LARGEST, 1))
    add[(1,)](out, x, -one)
    assert out.item() == LARGEST - 1
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation add"):
        add[(1,)](out, x, one)
