"""A Gated DeltaNet layer between its projections, as one custom op: convolution, gates, delta rule and gated norm.

Legend: B batch, T tokens, C channels, W width of the convolution, G key heads, H value heads, N key dim, M value dim.

    mixed = [q | k | v], C = 2 G N + H M          both states are updated in place
    convolution, SiLU -> unit q, k -> delta rule (decay and beta of a, b) -> RMSNorm * weight * SiLU(z)

`plain_delta_heads` is the plain definition of what is computed (kernels/delta_rule.py has its parts): it reads no
length back. Faster kernels register themselves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.kernels.delta_rule import (
    delta_gates,
    gated_delta_rule,
    gated_norm,
    short_convolution,
    spread_heads,
    unit_heads,
)

torch.library.define(
    "graphcore::delta_heads",
    "(Tensor mixed, Tensor z, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, Tensor rate, Tensor dt_bias,"
    " Tensor norm_weight, Tensor(a!) convolution, Tensor(b!) recurrent, Tensor starts, Tensor counts, int key_heads,"
    " float eps, bool tiled=False, str library='') -> Tensor",
)


def delta_heads(
    mixed: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    rate: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    convolution: Tensor,
    recurrent: Tensor,
    starts: Tensor,
    counts: Tensor,
    key_heads: int,
    eps: float,
    tiled: bool = False,
    library: str = "",
) -> Tensor:
    """Run the tokens through a layer's heads, and bring both states up to the last real token.

    A sequence that starts at 0 begins with states of zeros, whatever the buffers hold. Padding never changes a
    state, and a row without a real token keeps its own.

    Args:
        mixed: [B, T, C] compute dtype, the projections q [G, N], k [G, N] and v [H, M] of each token, side by side.
        z: [B, T, H M] compute dtype, gate of the norm.
        a, b: [B, T, H] compute dtype, projections for decay and beta.
        conv_weight: [C, W] float32, the oldest token's factor first.  conv_bias: [C] float32 or None.
        rate, dt_bias: [H] float32; decay = rate * softplus(a + dt_bias), with rate = -exp(A_log).
        norm_weight: [M] float32, a plain factor.
        convolution: [B, C, W-1] floating dtype, the last inputs of the convolution, oldest first; written in place.
        recurrent: [B, H, N, M] float32, written in place.
        starts: [B] int64.  counts: [B] int64, real tokens of this pass; the result for padding is unspecified.
        key_heads: G.
        eps: number added to the norm's mean square.
        tiled: value head h belongs to key head h mod G, as in GGUF files; else to h // (H / G).
        library: file of the C++ kernels, for the CPU; empty if there is none.

    Returns:
        [B, T, H M] compute dtype.
    """
    op = torch.ops.graphcore.delta_heads.default
    weights = (conv_weight, conv_bias, rate, dt_bias, norm_weight)
    spans = (convolution, recurrent, starts, counts, key_heads, eps, tiled, library)
    return op(mixed, z, a, b, *weights, *spans)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::delta_heads")  # type: ignore[untyped-decorator]  # torch does not type it
def _delta_heads_fake(_mixed: Tensor, z: Tensor, *_: object) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a layer, as its tensors have them."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(recurrent: Tensor, key_heads: int) -> "DeltaSizes":
        """Return the sizes of a layer with this state [B, H, N, M]."""
        return DeltaSizes(key_heads, *recurrent.shape[1:])

    @property
    def key_channels(self) -> int:
        """Channels of q, and as many of k: G N."""
        return self.key_heads * self.key_dim


def plain_delta_heads(
    mixed: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    rate: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    convolution: Tensor,
    recurrent: Tensor,
    starts: Tensor,
    counts: Tensor,
    key_heads: int,
    eps: float,
    tiled: bool = False,
    library: str = "",  # noqa: ARG001  # the op has one signature for all devices
) -> Tensor:
    """Implement `delta_heads` in plain torch."""
    sizes = DeltaSizes.of(recurrent, key_heads)
    is_new = ((starts == 0) & (counts > 0))[:, None, None]
    inputs = convolution.masked_fill(is_new, 0)
    joined, kept = short_convolution(mixed, conv_weight, inputs, conv_bias, counts)  # [B, T, C]
    q, k, v = joined.split((sizes.key_channels, sizes.key_channels, sizes.heads * sizes.value_dim), dim=-1)
    q, k = (spread_heads(unit_heads(x.unflatten(2, (key_heads, -1))), sizes.heads, tiled) for x in (q, k))
    decay, beta = delta_gates(a, b, rate, dt_bias, counts)
    v, state = v.unflatten(2, (sizes.heads, -1)), recurrent.masked_fill(is_new[..., None], 0)
    out, state = gated_delta_rule(q * sizes.key_dim**-0.5, k, v, decay, beta, state)
    convolution.copy_(kept)
    recurrent.copy_(state)
    return gated_norm(out, z.unflatten(2, (sizes.heads, -1)), norm_weight, eps).flatten(2).to(mixed.dtype)


# Not as a decorator: torch's would leave None under the function's name.
torch.library.impl("graphcore::delta_heads", "CompositeExplicitAutograd", plain_delta_heads)
