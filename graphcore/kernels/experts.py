"""A mixture of gated experts, as one custom op: each token through the experts that were chosen for it, summed.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token.

    gate, up, down: [X, F, D], [X, F, D], [X, D, F] and their biases [X, F], [X, F], [X, D]
    gate = min(gate x, limit);  up = clamp(up x, -limit, limit);  y = down((up + 1) * gate * sigmoid(alpha * gate))

On the CPU the op reads back who was chosen and touches those experts only. Elsewhere nothing may be read back:
`masked_experts` gathers the chosen weights of a few tokens, or runs every expert under a mask.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

ExpertFunction = Callable[[Tensor, int], Tensor]

torch.library.define(
    "graphcore::experts",
    "(Tensor x, Tensor chosen, Tensor shares, Tensor[] weights, Tensor[] biases, float limit, float alpha) -> Tensor",
)


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    limit: float,
    alpha: float,
) -> Tensor:
    """Return each token's sum of share times expert over the experts chosen for it.

    Args:
        x: [N, D] compute dtype.
        chosen: [N, C] int64, distinct within a token.
        shares: [N, C] compute dtype.
        weights: gate [X, F, D], up [X, F, D] and down [X, D, F], compute dtype.
        biases: gate [X, F], up [X, F] and down [X, D], compute dtype.
        limit: gate and up are clamped to it.
        alpha: of the gate's sigmoid.

    Returns:
        [N, D] compute dtype.
    """
    op = torch.ops.graphcore.experts.default
    return op(x, chosen, shares, weights, biases, limit, alpha)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::experts")  # type: ignore[untyped-decorator]  # torch does not type it
def _experts_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of the clamped arguments, all of one shape."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def looped_experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    limit: float,
    alpha: float,
) -> Tensor:
    """Implement `experts` expert by expert; an expert that no token chose is not read."""
    return each_on_its_own(
        x, chosen, shares, weights[0].shape[0], lambda tokens, e: _one_expert(tokens, e, weights, biases, limit, alpha)
    )


def each_on_its_own(x: Tensor, chosen: Tensor, shares: Tensor, num_experts: int, run: ExpertFunction) -> Tensor:
    """Return the weighted sum, each expert run on the tokens that chose it; `run` maps tokens [M, D] and an expert."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    per_token = chosen.shape[1]
    places = chosen.flatten().argsort(stable=True)  # [N C], places in `chosen` by expert
    counts = chosen.flatten().bincount(minlength=num_experts).tolist()
    begin = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        place = places[begin : begin + count]
        begin += count
        tokens = place // per_token
        y = run(x[tokens], expert)
        out.index_add_(0, tokens, y.float() * shares.flatten()[place, None].float())
    return out.to(x.dtype)


def _one_expert(
    x: Tensor, expert: int, weights: Sequence[Tensor], biases: Sequence[Tensor], limit: float, alpha: float
) -> Tensor:
    """Run some tokens [M, D] through one expert."""
    gate, up = (linear(x, weights[part][expert], biases[part][expert]) for part in (0, 1))
    return linear(clamped_swiglu(gate, up, limit, alpha), weights[2][expert], biases[2][expert])


def masked_experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    limit: float,
    alpha: float,
) -> Tensor:
    """Implement `experts` without reading back who was chosen."""
    # With no more choices than experts, the gathered copies are no larger than the layer's own weights.
    run = _gathered if chosen.numel() <= weights[0].shape[0] else _every_expert
    return run(x, chosen, shares, weights, biases, limit, alpha)


def _gathered(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    limit: float,
    alpha: float,
) -> Tensor:
    """Copy each token's chosen weights: what a few tokens read is a few experts."""
    flat = chosen.flatten()  # [N C]
    rows = x.repeat_interleave(chosen.shape[1], dim=0)[:, :, None]  # [N C, D, 1]
    gate, up = (torch.bmm(weights[part][flat], rows)[:, :, 0] + biases[part][flat] for part in (0, 1))
    hidden = clamped_swiglu(gate, up, limit, alpha)[:, :, None]  # [N C, F, 1]
    y = torch.bmm(weights[2][flat], hidden)[:, :, 0] + biases[2][flat]  # [N C, D]
    y = y.view(*chosen.shape, x.shape[1]).float() * shares[:, :, None].float()
    return y.sum(1).to(x.dtype)


def _every_expert(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    limit: float,
    alpha: float,
) -> Tensor:
    """Run all tokens through all experts and count those that were chosen."""
    return all_on_every(
        x, chosen, shares, weights[0].shape[0], lambda tokens, e: _one_expert(tokens, e, weights, biases, limit, alpha)
    )


def all_on_every(x: Tensor, chosen: Tensor, shares: Tensor, num_experts: int, run: ExpertFunction) -> Tensor:
    """Return the weighted sum without reading back who was chosen: every expert runs on all tokens."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(num_experts):
        is_chosen = chosen == expert  # [N, C]
        share = (shares.float() * is_chosen).sum(-1, keepdim=True)
        y = run(x, expert).float() * share
        out += y.masked_fill_(~is_chosen.any(-1, keepdim=True), 0)  # what is not asked for may overflow: 0 * inf is NaN
    return out.to(x.dtype)


# Not as decorators: torch's would leave None under the functions' names.
torch.library.impl("graphcore::experts", "CPU", looped_experts)
torch.library.impl("graphcore::experts", "CompositeExplicitAutograd", masked_experts)
