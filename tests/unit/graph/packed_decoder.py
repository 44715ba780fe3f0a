"""Packing a decoder's matrices at random, without a checkpoint."""

import torch
from support.packed_matrices import native_kernels

from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.nn.decoder import Decoder, Embedding
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear
from graphcore.quant import FORMATS


def pack_all(decoder: Decoder, name: str, rounding: str) -> Decoder:
    """Have every matrix be packed in a format, its values as near as the format can hold them."""
    one, library = FORMATS[name], native_kernels()
    for module in decoder.modules():
        if not isinstance(module, Linear | ExpertLinear | Embedding):
            continue
        dense = module.weight
        packing = KernelPacking(name, *dense.shape[-2:], library)
        rows, scale = one.split_rows(one.quantize(dense), dense.shape)
        parts = [packing.pack(part, scale) for part in (rows if dense.dim() == 3 else rows[None])]
        if isinstance(module, Embedding):
            module.pack(packing)
        else:
            module.pack(packing, rounding)
        module.weight = torch.stack(parts) if dense.dim() == 3 else parts[0]
    return decoder


def unpack_all(decoder: Decoder, name: str) -> Decoder:
    """Have every matrix hold what packing leaves of it, dense."""
    one = FORMATS[name]
    for module in decoder.modules():
        if isinstance(module, Linear | ExpertLinear | Embedding):
            module.weight.copy_(one.dequantize(one.quantize(module.weight), module.weight.shape))
    return decoder
