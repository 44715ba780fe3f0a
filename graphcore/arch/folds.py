"""What is done to a stored tensor, once, at load, so that every source arrives in one form.

Legend: R rows (output features), C columns (input features), H heads, E head dim, X experts.

A fold that only moves or picks rows works on packed rows as well as on dense ones: a row is never cut.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor


class Fold(ABC):
    """A change of one tensor.

    Attributes:
        in_float32: it computes with the values, so packed tensors are unpacked to float32 for it.
        works_packed: it moves or picks whole rows, or changes a scale that stands beside them.
    """

    in_float32: ClassVar[bool] = False
    works_packed: ClassVar[bool] = False

    @abstractmethod
    def apply(self, tensor: Tensor) -> Tensor:
        """Return the changed tensor; it may share memory with the given one."""

    def apply_packed(self, rows: Tensor, scale: float) -> tuple[Tensor, float]:
        """Return the changed rows, [..., R, bytes], and the changed scale of all of them."""
        assert self.works_packed, f"{type(self).__name__} needs the values"
        return self.apply(rows), scale


@dataclass(frozen=True)
class Transpose(Fold):
    """[..., C, R] to [..., R, C]: GPT-2's Conv1D and gpt-oss's bf16 experts are stored by input row. Dense only."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the transposed matrix."""
        return tensor.mT


@dataclass(frozen=True)
class PickRows(Fold):
    """Rows start, start + step, ... below stop: one of q, k, v out of a fused projection; an expert's gate or up.

    Attributes:
        axis: of the rows: 0, or -2 in the weights and -1 in the biases of experts, [X, R, C] and [X, R].
    """

    works_packed = True

    start: int
    stop: int
    step: int = 1
    axis: int = 0

    def apply(self, tensor: Tensor) -> Tensor:
        """Return those rows, as a view."""
        return tensor.movedim(self.axis, 0)[self.start : self.stop : self.step].movedim(0, self.axis)


@dataclass(frozen=True)
class SplitPairs(Fold):
    """Undo llama.cpp's row order for q and k: interleaved rotary pairs back to halves.

    GGUF row h * E + 2i + j is row h * E + j * E/2 + i of Hugging Face's weight (i < E/2, j in {0, 1}).
    """

    works_packed = True

    heads: int

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the rows, or the bias elements, in half-split order."""
        return rearrange(tensor, "(h i j) ... -> (h j i) ...", h=self.heads, j=2)


@dataclass(frozen=True)
class AddOne(Fold):
    """w to 1 + w in float32: Gemma's safetensors store a norm's distance from one; its GGUF files hold the sum."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the sum."""
        return tensor.float() + 1.0


@dataclass(frozen=True)
class WithoutScale(Fold):
    """w / max |w|: -1, 0 and 1 of a ternary weight, exactly."""

    in_float32 = True
    works_packed = True

    def apply_packed(self, rows: Tensor, scale: float) -> tuple[Tensor, float]:
        """Return the rows with a scale of 1."""
        return rows, 1.0

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the quotient, float32."""
        return tensor.float() / _peak(tensor).clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class ScaleOnly(Fold):
    """[R, C] to [1]: max |w|, the scale of a ternary weight."""

    in_float32 = True

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the scale, float32."""
        return _peak(tensor)


@dataclass(frozen=True)
class InverseScale(Fold):
    """[R, C] to [1]: the number whose inverse max |w| is.

    Such weights are stored with a divisor, usually in bf16. Inverting twice in float32 does not always give it back, so
    the bf16 number is taken if its inverse is the scale.
    """

    in_float32 = True

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the divisor, float32; 1 for a weight of zeros."""
        peak = _peak(tensor)
        scale = torch.where(peak > 0, peak, 1.0)
        exact = 1.0 / scale
        short = exact.to(torch.bfloat16).float()
        return torch.where(1.0 / short == scale, short, exact)


def _peak(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor.float())
    return torch.maximum(-low, high).reshape(1)
