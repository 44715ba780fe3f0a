"""From a checkpoint's bytes to a bound decoder: read, unpack, fold, cast, copy to its offset; one tensor at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.errors import CheckpointError
from graphcore.nn.decoder import Decoder
from graphcore.quant import FORMATS
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.matching import EMBEDDING, HEAD
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
        return self.sources[HEAD] == self.sources[EMBEDDING]

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` unpacked, folded and cast, on the CPU.

        Raises:
            CheckpointError: the file changed under us, or holds values that are no weights.
        """
        source = self.sources[name]
        info = self.checkpoint.tensors[source.name]
        stored = self.checkpoint.read(source.name)
        if info.encoding in FORMATS and stored.dtype is torch.uint8:
            unpacked = torch.float32 if any(fold.in_float32 for fold in source.folds) else dtype
            stored = FORMATS[info.encoding].dequantize(stored, info.shape, unpacked)
        elif not stored.is_floating_point():
            raise CheckpointError(
                f"{self.checkpoint.source}: tensor '{source.name}' holds {info.encoding}, not weights"
            )
        for fold in source.folds:
            stored = fold.apply(stored)
        return stored.to(dtype)

    def load(self, decoder: Decoder, device: torch.device, on_progress: Progress) -> int:
        """Give every group of the decoder a slot, fill it and bind the group's buffers to it, once.

        Args:
            decoder: on the meta device.
            on_progress: called with "load", groups done and groups in all.

        Returns:
            The bytes of all slots.
        """
        groups = list(decoder.groups())
        nbytes = 0
        for index, (prefix, module) in enumerate(groups):
            layout = self.layout(prefix, module)
            slot = Slot.allocate(layout.nbytes, device)
            for name, view in slot.views(layout).items():
                view.copy_(self.dense(prefix + name, view.dtype))
                bind(module, name, view)
            nbytes += layout.nbytes
            on_progress("load", index + 1, len(groups))
        if self.is_tied:
            bind(decoder.head, HEAD, decoder.embed_tokens.weight)
        return nbytes

    def layout(self, prefix: str, module: torch.nn.Module) -> Layout:
        """Return the layout of a group; a tied head has no bytes of its own."""
        return layout_of(
            (name, tensor) for name, tensor in module.named_buffers() if not (self.is_tied and prefix + name == HEAD)
        )
