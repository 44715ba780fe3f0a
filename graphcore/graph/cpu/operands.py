"""Operands of a native program's instructions: matrices, roundings, normalisations, and routing buffers."""

from dataclasses import dataclass

from torch import Tensor, nn

from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu import program as native
from graphcore.kernels.cpu.library import ROUNDINGS, Matrix
from graphcore.nn.linear import Linear
from graphcore.nn.norm import LayerNorm, RMSNorm, UnitNorm


@dataclass(frozen=True)
class Routing:
    """The routing of one recorded block: its buffers, and the instructions that use them.

    Attributes:
        layer: index of the block's layer.
        chosen: [B, C] int32, ids of the chosen experts, written by the instructions before `begin`.
        places: [B, C] int32, slots of these experts, read from `begin` on; `chosen` itself if experts are resident.
        sharing: lists of the rows that chose each expert, for the instructions.
        is_last: [1] int32, 0 while further experts must be fetched; None if experts are resident.
        begin: index of the first instruction that runs experts.
    """

    layer: int
    chosen: Tensor
    places: Tensor
    sharing: instructions.Sharing
    is_last: Tensor | None
    begin: int


def native_matrix(program: native.NativeProgram, linear: Linear, out: Tensor) -> tuple[Matrix, Tensor | None, Tensor]:
    """Return a linear's matrix, its bias in float32, and `out`, the tensor for its output."""
    bias = None if linear.bias is None else program.in_float32(linear.bias)
    matrix = program.matrix(linear.weight, linear.packing)
    if linear.packing is not None and linear.weight_scale is not None and not linear.weight_scale.is_meta:
        scale = linear.weight_scale.item()
        matrix.scale = 1 / scale if linear.int8_order == "divided" else scale
    return matrix, bias, out


def rounding_of(linear: Linear) -> int:
    """Return the number of the rounding of a linear's input."""
    return ROUNDINGS["token" if linear.int8_order is not None else linear.rounding]


def norm_of(program: native.NativeProgram, norm: nn.Module) -> instructions.Norm:
    """Return a module's normalisation as an operand of instructions."""
    if isinstance(norm, RMSNorm | UnitNorm):
        weight = norm.weight if isinstance(norm, RMSNorm) else None
        return native.norm(program, "rms", norm.eps, weight, None)
    assert isinstance(norm, LayerNorm), f"{type(norm).__name__} is no normalisation"
    return native.norm(program, "layer", norm.eps, norm.weight, norm.bias)
