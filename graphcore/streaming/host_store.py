"""Streamed weights that wait in RAM, laid out as in their slots, so that one copy moves a group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.kernels.packing import Packing
from graphcore.nn.decoder import Decoder
from graphcore.streaming.pinned_memory import private_pages
from graphcore.weights.conversion import fill_weight
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.matching import EMBEDDING, FEATURES, HEAD
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.slots import Slot


@dataclass(frozen=True)
class HostStore:
    """Weights in RAM that move to the device while the model runs.

    Attributes:
        groups: [nbytes] uint8, the bytes of a group laid out as in its slot, by group.
        tables: whole weights, by name: the head, tables whose rows are gathered, experts' matrices.
    """

    groups: Mapping[int, Tensor]
    tables: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that the store takes; groups that are slices of a table are counted once."""
        held = [*self.groups.values(), *self.tables.values()]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}.values())


def fill_store(loader: Loader, decoder: Decoder, groups: Sequence[Group], tables: Sequence[str]) -> HostStore:
    """Read weights from the checkpoint into a store in RAM, each once.

    Args:
        groups: groups that stream.
        tables: names of whole weights to store: "lm_head.weight" if parts of it stream, tables whose rows are
            gathered, experts' matrices.

    Raises:
        CheckpointError: a file changed, or holds values that are not valid weights.
    """
    whole = {name: _whole(loader, decoder, name) for name in tables}
    held: dict[int, Tensor] = {}
    for group in groups:
        weight = group.weights[0]
        if weight.rows is not None:
            held[group.index] = _rows_of(whole[weight.name], weight.rows, decoder)
            continue
        held[group.index] = read_group(loader, group)
    return HostStore(held, whole)


def read_group(loader: Loader, group: Group) -> Tensor:
    """Read a group from the checkpoint's files and return its bytes in RAM, [nbytes] uint8."""
    slot = Slot(private_pages(group.layout.nbytes))
    for weight, view in zip(group.weights, slot.views(group.layout).values(), strict=True):
        fill_weight(loader, weight.name, weight.packing, view, weight.rows)
    return slot.raw


def read_table(loader: Loader, name: str, packing: Packing | None, like: Tensor) -> Tensor:
    """Read a whole weight from the checkpoint's files and return it in RAM, in the shape and dtype of `like`."""
    table = private_pages(like.nbytes).view(like.dtype).view(like.shape)
    fill_weight(loader, name, packing, table)
    return table


def _whole(loader: Loader, decoder: Decoder, name: str) -> Tensor:
    if name in (EMBEDDING, FEATURES):
        table = decoder.table(name)
        return read_table(loader, name, table.packing, table.weight)
    group = decoder.head if name == HEAD else decoder
    return read_table(loader, name, packing_of(group, name), group.get_buffer(name))


def _rows_of(table: Tensor, rows: range, decoder: Decoder) -> Tensor:
    """Return the bytes of a range of the head's rows, as a view of its table."""
    packing = decoder.head.lm_head.packing
    if packing is None:
        return table[rows.start : rows.stop].view(-1).view(torch.uint8)
    if len(rows) == decoder.head.lm_head.outputs:
        return table
    part, begin = packing.part(rows.start, rows.stop)
    return table[begin : begin + part.nbytes]
