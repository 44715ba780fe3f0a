"""Hugging Face's forms of ternary weights, shown as the i2_s tensors that BitNet's GGUF files hold.

Legend: R rows (output features), C columns (input features).

    packed    X.weight uint8 [R / 4, C]: byte [r, c] has in bits 2k, 2k + 1 row r + k * R/4's code; code = ternary + 1
              X.weight_scale [1]: divides (linear_class bitlinear) or multiplies (autobitlinear)
    unpacked  X.weight float [R, C] of -1, 0, 1, and X.weight_scale [1]
    online    X.weight float [R, C]: scale = mean |w|, ternary = clip(round(w / scale), -1, 1)

Source: transformers, integrations/bitnet.py (`unpack_weights`, `BitLinear`, `AutoBitLinear`, `WeightQuant`); of what is
written: microsoft/BitNet, src/ggml-bitnet-mad.cpp, quantize_i2_s. quant/formats/i2_s.py draws it.
"""

import re
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.config_ternary import TernaryScaling
from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.encodings import I2_S
from graphcore.errors import CheckpointError

ROWS_PER_BYTE = 4
SCALE_SUFFIX = "_scale"  # of the weight's own name
SMALLEST_MEAN = 1e-5  # an all-zero weight keeps a finite inverse
PROJECTION = re.compile(r"(?:^|\.)layers\.\d+\..+_proj\.weight")


class TernaryCheckpoint(Checkpoint):
    """A safetensors checkpoint whose ternary projections are i2_s tensors [R, C] under their weights' names.

    A tensor that is not a whole number of i2_s groups is float32 instead.

    Args:
        stored: the checkpoint as the files have it.
        scaling: of its ternary weights.

    Raises:
        CheckpointError: a packed weight lacks its scale, or is in a checkpoint of plain ones.
    """

    def __init__(self, stored: Checkpoint, scaling: TernaryScaling) -> None:
        self.source = stored.source
        self.layout = stored.layout
        self.files = stored.files
        self.stored = stored
        self.scaling = scaling
        names = {name for name, info in stored.tensors.items() if self._is_ternary(info)}
        scales = {name + SCALE_SUFFIX for name in names} if scaling != "online" else set()
        self.ternary = frozenset(names)
        self.tensors = MappingProxyType(
            {
                name: self._virtual_info(info) if name in names else info
                for name, info in stored.tensors.items()
                if name not in scales
            }
        )

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return the bytes of what is stored; for a ternary weight its scale's after them, if it has one."""
        self.find(name)
        return tuple(span for stored in self._stored_names(name) for span in self.stored.spans(stored))

    def assemble(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor: i2_s bytes for a ternary one, else what is stored."""
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
        """Return what a stored weight's ternary values are multiplied by: [1] float32."""
        scale = self.stored.assemble(name + SCALE_SUFFIX, parts)
        if scale.numel() != 1 or not scale.is_floating_point() or not scale.isfinite().all() or not scale.all():
            raise CheckpointError(
                f"{self.source}: tensor {quoted(name + SCALE_SUFFIX)} must hold one number other than zero, found "
                f"{scale.dtype} {list(scale.shape)}; fetch the checkpoint again"
            )
        scale = scale.float().reshape(1)
        return 1.0 / scale if self.scaling == "divided" else scale


def _ternarized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R, C] uint8 and scale [] float32 of a plain weight, rounded as transformers does at run time."""
    wide = weight.float()
    inverse = 1.0 / wide.abs().mean().clamp(min=SMALLEST_MEAN)
    return ((wide * inverse).round_().clamp_(-1, 1) + 1.0).to(torch.uint8), 1.0 / inverse


def pack_i2_s(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the bytes of a tensor of (codes - 1) * scale.

    Args:
        codes: any shape of a whole number of groups, uint8, 0 to 3.
        scale: one float32.

    Returns:
        [elements / 4 + 32] uint8.
    """
    groups = codes.reshape(-1, 4, 32)  # element 32 * j + l of a group is [j, l]
    packed = groups[:, 0] << 6
    for position in (1, 2, 3):
        packed |= groups[:, position] << (6 - 2 * position)
    return with_scale_behind(packed.flatten(), scale)


def with_scale_behind(packed: Tensor, scale: Tensor) -> Tensor:
    """Return packed codes [n] uint8 with the tensor's scale, one float32, and its padding after them."""
    tail = torch.zeros(I2_S.tail_nbytes, dtype=torch.uint8, device=packed.device)
    tail[:4] = scale.to(torch.float32).reshape(1).view(torch.uint8)
    return torch.cat((packed, tail))
