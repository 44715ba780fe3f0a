"""A few tokens through their experts: two launches that read the routed experts' bytes and no others.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C choices of a token, S places.

    gate_up   a program for (token, choice) and a block of F:   hidden[n, c] = act(gate x[n], up x[n])
    down      the same for a block of D:   answers[n, c]; the last choice of a token and a block to arrive adds the
              answers of all, times their shares, best first: the bits do not depend on which choice is last

The kernels read the router's choice on the device, so one captured graph serves any choice. Weights may lie in pinned
memory of the host: then only the chosen experts' bytes cross the link.

A program multiplies several rows with one preparation of x. A block has as many such steps as let all programs run at
once: with one and a third waves of programs, the last third would leave most of the device idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.gpu.attention.splits import processors_of
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.experts.operands import (
    MixtureOperands,
    biased,
    gated_sums,
    has_matrix,
    matrix_at,
    place_of,
    row_sums,
)
from graphcore.kernels.gpu.layout import DeviceLayout
from graphcore.kernels.gpu.mean_squares import FusedNorm, store_for_norm
from graphcore.kernels.gpu.pdl import pdl_options

MOST_WARPS = 4
RESIDENT_WARPS = 24  # of a multiprocessor at once
REGISTERS = 80  # of a thread, at most: with them that many warps fit
MORE_REGISTERS = 88  # for nf4, and where scales have scales of their own: fewer, and Triton 3.6 moves some to memory
MOST_REGISTERS = 96  # where, besides, a matrix may lie in a slot or elsewhere
ROWS = 4  # packed rows that a program multiplies at once, in all its matrices
PERMUTED_ROWS = 2  # of nf4, whose levels take twice the registers while their bytes are apart
DENSE_ROWS = 4  # rows of a dense matrix that one program multiplies: a thread reads 16 bytes then


@triton.jit
def _gate_up(
    x, chosen, places, gate, up, gate_waits, up_waits, gate_bias, up_bias, hidden, choices, columns: tl.constexpr,
    features, gate_stride, up_stride, limit, alpha, steps, GATING: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + pair)
    place = place_of(expert, places)
    if not has_matrix(expert, place, gate_waits):
        return
    gate = matrix_at(expert, place, gate, gate_waits, gate_stride)
    up = matrix_at(expert, place, up, up_waits, up_stride)
    fed = x + pair // choices * columns
    begin = tl.program_id(1) * steps * ROWS
    for step in range(tl.minimum(steps, tl.cdiv(features - begin, ROWS))):
        first = begin + step * ROWS
        if GATE == UP:
            gates, ups = row_sums(fed, (gate, up), first, features, columns, GATE, ROWS, VECTORS)
        else:
            gates = row_sums(fed, (gate,), first, features, columns, GATE, ROWS, VECTORS)[0]
            ups = row_sums(fed, (up,), first, features, columns, UP, ROWS, VECTORS)[0]
        rows = first + tl.arange(0, ROWS)
        is_row = rows < features
        at = expert * features + rows
        gates, ups = biased(gates, gate_bias, at, is_row), biased(ups, up_bias, at, is_row)
        values = gated_sums(gates, ups, limit, alpha, GATING)
        tl.store(hidden + pair * features + rows, values.to(hidden.dtype.element_ty), mask=is_row)
    let_next_begin(DEPENDENT)


@triton.jit
def _down(
    hidden, chosen, shares, places, down, waits, bias, answers, stream, arrivals, norm_weight, norm_rows, squares,
    columns: tl.constexpr, features, stride, steps, FORM: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store one choice's answers for a block of rows; with a stream, the last one to arrive adds the weighted sum.

    A sum that a norm follows is left for it (mean_squares.py).
    """
    wait_for_earlier(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + pair)
    place = place_of(expert, places)
    begin = tl.program_id(1) * steps * ROWS
    end = tl.minimum(begin + steps * ROWS, features)
    block = begin + tl.arange(0, BLOCK)
    if has_matrix(expert, place, waits):
        matrix = (matrix_at(expert, place, down, waits, stride),)
        for step in range(tl.cdiv(end - begin, ROWS)):
            first = begin + step * ROWS
            sums = row_sums(hidden + pair * columns, matrix, first, features, columns, FORM, ROWS, VECTORS)[0]
            rows = first + tl.arange(0, ROWS)
            is_row = rows < features
            sums = biased(sums, bias, expert * features + rows, is_row)
            tl.store(answers + pair * features + rows, sums.to(answers.dtype.element_ty), mask=is_row)
    else:
        tl.store(answers + pair * features + block, tl.zeros([BLOCK], answers.dtype.element_ty), mask=block < end)
    let_next_begin(DEPENDENT)
    if stream is not None:
        token = pair // CHOICES
        arrival = arrivals + token * tl.num_programs(1) + tl.program_id(1)
        tl.debug_barrier()  # one thread counts the arrival after all have written
        arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        if arrived == CHOICES - 1:
            tl.store(arrival, 0)
            _add_answers(
                answers, shares, stream, norm_weight, norm_rows, squares, token, block, block < end, features, CHOICES
            )


@triton.jit
def _add_answers(
    answers, shares, stream, norm_weight, norm_rows, squares, token, rows, is_row, features, CHOICES: tl.constexpr
):
    """Add the sum of one token's answers times their shares to the stream; `.cg` reads what other processors wrote."""
    total = tl.zeros(rows.shape, tl.float32)
    for rank in tl.static_range(CHOICES):
        pair = token * CHOICES + rank
        answer = tl.load(answers + pair * features + rows, mask=is_row, other=0.0, cache_modifier=".cg")
        total += answer.to(tl.float32) * tl.load(shares + pair).to(tl.float32)
    to = stream + token * features + rows
    rounded = total.to(answers.dtype.element_ty).to(tl.float32)
    values = tl.load(to, mask=is_row, other=0.0) + rounded
    tl.store(to, values, mask=is_row)
    if norm_rows is not None:
        of_token = tl.full([1, 1], 0, tl.int64) + token
        store_for_norm(
            values[None, :], norm_weight, norm_rows, squares, of_token, rows[None, :], is_row[None, :], features
        )


def launch_few(x: Tensor, chosen: Tensor, mixture: MixtureOperands) -> Tensor:
    """Return the output of each chosen expert.

    Args:
        x: [N, D] compute dtype, contiguous.
        chosen: [N, C] int64, contiguous; -1 for no expert.

    Returns:
        [N, C, D] compute dtype, zeros for no expert.
    """
    return _launch(x, chosen, None, mixture, None, None, None)


def launch_few_summed(
    stream: Tensor,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    mixture: MixtureOperands,
    arrivals: Tensor | None = None,
    next_norm: FusedNorm | None = None,
) -> None:
    """Add the outputs' weighted sums to `stream` [N, D] float32; `shares` [N, C], the others as in `launch_few`.

    The bits equal those of `nn.moe.weighted_sum` over stored outputs: products of two 16-bit numbers are exact in
    float32, so it makes no difference whether a GPU fuses multiply and add. For float32 numbers it does.

    Args:
        arrivals: [most_arrivals or more] int32, counters that are zero before and after; None to allocate them, which
            takes one more launch.
        next_norm: buffers that the sum is also written to, for the next norm; their squares must be zero. None if x is
            float32.
    """
    if x.dtype is not torch.float32:
        _launch(x, chosen, shares, mixture, stream, arrivals, next_norm)
        return
    assert next_norm is None, "sums of float32 numbers are made outside the kernels"
    answers = launch_few(x, chosen, mixture)
    total = answers[:, 0] * shares[:, :1]
    for rank in range(1, chosen.shape[1]):
        total = total + answers[:, rank] * shares[:, rank, None]
    stream.add_(total)


def most_arrivals(device: torch.device) -> int:
    """Return the largest number of counters that a launch takes: one for each program, at one choice a token."""
    return RESIDENT_WARPS * processors_of(device) + limits.MOST_TOKENS


def rows_of(form: DeviceLayout | None, matrices: int) -> int:
    """Return the rows of each of some matrices that one program multiplies at once; None is a dense matrix."""
    if form is None:
        return DENSE_ROWS
    return (PERMUTED_ROWS if form.levels == "nf4" else ROWS) // matrices


def _how(form: DeviceLayout | None, columns: int, rows: int, has_slots: bool) -> dict[str, int]:
    """Return the options of a launch: the number of warps that leaves the fewest threads without a vector of a row.

    Args:
        has_slots: True if a matrix may lie in a slot or where it waits.
    """
    warps = MOST_WARPS
    if form is not None:
        vectors = columns // (16 * (8 // form.low))
        warps = min((4, 2, 1), key=lambda count: triton.cdiv(vectors, 32 * count) * count)
    registers = REGISTERS
    if form is not None and (form.super_nbytes or form.levels == "nf4"):
        registers = MOST_REGISTERS if has_slots else MORE_REGISTERS
    shape = {"ROWS": rows, "VECTORS": 32 * warps, "num_warps": warps, "maxnreg": registers, "enable_fp_fusion": True}
    return {**shape, **pdl_options()}


def program_blocks(rows: int, step: int, pairs: int, warps: int, device: torch.device) -> tuple[int, int]:
    """Return the steps of a block, and the number of blocks, so that the programs of all pairs run at once."""
    steps = triton.cdiv(rows, step)
    most = max(1, RESIDENT_WARPS // warps * processors_of(device))
    of_block = triton.cdiv(steps * pairs, most)
    return of_block, triton.cdiv(steps, of_block)


def launch_gate_up(x: Tensor, chosen: Tensor, mixture: MixtureOperands, hidden: Tensor) -> None:
    """Write each choice's hidden features to `hidden` [N C, F]; rows without an expert, or a missing one, stay."""
    dim, choices, features = x.shape[1], chosen.shape[1], mixture.features
    gate, up, _ = mixture.weights
    gate_form, up_form, _ = mixture.forms
    how = _how(gate_form, dim, rows_of(gate_form, 2), mixture.waiting[0] is not None)
    steps, blocks = program_blocks(features, how["ROWS"], chosen.numel(), how["num_warps"], x.device)
    _gate_up[(chosen.numel(), blocks)](
        x, chosen, mixture.places, gate, up, *mixture.waiting[:2], *mixture.biases[:2], hidden, choices, dim, features,
        gate.stride(0), up.stride(0), *mixture.gating[1:], steps, GATING=mixture.gating.kernel_name, GATE=gate_form,
        UP=up_form, **how,
    )  # fmt: skip


def _launch(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor | None,
    mixture: MixtureOperands,
    stream: Tensor | None,
    arrivals: Tensor | None,
    next_norm: FusedNorm | None,
) -> Tensor:
    (tokens, dim), choices, features = x.shape, chosen.shape[1], mixture.features
    answers = x.new_empty(tokens, choices, dim)
    if not chosen.numel():
        return answers
    hidden = torch.empty(tokens * choices, features, dtype=x.dtype, device=x.device)
    launch_gate_up(x, chosen, mixture, hidden)
    down, form = mixture.weights[2], mixture.forms[2]
    how = _how(form, features, rows_of(form, 1), mixture.waiting[2] is not None)
    steps, blocks = program_blocks(dim, how["ROWS"], chosen.numel(), how["num_warps"], x.device)
    if stream is not None and arrivals is None:
        arrivals = torch.zeros(tokens * blocks, dtype=torch.int32, device=x.device)
    assert arrivals is None or arrivals.numel() >= tokens * blocks, f"{arrivals.numel()} arrivals, {tokens} x {blocks}"
    block = triton.next_power_of_2(steps * how["ROWS"])
    _down[(chosen.numel(), blocks)](
        hidden, chosen, shares, mixture.places, down, mixture.waiting[2], mixture.biases[2], answers, stream, arrivals,
        *(next_norm or (None, None, None)), features, dim, down.stride(0), steps, FORM=form, CHOICES=choices,
        BLOCK=block, **how,
    )  # fmt: skip
    return answers
