"""Chooses each token's likeliest experts and their shares, in one small launch after the router's product.

Legend: N tokens, X experts, C choices of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

torch.library.define(
    "graphcore::gpu_choose_experts", "(Tensor scores, Tensor? counts, int top_k, bool over_all) -> (Tensor, Tensor)"
)


def choose_decode_experts(
    scores: Tensor, counts: Tensor | None, top_k: int, over_all: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the experts with the highest scores, best first, and their shares in a softmax.

    Args:
        scores: [N, X] any float dtype, contiguous, no NaN.
        counts: [N] int64, 0 for padding, which chooses no expert; or None.
        top_k: C.
        over_all: True if the softmax is over all experts, False if it is over the chosen ones.

    Returns:
        chosen [N, C] int64, -1 for no expert, the first of equal scores; shares [N, C], dtype of the scores.
    """
    return torch.ops.graphcore.gpu_choose_experts.default(scores, counts, top_k, over_all)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::gpu_choose_experts")
def _fake(scores: Tensor, _counts: Tensor | None, top_k: int, _over_all: bool) -> tuple[Tensor, Tensor]:
    shares = scores.new_empty(scores.shape[0], top_k)
    return shares.to(torch.int64), shares


@triton.jit
def _choose(
    scores, counts, chosen, shares, num_experts, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BEST: tl.constexpr,
    OVER_ALL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EXPERTS)
    left = tl.load(scores + token * num_experts + at, mask=at < num_experts, other=-float("inf")).to(tl.float32)
    if OVER_ALL:
        whole = tl.sum(tl.exp(left - tl.max(left, 0)), 0)
    ranks = tl.arange(0, BEST)
    best = tl.full([BEST], -float("inf"), tl.float32)
    who = tl.zeros([BEST], tl.int32)
    for rank in tl.static_range(TOP_K):
        score, expert = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(ranks == rank, score, best)
        who = tl.where(ranks == rank, expert, who)
        left = tl.where(at == expert, -float("inf"), left)
    parts = tl.exp(best - tl.max(best, 0))
    share = parts / (whole if OVER_ALL else tl.sum(parts, 0))
    if counts is not None:
        who = tl.where(tl.load(counts + token) > 0, who, -1)
    to = token * TOP_K + ranks
    tl.store(chosen + to, who.to(tl.int64), mask=ranks < TOP_K)
    tl.store(shares + to, share.to(shares.dtype.element_ty), mask=ranks < TOP_K)


def launch_choose_experts(scores: Tensor, counts: Tensor | None, top_k: int, over_all: bool) -> tuple[Tensor, Tensor]:
    """Implement `choose_decode_experts`."""
    tokens, num_experts = scores.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=scores.device)
    shares = torch.empty(tokens, top_k, dtype=scores.dtype, device=scores.device)
    _choose[(tokens,)](
        scores, counts, chosen, shares, num_experts, TOP_K=top_k, EXPERTS=triton.next_power_of_2(num_experts),
        BEST=triton.next_power_of_2(top_k), OVER_ALL=over_all, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return chosen, shares


# Not as a decorator: torch's would leave None under the function's name. Without a GPU the interpreter runs it.
torch.library.impl("graphcore::gpu_choose_experts", "CompositeExplicitAutograd", launch_choose_experts)
