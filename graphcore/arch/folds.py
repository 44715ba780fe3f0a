"""Folds: changes that are applied once to a stored tensor at load, so that all sources end in one form.

Legend: R rows (output features), C columns (input features), H heads, E head dim, X experts.

A fold that only moves or picks whole rows works on packed rows as well as on dense ones.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor


class Fold(ABC):
    """The interface of a change to one stored tensor.

    Attributes:
        in_float32: True if the fold computes with values, so that packed tensors are unpacked to float32 for it.
        works_packed: True if the fold works on packed rows: it moves or picks whole rows, or changes only their scale.
    """

    in_float32: ClassVar[bool] = False
    works_packed: ClassVar[bool] = False

    @abstractmethod
    def apply(self, tensor: Tensor) -> Tensor:
        """Return the changed tensor, which may share memory with the original."""

    def apply_packed(self, rows: Tensor, scale: float) -> tuple[Tensor, float]:
        """Return the changed packed rows, [..., R, bytes] uint8, and the changed scale of the whole tensor."""
        assert self.works_packed, f"{type(self).__name__} needs the values"
        return self.apply(rows), scale


@dataclass(frozen=True)
class Transpose(Fold):
    """The transpose of a dense matrix stored by input row (GPT-2's Conv1D, gpt-oss's bf16 experts): to [..., R, C]."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the transposed matrix."""
        return tensor.mT


@dataclass(frozen=True)
class PickRows(Fold):
    """A choice of rows start, start + step, ... below stop: q, k or v of a fused projection, or an expert's gate or up.

    Attributes:
        axis: axis of the rows: 0, or for experts -2 in weights [X, R, C] and -1 in biases [X, R].
    """

    works_packed = True

    start: int
    stop: int
    step: int = 1
    axis: int = 0

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the chosen rows, as a view."""
        return tensor.movedim(self.axis, 0)[self.start : self.stop : self.step].movedim(0, self.axis)


@dataclass(frozen=True)
class SplitPairs(Fold):
    """The inverse of llama.cpp's row order for q and k: from interleaved rotary pairs back to halves.

    GGUF row h * E + 2i + j is row h * E + j * E/2 + i of Hugging Face's weight (i < E/2, j in {0, 1}).
    """

    works_packed = True

    heads: int

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the rows, or the bias elements, in half-split order."""
        return rearrange(tensor, "(h i j) ... -> (h j i) ...", h=self.heads, j=2)


@dataclass(frozen=True)
class AddOne(Fold):
    """The change of w to 1 + w in float32, for norms: Gemma's safetensors store w, its GGUF files 1 + w."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return 1 + tensor, float32."""
        return tensor.float() + 1.0


@dataclass(frozen=True)
class WithoutScale(Fold):
    """The change of a ternary weight w to w / max |w|, which is exactly -1, 0 and 1."""

    in_float32 = True
    works_packed = True

    def apply_packed(self, rows: Tensor, scale: float) -> tuple[Tensor, float]:
        """Return the rows with a scale of 1."""
        return rows, 1.0

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the ternary values, float32."""
        return tensor.float() / _peak(tensor).clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class ScaleOnly(Fold):
    """The change of a ternary weight [R, C] to its scale [1], max |w|."""

    in_float32 = True

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the scale, float32."""
        return _peak(tensor)


@dataclass(frozen=True)
class InverseScale(Fold):
    """The change of a ternary weight [R, C] to its divisor [1], the inverse of max |w|.

    Such weights are stored with a divisor, usually in bf16. Two inversions in float32 do not always restore it, so the
    nearest bf16 number is taken if its inverse is the scale.
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
