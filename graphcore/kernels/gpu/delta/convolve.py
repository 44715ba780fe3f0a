"""The short convolution of a Gated DeltaNet layer, unit keys and queries, and the gates of the rule, as one kernel.

Legend: B batch, T tokens, C channels, W width of the convolution, G key heads, H value heads, N key dim, M value dim.

One program takes one head of q, k or v for some tokens of a sequence. The one with the first tokens also brings the
convolution's state up to the last real token: no other program reads it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.pdl import pdl_options
from graphcore.kernels.ops.gated_delta import DeltaParts

TOKENS = 16  # of a program; at least the width of a convolution
UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), to float32's relative precision for small results too."""
    small = tl.exp(tl.minimum(x, 20.0))
    series = small * (1 - small * (0.5 - small / 3))
    return tl.where(x > 20.0, x, tl.where(small < 0.01, series, tl.log(1 + small)))


@triton.jit
def _convolve(
    mixed, a, b, weight, bias, rate, dt_bias, state, starts, counts, joined, decays, betas,
    tokens, channels, key_heads, heads, scale,
    WIDTH: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    TAPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    head, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    is_value = head >= 2 * key_heads
    at = tl.arange(0, BLOCK)
    is_there = at < tl.where(is_value, VALUE_DIM, KEY_DIM)
    skipped = tl.where(is_value, 2 * key_heads * (KEY_DIM - VALUE_DIM), 0)  # where values begin
    channel = skipped + head * tl.where(is_value, VALUE_DIM, KEY_DIM) + at
    token = part * TOKENS + tl.arange(0, TOKENS)
    rows = mixed + sequence * tokens * channels + channel
    olds = state + (sequence * channels + channel) * (WIDTH - 1)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=is_there, other=0.0)[None, :]
    for tap in tl.static_range(WIDTH):
        x = convolution_inputs(rows, None, olds, token - (WIDTH - 1) + tap, start, count, is_there, channels, WIDTH)
        total += x * tl.load(weight + channel * WIDTH + tap, mask=is_there, other=0.0)[None, :]
    y = tl.where((token < count)[:, None], total / (1 + tl.exp(-total)), 0.0)
    if not is_value:
        length = tl.rsqrt(tl.sum(y * y, axis=1) + UNIT_EPS) * tl.where(head < key_heads, scale, 1.0)
        y *= length[:, None]
    place = sequence * tokens + token
    is_token = token < tokens
    tl.store(joined + place[:, None] * channels + channel[None, :], y, mask=is_token[:, None] & is_there[None, :])
    if is_value:
        value_head = head - 2 * key_heads
        is_real = token < count
        gates = place * heads + value_head
        step = tl.load(a + gates, mask=is_real, other=0.0).to(tl.float32) + tl.load(dt_bias + value_head)
        strength = 1 / (1 + tl.exp(-tl.load(b + gates, mask=is_real, other=0.0).to(tl.float32)))
        tl.store(decays + gates, tl.where(is_real, tl.load(rate + value_head) * _softplus(step), 0.0), mask=is_token)
        tl.store(betas + gates, tl.where(is_real, strength, 0.0), mask=is_token)
    if part == 0:
        slot = tl.arange(0, TAPS)
        kept = convolution_inputs(rows, None, olds, count - (WIDTH - 1) + slot, start, count, is_there, channels, WIDTH)
        tl.debug_barrier()  # every thread has read the state
        is_kept = (slot < tl.where(count > 0, WIDTH - 1, 0))[:, None] & is_there[None, :]
        tl.store(olds[None, :] + slot[:, None], kept.to(state.dtype.element_ty), mask=is_kept)


@triton.jit
def convolution_inputs(rows, factors, olds, token, start, count, is_there, stride, WIDTH: tl.constexpr):
    """Return the inputs of some tokens, [tokens, BLOCK] float32; those before 0 are the state's, or 0.

    Args:
        rows, factors: [BLOCK] pointers to the channels of token 0, and to what they are multiplied with or None.
        olds: [BLOCK] pointers to the channels' states.
        token: [tokens] indices, at least 1 - WIDTH; other tokens are 0.
        stride: elements between two tokens.
    """
    is_new = (token >= 0) & (token < count)
    is_old = token < tl.where(start > 0, 0, -WIDTH)
    at, is_read = token[:, None].to(tl.int64) * stride, is_new[:, None] & is_there[None, :]
    new = tl.load(rows[None, :] + at, mask=is_read, other=0.0).to(tl.float32)
    if factors is not None:
        new *= tl.load(factors[None, :] + at, mask=is_read, other=0.0).to(tl.float32)
    old = tl.load(olds[None, :] + (token + WIDTH - 1)[:, None], mask=is_old[:, None] & is_there[None, :], other=0.0)
    return new + old.to(tl.float32)


def launch_convolve(parts: DeltaParts) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve the tokens of `delta_heads`, and bring the convolution's state up to the last real one.

    Returns:
        The channels [B, T, C] float32, with unit keys, and unit queries times N^-0.5; decays and betas [B, T, H]
        float32. Padding is 0.
    """
    batch, tokens, channels = parts.mixed.shape
    _, heads, key_dim, value_dim = parts.recurrent.shape
    width = parts.conv_weight.shape[1]
    assert width <= TOKENS, f"a convolution of {width} reads more tokens than a program has"
    for tensor in parts.tensors:
        assert tensor is None or tensor.is_contiguous(), "the kernels find their place by shape alone"
    device = parts.mixed.device
    joined = torch.empty(batch, tokens, channels, dtype=torch.float32, device=device)
    decays, betas = (torch.empty(batch, tokens, heads, dtype=torch.float32, device=device) for _ in range(2))
    block, of_program = max(16, triton.next_power_of_2(max(key_dim, value_dim))), 1 if tokens == 1 else TOKENS
    _convolve[(2 * parts.key_heads + heads, triton.cdiv(tokens, of_program), batch)](
        parts.mixed, parts.a, parts.b, parts.conv_weight, parts.conv_bias, parts.rate, parts.dt_bias,
        parts.convolution, parts.starts, parts.counts, joined, decays, betas,
        tokens, channels, parts.key_heads, heads, key_dim**-0.5,
        WIDTH=width, KEY_DIM=key_dim, VALUE_DIM=value_dim, TOKENS=of_program, BLOCK=block,
        TAPS=triton.next_power_of_2(width), num_warps=1 if tokens == 1 else 4, enable_fp_fusion=True,
        **pdl_options(),
    )  # fmt: skip
    return joined, decays, betas
