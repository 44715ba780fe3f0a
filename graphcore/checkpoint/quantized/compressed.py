"""compressed-tensors' weights.

Legend: O rows (output features), I columns (input features), G groups of I / G columns, B bits of a code.

    pack-quantized   X.weight_packed int32 [O, I B / 32], codes + 2^(B - 1), lowest bits first; X.weight_scale [O, G]
                     X.weight_zero_point int32 [O B / 32, G], zeros along rows, only of weights that are not symmetric
                     X.weight_shape [2]; X.weight_g_idx [I], groups, only if they are not the usual ones
    int-quantized    X.weight int8 [O, I], X.weight_scale [O, G], [O] or [1]; X.weight_zero_point int8, the same shape
    nvfp4            X.weight_packed uint8 [O, I / 2], E2M1, the even column in the low nibble
                     X.weight_scale float8_e4m3 [O, I / 16]; X.weight_global_scale float32 [1], a divisor
    mxfp4            X.weight_packed the same; X.weight_scale uint8 [O, I / 32], exponents, the scale is 2^(e - 127)

    modelopt-nvfp4   X.weight the packed codes; X.weight_scale the same; X.weight_scale_2 float32 [] or [1], a factor

The last is TensorRT Model Optimizer's. float-quantized is in fp8.py. Source: compressed-tensors,
compressors/pack_quantized and fp4_quantized, quantization/lifecycle; modelopt, torch/quantization/qtensor.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.quantized.blocks import BLOCK, nibbles, split_nibbles
from graphcore.checkpoint.quantized.layout import (
    FLOATS,
    INTEGERS,
    IntegerLayout,
    Kind,
    QuantizedWeight,
    WeightLayout,
)
from graphcore.errors import CheckpointError, quoted
from graphcore.quant.formats.mxfp4 import MXFP4
from graphcore.quant.formats.nvfp4_f32 import NVFP4_F32

WORD_BITS = 32
NAN_EXPONENT = 255
SCALE, ZERO, PACKED = ".weight_scale", ".weight_zero_point", ".weight_packed"


class PackQuantizedLayout(IntegerLayout):
    """Weights of compressed-tensors' format pack-quantized."""

    name = "pack-quantized"
    codes, scales, zeros, order, shape = PACKED, SCALE, ZERO, ".weight_g_idx", ".weight_shape"
    needed, optional = (scales, shape), (zeros, order)

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a packed tensor has words, not bytes."""
        return info.encoding != "u8"

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        return {
            self.codes: (("i32",), (2,)),
            self.scales: (FLOATS, (1, 2)),
            self.zeros: (("i32", "i8"), (1, 2)),
            self.order: (INTEGERS, (1,)),
            self.shape: (INTEGERS, (1,)),
        }

    def measured(self, infos: Mapping[str, TensorInfo]) -> tuple[tuple[int, int], int, int]:
        """Return shape, bits and groups; the bits follow from a stated width, or from the stored shape."""
        codes = infos[self.codes]
        rows, words = codes.shape
        groups = _num_groups(self, codes, infos[self.scales])
        bits = self._bits(codes, words, groups)
        if self.zeros in infos:
            zeros, packed = infos[self.zeros], (-(-rows * bits // WORD_BITS), groups)
            if zeros.shape != (packed if zeros.encoding == "i32" else infos[self.scales].shape):
                raise self.wrong(codes, zeros)
        return (rows, words * WORD_BITS // bits), bits, groups

    def _bits(self, codes: TensorInfo, words: int, groups: int) -> int:
        fitting = {one.bits for one in self.scheme.widths if one.fits(words * WORD_BITS // one.bits, groups)}
        if len(fitting) == 1:
            return fitting.pop()  # without reading: a plan may have headers only
        other = self.stored.tensors[codes.name.removesuffix(self.codes) + self.shape]
        stated = self.stored.read(other.name).flatten().tolist()
        columns = stated[1] if len(stated) == 2 else 0
        if columns < 1 or words * WORD_BITS % columns or words * WORD_BITS < columns:
            raise self.wrong(codes, other)
        return int(words * WORD_BITS // columns)

    def codes_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the codes: bytes of a word are neighbouring columns."""
        return stored.contiguous().view(torch.uint8)

    def zeros_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the zero points: bytes of a word are neighbouring rows; of a whole tensor, one int8."""
        rows = weight.info.shape[0]
        if stored.dtype is torch.int8:
            own = (stored.to(torch.int32) + (1 << (weight.bits - 1))).to(torch.uint8)
            return own.reshape(-1, weight.groups).expand(rows, weight.groups).contiguous()
        raw = stored.T.flatten().view(torch.uint8).view(weight.groups, -1)  # [G, O B / 8]
        return (nibbles(raw) if weight.bits == 4 else raw).T[:rows].contiguous()

    def scales_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the scales."""
        return stored.reshape(-1, weight.groups)


class IntQuantizedLayout(IntegerLayout):
    """Weights of compressed-tensors' format int-quantized, signed bytes."""

    name = "int-quantized"
    codes, scales, zeros, order = ".weight", SCALE, ZERO, ".weight_g_idx"
    needed, optional = (scales,), (zeros, order)

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a weight is a matrix of bytes."""
        return info.encoding == "i8" and len(info.shape) > 1

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        numbers = (0, 1, 2)
        return {
            self.codes: (("i8",), (2,)),
            self.scales: (FLOATS, numbers),
            self.zeros: (INTEGERS + FLOATS, numbers),
            self.order: (INTEGERS, (1,)),
        }

    def measured(self, infos: Mapping[str, TensorInfo]) -> tuple[tuple[int, int], int, int]:
        """Return shape, bits and groups."""
        codes, scales = infos[self.codes], infos[self.scales]
        if self.zeros in infos and infos[self.zeros].shape not in ((), (1,), (1, 1), scales.shape):
            raise self.wrong(codes, infos[self.zeros])
        return (codes.shape[0], codes.shape[1]), 8, _num_groups(self, codes, scales)

    def codes_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the codes from 0."""
        return stored.contiguous().view(torch.uint8) ^ 0x80

    def zeros_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the zero points from 0."""
        grid = stored.reshape(-1, weight.groups) if stored.numel() > 1 else stored.reshape(1, 1)
        moved = grid.to(torch.float32) + 128
        if not bool(((moved >= 0) & (moved <= 255) & (moved == moved.round())).all()):
            raise CheckpointError(
                f"{self.stored.source}: {quoted(weight.parts[self.zeros])} has zero points that are no integers from "
                "-128 to 127; fetch the checkpoint again"
            )
        return moved.to(torch.uint8).expand(weight.info.shape[0], weight.groups).contiguous()

    def scales_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the scales."""
        return stored.reshape(-1, weight.groups)


def _num_groups(layout: IntegerLayout, codes: TensorInfo, scales: TensorInfo) -> int:
    """Return the number of groups: scales are [O, G], [O], or one number for the tensor."""
    rows, words = codes.shape
    scaled, groups = scales.shape if len(scales.shape) == 2 else (*(scales.shape or (1,)), 1)
    if (scaled != rows and (scaled, groups) != (1, 1)) or min(rows, words, groups) < 1:
        raise layout.wrong(codes, scales)
    return groups


class Nvfp4Layout(WeightLayout):
    """Weights of compressed-tensors' format nvfp4-pack-quantized.

    Attributes:
        scales, whole: suffixes of the tensors of scales, and of the scale of the whole tensor.
        divides: True if groups' scales are divided by the whole one, False if they are multiplied with it.
    """

    name = "nvfp4-pack-quantized"
    codes, scales, whole = PACKED, SCALE, ".weight_global_scale"
    needed = (scales, whole)
    divides: ClassVar[bool] = True

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a packed tensor has bytes and a global scale."""
        stem = info.name.removesuffix(self.codes)
        return info.encoding == "u8" and stem + self.whole in self.stored.tensors

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        return {self.codes: (("u8",), (2,)), self.scales: (("f8_e4m3",), (2,)), self.whole: (("f32",), (0, 1))}

    def described(self, stem: str, infos: Mapping[str, TensorInfo]) -> QuantizedWeight:
        """Return a weight as nvfp4_f32."""
        codes, scales = infos[self.codes], infos[self.scales]
        rows, half = codes.shape
        if scales.shape != (rows, half // 8) or half % 8 or min(rows, half) < 1:
            raise self.wrong(codes, scales)
        if infos[self.whole].shape not in ((), (1,)):
            raise self.wrong(codes, infos[self.whole])
        return self.presented(stem, (rows, 2 * half), NVFP4_F32, 4, half // 8, infos)

    def blocks(self, weight: QuantizedWeight, found: Mapping[str, Tensor]) -> Tensor:
        """Return nvfp4_f32 blocks; a group's scale and the global one are joined as the library does, in float32."""
        rows, columns = weight.info.shape
        groups, whole = found[self.scales].to(torch.float32), found[self.whole].flatten()
        scales = groups / whole if self.divides else groups * whole
        if not bool(scales.isfinite().all()) or not bool(whole.isfinite().all()):
            names = f"{quoted(weight.parts[self.scales])} and {quoted(weight.parts[self.whole])}"
            raise CheckpointError(f"{self.stored.source}: scales {names} are not finite; fetch the checkpoint again")
        halves = (scales / 2).view(rows, columns // BLOCK, 2).view(torch.uint8)
        return torch.cat([halves, split_nibbles(found[self.codes].view(rows, columns // BLOCK, -1))], dim=2)


class ModeloptNvfp4Layout(Nvfp4Layout):
    """Weights of TensorRT Model Optimizer's NVFP4."""

    name = "modelopt-nvfp4"
    codes, scales, whole = ".weight", SCALE, ".weight_scale_2"
    needed = (scales, whole)
    divides = False


class Mxfp4Layout(WeightLayout):
    """Weights of compressed-tensors' format mxfp4-pack-quantized."""

    name = "mxfp4-pack-quantized"
    codes, scales = PACKED, SCALE
    needed = (scales,)

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a packed tensor has bytes and no global scale."""
        stem = info.name.removesuffix(self.codes)
        return info.encoding == "u8" and stem + Nvfp4Layout.whole not in self.stored.tensors

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        return {self.codes: (("u8",), (2,)), self.scales: (("u8",), (2,))}

    def described(self, stem: str, infos: Mapping[str, TensorInfo]) -> QuantizedWeight:
        """Describe the weight as an mxfp4 tensor [O, I]."""
        codes, scales = infos[self.codes], infos[self.scales]
        rows, half = codes.shape
        if scales.shape != (rows, half // 16) or half % 16 or min(rows, half) < 1:
            raise self.wrong(codes, scales)
        return self.presented(stem, (rows, 2 * half), MXFP4, 4, half // 16, infos)

    def blocks(self, weight: QuantizedWeight, found: Mapping[str, Tensor]) -> Tensor:
        """Interleave codes and E8M0 scales as ggml's mxfp4 blocks: [O, I / 32, 17] uint8."""
        scales = found[self.scales]
        if int(scales.max()) == NAN_EXPONENT:
            raise CheckpointError(
                f"{self.stored.source}: {quoted(weight.parts[self.scales])} has NaN; fetch the checkpoint again"
            )
        return torch.cat([scales.unsqueeze(2), split_nibbles(found[self.codes].view(*scales.shape, -1))], dim=2)
