"""A gated short convolution between its projections (LFM2), as one custom op.

Legend: B batch, T tokens, C channels, W width of the convolution.

    mixed = [b | c | x] of each token        c * (causal convolution of b * x)        the state is updated in place

`plain_gated_convolution` is the reference implementation; it reads no length on the host. The CPU runs the C++ kernel
(native/convolution.h) if there is a library; a GPU's kernel registers itself.

Source: transformers, modeling_lfm2, `Lfm2ShortConv`.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphcore.kernels.cpu.instructions import MOST_TAPS, GatedConvolution
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, open_library
from graphcore.kernels.custom_ops import register_custom_op, register_implementation
from graphcore.kernels.ops.delta_rule import causal_convolution


class ConvParts(NamedTuple):
    """Arguments of `gated_convolution`.

    Attributes:
        mixed: [B, T, 3 C] compute dtype, the projections b, c and x of each token, side by side.
        conv_weight: [C, W] float32, the oldest token's factor first.
        conv_bias: [C] float32 or None.
        convolution: [B, C, W-1] floating dtype, the last inputs b * x, oldest first; written in place.
        starts: [B] int64, tokens that the state has seen.
        counts: [B] int64, real tokens of this pass; the result for padding is unspecified.
        library: file of the C++ kernels, for the CPU; empty if there is none.
    """

    mixed: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    convolution: Tensor
    starts: Tensor
    counts: Tensor
    library: str = ""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in order."""
        return self[:6]


def gated_convolution(*parts: Any) -> Tensor:
    """Run the tokens through a layer's convolution and gates, and advance the state to the last real token.

    A sequence that starts at 0 begins with a state of zeros, whatever the buffer contains. Padding never changes the
    state, and a row without a real token keeps its own.

    Args:
        parts: fields of `ConvParts`, one by one, because torch.fx traces this function.

    Returns:
        [B, T, C] compute dtype.
    """
    return _gated_convolution(ConvParts(*parts))


def plain_gated_convolution(parts: ConvParts) -> Tensor:
    """Implement `gated_convolution` in plain torch."""
    b, c, x = (one.float() for one in parts.mixed.chunk(3, dim=-1))
    is_new = ((parts.starts == 0) & (parts.counts > 0))[:, None, None]
    inputs = parts.convolution.masked_fill(is_new, 0)
    convolved, kept = causal_convolution(b * x, parts.conv_weight, inputs, parts.conv_bias, parts.counts)
    parts.convolution.copy_(kept)
    return (c * convolved).to(parts.mixed.dtype)


def gated_convolution_on_cpu(parts: ConvParts) -> Tensor:
    """Run `gated_convolution` in C++ if there is a library, else in plain torch."""
    if not parts.library or parts.conv_weight.shape[1] > MOST_TAPS:
        return plain_gated_convolution(parts)
    parts = parts._replace(mixed=parts.mixed.contiguous())
    out = empty_output(parts)
    native = convolution_arguments(parts, out, _address)
    open_library(parts.library).graphcore_gated_convolution(torch.get_num_threads(), ctypes.byref(native))
    return out


def empty_output(parts: ConvParts) -> Tensor:
    """Return an empty tensor for the result, [B, T, C] compute dtype."""
    batch, tokens, _ = parts.mixed.shape
    return parts.mixed.new_empty(batch, tokens, parts.conv_weight.shape[0])


def convolution_arguments(
    parts: ConvParts,
    out: Tensor,
    address: Callable[[Tensor | None], int | None],
    caches: Tensor | None = None,
) -> GatedConvolution:
    """Return the C++ struct with the layer's arguments.

    Args:
        out: [B, T, C] tensor that the output is written to.
        address: function that returns a tensor's address, None for None.
        caches: [B] int64, row of the state of each sequence; None if they are in order.
    """
    arguments = GatedConvolution(*map(address, parts.tensors), address(out), address(caches))
    arguments.sequences, arguments.tokens, _ = parts.mixed.shape
    # the stride of an axis of size 1 means nothing
    arguments.stride = parts.mixed.stride(0 if arguments.tokens == 1 else 1)
    arguments.channels, arguments.width = parts.conv_weight.shape
    arguments.format = DTYPE_NUMBERS[parts.mixed.dtype]
    arguments.state_format = DTYPE_NUMBERS[parts.convolution.dtype]
    return arguments


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), f"strides {tensor.stride()}, the kernel reads one run"
    return tensor.data_ptr()


_gated_convolution = register_custom_op(
    "gated_convolution", plain_gated_convolution, empty_output, mutates_args=["parts_convolution"]
)
register_implementation("gated_convolution", "CPU", gated_convolution_on_cpu)
