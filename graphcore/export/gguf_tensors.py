"""Conversion of the decoder's weights to GGUF's tensors: the inverse of the architecture's GGUF sources.

    architecture     decoder's q_proj = SplitPairs of blk.0.attn_q        so    blk.0.attn_q = JoinPairs of q_proj
                     q, k, v_proj     = rows of blk.0.attn_qkv                  blk.0.attn_qkv = q, k, v_proj in a row

An architecture needs no table of its own here if `unfolded` can undo the folds of its GGUF sources.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.folds import AsOneRow, Fold, GroupHeads, PickParts, PickRows, SplitPairs, Times
from graphcore.errors import UnsupportedError


@dataclass(frozen=True)
class Member:
    """One of the decoder's weights in a GGUF tensor, with the folds that turn the stored form into the decoder's."""

    name: str
    folds: tuple[Fold, ...]

    @property
    def first_row(self) -> int:
        """Index of its first row in the GGUF tensor."""
        return next((fold.start for fold in self.folds if isinstance(fold, PickRows)), 0)

    @property
    def axis(self) -> int:
        """Axis of its rows in the GGUF tensor."""
        return next((fold.axis for fold in self.folds if isinstance(fold, PickRows)), 0)


def gguf_members(names: Sequence[str], source_of: Callable[[str], TensorSource]) -> dict[str, tuple[Member, ...]]:
    """Return the decoder's weights in each GGUF tensor, in order of rows; tensors are in order of first use."""
    found: dict[str, list[Member]] = {}
    for name in names:
        source = source_of(name)
        found.setdefault(source.name, []).append(Member(name, source.folds))
    return {name: tuple(sorted(members, key=lambda member: member.first_row)) for name, members in found.items()}


def gguf_shape(members: Sequence[Member], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a GGUF tensor, given the shapes of the decoder's weights."""
    if any(isinstance(fold, AsOneRow) for fold in members[0].folds):
        return (shapes[members[0].name][1],)
    shape, axis = list(shapes[members[0].name]), members[0].axis
    shape[axis] = sum(shapes[member.name][axis] for member in members)
    return tuple(shape)


def unfolded(members: Sequence[Member], weight_of: Callable[[str], Tensor], tensor_name: str) -> Tensor:
    """Return the dense GGUF tensor that holds the members.

    Args:
        weight_of: function from a decoder name to its dense weight in the decoder's form.

    Raises:
        UnsupportedError: a fold cannot be undone.
    """
    if len(members) > 1 and all(isinstance(fold, PickParts) for member in members for fold in member.folds[:1]):
        return _regrouped(members, weight_of, tensor_name)
    parts = []
    for member in members:
        part = weight_of(member.name)
        for fold in reversed(member.folds):
            part = _undo(fold, part, tensor_name)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=members[0].axis)


def _regrouped(members: Sequence[Member], weight_of: Callable[[str], Tensor], tensor_name: str) -> Tensor:
    """Return the GGUF tensor whose groups of rows each consist of parts of several members."""
    pieces: dict[int, Tensor] = {}  # [groups, rows of the part, ...] by the part's first row
    for member in members:
        fold, *after = member.folds
        assert isinstance(fold, PickParts), "checked by the caller"
        weight = weight_of(member.name)
        for other in reversed(after):
            weight = _undo(other, weight, tensor_name)
        sizes = [fold.groups * (end - begin) for begin, end in fold.parts]
        for (begin, _), rows in zip(fold.parts, weight.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            pieces[begin] = rows.reshape(fold.groups, -1, *rows.shape[1:])
    return torch.cat([pieces[begin] for begin in sorted(pieces)], dim=1).flatten(0, 1)


def _undo(fold: Fold, tensor: Tensor, tensor_name: str) -> Tensor:
    match fold:
        case PickRows():
            return tensor  # its rows are where the order of the members puts them
        case SplitPairs() | GroupHeads():
            return fold.undo(tensor)
        case AsOneRow():
            return tensor.flatten()
        case Times(factor):
            return tensor / factor
    raise UnsupportedError(f"{tensor_name}: {type(fold).__name__} has no way back into GGUF's form")
