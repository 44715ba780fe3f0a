"""The delta rule and the gated norm for one token of each sequence, as one kernel.

Legend: B batch, C channels, G key heads, H value heads, N key dim, M value dim.

A program takes a head. Its state lies in registers, so that it is read once and written once. What the query reads of
the new state follows from what it reads of the old one, so both sums over the key dim are taken together:

    q (S + k c) = q S + (q . k) c
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.pdl import pdl_options
from graphcore.kernels.ops.gated_delta import DeltaParts

STATE_VALUES = 64  # numbers of a state that a thread holds, at most


@triton.jit
def _one_token(
    joined, decays, betas, z, norm_weight, state, starts, counts, out, channels, key_heads, heads, eps,
    TILED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(counts + sequence) == 0:
        return
    key_head = head % key_heads if TILED else head // (heads // key_heads)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    place = sequence * heads + head
    is_there = is_key[:, None] & is_value[None, :]
    is_old = is_there & (key < tl.where(tl.load(starts + sequence) > 0, KEYS, 0))[:, None]
    at = state + (place * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    held = tl.load(at, mask=is_old, other=0.0) * tl.exp(tl.load(decays + place))
    row = joined + sequence * channels
    q = tl.load(row + key_head * KEY_DIM + key, mask=is_key, other=0.0)
    k = tl.load(row + (key_heads + key_head) * KEY_DIM + key, mask=is_key, other=0.0)
    v = tl.load(row + 2 * key_heads * KEY_DIM + head * VALUE_DIM + value, mask=is_value, other=0.0)
    change = tl.load(betas + place) * (v - tl.sum(k[:, None] * held, axis=0))
    answer = tl.sum(q[:, None] * held, axis=0) + tl.sum(q * k) * change
    tl.store(at, held + k[:, None] * change[None, :], mask=is_there)
    answer *= tl.rsqrt(tl.sum(answer * answer) / VALUE_DIM + eps)
    gate = tl.load(z + place * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
    answer *= tl.load(norm_weight + value, mask=is_value, other=0.0) * gate / (1 + tl.exp(-gate))
    tl.store(out + place * VALUE_DIM + value, answer.to(out.dtype.element_ty), mask=is_value)


def launch_one_token(parts: DeltaParts, joined: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
    """Apply the rule to one token [B, 1, C] of `launch_convolve`; return the result of `delta_heads`."""
    batch, heads, key_dim, value_dim = parts.recurrent.shape
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
    out = torch.empty_like(parts.z)
    _one_token[(heads, batch)](
        joined, decays, betas, parts.z, parts.norm_weight, parts.recurrent, parts.starts, parts.counts, out,
        joined.shape[-1], parts.key_heads, heads, parts.eps, TILED=parts.tiled, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEYS=keys, VALUES=values, num_warps=min(max(keys * values // (32 * STATE_VALUES), 1), 16),
        enable_fp_fusion=True, **pdl_options(),
    )  # fmt: skip
    return out
