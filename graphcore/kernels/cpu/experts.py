"""Runs the experts of a mixture for many tokens on the CPU, as one job of the C++ kernels.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token, S places.

A single expert has a few dozen tokens, too little work for a thread barrier after each product. The job divides the
rows of all chosen experts among the threads. As in a decode step, values between products are float32.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.activations import Gating
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, ROUNDINGS, Matrix, open_library

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class ExpertsChunk(ctypes.Structure):
    """The arguments of the job; the fields mirror native/experts.h."""

    _fields_ = (
        ("x", POINTER),
        ("matrices", Matrix * 3),
        ("biases", POINTER * 3),
        ("sorted", POINTER),
        ("begins", POINTER),
        ("experts", POINTER),
        ("places", POINTER),
        ("out", POINTER),
        ("tokens", INT),
        ("used", INT),
        ("present", INT),
        ("format", INT),
        ("rounding", INT),
        ("activation", INT),
        ("limit", FLOAT),
        ("alpha", FLOAT),
    )


def run_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Sequence[int],
    gating: Gating,
    packings: Sequence[KernelPacking],
    rounding: str,
) -> Tensor:
    """Return the outputs [N, C, D] of packed experts, as `packed_experts` does.

    Args:
        x, chosen: [N, D] and [N, C].
        weights: gate, up and down, [S, nbytes] uint8 each.
        biases: gate [X, F], up [X, F] and down [X, D]; empty for none.
        places: place of each of the X experts; -1 if it is missing.
        packings: packings of one expert's gate, up and down.
    """
    flat, where = chosen.flatten(), torch.tensor(places, dtype=torch.int32, device="cpu")
    has_answer = (flat >= 0) & (where[flat.clamp(min=0)] >= 0)
    num_answers = int(has_answer.sum())
    out = x.new_empty if num_answers == len(flat) else x.new_zeros
    y = out((*chosen.shape, x.shape[1]))
    if not num_answers:  # a job needs work in each phase
        return y
    keys = torch.where(has_answer, flat, len(places))  # (token, expert) pairs without an output are sorted last
    order = keys.argsort(stable=True)[:num_answers].int()
    counts = keys.bincount(minlength=len(places) + 1)[:-1]
    present = counts.nonzero().flatten()
    begins = torch.cat((counts.new_zeros(1), counts[present].cumsum(0))).int()
    x, numbers, there = x.contiguous(), present.int(), where[present]
    wide = [bias.float() for bias in biases]
    chunk = ExpertsChunk(
        x.data_ptr(),
        (Matrix * 3)(*(packing.matrix(weight[0]) for packing, weight in zip(packings, weights, strict=True))),
        (POINTER * 3)(*(bias.data_ptr() for bias in wide)),
        *(tensor.data_ptr() for tensor in (order, begins, numbers, there, y)),
        *(*chosen.shape, len(present), DTYPE_NUMBERS[x.dtype], ROUNDINGS[rounding]),
        *(gating.number, gating.limit, gating.alpha),
    )
    open_library(packings[0].library).graphcore_experts(torch.get_num_threads(), ctypes.byref(chunk))
    return y
