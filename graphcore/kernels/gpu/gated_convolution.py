"""`graphcore::gated_convolution` on a GPU, one kernel; kernels/ops/gated_convolution.py says what it computes.

Legend: B batch, T tokens, C channels, W width of the convolution.

One program takes a block of channels for some tokens of a sequence. The one with the first tokens also brings the
state up to the last real token: no other program reads it. The host does not wait.
"""

import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_implementation
from graphcore.kernels.gpu.delta.convolve import TOKENS, convolution_inputs
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.pdl import pdl_options
from graphcore.kernels.ops.gated_convolution import ConvParts, empty_output, plain_gated_convolution

CHANNELS = 128  # of a program


@triton.jit
def _gated_convolution(
    mixed, weight, bias, state, starts, counts, out, tokens, channels,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    part, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = channel < channels
    token = part * TOKENS + tl.arange(0, TOKENS)
    rows = mixed + sequence * tokens * 3 * channels + channel
    factors, stride = rows + 2 * channels, 3 * channels
    olds = state + (sequence * channels + channel) * (WIDTH - 1)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        before = token - (WIDTH - 1) + tap
        x = convolution_inputs(rows, factors, olds, before, start, count, is_there, stride, WIDTH)
        total += x * tl.load(weight + channel * WIDTH + tap, mask=is_there, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=is_there, other=0.0)[None, :]
    at = token[:, None].to(tl.int64) * stride + channels
    is_real = (token < count)[:, None] & is_there[None, :]
    y = total * tl.load(rows[None, :] + at, mask=is_real, other=0.0).to(tl.float32)
    to = out + (sequence * tokens + token[:, None]) * channels + channel[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & is_there[None, :])
    if part == 0:
        slot = tl.arange(0, TAPS)
        last = count - (WIDTH - 1) + slot
        kept = convolution_inputs(rows, factors, olds, last, start, count, is_there, stride, WIDTH)
        tl.debug_barrier()  # every thread has read the state
        is_kept = (slot < tl.where(count > 0, WIDTH - 1, 0))[:, None] & is_there[None, :]
        tl.store(olds[None, :] + slot[:, None], kept.to(state.dtype.element_ty), mask=is_kept)


def launch_gated_convolution(parts: ConvParts) -> Tensor:
    """Implement `gated_convolution`."""
    batch, tokens, _ = parts.mixed.shape
    channels, width = parts.conv_weight.shape
    if width > TOKENS:
        return plain_gated_convolution(parts)
    parts = parts._replace(mixed=parts.mixed.contiguous())
    for tensor in parts.tensors:
        assert tensor is None or tensor.is_contiguous(), "the kernel finds its place by shape alone"
    out, of_program = empty_output(parts), 1 if tokens == 1 else TOKENS
    _gated_convolution[(triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, of_program), batch)](
        parts.mixed, parts.conv_weight, parts.conv_bias, parts.convolution, parts.starts, parts.counts, out,
        tokens, channels, WIDTH=width, TOKENS=of_program, BLOCK=CHANNELS, TAPS=triton.next_power_of_2(width),
        num_warps=1 if tokens == 1 else 4, enable_fp_fusion=True, **pdl_options(),
    )  # fmt: skip
    return out


register_implementation("gated_convolution", "CUDA", launch_gated_convolution)
