"""Hugging Face's MXFP4 checkpoints, whose blocks and scales in two tensors are presented as one mxfp4 tensor of ggml.

    X_blocks  u8 [..., O, I/32, 16]   byte b: hhhh llll, l = element 2b, h = element 2b + 1
    X_scales  u8 [..., O, I/32]       exponent e, the scale is 2^(e - 127)
    ggml      per block of 32: e, then 16 bytes, byte j: l = element j, h = element j + 16

Codes and exponents mean the same in both, so the conversion only reorders bits and is exact. The tensor keeps the name
X_blocks. Source: transformers, integrations/mxfp4.py, `convert_moe_packed_tensors`; ggml, `dequantize_row_mxfp4`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.errors import CheckpointError, quoted
from graphcore.quant.formats.mxfp4 import MXFP4

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Checkpoint(SafetensorsCheckpoint):
    """A safetensors checkpoint that presents each pair of blocks and scales as one mxfp4 tensor, named as the blocks.

    Raises:
        CheckpointError: as for `SafetensorsCheckpoint`, or blocks and scales do not match.
    """

    def __init__(self, path: str | Path, elsewhere: Mapping[str, Sequence[TensorInfo]] = MappingProxyType({})) -> None:
        super().__init__(path, elsewhere)
        self._stored = self.tensors
        self.tensors = MappingProxyType(join_pairs(self._stored, self.source))
        self.faults = self.faults_of_parts({name: (_scales_of(name),) for name in self.tensors})

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the spans of a tensor's bytes: for a pair, those of its blocks and its scales."""
        if self.find(name).encoding != MXFP4.name:
            return super().spans(name)
        return self._stored[name].span(), self._stored[_scales_of(name)].span()

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor: for a pair uint8 [nbytes] in ggml's order, else as it is stored.

        The parts of a pair may also be some consecutive rows, with as many blocks as scales.
        """
        if self.find(name).encoding != MXFP4.name:
            return super().assemble(name, parts)
        blocks, scales = parts
        return ggml_bytes(
            blocks.view(-1, *self._stored[name].shape[-2:]),
            scales.view(-1, self._stored[_scales_of(name)].shape[-1]),
        )


def has_pairs(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether any tensor is stored as a pair of blocks and scales."""
    return any(name.endswith(BLOCKS) and _scales_of(name) in tensors for name in tensors)


def join_pairs(tensors: Mapping[str, TensorInfo], source: str) -> dict[str, TensorInfo]:
    """Return the tensors with each pair of blocks and scales replaced by one, under the name of the blocks.

    Raises:
        CheckpointError: blocks and scales do not match.
    """
    pairs = [name for name in tensors if name.endswith(BLOCKS) and _scales_of(name) in tensors]
    scales = {_scales_of(name) for name in pairs}
    found = {name: info for name, info in tensors.items() if name not in scales}
    return found | {name: _joined_info(tensors[name], tensors[_scales_of(name)], source) for name in pairs}


def _scales_of(name: str) -> str:
    return name.removesuffix(BLOCKS) + SCALES


def _joined_info(blocks: TensorInfo, scales: TensorInfo, source: str) -> TensorInfo:
    """Return the description of the joined tensor, [..., O, I]; its offset is that of the blocks."""
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
    """Convert a pair of blocks and scales to ggml's mxfp4 blocks.

    Args:
        blocks: codes, [..., 16] uint8.
        scales: exponents, [...] uint8.

    Returns:
        The bytes of the mxfp4 blocks, [nbytes] uint8, 17 bytes for each.
    """
    half = MXFP4.block_elements // 4
    out = torch.empty(*scales.shape, MXFP4.block_nbytes, dtype=torch.uint8, device="cpu")
    first, second = blocks[..., :half], blocks[..., half:]  # elements 0 .. 15 and 16 .. 31
    out[..., 0] = scales
    out[..., 1::2] = (first & 15) | (second << 4)  # even elements j, and j + 16
    out[..., 2::2] = (first >> 4) | (second & 0xF0)
    return out.flatten()
