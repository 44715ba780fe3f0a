"""bitsandbytes' weights of eight and four bits.

Legend: O rows (output features), I columns (input features).

    8 bit   X.weight int8 [O, I], X.SCB float32 [O], weight = code * SCB / 127; X.weight_format, 0 for rows in order
    4 bit   X.weight uint8 [O I / 2, 1], or its bytes as another dtype, of two codes the first in the high nibble, and
            .absmax          float32 [O I / n], the largest weight of each n in a row; or uint8, indices
            .quant_map       float32 [16], levels
            .nested_absmax, .nested_quant_map          float32 [O I / n / m], [256]: absmax = offset + map[i] * nested
            .quant_state.bitsandbytes__nf4 or __fp4    uint8, JSON: shape, blocksize n, nested_blocksize m, offset

Source: bitsandbytes, functional (QuantState) and nn (Linear8bitLt).
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.quantized.blocks import (
    BLOCK,
    float_blocks,
    integer_blocks,
    split_nibbles,
)
from graphcore.checkpoint.quantized.layout import ADVICE, FLOATS, Kind, QuantizedWeight, WeightLayout
from graphcore.checkpoint.quantized.scheme import QuantizedScheme
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.quant.formats.affine8 import AFFINE8
from graphcore.quant.formats.fp4 import FP4
from graphcore.quant.formats.nf4 import NF4

LARGEST_CODE = 127
STATE = ".weight.quant_state.bitsandbytes__"
FORMATS_BY_SUFFIX = {f"{STATE}nf4": NF4, f"{STATE}fp4": FP4}
MAP, ABSMAX, NESTED = ".weight.quant_map", ".weight.absmax", (".weight.nested_absmax", ".weight.nested_quant_map")


class Bnb8BitLayout(WeightLayout):
    """Weights of LLM.int8(); which activations are rounded is left out."""

    name = "bitsandbytes 8-bit"
    codes, scales, order = ".weight", ".SCB", ".weight_format"
    needed, optional = (scales,), (order,)

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a weight is a matrix of bytes."""
        return info.encoding == "i8" and len(info.shape) > 1

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        return {self.codes: (("i8",), (2,)), self.scales: (("f32",), (1, 2)), self.order: (("u8",), (0, 1))}

    def described(self, stem: str, infos: Mapping[str, TensorInfo]) -> QuantizedWeight:
        """Describe the weight as an affine8 tensor [O, I]."""
        codes, scales = infos[self.codes], infos[self.scales]
        rows, columns = codes.shape
        if scales.shape not in ((rows,), (rows, 1)) or min(rows, columns) < 1:
            raise self.wrong(codes, scales)
        return self.presented(stem, (rows, columns), AFFINE8, 8, 1, infos)

    def blocks(self, weight: QuantizedWeight, found: Mapping[str, Tensor]) -> Tensor:
        """Return affine8 blocks."""
        if self.order in found and bool(found[self.order].any()):
            raise UnsupportedError(
                f"{self.stored.source}: {quoted(weight.parts[self.order])} says that codes are in another order than "
                f"that of rows, which is not read; {ADVICE}"
            )
        scales = found[self.scales].reshape(-1, 1) / LARGEST_CODE
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"{self.stored.source}: {quoted(weight.parts[self.scales])} is not finite; fetch the checkpoint again"
            )
        codes = found[self.codes].contiguous().view(torch.uint8) ^ 0x80
        return integer_blocks(AFFINE8, 8, codes, None, scales)


class QuantState:
    """The JSON beside a weight of four bits.

    Attributes:
        shape: rows and columns of the weight.
        blocksize, nested_blocksize: number of weights that share an absmax, and of those that share a nested one.
        nested_offset: number that is added to absmax; None if it is not stated.
    """

    def __init__(self, raw: object, quant_type: str) -> None:
        fields = raw if isinstance(raw, dict) else {}
        if fields.get("quant_type", quant_type) != quant_type:
            raise ValueError(f"quant_type is {quoted(fields['quant_type'])}")
        shape = fields.get("shape")
        sizes = [*(shape if isinstance(shape, list) else ()), fields.get("blocksize")]
        if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError("shape or blocksize is missing")
        self.shape, self.blocksize = (sizes[0], sizes[1]), sizes[2]
        self.nested_blocksize, offset = fields.get("nested_blocksize", 0), fields.get("nested_offset")
        if type(self.nested_blocksize) is not int or type(offset) not in (int, float, type(None)):
            raise ValueError("nested_blocksize or nested_offset is no number")
        self.nested_offset = None if offset is None else float(offset)


class Bnb4BitLayout(WeightLayout):
    """Weights of NF4 or FP4, with or without a double quantisation of their scales."""

    name = "bitsandbytes 4-bit"
    codes = ".weight"
    needed = (ABSMAX, MAP)
    optional = (*NESTED, *FORMATS_BY_SUFFIX)

    def __init__(self, stored: Checkpoint, scheme: QuantizedScheme) -> None:
        super().__init__(stored, scheme)
        self._states: dict[str, QuantState] = {}

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a weight has a description beside it; its bytes may be stored as another dtype."""
        return any(info.name.removesuffix(self.codes) + suffix in self.stored.tensors for suffix in FORMATS_BY_SUFFIX)

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        states = dict.fromkeys(FORMATS_BY_SUFFIX, (("u8",), (1,)))
        floats: Kind = (("f32",), (1,))
        return {
            self.codes: (("u8", *FLOATS), (1, 2)),
            ABSMAX: (("f32", "u8"), (1,)),
            MAP: floats,
            **dict.fromkeys(NESTED, floats),
            **states,
        }

    def described(self, stem: str, infos: Mapping[str, TensorInfo]) -> QuantizedWeight:
        """Return a weight as nf4 or fp4; its shape is read from the JSON beside it."""
        source, codes, absmax = self.stored.source, infos[self.codes], infos[ABSMAX]
        states = [suffix for suffix in FORMATS_BY_SUFFIX if suffix in infos]
        if len(states) != 1 or (absmax.encoding == "u8" and not all(suffix in infos for suffix in NESTED)):
            missing = stem + (f"{STATE}nf4" if len(states) != 1 else NESTED[0])
            raise CheckpointError(
                f"{source}: Missing required tensor: {quoted(missing)}, of a quantised weight; fetch the "
                "checkpoint again"
            )
        try:
            raw = json.loads(bytes(self.stored.read(infos[states[0]].name).numpy()))
            state = QuantState(raw, states[0].removeprefix(STATE))
        except (ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{source}: {quoted(infos[states[0]].name)} is no description of a weight ({error}); fetch the "
                "checkpoint again"
            ) from None
        rows, columns = state.shape
        if codes.nbytes * 2 != rows * columns or absmax.shape[0] != -(-rows * columns // state.blocksize):
            raise self.wrong(codes, absmax)
        if state.blocksize % BLOCK:
            raise UnsupportedError(f"{source}: {quoted(codes.name)} has blocks of {state.blocksize} weights; {ADVICE}")
        self._states[stem] = state
        return self.presented(stem, state.shape, FORMATS_BY_SUFFIX[states[0]], 4, 1, infos)

    def blocks(self, weight: QuantizedWeight, found: Mapping[str, Tensor]) -> Tensor:
        """Return nf4 or fp4 blocks."""
        state = self._states[weight.info.name.removesuffix(".weight")]
        levels = torch.tensor(weight.format.float_levels, dtype=torch.float32, device="cpu")
        if not torch.equal(found[MAP], levels):
            raise UnsupportedError(
                f"{self.stored.source}: {quoted(weight.parts[MAP])} has other levels than {weight.info.encoding}; "
                f"{ADVICE}"
            )
        absmax = self._absmax(weight, found, state)
        rows, columns = weight.info.shape
        swapped = found[self.codes].contiguous().view(torch.uint8).reshape(rows, columns // BLOCK, -1)
        codes = split_nibbles(swapped << 4 | swapped >> 4)
        num_blocks = rows * columns // BLOCK
        each = absmax.repeat_interleave(min(state.blocksize // BLOCK, num_blocks))[:num_blocks]
        return float_blocks(codes, each.view(rows, -1))

    def _absmax(self, weight: QuantizedWeight, found: Mapping[str, Tensor], state: QuantState) -> Tensor:
        """Return the scale of each block of the file: float32 [O I / n]."""
        absmax = found[ABSMAX]
        if absmax.dtype is torch.uint8:
            nested, levels = (found[suffix] for suffix in NESTED)
            offset, size = state.nested_offset, min(state.nested_blocksize, len(absmax))
            if len(levels) != 256 or size < 1 or len(nested) * size < len(absmax) or offset is None:
                raise CheckpointError(
                    f"{self.stored.source}: {quoted(weight.parts[NESTED[0]])} does not fit with "
                    f"{quoted(weight.parts[ABSMAX])}, nested_blocksize and nested_offset beside them; fetch the "
                    "checkpoint again"
                )
            factors = nested.repeat_interleave(size)[: len(absmax)]
            absmax = levels[absmax.to(torch.int64)] * factors + offset
        if not bool(absmax.isfinite().all()):
            raise CheckpointError(
                f"{self.stored.source}: {quoted(weight.parts[ABSMAX])} is not finite; fetch the checkpoint again"
            )
        return absmax
