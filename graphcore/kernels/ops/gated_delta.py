"""A Gated DeltaNet layer between its projections, as one custom op: convolution, gates, delta rule and gated norm.

Legend: B batch, T tokens, C channels, W width of the convolution, G key heads, H value heads, N key dim, M value dim.

    mixed = [q | k | v], C = 2 G N + H M          both states are updated in place
    convolution, SiLU -> unit q, k -> delta rule (decay and beta of a, b) -> RMSNorm * weight * SiLU(z)

`plain_delta_heads` is the reference implementation (kernels/ops/delta_rule.py has its parts); it reads no length on the
host. The CPU runs the C++ kernels (native/delta.h) if there is a library; a GPU's kernels register themselves.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphcore.kernels.cpu.instructions import MOST_TAPS, Delta
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, open_library
from graphcore.kernels.custom_ops import register_custom_op, register_implementation
from graphcore.kernels.ops.delta_rule import (
    delta_gates,
    gated_delta_rule,
    gated_norm,
    short_convolution,
    spread_heads,
    unit_heads,
)


class DeltaParts(NamedTuple):
    """Arguments of `delta_heads`.

    Attributes:
        mixed: [B, T, C] compute dtype, the projections q [G, N], k [G, N] and v [H, M] of each token, side by side.
        z: [B, T, H M] compute dtype, gate of the norm.
        a, b: [B, T, H] compute dtype, projections for decay and beta.
        conv_weight: [C, W] float32, the oldest token's factor first.
        conv_bias: [C] float32 or None.
        rate, dt_bias: [H] float32; decay = rate * softplus(a + dt_bias), with rate = -exp(A_log).
        norm_weight: [M] float32, a plain factor.
        convolution: [B, C, W-1] floating dtype, the last inputs of the convolution, oldest first; written in place.
        recurrent: [B, H, N, M] float32, written in place.
        starts: [B] int64, tokens that the states have seen.
        counts: [B] int64, real tokens of this pass; the result for padding is unspecified.
        key_heads: G.
        eps: number added to the norm's mean square.
        tiled: True if value head h belongs to key head h mod G, as in GGUF files; False if to h // (H / G).
        library: file of the C++ kernels, for the CPU; empty if there is none.
    """

    mixed: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    rate: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    convolution: Tensor
    recurrent: Tensor
    starts: Tensor
    counts: Tensor
    key_heads: int
    eps: float
    tiled: bool = False
    library: str = ""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in order."""
        return self[:13]


def delta_heads(*parts: Any) -> Tensor:
    """Run the tokens through a layer's heads, and advance both states to the last real token.

    A sequence that starts at 0 begins with zero states, whatever the buffers contain. Padding never changes a state,
    and a row without a real token keeps its states.

    Args:
        parts: fields of `DeltaParts`, one by one, because torch.fx traces this function.

    Returns:
        [B, T, H M] compute dtype.
    """
    return _delta_heads(DeltaParts(*parts))


def plain_delta_heads(parts: DeltaParts) -> Tensor:
    """Implement `delta_heads` in plain torch."""
    _, heads, key_dim, value_dim = parts.recurrent.shape
    is_new = ((parts.starts == 0) & (parts.counts > 0))[:, None, None]
    inputs = parts.convolution.masked_fill(is_new, 0)
    joined, kept = short_convolution(parts.mixed, parts.conv_weight, inputs, parts.conv_bias, parts.counts)  # [B, T, C]
    keys = parts.key_heads * key_dim
    q, k, v = torch.split(joined, [keys, keys, heads * value_dim], dim=-1)
    q, k = (spread_heads(unit_heads(x.view(*x.shape[:2], -1, key_dim)), heads, parts.tiled) for x in (q, k))
    decay, beta = delta_gates(parts.a, parts.b, parts.rate, parts.dt_bias, parts.counts)
    state = parts.recurrent.masked_fill(is_new[..., None], 0)
    v = v.view(*v.shape[:2], heads, value_dim)
    out, state = gated_delta_rule(q * key_dim**-0.5, k, v, decay, beta, state)
    parts.convolution.copy_(kept)
    parts.recurrent.copy_(state)
    return gated_norm(out, parts.z.view_as(out), parts.norm_weight, parts.eps).flatten(2).to(parts.mixed.dtype)


def delta_heads_on_cpu(parts: DeltaParts) -> Tensor:
    """Run `delta_heads` in C++ if there is a library, else in plain torch."""
    if not parts.library or parts.conv_weight.shape[1] > MOST_TAPS:
        return plain_delta_heads(parts)
    inputs = {name: getattr(parts, name).contiguous() for name in ("mixed", "z", "a", "b")}
    parts = parts._replace(**inputs)
    out = torch.empty_like(parts.z)
    native = delta_arguments(Delta, parts, None, out, _address)
    open_library(parts.library).graphcore_delta_heads(torch.get_num_threads(), ctypes.byref(native))
    return out


def delta_arguments(
    kind: type[Delta],
    parts: DeltaParts,
    joined: Tensor | None,
    out: Tensor,
    address: Callable[[Tensor | None], int | None],
    caches: Tensor | None = None,
) -> Delta:
    """Return the C++ struct with the layer's arguments.

    Args:
        kind: type of the struct: `Delta`, or an instruction derived from it.
        joined: buffer for the convolution's output; None if the kernels allocate it.
        out: tensor that the output is written to.
        address: function that returns a tensor's address, None for None.
        caches: [B] int64, row of the states of each sequence; None if they are in order.
    """
    arguments = kind(*map(address, parts.tensors), address(joined), address(out), address(caches))
    arguments.strides[:] = [part.stride(1) for part in (parts.mixed, parts.z, parts.a, parts.b)]
    arguments.sequences, arguments.tokens, _ = parts.mixed.shape
    arguments.width, arguments.key_heads = parts.conv_weight.shape[1], parts.key_heads
    _, arguments.heads, arguments.key_dim, arguments.value_dim = parts.recurrent.shape
    arguments.format = DTYPE_NUMBERS[parts.mixed.dtype]
    arguments.state_format = DTYPE_NUMBERS[parts.convolution.dtype]
    arguments.tiled, arguments.eps = parts.tiled, parts.eps
    return arguments


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), f"strides {tensor.stride()}, the kernels read one run"
    return tensor.data_ptr()


_delta_heads = register_custom_op(
    "delta_heads",
    plain_delta_heads,
    lambda parts: torch.empty_like(parts.z, memory_format=torch.contiguous_format),
    mutates_args=["parts_convolution", "parts_recurrent"],
)
register_implementation("delta_heads", "CPU", delta_heads_on_cpu)
