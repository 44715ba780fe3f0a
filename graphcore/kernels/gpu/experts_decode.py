"""A few tokens through their experts: two launches that read the routed experts' bytes and no others.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C choices of a token, S places.

    gate_up   a program for (token, choice) and some rows of F:   hidden[n, c] = act(gate x[n], up x[n])
    down      the same for rows of D:   answers[n, c]; or for (token): the answers times their shares, best first

Who was chosen is read on the device, so a captured graph follows the router. Weights may lie in page-locked memory of
the host: what crosses the link then are the chosen experts' bytes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.experts_form import activated, dense_sums, place_of

ROWS = 4  # of a matrix that one program multiplies
WARPS = 4


@triton.jit
def _gate_up(
    x, chosen, places, gate, up, gate_bias, up_bias, hidden, choices, columns, features, limit, alpha,
    ROWS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + pair)
    place = place_of(expert, places)
    if place < 0:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < features
    fed = x + pair // choices * columns
    start = place * features * columns
    gates = dense_sums(fed, gate + start, rows, is_row, columns, ROWS)
    ups = dense_sums(fed, up + start, rows, is_row, columns, ROWS)
    gates += tl.load(gate_bias + expert * features + rows, mask=is_row, other=0.0).to(tl.float32)
    ups += tl.load(up_bias + expert * features + rows, mask=is_row, other=0.0).to(tl.float32)
    values = activated(gates, ups, limit, alpha)
    tl.store(hidden + pair * features + rows, values.to(hidden.dtype.element_ty), mask=is_row)


@triton.jit
def _down(
    hidden, chosen, shares, places, down, bias, out, choices, columns, features,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One token's sum where there are shares, else one choice's answer: then `choices` is 1."""
    first = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < features
    total = tl.zeros([ROWS], tl.float32)
    for rank in range(choices):
        pair = first * choices + rank
        expert = tl.load(chosen + pair)
        place = place_of(expert, places)
        if place >= 0:
            start = place * features * columns
            answer = dense_sums(hidden + pair * columns, down + start, rows, is_row, columns, ROWS)
            answer += tl.load(bias + expert * features + rows, mask=is_row, other=0.0).to(tl.float32)
            if shares is not None:
                answer *= tl.load(shares + pair).to(tl.float32)
            total += answer
    tl.store(out + first * features + rows, total.to(out.dtype.element_ty), mask=is_row)


def launch_few(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    clamp: tuple[float, float],
    places: Tensor | None,
) -> Tensor:
    """Return the answers, or with shares their sums.

    Args:
        x: [N, D] compute dtype, contiguous.
        chosen: [N, C] int64, contiguous; -1 is nobody.
        shares: [N, C], or None.
        weights: gate [S, F, D], up [S, F, D], down [S, D, F], contiguous, on the device or page-locked.
        biases: gate [X, F], up [X, F], down [X, D].
        clamp: limit and alpha of the activation.
        places: [X] int32 or int64 on the device, or None.

    Returns:
        [N, C, D], or with shares [N, D], compute dtype.
    """
    (tokens, dim), choices, features = x.shape, chosen.shape[1], biases[0].shape[1]
    hidden = x.new_empty(tokens * choices, features)
    out = x.new_empty((tokens, choices, dim) if shares is None else (tokens, dim))
    if not chosen.numel():
        return out.zero_()
    gate, up, down = weights
    _gate_up[(tokens * choices, triton.cdiv(features, ROWS))](
        x, chosen, places, gate, up, biases[0], biases[1], hidden, choices, dim, features, *clamp,
        ROWS=ROWS, num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    each, sums = (choices, 1) if shares is None else (1, choices)
    _down[(tokens * each, triton.cdiv(dim, ROWS))](
        hidden, chosen, shares, places, down, biases[2], out, sums, features, dim,
        ROWS=ROWS, num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return out
