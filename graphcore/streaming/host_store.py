"""Streamed weights that are kept in RAM, laid out as they move, so that one copy moves a group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.host_pages import private_pages
from graphcore.kernels.packing import Packing
from graphcore.weights.conversion import fill_weight
from graphcore.weights.groups import Group, GroupWeight
from graphcore.weights.loader import Loader
from graphcore.weights.slots import Slot


class MatrixModule(Protocol):
    """A module with one matrix, which may be on the meta device: a table, a head, a projection of experts."""

    @property
    def weight(self) -> Tensor:
        """Rows of the matrix, or its packed bytes."""

    @property
    def packing(self) -> Packing | None:
        """Packing of the matrix; None if it is dense."""


@dataclass(frozen=True)
class HostStore:
    """Weights in RAM that move to the device while the model runs.

    Attributes:
        groups: [nbytes] uint8, the bytes of a group laid out as in its slot, or as `Group.on_link`, by group.
        tables: whole weights, by name: the head, tables whose rows are gathered, experts' matrices.
    """

    groups: Mapping[int, Tensor]
    tables: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that the store takes; groups that are slices of a table are counted once."""
        held = [*self.groups.values(), *self.tables.values()]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}.values())


def fill_store(loader: Loader, groups: Sequence[Group], matrices: Mapping[str, MatrixModule]) -> HostStore:
    """Read weights from the checkpoint into a store in RAM, each stored tensor once.

    Args:
        groups: groups that stream; for a device with its own memory, as they cross the link (`Group.on_link`).
        matrices: whole matrices to store, by the weights' names: the head if slices of it stream, tables whose rows are
            gathered, experts' matrices.

    Raises:
        CheckpointError: a file changed, or holds values that are not valid weights.
    """
    read: dict[TensorSource, Tensor] = {}  # a tied head and table are one tensor
    for name, matrix in matrices.items():
        if loader.sources[name] not in read:
            read[loader.sources[name]] = _read_whole(loader, name, matrix)
    tables = {name: read[loader.sources[name]] for name in matrices}
    held: dict[int, Tensor] = {}
    for group in groups:
        weight = group.weights[0]
        if weight.rows is not None:
            held[group.index] = _rows_of(tables[weight.name], matrices[weight.name].packing, weight)
            continue
        slot = Slot(private_pages(group.layout.nbytes))
        group.fill(loader, slot)
        held[group.index] = slot.raw
    return HostStore(held, tables)


def _read_whole(loader: Loader, name: str, matrix: MatrixModule) -> Tensor:
    like = matrix.weight
    table = private_pages(like.nbytes).view(like.dtype).view(like.shape)
    fill_weight(loader, name, matrix.packing, table)
    return table


def _rows_of(table: Tensor, packing: Packing | None, part: GroupWeight) -> Tensor:
    """Return the bytes of a row slice, [nbytes] uint8, as a view of the whole matrix, which has the packing."""
    assert part.rows is not None, f"{part.name} is whole"
    if packing is None:
        return table[part.rows.start : part.rows.stop].view(-1).view(torch.uint8)
    if part.tensor.nbytes == table.nbytes:  # some packings cannot be cut
        return table
    _, begin = packing.part(part.rows.start, part.rows.stop)
    return table[begin : begin + part.tensor.nbytes]
