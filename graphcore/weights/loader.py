"""What becomes of a stored tensor: read, folded, and packed or unpacked and cast."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.errors import CheckpointError
from graphcore.quant import FORMATS
from graphcore.quant.packing import Packing
from graphcore.quant.packing_error import packing_error
from graphcore.weights.matching import SCALE
from graphcore.weights.packed_weights import TERNARY, is_tied


@dataclass(frozen=True)
class Loader:
    """Makes a decoder's weights from a checkpoint.

    Attributes:
        sources: stored tensor and folds of each of the decoder's weights.
        errors: relative RMS error of each weight that was packed at load.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, TensorSource]
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def is_tied(self) -> bool:
        """Whether the head reads the embedding's bytes."""
        return is_tied(self.sources)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the checkpoint has of the decoder's weights; what two weights share counts once."""
        names = {source.name for source in self.sources.values()}
        return sum(self.checkpoint.tensors[name].nbytes for name in names)

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` unpacked, folded and cast, on the CPU.

        Raises:
            CheckpointError: the file changed under us, or holds values that are no weights.
        """
        return self.dense_of(name, self.checkpoint.read(self.sources[name].name), dtype)

    def dense_of(self, name: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` as `dense` does; `stored` is what the checkpoint's `read` gives."""
        source = self.sources[name]
        info = self.checkpoint.tensors[source.name]
        if name.endswith(SCALE) and info.encoding == TERNARY:
            peak = FORMATS[TERNARY].split_rows(stored, info.shape)[1]  # without unpacking it
            stored = torch.tensor([peak])
        elif info.encoding in FORMATS and stored.dtype is torch.uint8:
            unpacked = torch.float32 if any(fold.in_float32 for fold in source.folds) else dtype
            stored = FORMATS[info.encoding].dequantize(stored, info.shape, unpacked)
        elif not stored.is_floating_point():
            raise CheckpointError(
                f"{self.checkpoint.source}: tensor '{source.name}' holds {info.encoding}, not weights"
            )
        for fold in source.folds:
            stored = fold.apply(stored)
        return stored.to(dtype)

    def packed(self, name: str, packing: Packing) -> Tensor:
        """Return the weight `name` packed: [nbytes] uint8 on the CPU, [X, nbytes] where it is one for each expert.

        Raises:
            CheckpointError: the file changed under us, or has values that the format cannot hold.
        """
        return self.packed_of(name, self.checkpoint.read(self.sources[name].name), packing)

    def packed_of(self, name: str, stored: Tensor, packing: Packing) -> Tensor:
        """Return the weight `name` as `packed` does; `stored` is what the checkpoint's `read` gives."""
        source = self.sources[name]
        info = self.checkpoint.tensors[source.name]
        one = FORMATS[packing.format]
        if info.encoding == packing.format:
            rows, scale = one.split_rows(stored, info.shape)
            for fold in source.folds:
                rows, scale = fold.apply_packed(rows, scale)
        else:
            dense = self.dense_of(name, stored, torch.float32)
            raw = one.quantize(dense)
            self.errors[name] = packing_error(dense, raw, one, dense.shape)
            rows, scale = one.split_rows(raw, dense.shape)
        if rows.dim() == 2:
            return packing.pack(rows, scale)
        return torch.stack([packing.pack(expert, scale) for expert in rows])
