"""From a checkpoint to a decoder whose resident weights are in place: one allocation, filled piece by piece, bound."""

from collections.abc import Collection

import torch
from torch import nn

from graphcore.checkpoint.file_bytes import read_span
from graphcore.nn.decoder import Decoder
from graphcore.progress import Progress
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.loader import Loader
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.pieces import Piece, pieces_of
from graphcore.weights.residency import check_resident
from graphcore.weights.slots import Slot, bind

CPU = torch.device("cpu")


def load_resident(
    loader: Loader,
    decoder: Decoder,
    device: torch.device,
    on_progress: Progress,
    moved: Collection[str] = (),
) -> int:
    """Give the weights of every group of the decoder a place for good, fill it and bind the buffers to it, once.

    Args:
        decoder: on the meta device.
        on_progress: called with "load", the part that is there now, bytes done and bytes in all.
        moved: names of weights that have no place of their own; they stay on the meta device.

    Returns:
        The bytes of all places.

    Raises:
        CheckpointError: the file changed under us, or holds values that are no weights.
        ResidencyError: a weight did not come to lie where it was planned to.
    """
    groups = list(decoder.groups())
    layouts = [resident_layout(loader, prefix, module, moved) for prefix, module in groups]
    whole = Slot.allocate(sum(layout.nbytes for layout in layouts), device)
    slots = whole.split(layouts)
    done = 0
    for index, ((prefix, module), layout, slot) in enumerate(zip(groups, layouts, slots, strict=True)):
        # Pieces are written by this machine's processor: what lies elsewhere is made here and copied in one run.
        made = slot if device.type == "cpu" else Slot.allocate(layout.nbytes, CPU)
        for name, view in made.views(layout).items():
            for piece in pieces_of(loader, prefix + name, packing_of(module, name), view):
                fill_from_files(loader, piece)
        if made is not slot:
            slot.raw.copy_(made.raw)
        for name, view in slot.views(layout).items():
            bind(module, name, view)
        done += layout.nbytes
        on_progress("load", index, done, whole.raw.nbytes)
    if loader.is_tied and HEAD not in moved:
        bind(decoder.head, HEAD, decoder.embed_tokens.weight)
    check_resident(decoder, whole, layouts, device, moved)
    return whole.raw.nbytes


def fill_from_files(loader: Loader, piece: Piece) -> None:
    """Read a piece's bytes and put them in their place, all on this thread.

    Raises:
        CheckpointError: a file is not what it was, or its bytes are no such weight.
    """
    checkpoint = loader.checkpoint
    piece.write([read_span(span, checkpoint.files[span.file], piece.weight) for span in piece.spans], None)


def resident_layout(loader: Loader, prefix: str, module: nn.Module, moved: Collection[str] = ()) -> Layout:
    """Return the layout of a group's weights that do not move; a tied head has no bytes of its own."""
    left_out = {*moved, HEAD} if loader.is_tied else moved
    return layout_of((name, tensor) for name, tensor in module.named_buffers() if prefix + name not in left_out)
