"""The interface of every stored encoding of weights: dequantisation and quantisation of its blocks.

Legend: N blocks of one tensor, W bytes per block, E elements per block.

    raw     uint8 [nbytes], as the file has them: blocks in row-major order, no padding between rows
    blocks  uint8 [N, W], the same bytes seen as blocks
    dense   float [shape], torch order (the last dimension is contiguous and is the one cut into blocks)

A format depends on no file, tensor name or module. It has no state: one frozen object per encoding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, NamedTuple

import torch

from graphcore.encodings import Encoding
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.quant.block_slices import decode_in_slices, slices_of_blocks

SURELY_IN_RANGE = 3e4  # weights up to this magnitude overflow no format's float16 scale


class Change(NamedTuple):
    """A change of a plane's bytes on their way to a GPU, and its inverse: [R, K, bytes] uint8."""

    do: Callable[[torch.Tensor], torch.Tensor]
    undo: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format(Encoding, ABC):
    """A stored encoding of weights: its block sizes and ids, with its dequantisation and quantisation.

    Attributes:
        low_change, scale_change: changes from a block's bytes to a GPU's low codes and scales; None for plain copies.
    """

    low_change: ClassVar[Change | None] = None
    scale_change: ClassVar[Change | None] = None

    @abstractmethod
    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the weights of whole blocks, bit-exact with libggml: products rounded in ggml's order, no FMA.

        Args:
            blocks: [N, W] uint8; rows are contiguous. Not written to.

        Returns:
            [N, E] float32, in memory of its own.
        """

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the blocks that stand for the weights as closely as this format can.

        Args:
            dense: [N, E] float32, finite, contiguous. Not written to.

        Returns:
            [N, W] uint8, in memory of its own.

        Raises:
            UnsupportedError: weights cannot be packed as this format; `format_choice.packable_names` lists the others.
        """
        raise UnsupportedError(
            f"{self.name}: graphcore reads this format and does not write it; pack as another, such as q8_0 or q4_k"
        )

    @property
    def can_quantize(self) -> bool:
        """Whether dense weights can be packed as this format."""
        return type(self).quantize_blocks is not Format.quantize_blocks

    def quantize(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the stored bytes of a dense tensor.

        Args:
            dense: torch order, any float dtype, on the CPU or another device; never copied whole.

        Returns:
            [nbytes] uint8, on the device of `dense`.

        Raises:
            UnsupportedError: weights cannot be packed as this format.
            CheckpointError: rows are not a whole number of blocks, or a weight is infinite, NaN or too large.
        """
        assert dense.is_floating_point(), f"weights are floats, got {dense.dtype}"
        raw = torch.empty(self.nbytes(dense.shape), dtype=torch.uint8, device=dense.device)
        blocks, weights = raw.view(-1, self.block_nbytes), dense.reshape(-1, self.block_elements)
        for some in slices_of_blocks(len(blocks), self.block_elements):
            blocks[some].copy_(self.quantize_checked(weights[some].to(torch.float32)))
        return raw

    def quantize_checked(self, dense: torch.Tensor) -> torch.Tensor:
        """Return `quantize_blocks` of the weights, after checking that the format can hold them.

        Raises:
            CheckpointError: a weight is infinite, NaN or too large for the format's scales.
        """
        largest = dense.abs().max().item() if dense.numel() else 0.0
        self.check_finite(largest)
        blocks = self.quantize_blocks(dense)
        self.check_range(blocks, largest)
        return blocks

    def check_finite(self, largest: float) -> None:
        """Check that weights are finite.

        Args:
            largest: largest magnitude of a weight; NaN if one is NaN.

        Raises:
            CheckpointError: a weight is infinite or NaN.
        """
        if not isfinite(largest):
            raise CheckpointError(f"{self.name}: the tensor has infinite or NaN weights, which no format can pack")

    def check_range(self, blocks: torch.Tensor, largest: float) -> None:
        """Check that packed weights are finite.

        Args:
            blocks: [N, W] uint8, blocks made of the weights.
            largest: largest magnitude of a weight.

        Raises:
            CheckpointError: the weights are too large for the format's scales.
        """
        if largest > SURELY_IN_RANGE and not self.dequantize_blocks(blocks).isfinite().all():
            raise CheckpointError(
                f"{self.name}: the tensor has weights as large as {largest:.3g}, beyond the range of this format; "
                "pack it as bf16 or f32"
            )

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the stored size of a tensor, in bytes.

        Args:
            shape: torch order, in elements.

        Raises:
            CheckpointError: the rows are not a whole number of blocks.
        """
        if not self.divides(shape):
            row_elements = shape[-1] if shape else 1
            raise CheckpointError(
                f"{self.name}: shape {list(shape)} has rows of {row_elements} elements, which is not a multiple of the "
                f"block of {self.block_elements}; the shape must be in torch order, rows first"
            )
        return super().nbytes(shape)

    def split_rows(self, raw: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, float]:
        """Return the rows of a tensor, and the scale of the whole tensor if the format has one, else 1.

        Args:
            raw: [nbytes] uint8.
            shape: [..., O, I], I a whole number of blocks.

        Returns:
            [..., O, W] uint8, a view of `raw`.
        """
        self.check_raw(raw, shape)
        return raw.view(*shape[:-1], -1), 1.0

    def join_rows(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the bytes of the tensor that these rows make: the inverse of `split_rows`."""
        return rows.contiguous().flatten()

    def dequantize(self, raw: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dense tensor that `raw` encodes.

        Args:
            raw: [nbytes] uint8, contiguous, on any device.
            shape: torch order, in elements.
            dtype: dtype of the result, a float type; each float32 weight is cast to it. The whole tensor never exists
                in float32 beside a result of another dtype.

        Returns:
            `shape`, `dtype`, on the device of `raw`.

        Raises:
            CheckpointError: `raw` is not a flat run of bytes, its size is not that of `shape`, or the rows are not a
                whole number of blocks.
        """
        self.check_raw(raw, shape)
        blocks, decode = self.decoder(raw)
        return decode_in_slices(blocks, decode, self.block_elements, dtype).view(tuple(shape))

    def decoder(self, raw: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return a tensor's blocks, [N, W], and a function from some of them to weights: [n, W] -> [n, E] float32.

        Args:
            raw: [nbytes] uint8, checked; the blocks are a view of it.
        """
        return raw.view(-1, self.block_nbytes), self.dequantize_blocks

    def planes_of(self, blocks: torch.Tensor) -> list[torch.Tensor | None]:
        """Return low codes, high codes, scales and supers (kernels/gpu/layout.py): [R, K, W] uint8 -> [R, K, bytes].

        Planes that the format lacks are None. R rows, K blocks of a row.
        """
        assert self.planes is not None, f"no GPU kernel multiplies {self.name}"
        parts = [None if place is None else blocks[..., place[0] : place[1]] for place in self.planes.places]
        return [
            part if part is None or change is None else change.do(part)
            for part, change in zip(parts, self._changes, strict=True)
        ]

    def weights_of_planes(
        self, parts: Sequence[torch.Tensor], scale: float, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the dense tensor whose planes these are.

        Args:
            parts: low codes, high codes, scales and supers, [R, K, bytes] uint8 each; those that the format lacks have
                no bytes.
            scale: scale of the whole tensor, for formats that have one, else 1.
            shape: torch order, in elements.
        """
        return self.dequantize(self.join_rows(self.blocks_of(parts).flatten(1), scale), shape, dtype)

    def blocks_of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the file's blocks from the planes of `planes_of`: [R, K, bytes] uint8 each -> [R, K, W].

        Args:
            parts: all four planes; those that the format lacks have no bytes.
        """
        assert self.planes is not None, f"no GPU kernel multiplies {self.name}"
        found = [
            (place, part if change is None else change.undo(part))
            for place, part, change in zip(self.planes.places, parts, self._changes, strict=True)
            if place is not None
        ]
        return torch.cat([part for _, part in sorted(found, key=lambda one: one[0])], dim=-1)

    @property
    def _changes(self) -> tuple[Change | None, ...]:
        return self.low_change, None, self.scale_change, None

    def check_raw(self, raw: torch.Tensor, shape: Sequence[int]) -> None:
        """Check that `raw` can be the bytes of a tensor of this shape.

        Raises:
            CheckpointError: as in `dequantize`.
        """
        if raw.dtype != torch.uint8 or raw.dim() != 1 or not raw.is_contiguous():
            raise CheckpointError(
                f"{self.name}: raw bytes must be a contiguous uint8 tensor of one dimension, found {raw.dtype} "
                f"{list(raw.shape)} with strides {list(raw.stride())}; pass the tensor as the file has it"
            )
        expected = self.nbytes(shape)
        if raw.numel() != expected:
            raise CheckpointError(
                f"{self.name}: shape {list(shape)} takes {expected} bytes, found {raw.numel()}; the type, the shape or "
                "the file's size is wrong"
            )
