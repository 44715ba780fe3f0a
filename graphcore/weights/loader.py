"""From a checkpoint's bytes to a bound decoder: read, fold, pack or cast, copy to its offset; one tensor at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.errors import CheckpointError
from graphcore.nn.decoder import Decoder
from graphcore.quant import FORMATS
from graphcore.quant.packing import Packing
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import is_tied, packing_of
from graphcore.weights.slots import Slot, bind

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Loader:
    """Fills layer groups' slots from a checkpoint.

    Attributes:
        sources: stored tensor and folds of each of the decoder's weights.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, TensorSource]

    @property
    def is_tied(self) -> bool:
        """Whether the head reads the embedding's bytes."""
        return is_tied(self.sources)

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` unpacked, folded and cast, on the CPU.

        Raises:
            CheckpointError: the file changed under us, or holds values that are no weights.
        """
        source = self.sources[name]
        info = self.checkpoint.tensors[source.name]
        stored = self.checkpoint.read(source.name)
        if info.encoding in FORMATS and stored.dtype is torch.uint8:
            stored = FORMATS[info.encoding].dequantize(stored, info.shape, dtype)
        elif not stored.is_floating_point():
            raise CheckpointError(
                f"{self.checkpoint.source}: tensor '{source.name}' holds {info.encoding}, not weights"
            )
        for fold in source.folds:
            stored = fold.apply(stored)
        return stored.to(dtype)

    def packed(self, name: str, packing: Packing) -> Tensor:
        """Return the weight `name` packed, its rows folded: [nbytes] uint8 on the CPU.

        Raises:
            CheckpointError: the file changed under us.
        """
        source = self.sources[name]
        info = self.checkpoint.tensors[source.name]
        rows, scale = FORMATS[packing.format].split_rows(self.checkpoint.read(source.name), info.shape)
        for fold in source.folds:
            rows = fold.apply(rows)
        return packing.pack(rows, scale)

    def load(self, decoder: Decoder, device: torch.device, on_progress: Progress) -> int:
        """Give every group of the decoder a slot, fill it and bind the group's buffers to it, once.

        Args:
            decoder: on the meta device.
            on_progress: called with "load", groups done and groups in all.

        Returns:
            The bytes of all slots.
        """
        groups = list(decoder.groups())
        layouts = [self.layout(prefix, module) for prefix, module in groups]
        slots = Slot.allocate(sum(layout.nbytes for layout in layouts), device).split(layouts)
        for index, ((prefix, module), layout, slot) in enumerate(zip(groups, layouts, slots, strict=True)):
            for name, view in slot.views(layout).items():
                packing = packing_of(module, name)
                full = prefix + name
                view.copy_(self.dense(full, view.dtype) if packing is None else self.packed(full, packing))
                bind(module, name, view)
            on_progress("load", index + 1, len(groups))
        if self.is_tied:
            bind(decoder.head, HEAD, decoder.embed_tokens.weight)
        return sum(layout.nbytes for layout in layouts)

    def layout(self, prefix: str, module: torch.nn.Module) -> Layout:
        """Return the layout of a group; a tied head has no bytes of its own."""
        return layout_of(
            (name, tensor) for name, tensor in module.named_buffers() if not (self.is_tied and prefix + name == HEAD)
        )
