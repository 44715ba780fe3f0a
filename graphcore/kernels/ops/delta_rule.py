"""Gated DeltaNet in plain torch: a short convolution, the gated delta rule, and a gated norm.

Legend: B batch, T tokens, C channels, W width of the convolution, G key heads, H value heads, N key dim, M value dim.

A value head keeps a matrix S [N, M] instead of keys and values. For each token, with gate g = exp(decay):

    S   <- g S                          forget
    S   <- S + k (beta (v - k S))       move the value stored under key k towards v
    o    = q S

Source: Yang et al. 2024, "Gated Delta Networks", equation 10 and section 3.3 (chunks); the convolution, the gates and
the norm as in `Qwen3NextGatedDeltaNet` of transformers 5.23. Everything is computed in float32 (float64 for float64).

Padding tokens do not change the state: the rule gets beta 0 and decay 0 for them, and the convolution uses `counts`.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from graphcore.kernels import limits

MOST_STEPS = 8  # tokens that are computed one by one rather than as a chunk
UNIT_EPS = 1e-6


def short_convolution(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply a causal convolution of each channel, and SiLU.

    Args:
        x: [B, T, C] floating dtype.
        weight: [C, W], the oldest token's factor first.
        state: [B, C, W-1], the inputs before x, oldest first.
        bias: [C] or None.
        counts: [B] int64, number of real tokens of each sequence; None if all are real.

    Returns:
        SiLU of the convolution [B, T, C] float32, 0 where a token is padding, and the state after the last real token,
        [B, C, W-1] in the state's dtype.
    """
    total, kept = causal_convolution(x, weight, state, bias, counts)
    y = silu(total)
    return (y if counts is None else y.where(_is_real(x.shape[1], counts), 0.0)), kept


def causal_convolution(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply a causal convolution of each channel, with the arguments of `short_convolution`.

    Returns:
        The convolution [B, T, C] float32, unspecified where a token is padding, and the state after the last real
        token, [B, C, W-1] in the state's dtype.
    """
    tokens, width = x.shape[1], weight.shape[1]
    inputs = torch.cat((_wide(state).transpose(1, 2), _wide(x)), dim=1)  # [B, W-1+T, C]
    total = torch.zeros((), device=x.device, dtype=torch.float32)
    for tap in range(width):
        total = total + inputs[:, tap : tap + tokens] * weight[:, tap]
    kept = _last_inputs(inputs, width - 1, counts).transpose(1, 2).to(state.dtype)
    return (total if bias is None else total + bias), kept


def _last_inputs(inputs: Tensor, kept: int, counts: Tensor | None) -> Tensor:
    """Return the last inputs up to each sequence's last real token: [B, kept, C]."""
    if counts is None:
        return inputs[:, inputs.shape[1] - kept :]
    places = counts[:, None] + torch.arange(
        kept, device=counts.device, dtype=torch.int64
    )  # [B, kept]; the state's inputs come first
    return inputs.gather(1, places[:, :, None].expand(-1, -1, inputs.shape[2]))


def unit_heads(x: Tensor) -> Tensor:
    """Return heads [..., N] divided by their L2 norms."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


def spread_heads(x: Tensor, heads: int, tiled: bool = False) -> Tensor:
    """Repeat each key head for its value heads: [B, T, G, N] to [B, T, H, N].

    Args:
        x: [B, T, G, N].
        heads: number of value heads H, a multiple of G.
        tiled: True if value head h belongs to key head h mod G, as in GGUF files; False if to h // (H / G).
    """
    group = heads // x.shape[2]
    if group == 1:
        return x
    return x.repeat(1, 1, group, 1) if tiled else x.repeat_interleave(group, dim=2)


def delta_gates(
    a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rule's decay and beta, both [B, T, H] float32, and 0 where a token is padding.

    Args:
        a, b: [B, T, H] floating dtype, projections of the token.
        rate: [H] float32, -exp(A_log).
        bias: [H] float32, added to a.
        counts: [B] int64, number of real tokens of each sequence; None if all are real.
    """
    decay, beta = rate * softplus(_wide(a) + bias), _wide(b).sigmoid()
    if counts is None:
        return decay, beta
    is_real = _is_real(a.shape[1], counts)
    return decay.where(is_real, 0.0), beta.where(is_real, 0.0)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(x) * weight * SiLU(z): [..., M] float32.

    Args:
        x, z: [..., M] floating dtype.
        weight: [M] float32, a plain factor (Qwen's other norms store it minus 1).
        eps: number added to the mean square.
    """
    wide = _wide(x)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight * silu(_wide(z))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to all tokens in order.

    Args:
        q, k: [B, T, H, N] of `unit_heads`, q also multiplied by N^-0.5; one for each value head (`spread_heads`).
        v: [B, T, H, M].
        decay: [B, T, H], logarithm of the gate, at most 0.
        beta: [B, T, H], strength of the update, 0 to 1.
        state: [B, H, N, M].

    Returns:
        The outputs [B, T, H, M] and the state after the last token [B, H, N, M], float32.
    """
    rule = gated_delta_steps if q.shape[1] <= MOST_STEPS else gated_delta_chunks
    return rule(q, k, v, decay, beta, state)


def gated_delta_steps(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Implement `gated_delta_rule` token by token."""
    q, k, v, decay, beta, state = (_wide(part) for part in (q, k, v, decay, beta, state))
    answers = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhn,bhnm->bhm", k[:, t], state))
        state = state + k[:, t, :, :, None] * change[:, :, None]
        answers.append(torch.einsum("bhn,bhnm->bhm", q[:, t], state))
    return torch.stack(answers, dim=1), state


def gated_delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, chunk: int = limits.DELTA_CHUNK
) -> tuple[Tensor, Tensor]:
    """Implement `gated_delta_rule` with matrix products over chunks of tokens.

    With d(i) the sum of the chunk's decays up to token i, and S the state before the chunk, the changes
    c(i) = beta(i) (v(i) - value read with k(i)) solve a triangular system:

        c(i) + beta(i) sum over j < i of exp(d(i) - d(j)) (k(i) . k(j)) c(j)  =  beta(i) (v(i) - exp(d(i)) k(i) S)

    Args:
        chunk: largest number of tokens of one chunk.
    """
    wide = [_wide(part).transpose(1, 2) for part in (q, k, v, decay, beta)]  # [B, H, T, ...]
    state, answers = _wide(state), []
    for first in range(0, q.shape[1], chunk):
        q, k, v, decay, beta = (part[:, :, first : first + chunk] for part in wide)
        out, state = _chunk(q, k, v, decay, beta, state)
        answers.append(out)
    return torch.cat(answers, dim=2).transpose(1, 2), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rule to one chunk; parts are [B, H, T, N], [B, H, T, M] and [B, H, T]."""
    sums = decay.cumsum(-1)  # [B, H, T]
    gates = sums.exp()[..., None]
    # exp(d(i) - d(j)) of later j would overflow; they are masked before the exponential
    is_later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(is_later, float("-inf")).exp()  # [B, H, T, T]
    system = k @ k.transpose(2, 3) * between * beta[..., None]  # its diagonal is not read
    reads = beta[..., None] * (v - gates * (k @ state))
    changes = torch.linalg.solve_triangular(system, reads, upper=False, unitriangular=True)  # [B, H, T, M]
    out = gates * (q @ state) + (q @ k.transpose(2, 3) * between) @ changes
    to_end = (sums[..., -1:] - sums).exp()[..., None]
    state = gates[..., -1:, :] * state + (k * to_end).transpose(2, 3) @ changes
    return out, state


def _is_real(tokens: int, counts: Tensor) -> Tensor:
    """Return which tokens are not padding: [B, T, 1]."""
    return (torch.arange(tokens, device=counts.device, dtype=torch.int64) < counts[:, None])[:, :, None]


def _wide(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays."""
    return x if x.dtype is torch.float64 else x.float()
