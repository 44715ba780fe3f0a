"""A few tokens through their experts: two launches that read the routed experts' bytes and no others.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C choices of a token, S places.

    gate_up   a program for (token, choice) and some rows of F:   hidden[n, c] = act(gate x[n], up x[n])
    down      the same for rows of D:   answers[n, c]; or for (token): the answers times their shares, best first

The choice is read on the device, so a captured graph follows the router. Weights may lie in page-locked memory of the
host: then only the chosen experts' bytes cross the link.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.device_layout import DeviceLayout
from graphcore.kernels.gpu.experts.operands import (
    MixtureOperands,
    biased,
    gated_sums,
    place_of,
    row_sums,
    row_sums_of_two,
)
from graphcore.kernels.gpu.packed.program_tiles import most_rows

MOST_WARPS = 4
DENSE_ROWS = 4  # rows of a dense matrix that one program multiplies: a thread reads 16 bytes then


@triton.jit
def _gate_up(
    x, chosen, places, gate, up, gate_bias, up_bias, hidden, choices, columns, features, gate_stride, up_stride,
    limit, alpha, GATING: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + pair)
    place = place_of(expert, places)
    if place < 0:
        return
    first = tl.program_id(1) * ROWS
    fed = x + pair // choices * columns
    gates, ups = row_sums_of_two(
        fed, gate + place * gate_stride, up + place * up_stride, first, features, columns, GATE, UP, ROWS, UNITS
    )
    rows = first + tl.arange(0, ROWS)
    is_row = rows < features
    at = expert * features + rows
    values = gated_sums(biased(gates, gate_bias, at, is_row), biased(ups, up_bias, at, is_row), limit, alpha, GATING)
    tl.store(hidden + pair * features + rows, values.to(hidden.dtype.element_ty), mask=is_row)


@triton.jit
def _down(
    hidden, chosen, shares, places, down, bias, out, choices, columns, features, stride,
    FORM: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Compute one choice's answer if `choices` is 1; with shares, add one token's weighted sum to `out`."""
    first = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < features
    total = tl.zeros([ROWS], tl.float32)
    for rank in range(choices):
        pair = first * choices + rank
        expert = tl.load(chosen + pair)
        place = place_of(expert, places)
        if place >= 0:
            matrix = down + place * stride
            fed = hidden + pair * columns
            answer = row_sums(fed, matrix, tl.program_id(1) * ROWS, features, columns, FORM, ROWS, UNITS)
            answer = biased(answer, bias, expert * features + rows, is_row)
            if shares is not None:
                answer = answer.to(hidden.dtype.element_ty).to(tl.float32) * tl.load(shares + pair).to(tl.float32)
            total += answer
    to = out + first * features + rows
    if shares is not None:
        total = total.to(hidden.dtype.element_ty).to(tl.float32) + tl.load(to, mask=is_row, other=0.0)
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row)


def launch_few(x: Tensor, chosen: Tensor, mixture: MixtureOperands) -> Tensor:
    """Return each choice's answer.

    Args:
        x: [N, D] compute dtype, contiguous.
        chosen: [N, C] int64, contiguous; -1 for no expert.

    Returns:
        [N, C, D] compute dtype, zeros for no expert.
    """
    out = x.new_empty(*chosen.shape, x.shape[1])
    _launch(x, chosen, None, mixture, out)
    return out


def launch_few_summed(stream: Tensor, x: Tensor, chosen: Tensor, shares: Tensor, mixture: MixtureOperands) -> None:
    """Add the answers' weighted sums to `stream` [N, D] float32; `shares` [N, C], the others as in `launch_few`.

    The bits equal those of `nn.moe.weighted_sum` over stored answers: products of two narrow numbers are exact in
    float32, so it makes no difference if a GPU fuses multiply and add. For float32 numbers it does.
    """
    if x.dtype is not torch.float32:
        _launch(x, chosen, shares, mixture, stream)
        return
    answers = launch_few(x, chosen, mixture)
    total = answers[:, 0] * shares[:, :1]
    for rank in range(1, chosen.shape[1]):
        total = total + answers[:, rank] * shares[:, rank, None]
    stream.add_(total)


def rows_of(form: DeviceLayout | None) -> int:
    """Return the rows of a matrix that one program multiplies; None is a dense matrix."""
    return DENSE_ROWS if form is None else most_rows(form)


def _how(form: DeviceLayout | None, columns: int) -> dict[str, int | bool]:
    """Return the options of a launch: the number of warps that leaves the fewest threads without a unit of a row."""
    warps = MOST_WARPS
    if form is not None:
        units = columns // (16 * (8 // form.low))
        warps = min((4, 2, 1), key=lambda count: triton.cdiv(units, 32 * count) * count)
    return {"ROWS": rows_of(form), "UNITS": 32 * warps, "num_warps": warps, "enable_fp_fusion": True}


def launch_gate_up(x: Tensor, chosen: Tensor, mixture: MixtureOperands, hidden: Tensor) -> None:
    """Write each choice's hidden features to `hidden` [N C, F]; rows without an expert, or a missing one, stay."""
    dim, choices, features = x.shape[1], chosen.shape[1], mixture.features
    gate, up, _ = mixture.weights
    gate_form, up_form, _ = mixture.forms
    how = _how(gate_form, dim)
    _gate_up[(chosen.numel(), triton.cdiv(features, how["ROWS"]))](
        x, chosen, mixture.places, gate, up, *mixture.biases[:2], hidden, choices, dim, features, gate.stride(0),
        up.stride(0), *mixture.gating[1:], GATING=mixture.gating.kernel_name, GATE=gate_form, UP=up_form, **how,
    )  # fmt: skip


def _launch(x: Tensor, chosen: Tensor, shares: Tensor | None, mixture: MixtureOperands, out: Tensor) -> None:
    (tokens, dim), choices, features = x.shape, chosen.shape[1], mixture.features
    if not chosen.numel():
        return
    hidden = torch.empty(tokens * choices, features, dtype=x.dtype, device=x.device)
    launch_gate_up(x, chosen, mixture, hidden)
    down, form = mixture.weights[2], mixture.forms[2]
    each, summed = (choices, 1) if shares is None else (1, choices)
    how = _how(form, features)
    _down[(tokens * each, triton.cdiv(dim, how["ROWS"]))](
        hidden, chosen, shares, mixture.places, down, mixture.biases[2], out, summed, features, dim, down.stride(0),
        FORM=form, **how,
    )  # fmt: skip
