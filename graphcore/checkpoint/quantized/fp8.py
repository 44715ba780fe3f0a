"""FP8 weights: E4M3 codes with scales of blocks, rows or the whole tensor.

Legend: O rows (output features), I columns (input features).

    X.weight float8_e4m3 [O, I] and one of
    X.weight_scale_inv   transformers' fp8, DeepSeek: [O / 128, I / 128] rounded up, or one number; also a factor
    X.weight_scale       compressed-tensors' float-quantized, fbgemm_fp8, modelopt: the same, or [O, 1], [O]
    either of them       MXFP8: uint8 [O, I / 32] or float8_e8m0, exponents, the scale is 2^(e - 127)

Source: transformers, integrations/finegrained_fp8.py; compressed-tensors, quantization/lifecycle/forward.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.quantized.blocks import BLOCK, float_blocks
from graphcore.checkpoint.quantized.layout import ADVICE, FLOATS, Kind, QuantizedWeight, WeightLayout
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.quant.formats.fp8 import FP8

EXPONENTS = ("u8", "f8_e8m0")
NAN = 0x7F  # with either sign


class Fp8Layout(WeightLayout):
    """Weights of E4M3."""

    name = "fp8"
    codes = ".weight"
    needed = ()
    optional = (".weight_scale_inv", ".weight_scale")

    def is_codes(self, info: TensorInfo) -> bool:
        """Return whether a weight has eight-bit floats, or a scale that only those have."""
        inverse = info.name.removesuffix(self.codes) + self.optional[0]
        return info.encoding == "f8_e4m3" or inverse in self.stored.tensors

    def kinds(self) -> Mapping[str, Kind]:
        """Return the kinds of a weight's tensors."""
        return {self.codes: (("f8_e4m3",), (2,)), **dict.fromkeys(self.optional, (FLOATS + EXPONENTS, (0, 1, 2)))}

    def described(self, stem: str, infos: Mapping[str, TensorInfo]) -> QuantizedWeight:
        """Return a weight as fp8."""
        codes, scales = infos[self.codes], [infos[name] for name in self.optional if name in infos]
        if len(scales) != 1:
            names = " and ".join(quoted(stem + suffix) for suffix in self.optional)
            raise CheckpointError(
                f"{self.stored.source}: of tensors {names} one must be there, and {len(scales)} are, beside the FP8 "
                f"weight {quoted(codes.name)}; fetch the checkpoint again"
            )
        rows, columns = codes.shape
        if min(rows, columns) < 1 or scales[0].shape not in self._shapes_of_scales(scales[0], rows, columns):
            raise self.wrong(codes, scales[0])
        if self.scheme.block is not None and self.scheme.block[1] % BLOCK:
            raise UnsupportedError(
                f"{self.stored.source}: blocks of {list(self.scheme.block)} weights share a scale, and {BLOCK} columns "
                f"must; {ADVICE}"
            )
        return self.presented(stem, (rows, columns), FP8, 8, 1, infos)

    def _shapes_of_scales(self, scales: TensorInfo, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
        if self.scheme.block is not None and scales.name.endswith(self.optional[0]):
            shapes = shapes[:2]  # the config states blocks for all weights
        if scales.encoding in EXPONENTS:
            shapes = (*shapes, (rows, columns // BLOCK))
        if self.scheme.block is None:
            return shapes
        high, wide = self.scheme.block
        return *shapes, (-(-rows // high), -(-columns // wide))

    def blocks(self, weight: QuantizedWeight, found: Mapping[str, Tensor]) -> Tensor:
        """Return fp8 blocks."""
        codes = found[self.codes].contiguous().view(torch.uint8)
        (suffix,) = (name for name in self.optional if name in found)
        scales = self._each(_factors(found[suffix]), *codes.shape)
        if int((codes & NAN).max()) == NAN or not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"{self.stored.source}: {quoted(weight.parts[self.codes])} or its scales have NaN or infinity; fetch "
                "the checkpoint again"
            )
        return float_blocks(codes.view(len(codes), -1, BLOCK), scales)

    def _each(self, scales: Tensor, rows: int, columns: int) -> Tensor:
        """Return the scale of each block of 32 columns: [O, I / 32] float32."""
        if scales.shape == (rows, columns // BLOCK):
            return scales
        num_blocks, (high, wide) = columns // BLOCK, self.scheme.block or (1, columns)
        high, wide = min(high, rows), min(wide, columns)
        if scales.dim() < 2 or scales.shape != (-(-rows // high), -(-columns // wide)):
            return scales.reshape(-1, 1).expand(rows, num_blocks)
        tall = scales.repeat_interleave(high, dim=0)[:rows]
        return tall.repeat_interleave(-(-wide // BLOCK), dim=1)[:, :num_blocks]


def _factors(scales: Tensor) -> Tensor:
    """Return stored scales as float32, of the same shape; bytes are exponents."""
    if scales.dtype is torch.uint8:
        return scales.view(torch.float8_e8m0fnu).to(torch.float32)
    return scales.to(torch.float32)
