"""What is done to a stored tensor, once, at load, so that every source arrives in one form.

Legend: R rows (output features), C columns (input features), H heads, E head dim, X experts.

A fold that only moves or picks rows works on packed rows as well as on dense ones: a row is never cut.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from einops import rearrange
from torch import Tensor


class Fold(ABC):
    """A change of one tensor."""

    @abstractmethod
    def apply(self, tensor: Tensor) -> Tensor:
        """Return the changed tensor; it may share memory with the given one."""


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
