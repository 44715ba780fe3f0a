"""Hugging Face's MXFP4 checkpoints: blocks and scales in two tensors, shown as one tensor of ggml's mxfp4.

    X_blocks  u8 [..., O, I/32, 16]   byte b: hhhh llll, l = element 2b, h = element 2b + 1
    X_scales  u8 [..., O, I/32]       exponent e, the scale is 2^(e - 127)
    ggml      per block of 32: e, then 16 bytes, byte j: l = element j, h = element j + 16

Codes and exponents mean the same in both, so nothing is computed and nothing lost. The one tensor keeps the name
X_blocks. Source: transformers, integrations/mxfp4.py, `convert_moe_packed_tensors`; ggml, `dequantize_row_mxfp4`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.encodings import MXFP4
from graphcore.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4PairsCheckpoint(SafetensorsCheckpoint):
    """A safetensors checkpoint with each pair of blocks and scales as one mxfp4 tensor, named as its blocks.

    Raises:
        CheckpointError: as for SafetensorsCheckpoint, or blocks and scales do not fit together.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._stored = self.tensors
        self.tensors = MappingProxyType(joined(self._stored, self.source))

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return the bytes of a pair's blocks, then of its scales; one run for what is no pair."""
        if self.find(name).encoding != MXFP4.name:
            return super().spans(name)
        return self._stored[name].span(), self._stored[_scales_of(name)].span()

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor: uint8 [nbytes] in ggml's order for a pair, as it is stored otherwise.

        Of a pair some consecutive rows will do, as many blocks as scales.
        """
        if self.find(name).encoding != MXFP4.name:
            return super().assemble(name, parts)
        blocks, scales = parts
        return ggml_bytes(
            blocks.view(-1, *self._stored[name].shape[-2:]),
            scales.view(-1, self._stored[_scales_of(name)].shape[-1]),
        )


def has_pairs(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether some tensor is stored as blocks and scales."""
    return any(name.endswith(BLOCKS) and _scales_of(name) in tensors for name in tensors)


def joined(tensors: Mapping[str, TensorInfo], source: str) -> dict[str, TensorInfo]:
    """Return the tensors with each pair as one, in place of its blocks.

    Raises:
        CheckpointError: blocks and scales do not fit together.
    """
    pairs = [name for name in tensors if name.endswith(BLOCKS) and _scales_of(name) in tensors]
    scales = {_scales_of(name) for name in pairs}
    found = {name: info for name, info in tensors.items() if name not in scales}
    return found | {name: _joined_info(tensors[name], tensors[_scales_of(name)], source) for name in pairs}


def _scales_of(name: str) -> str:
    return name.removesuffix(BLOCKS) + SCALES


def _joined_info(blocks: TensorInfo, scales: TensorInfo, source: str) -> TensorInfo:
    """Return the description of one tensor, [..., O, I]; its offset is that of the blocks."""
    are_bytes = blocks.encoding == scales.encoding == "u8"
    if not are_bytes or blocks.shape != (*scales.shape, MXFP4.block_elements // 2) or len(scales.shape) < 2:
        raise CheckpointError(
            f"{source}: tensors {quoted(blocks.name)} ({blocks.encoding}, {list(blocks.shape)}) and "
            f"{quoted(scales.name)} ({scales.encoding}, {list(scales.shape)}) are no MXFP4 blocks and scales; fetch "
            "the checkpoint again"
        )
    shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4.block_elements)
    return replace(blocks, shape=shape, encoding=MXFP4.name, nbytes=blocks.nbytes + scales.nbytes)


def ggml_bytes(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the pair as ggml stores it.

    Args:
        blocks: [..., 16] uint8.
        scales: [...] uint8.

    Returns:
        [nbytes] uint8, 17 bytes a block.
    """
    half = MXFP4.block_elements // 4
    out = torch.empty(*scales.shape, MXFP4.block_nbytes, dtype=torch.uint8)
    first, second = blocks[..., :half], blocks[..., half:]  # elements 0 .. 15 and 16 .. 31
    out[..., 0] = scales
    out[..., 1::2] = (first & 15) | (second << 4)  # even elements j, and j + 16
    out[..., 2::2] = (first >> 4) | (second & 0xF0)
    return out.flatten()
