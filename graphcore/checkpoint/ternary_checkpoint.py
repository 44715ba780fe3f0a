"""Hugging Face's forms of ternary weights, presented as i2_s tensors like those in BitNet's GGUF files.

Legend: R rows (output features), C columns (input features).

    packed    X.weight uint8 [R / 4, C]: bits 2k, 2k + 1 of byte [r, c] code row r + k * R/4; code = ternary + 1
              X.weight_scale [1]: divides (linear_class bitlinear) or multiplies (autobitlinear)
    unpacked  X.weight float [R, C] of -1, 0, 1, and X.weight_scale [1]
    online    X.weight float [R, C]: scale = mean |w|, ternary = clip(round(w / scale), -1, 1)

Source of the stored forms: transformers, integrations/bitnet.py (`unpack_weights`, `BitLinear`, `AutoBitLinear`,
`WeightQuant`). Source of i2_s: microsoft/BitNet, src/ggml-bitnet-mad.cpp, quantize_i2_s (see quant/formats/i2_s.py).
"""

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.errors import CheckpointError, quoted
from graphcore.quant.formats.i2_s import I2_S, with_scale_behind

TernaryScaling = Literal["divided", "multiplied", "online"]
"""Use of weight_scale: "divided" and "multiplied" say what it does to the ternary weight (linear_class "bitlinear" and
"autobitlinear"); with "online" there is none, and plain weights become ternary at load (quantization_mode "online")."""

ROWS_PER_BYTE = 4
SCALE_SUFFIX = "_scale"  # suffix of a weight's name that gives the name of its scale
SMALLEST_MEAN = 1e-5  # so that an all-zero weight has a finite inverse
PROJECTION = re.compile(r"(?:^|\.)layers\.\d+\..+_proj\.weight")


class TernaryCheckpoint(Checkpoint):
    """A view of a safetensors checkpoint with ternary projections as i2_s tensors [R, C], under the weights' names.

    A tensor whose size is not a whole number of i2_s groups is float32 instead.

    Args:
        stored: checkpoint as stored in the files.
        scaling: use of the ternary weights' scales.

    Raises:
        CheckpointError: a packed weight has no scale, or is in a checkpoint of plain weights.
    """

    def __init__(self, stored: Checkpoint, scaling: TernaryScaling) -> None:
        self.source = stored.source
        self.layout = stored.layout
        self.files, self.notes = stored.files, stored.notes
        self.stored = stored
        self.scaling = scaling
        names = {name for name, info in stored.tensors.items() if self._is_ternary(info)}
        scales = {name + SCALE_SUFFIX for name in names} if scaling != "online" else set()
        self.ternary = frozenset(names)
        self.faults = stored.faults_of_parts({name: (name + SCALE_SUFFIX,) for name in names})
        self.tensors = MappingProxyType(
            {
                name: self._virtual_info(info) if name in names else info
                for name, info in stored.tensors.items()
                if name not in scales
            }
        )

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the spans of a stored tensor; for a ternary weight followed by those of its scale, if it has one."""
        self.find(name)
        return tuple(span for stored in self._stored_names(name) for span in self.stored.spans(stored))

    def assemble(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor: for a ternary weight i2_s bytes or float32, else as it is stored."""
        self.find(name)
        count = len(self.stored.spans(name))
        weight = self.stored.assemble(name, parts[:count])
        if name not in self.ternary:
            return weight
        if self.scaling == "online":
            codes, scale = _ternarized(weight)
        else:
            codes, scale = self._codes(name, weight), self._scale(name, parts[count:])
        if self.tensors[name].encoding == I2_S.name:
            return pack_i2_s(codes, scale)
        return (codes.float() - 1.0) * scale

    def _stored_names(self, name: str) -> tuple[str, ...]:
        has_scale = name in self.ternary and self.scaling != "online"
        return (name, name + SCALE_SUFFIX) if has_scale else (name,)

    def _is_ternary(self, info: TensorInfo) -> bool:
        if len(info.shape) != 2 or PROJECTION.search(info.name) is None:
            return False
        is_packed, has_scale = info.encoding == "u8", info.name + SCALE_SUFFIX in self.stored.tensors
        if is_packed and self.scaling == "online":
            raise CheckpointError(
                f"{self.source}: tensor {quoted(info.name)} is packed, but quantization_mode is online, which is for "
                "plain weights; correct the quantization_config"
            )
        if is_packed and not has_scale:
            raise CheckpointError(
                f"{self.source}: Missing required tensor: {quoted(info.name + SCALE_SUFFIX)}, the scale of a packed "
                "weight; fetch the checkpoint again"
            )
        return self.scaling == "online" or has_scale

    def _virtual_info(self, info: TensorInfo) -> TensorInfo:
        rows, columns = info.shape
        shape = (rows * ROWS_PER_BYTE if info.encoding == "u8" else rows, columns)
        if I2_S.divides(shape):
            return TensorInfo(info.name, shape, I2_S.name, None, 0, I2_S.nbytes(shape))
        return TensorInfo(info.name, shape, "f32", None, 0, 4 * shape[0] * shape[1])

    def _codes(self, name: str, weight: Tensor) -> Tensor:
        """Return the codes of a stored weight: [R, C] uint8."""
        if weight.dtype is torch.uint8:
            return torch.cat([(weight >> shift) & 3 for shift in (0, 2, 4, 6)])
        codes = (weight.float() + 1.0).to(torch.uint8)
        if not torch.equal(codes.to(weight.dtype) - 1.0, weight) or codes.max() > 2:
            raise CheckpointError(
                f"{self.source}: tensor {quoted(name)} has a weight_scale, but holds other values than -1, 0 and 1; "
                "is quantization_mode online?"
            )
        return codes

    def _scale(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the factor of a stored weight's ternary values: [1] float32."""
        scale = self.stored.assemble(name + SCALE_SUFFIX, parts)
        if scale.numel() != 1 or not scale.is_floating_point() or not scale.isfinite().all() or not scale.all():
            raise CheckpointError(
                f"{self.source}: tensor {quoted(name + SCALE_SUFFIX)} must hold one number other than zero, found "
                f"{scale.dtype} {list(scale.shape)}; fetch the checkpoint again"
            )
        scale = scale.float().reshape(1)
        return 1.0 / scale if self.scaling == "divided" else scale


def _ternarized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [R, C] uint8 and the scale [] float32 of a plain weight, rounded as in transformers."""
    wide = weight.float()
    inverse = 1.0 / wide.abs().mean().clamp(min=SMALLEST_MEAN)
    return ((wide * inverse).round_().clamp_(-1, 1) + 1.0).to(torch.uint8), 1.0 / inverse


def pack_i2_s(codes: Tensor, scale: Tensor) -> Tensor:
    """Pack ternary codes and their scale as i2_s: the weights are (codes - 1) * scale.

    Args:
        codes: codes 0 to 3, uint8, any shape with a whole number of groups.
        scale: one float32.

    Returns:
        The bytes of the tensor, [elements / 4 + 32] uint8.
    """
    groups = codes.reshape(-1, 4, 32)  # element 32 * j + l of a group is [j, l]
    packed = groups[:, 0] << 6
    for position in (1, 2, 3):
        packed |= groups[:, position] << (6 - 2 * position)
    return with_scale_behind(packed.flatten(), scale)
