"""GPTQ's and AWQ's integer weights, whose words have codes along columns, or along rows.

Legend: O rows (output features), I columns (input features), G groups of I / G columns, B bits of a code.

    gptq     X.qweight int32 [I B / 32, O]: word [w, o] has the codes of columns w 32 / B on, the lowest first
             X.scales [G, O]; X.qzeros int32 [G, O B / 32], zeros along rows, less 1 in version 1; X.g_idx [I], groups
    awq      X.qweight int32 [I, O / 8], X.qzeros int32 [G, O / 8]: of eight rows, the nibbles from the lowest on have
             rows 0 2 4 6 1 3 5 7; X.scales [G, O]; without zero points there are no qzeros

Source: AutoGPTQ, nn_modules/qlinear; gptqmodel, utils/model.py (versions 1 and 2); AutoAWQ, utils/packing_utils.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.quantized.blocks import nibbles
from graphcore.checkpoint.quantized.layout import FLOATS, INTEGERS, IntegerLayout, Kind, QuantizedWeight

WORD_BITS = 32
AWQ_BITS, AWQ_ROWS = 4, (0, 2, 4, 6, 1, 3, 5, 7)  # row of each nibble
LOW_NIBBLES = 0x0F0F0F0F


class GptqLayout(IntegerLayout):
    """Weights of GPTQ's version 1, whose programs store zero points less 1."""

    name = "gptq"
    codes, scales, zeros, order = ".qweight", ".scales", ".qzeros", ".g_idx"
    needed, optional = (scales, zeros), (order,)
    stored_less, always_has_order = 1, True

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        words: Kind = (("i32",), (2,))
        return {self.codes: words, self.zeros: words, self.scales: (FLOATS, (2,)), self.order: (INTEGERS, (1,))}

    def measured(self, infos: Mapping[str, TensorInfo]) -> tuple[tuple[int, int], int, int]:
        """Return shape, bits and groups: a word has as many zeros of rows as codes."""
        codes, scales, zeros = infos[self.codes], infos[self.scales], infos[self.zeros]
        (words, rows), (groups, scaled) = codes.shape, scales.shape
        if scaled != rows or min(words, rows, groups) < 1:
            raise self.wrong(codes, scales)
        whole = zeros.shape[1] * WORD_BITS
        if whole < rows or whole % rows or zeros.shape[0] != groups:
            raise self.wrong(codes, zeros)
        bits = whole // rows
        return (rows, words * WORD_BITS // bits), bits, groups

    def codes_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Unpack the int32 words, which pack along input features, to codes [O, I B / 8] uint8."""
        rows, columns = weight.info.shape
        raw = stored.contiguous().view(torch.uint8).view(-1, rows, 4).transpose(0, 1)
        return raw.reshape(rows, columns * weight.bits // 8)

    def zeros_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the zero points. Version 1 adds 1 to whole words, as gptqmodel does: 15 and 255 carry."""
        ones = 0x11111111 if weight.bits == 4 else 0x01010101
        raw = (stored + self.stored_less * ones).contiguous().view(torch.uint8)
        return (nibbles(raw) if weight.bits == 4 else raw).T.contiguous()

    def scales_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the scales."""
        return stored.T


class Gptq2Layout(GptqLayout):
    """Weights of GPTQ's version 2."""

    name = "gptq_v2"
    stored_less = 0


class AwqLayout(IntegerLayout):
    """AWQ weights packed for the GEMM kernel (version "gemm")."""

    name = "awq"
    codes, scales, zeros = ".qweight", ".scales", ".qzeros"
    needed, optional = (scales,), (zeros,)

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        words: Kind = (("i32",), (2,))
        return {self.codes: words, self.zeros: words, self.scales: (FLOATS, (2,))}

    def measured(self, infos: Mapping[str, TensorInfo]) -> tuple[tuple[int, int], int, int]:
        """Return shape, bits and groups."""
        codes, scales = infos[self.codes], infos[self.scales]
        (columns, words), (groups, rows) = codes.shape, scales.shape
        if rows != words * len(AWQ_ROWS) or min(columns, rows, groups) < 1:
            raise self.wrong(codes, scales)
        if self.zeros in infos and infos[self.zeros].shape != (groups, words):
            raise self.wrong(codes, infos[self.zeros])
        return (rows, columns), AWQ_BITS, groups

    def codes_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Unpack the int32 words, which pack along output features, to 4-bit codes [O, I / 2] uint8."""
        even, odd = stored.T[:, 0::2], stored.T[:, 1::2]  # [O / 8, I / 2]
        low = even & LOW_NIBBLES | (odd & LOW_NIBBLES) << 4
        high = even >> 4 & LOW_NIBBLES | odd & ~LOW_NIBBLES
        out = torch.empty(len(low), len(AWQ_ROWS), low.shape[1], dtype=torch.uint8, device="cpu")
        for words, first in ((low, 0), (high, 1)):
            own = words.contiguous().view(torch.uint8).view(*words.shape, 4)
            for byte, row in enumerate(AWQ_ROWS[first::2]):
                out[:, row] = own[..., byte]
        return out.view(*weight.info.shape[:1], -1)

    def zeros_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the zero points."""
        return _rows_in_order(stored).T.contiguous()

    def scales_of(self, weight: QuantizedWeight, stored: Tensor) -> Tensor:
        """Return the scales."""
        return stored.T


def _rows_in_order(words: Tensor) -> Tensor:
    """Return AWQ's codes in the order of rows: [n, O / 8] int32 to [n, O] uint8."""
    eight = nibbles(words.contiguous().view(torch.uint8)).view(len(words), -1, len(AWQ_ROWS))
    places = torch.tensor(AWQ_ROWS, dtype=torch.int64, device="cpu").argsort()  # the nibble of each row
    return eight[..., places].flatten(1)
