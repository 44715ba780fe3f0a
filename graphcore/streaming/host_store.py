"""Weights that wait in RAM, in the very bytes that slots hold, for one copy per group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.nn.decoder import Decoder
from graphcore.streaming.pages import private_pages
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.matching import EMBEDDING, HEAD
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.pieces import pieces_of
from graphcore.weights.residents import fill_from_files
from graphcore.weights.slots import Slot


@dataclass(frozen=True)
class HostStore:
    """Groups' bytes in RAM.

    Attributes:
        groups: [nbytes] uint8 of each group, laid out as in its slot.
        tables: whole weights by name: the head, the embedding's table if it waits here too, experts' matrices.
    """

    groups: Mapping[int, Tensor]
    tables: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of RAM; parts of a table are not counted twice."""
        held = [*self.groups.values(), *self.tables.values()]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}.values())


def fill_store(loader: Loader, decoder: Decoder, groups: Sequence[Group], tables: Sequence[str]) -> HostStore:
    """Return a store with every byte in its place, read from the checkpoint once.

    Args:
        groups: that stream.
        tables: names of whole weights that are wanted: "lm_head.weight" where parts of it stream, or a table to gather
            rows from, or experts' matrices.

    Raises:
        CheckpointError: a file changed, or holds values that are no weights.
    """
    whole = {name: _whole(loader, decoder, name) for name in tables}
    held: dict[int, Tensor] = {}
    for group in groups:
        place = group.places[0]
        if place.rows is not None:
            held[group.index] = _rows_of(whole[place.name], place.rows, decoder)
            continue
        slot = Slot(private_pages(group.layout.nbytes))
        for place, view in zip(group.places, slot.views(group.layout).values(), strict=True):
            for piece in pieces_of(loader, place.name, place.packing, view):
                fill_from_files(loader, piece)
        held[group.index] = slot.raw
    return HostStore(held, whole)


def _whole(loader: Loader, decoder: Decoder, name: str) -> Tensor:
    leaf = "weight" if name == EMBEDDING else name
    group = {HEAD: decoder.head, EMBEDDING: decoder.embed_tokens}.get(name, decoder)
    owner = group.get_buffer(leaf)
    table = private_pages(owner.nbytes).view(owner.dtype).view(owner.shape)
    for piece in pieces_of(loader, name, packing_of(group, leaf), table):
        fill_from_files(loader, piece)
    return table


def _rows_of(table: Tensor, rows: range, decoder: Decoder) -> Tensor:
    """Return the bytes of some rows of the head."""
    packing = decoder.head.lm_head.packing
    if packing is None:
        return table[rows.start : rows.stop].view(-1).view(torch.uint8)
    if len(rows) == decoder.head.lm_head.outputs:
        return table
    part, begin = packing.part(rows.start, rows.stop)
    return table[begin : begin + part.nbytes]
