"""Folds: changes that are applied once to a stored tensor at load, so that all sources end in one form.

Legend: R rows (output features), C columns (input features), H heads, E head dim, X experts.

A fold that only moves or picks whole rows works on packed rows as well as on dense ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    def shape_of(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that `apply` gives a tensor of shape `stored`.

        Raises:
            RuntimeError, ValueError, IndexError: tensors of that shape cannot be changed so.
        """
        return tuple(self.apply(torch.empty(stored, dtype=torch.float32, device="meta")).shape)

    def apply_packed(self, rows: Tensor, scale: float) -> tuple[Tensor, float]:
        """Return the changed packed rows, [..., R, bytes] uint8, and the changed scale of the whole tensor."""
        assert self.works_packed, f"{type(self).__name__} needs the values"
        return self.apply(rows), scale


class ElementwiseFold(Fold):
    """A fold that changes each value on its own and keeps the shape.

    Its shape is not found on the meta device: arithmetic there imports torch._dynamo, which takes 1.7 s.
    """

    def shape_of(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return `stored`: an elementwise change keeps the shape."""
        return tuple(stored)


class ScaleFold(Fold):
    """A fold that reduces a matrix to its scale."""

    def shape_of(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return (1,): one scale for the whole matrix."""
        return (1,)


@dataclass(frozen=True)
class Transpose(Fold):
    """The transpose of a dense matrix stored by input row (GPT-2's Conv1D, gpt-oss's bf16 experts): to [..., R, C]."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the transposed matrix."""
        return tensor.mT


@dataclass(frozen=True)
class PickRows(Fold):
    """Rows start, start + step, ... below stop of a tensor: q, k or v of a fused projection, or an expert's gate or up.

    Attributes:
        axis: axis of the rows: 0, or for experts -2 in weights [X, R, C] and -1 in biases [X, R].
    """

    works_packed = True

    start: int
    stop: int
    step: int = 1
    axis: int = 0

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the selected rows, as a view."""
        return tensor.movedim(self.axis, 0)[self.start : self.stop : self.step].movedim(0, self.axis)


@dataclass(frozen=True)
class PickParts(Fold):
    """A selection of the same rows of each of several groups of rows: part by part, and group by group within a part.

    Qwen stores a query and its gate side by side for each head, and q, k, v and z for each key head.

    Attributes:
        groups: number of groups; the tensor's rows divide into them evenly.
        parts: first row and end of each part, within a group.
    """

    works_packed = True

    groups: int
    parts: tuple[tuple[int, int], ...]

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the selected rows, or elements of a bias."""
        grouped = tensor.reshape(self.groups, tensor.shape[0] // self.groups, *tensor.shape[1:])
        return _joined([grouped[:, begin:end].flatten(0, 1) for begin, end in self.parts])


@dataclass(frozen=True)
class AsHeads(Fold):
    """The change of rows of consecutive heads to a matrix for each head: [H * R, C] to [H, R, C]."""

    works_packed = True

    heads: int

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the matrices, as a view if the rows are one run."""
        return tensor.reshape(self.heads, tensor.shape[0] // self.heads, *tensor.shape[1:])


@dataclass(frozen=True)
class GroupHeads(Fold):
    """The inverse of llama.cpp's order of value heads: from tiled to grouped by key head.

    tiled    v0 of k0, v0 of k1, ..., v1 of k0, v1 of k1, ...
    grouped  v0 of k0, v1 of k0, ..., v0 of k1, v1 of k1, ...

    Attributes:
        key_heads, per_key: number of key heads, and of value heads of each.
        width: rows, or columns, of one value head.
        first: first row of the value heads; those before it stay.
        of_columns: True for the columns of a matrix instead of its rows.
    """

    key_heads: int
    per_key: int
    width: int
    first: int = 0
    of_columns: bool = False

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the tensor with value heads grouped by key head."""
        return self._moved(tensor, "(v k w)", "(k v w)")

    def undo(self, tensor: Tensor) -> Tensor:
        """Return the tensor with value heads tiled."""
        return self._moved(tensor, "(k v w)", "(v k w)")

    def _moved(self, tensor: Tensor, before: str, after: str) -> Tensor:
        pattern = f"r {before} -> r {after}" if self.of_columns else f"{before} ... -> {after} ..."
        moved = rearrange(tensor[self.first :], pattern, k=self.key_heads, v=self.per_key, w=self.width)
        return _joined([tensor[: self.first], moved]) if self.first else moved


@dataclass(frozen=True)
class NegatedExp(ElementwiseFold):
    """The change of A_log to -exp(A_log) in float32, the form in which GGUF files store it."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return -exp(tensor), float32."""
        return -tensor.float().exp()


@dataclass(frozen=True)
class WithoutChannelAxis(Fold):
    """The change of a depthwise convolution's weight from [C, 1, W] to [C, W]."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the weight without its axis of size 1, as a view."""
        return tensor.squeeze(1)


@dataclass(frozen=True)
class AsOneRow(Fold):
    """The change of a vector [C] to a matrix of one row, [1, C]."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the matrix, as a view."""
        return tensor.reshape(1, -1)


@dataclass(frozen=True)
class SplitPairs(Fold):
    """The change of rows of q and k from interleaved rotary pairs to halves (llama.cpp's row order, and GLM's).

    Stored row h * E + 2i + j becomes row h * E + j * W/2 + i (i < W/2, j in {0, 1}); a head's other rows stay.

    Attributes:
        width: W, number of features of a head that rotate, from the first on; None for all.
    """

    works_packed = True

    heads: int
    width: int | None = None

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the rows, or the bias elements, in half-split order."""
        return self._moved(tensor, "h (i j) ... -> h (j i) ...")

    def undo(self, tensor: Tensor) -> Tensor:
        """Return the rows, or the bias elements, with interleaved pairs."""
        return self._moved(tensor, "h (j i) ... -> h (i j) ...")

    def _moved(self, tensor: Tensor, pattern: str) -> Tensor:
        heads = tensor.unflatten(0, (self.heads, -1))  # type: ignore[no-untyped-call]
        turning, rest = heads[:, : self.width], heads[:, heads.shape[1] if self.width is None else self.width :]
        moved = rearrange(turning, pattern, j=2)
        return (_joined([moved, rest], dim=1) if rest.shape[1] else moved).flatten(0, 1)


@dataclass(frozen=True)
class AddOne(ElementwiseFold):
    """The change of w to 1 + w in float32, for norms: Gemma's safetensors store w, its GGUF files 1 + w."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return 1 + tensor, float32."""
        return tensor.float() + 1.0


@dataclass(frozen=True)
class Times(ElementwiseFold):
    """The product of a vector with a constant, in float32 (a scale that Gemma 4's router divides by sqrt(dim))."""

    factor: float

    def apply(self, tensor: Tensor) -> Tensor:
        """Return tensor * factor, float32."""
        return tensor.float() * self.factor


@dataclass(frozen=True)
class WithoutScale(ElementwiseFold):
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
class ScaleOnly(ScaleFold):
    """The change of a ternary weight [R, C] to its scale [1], max |w|."""

    in_float32 = True

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the scale, float32."""
        return _peak(tensor)


@dataclass(frozen=True)
class InverseScale(ScaleFold):
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


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; on the meta device without `torch.cat`, which imports torch._dynamo there (1.7 s)."""
    if not parts[0].is_meta:
        return torch.cat(list(parts), dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def _peak(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor.float())
    return torch.maximum(-low, high).reshape(1)
