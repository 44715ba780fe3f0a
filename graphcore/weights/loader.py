"""The loader, which turns stored tensors into weights: read, fold, then pack, or unpack and cast."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.quantized.layout import ORDER
from graphcore.errors import CheckpointError
from graphcore.kernels.packing import GROUP_ROWS, Packing
from graphcore.quant import FORMATS
from graphcore.quant.packing_error import SquaredError
from graphcore.quant.registry import has_tensor_scale
from graphcore.weights.matching import SCALE
from graphcore.weights.packed_weights import is_tied

PACKED_WEIGHTS = 1 << 20  # number of weights that are packed at a time


@dataclass(frozen=True)
class Loader:
    """A source of a decoder's weights, which it reads and converts from a checkpoint.

    Attributes:
        sources: stored tensor and folds of a weight, by the weight's name in the decoder.
        squared_errors: error of the rows packed so far, by the name of a weight that is packed at load. One thread
            packs all weights: `quant` and streaming from files exclude each other.
        beneath: loader of the weights without adapters; None if there are no adapters.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, TensorSource]
    squared_errors: dict[str, SquaredError] = field(default_factory=dict)
    beneath: "Loader | None" = None

    @property
    def errors(self) -> dict[str, float]:
        """Relative RMS error of packing, by the name of a weight that was packed at load."""
        return {name: error.relative for name, error in self.squared_errors.items()}

    @property
    def is_tied(self) -> bool:
        """Whether the head reads the embedding's bytes."""
        return is_tied(self.sources)

    def kept(self, names: Container[str]) -> "Loader":
        """Return a loader of some of the weights."""
        beneath = None if self.beneath is None else self.beneath.kept(names)
        return replace(self, sources={name: at for name, at in self.sources.items() if name in names}, beneath=beneath)

    @property
    def stored_nbytes(self) -> int:
        """Stored bytes of the decoder's weights in the checkpoint; a tensor that two weights share counts once.

        Files of adapters count whole.
        """
        if self.beneath is not None:
            files = self.checkpoint.files.keys() - self.beneath.checkpoint.files.keys()
            return self.beneath.stored_nbytes + sum(self.checkpoint.files[path].size for path in files)
        names = {source.name for source in self.sources.values()}
        return sum(self.checkpoint.tensors[name].nbytes for name in names)

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` unpacked, folded and cast, on the CPU.

        Raises:
            CheckpointError: the file changed, or holds values that are not valid weights.
        """
        return self.dense_of(name, self.checkpoint.read(self.sources[name].name), dtype)

    def dense_of(self, name: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` as `dense` does, from `stored`, the result of the checkpoint's `read`."""
        return self.folded(name, stored, dtype).to(dtype)

    def folded(self, name: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` dense and folded, in the stored dtype, or in `dtype` if it is stored packed."""
        source = self.sources[name]
        info = self.checkpoint.tensors[source.name]
        if name.endswith(SCALE) and has_tensor_scale(info.encoding):
            peak = FORMATS[info.encoding].split_rows(stored, info.shape)[1]  # without unpacking it
            stored = torch.tensor([peak], dtype=torch.float32, device="cpu")
        elif info.encoding in FORMATS and stored.dtype is torch.uint8:
            unpacked = torch.float32 if any(fold.in_float32 for fold in source.folds) else dtype
            stored = FORMATS[info.encoding].dequantize(stored, info.shape, unpacked)
        elif not stored.is_floating_point() and not name.endswith(ORDER):
            raise CheckpointError(
                f"{self.checkpoint.source}: tensor '{source.name}' holds {info.encoding}, not weights"
            )
        for fold in source.folds:
            stored = fold.apply(stored)
        return stored

    def packed(self, name: str, packing: Packing) -> Tensor:
        """Return the weight `name` packed: [nbytes] uint8 on the CPU, or [X, nbytes] for X experts.

        Raises:
            CheckpointError: the file changed, or has values that the format cannot represent.
        """
        source = self.sources[name]
        shape = self.checkpoint.tensors[source.name].shape
        out = torch.empty((*shape[:-2], packing.nbytes), dtype=torch.uint8, device="cpu")
        self.pack_into(name, self.checkpoint.read(source.name), packing, out)
        return out

    def pack_into(self, name: str, stored: Tensor, packing: Packing, out: Tensor) -> None:
        """Write the weight `name`, in the form that `packed` returns, into its memory.

        Args:
            stored: stored tensor, the result of the checkpoint's `read`.
            out: memory of the weight, uint8.
        """
        source = self.sources[name]
        info = self.checkpoint.tensors[source.name]
        if info.encoding != packing.format:
            dense = self.folded(name, stored, torch.float32)
            for matrix, place in zip(_matrices(dense), _matrices(out, 1), strict=True):
                self.pack_rows(name, matrix, packing, 0, place)
            return
        rows, scale = FORMATS[packing.format].split_rows(stored, info.shape)
        for fold in source.folds:
            rows, scale = fold.apply_packed(rows, scale)
        for matrix, place in zip(_matrices(rows), _matrices(out, 1), strict=True):
            packing.pack_rows(matrix.contiguous(), 0, place)
            packing.write_scale(place, scale)

    def pack_rows(
        self, name: str, dense: Tensor, packing: Packing, begin: int, out: Tensor, threads: int | None = None
    ) -> None:
        """Pack dense rows of the weight `name` into its memory, some at a time, and add up their error.

        Args:
            dense: [R, I] any float dtype, the folded rows begin .. begin + R - 1.
            begin: index of the first row, a multiple of GROUP_ROWS.
            out: [nbytes] uint8, memory of the whole matrix.
            threads: number of threads, as for `Packing.pack_rows`.

        Raises:
            CheckpointError: the rows have values that the format cannot represent.
        """
        one = FORMATS[packing.format]
        step = max(GROUP_ROWS, PACKED_WEIGHTS // dense.shape[1] // GROUP_ROWS * GROUP_ROWS)
        if not packing.can_split:  # one scale for the whole matrix
            step = len(dense)
        for at in range(0, len(dense), step):
            some = dense[at : at + step]
            raw, error = packing.quantize(some, threads=threads)
            self.squared_errors[name] = self.squared_errors.get(name, SquaredError()) + error
            rows, scale = one.split_rows(raw, some.shape)
            packing.pack_rows(rows, begin + at, out, threads=threads)
            packing.write_scale(out, scale)


def _matrices(tensor: Tensor, dims: int = 2) -> list[Tensor]:
    """Return the tensor in a list if it has `dims` dimensions, else the list of its slices along the first."""
    return [tensor] if tensor.dim() == dims else list(tensor)
