"""Top-k routing: each token's experts and their shares, in one launch with the router's product, or after it.

Legend: N tokens, D model dim, X experts, C choices of a token.

    route    a program for some experts' scores; the last one to arrive chooses. Arrivals as in attention/decode.py
    choose   a program for a token, where the scores come from another kernel: a packed router
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.epilogue import scaled_and_biased, store_products
from graphcore.kernels.gpu.matrix import DENSE, DeviceMatrix
from graphcore.kernels.gpu.pdl import pdl_options
from graphcore.kernels.gpu.products.dense import dense_tile, dotted_sums, in_pairs, multiplied_sums
from graphcore.routing import ScoredRouting


@triton.jit
def keep_best_groups(ranked, at, num_experts, GROUPS: tl.constexpr, USED: tl.constexpr,
                     RANKED_BY: tl.constexpr):  # fmt: skip
    """Return scores that are -inf outside the USED groups whose RANKED_BY best scores have the largest sums."""
    group = at // (num_experts // GROUPS)
    sums = tl.full(ranked.shape, -float("inf"), tl.float32)  # a group's sum at the place of its best expert
    for one in tl.static_range(GROUPS):
        own = tl.where(group == one, ranked, -float("inf"))
        best, place = tl.max(own, 0, return_indices=True, return_indices_tie_break_left=True)
        if RANKED_BY > 1:
            best += tl.max(tl.where(at == place, -float("inf"), own), 0)
        sums = tl.where(at == place, best, sums)
    kept = at < 0
    for _ in tl.static_range(USED):
        _best, place = tl.max(sums, 0, return_indices=True, return_indices_tie_break_left=True)
        kept = kept | (group == place // (num_experts // GROUPS))
        sums = tl.where(at == place, -float("inf"), sums)
    return tl.where(kept, ranked, -float("inf"))


@triton.jit
def choose_for(
    token, scores, counts, selection_bias, chosen, shares, num_experts, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    BEST: tl.constexpr, OVER_ALL: tl.constexpr, FUNCTION: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr,
    NORMALISES: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, RANKED_BY: tl.constexpr,
):  # fmt: skip
    """Choose one token's experts; `.cg` reads scores that other multiprocessors wrote."""
    at = tl.arange(0, EXPERTS)
    row = scores + token * num_experts
    left = tl.load(row + at, mask=at < num_experts, other=-float("inf"), cache_modifier=".cg").to(tl.float32)
    if FUNCTION != "":
        if FUNCTION == "sigmoid":
            own = 1.0 / (1.0 + tl.exp(-left))
        else:
            parts = tl.exp(left - tl.max(left, 0))
            own = parts / tl.sum(parts, 0)
        ranked = own
        if selection_bias is not None:
            ranked += tl.load(selection_bias + at, mask=at < num_experts, other=0.0)
        left = tl.where(at < num_experts, ranked, -float("inf"))
        if GROUPS > 1:
            left = keep_best_groups(left, at, num_experts, GROUPS, USED, RANKED_BY)
    if OVER_ALL:
        whole = tl.sum(tl.exp(left - tl.max(left, 0)), 0)
    ranks = tl.arange(0, BEST)
    best = tl.full([BEST], -float("inf"), tl.float32)
    who = tl.zeros([BEST], tl.int32)
    for rank in tl.static_range(TOP_K):
        score, expert = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        if FUNCTION != "":
            score = tl.sum(tl.where(at == expert, own, 0.0), 0)
        best = tl.where(ranks == rank, score, best)
        who = tl.where(ranks == rank, expert, who)
        left = tl.where(at == expert, -float("inf"), left)
    if FUNCTION != "":
        share = tl.where(ranks < TOP_K, best, 0.0)
        if NORMALISES:
            share = share / (tl.sum(share, 0) + EPS)
        share = share * FACTOR
    else:
        parts = tl.exp(best - tl.max(best, 0))
        share = parts / (whole if OVER_ALL else tl.sum(parts, 0))
    if counts is not None:
        who = tl.where(tl.load(counts + token) > 0, who, -1)
    to = token * TOP_K + ranks
    tl.store(chosen + to, who.to(tl.int64), mask=ranks < TOP_K)
    tl.store(shares + to, share.to(shares.dtype.element_ty), mask=ranks < TOP_K)


@triton.jit
def _choose(
    scores, counts, selection_bias, chosen, shares, num_experts,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BEST: tl.constexpr, OVER_ALL: tl.constexpr,
    FUNCTION: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr,
    NORMALISES: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, RANKED_BY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    choose_for(
        token, scores, counts, selection_bias, chosen, shares, num_experts, TOP_K, EXPERTS, BEST, OVER_ALL,
        FUNCTION, GROUPS, USED, NORMALISES, EPS, FACTOR, RANKED_BY,
    )  # fmt: skip


@triton.jit
def _route(
    x, weight, bias, counts, selection_bias, scores, arrivals, chosen, shares, tokens, columns, num_experts,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BEST: tl.constexpr, OVER_ALL: tl.constexpr,
    FUNCTION: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr,
    NORMALISES: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, RANKED_BY: tl.constexpr, DOTS: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the scores of R experts; the last program to arrive chooses from all of them."""
    start = tl.program_id(0) * R
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    if DOTS:
        sums = dotted_sums(x, weight, start, num_experts, tokens, columns, N, R, G, V, IS_EVEN)
    else:
        sums = multiplied_sums(x, weight, start, num_experts, tokens, columns, N, R, G, V, IS_EVEN)
    token = tl.minimum(tl.arange(0, N), tokens - 1)[:, None]
    row = start + tl.arange(0, R)[None, :]
    values = scaled_and_biased(sums, token, row, row < num_experts, None, None, bias, False)
    store_products(scores, values, 0, start, tokens, num_experts, num_experts, False, N, R)
    tl.debug_barrier()  # one thread counts the arrival after all have written
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)
        for one in range(tokens):
            choose_for(
                one, scores, counts, selection_bias, chosen, shares, num_experts, TOP_K, EXPERTS, BEST, OVER_ALL,
                FUNCTION, GROUPS, USED, NORMALISES, EPS, FACTOR, RANKED_BY,
            )  # fmt: skip


def launch_choose_experts(
    scores: Tensor,
    counts: Tensor | None,
    top_k: int,
    over_all: bool,
    routing: ScoredRouting | None = None,
    selection_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts with the highest scores, best first, and their shares in a softmax.

    Args:
        scores: [N, X] any float dtype, contiguous, no NaN.
        counts: [N] int64, 0 for padding, which chooses no expert; or None.
        top_k: C.
        over_all: True if the softmax is over all experts, False if it is over the chosen ones.
        routing: rule by which experts have scores of their own, instead of a softmax; or None.
        selection_bias: [X] float32, numbers added to these scores for the choice; None for none.

    Returns:
        chosen [N, C] int64, -1 for no expert, the first of equal scores; shares [N, C], dtype of the scores.
    """
    tokens, num_experts = scores.shape
    chosen, shares = _empty_choice(scores, top_k)
    _choose[(tokens,)](
        scores, counts, selection_bias, chosen, shares, num_experts,
        **_constants(num_experts, top_k, over_all, routing), num_warps=1,
        enable_fp_fusion=True, **pdl_options(),
    )  # fmt: skip
    return chosen, shares


def launch_route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Tensor | None,
    top_k: int,
    over_all: bool,
    arrivals: Tensor | None = None,
    routing: ScoredRouting | None = None,
    selection_bias: Tensor | None = None,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the experts with the highest scores x @ weight.T + bias, as `choose_decode_experts` does.

    Args:
        x: [N, D] compute dtype, contiguous; N up to 8.
        weight: [X, D] and bias: [X], compute dtype.
        arrivals: [1 or more] int32, a counter that is zero before and after; None to allocate it, in one more launch.
        in_float32: True for scores and shares in float32; False for scores that are rounded to x's dtype.
    """
    num_experts = len(weight)
    assert len(x) <= limits.MOST_TOKENS, f"{len(x)} tokens, this kernel is for up to {limits.MOST_TOKENS}"
    assert x.is_contiguous(), "the kernel takes x row by row"
    scores = _empty_scores(x, num_experts, in_float32)
    chosen, shares = _empty_choice(scores, top_k)
    if arrivals is None:
        arrivals = torch.zeros(1, dtype=torch.int32, device=x.device)
    x, (router,) = in_pairs(x, [DeviceMatrix(weight, bias, None, DENSE, num_experts)])
    tile = dense_tile(x, num_experts)
    _route[(triton.cdiv(num_experts, tile["R"]),)](
        x, router.weight, bias, counts, selection_bias, scores, arrivals, chosen, shares, *x.shape, num_experts,
        **_constants(num_experts, top_k, over_all, routing), **tile,
    )  # fmt: skip
    return chosen, shares


def _empty_scores(x: Tensor, num_experts: int, in_float32: bool) -> Tensor:
    return torch.empty(len(x), num_experts, dtype=torch.float32 if in_float32 else x.dtype, device=x.device)


def _empty_choice(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shares = scores.new_empty(len(scores), top_k)
    return torch.empty_like(shares, dtype=torch.int64), shares


def _constants(num_experts: int, top_k: int, over_all: bool, routing: ScoredRouting | None) -> dict[str, Any]:
    widths = {"EXPERTS": triton.next_power_of_2(num_experts), "BEST": triton.next_power_of_2(top_k)}
    names = ("FUNCTION", "GROUPS", "USED", "NORMALISES", "EPS", "FACTOR", "RANKED_BY")
    own = zip(names, routing or ("", 1, 1, False, 0.0, 1.0, 2), strict=True)
    return {"TOP_K": top_k, "OVER_ALL": over_all, **widths, **dict(own)}


choose_decode_experts = register_custom_op(
    "gpu_choose_experts", launch_choose_experts, lambda scores, top_k: _empty_choice(scores, top_k)
)
route_decode_experts = register_custom_op(
    "gpu_route_experts",
    launch_route,
    lambda x, weight, top_k, in_float32: _empty_choice(_empty_scores(x, len(weight), in_float32), top_k),
    mutates_args=["arrivals"],
)
