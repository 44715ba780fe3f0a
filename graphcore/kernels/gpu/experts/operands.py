"""The parts that the kernels of a mixture of experts share: an expert's place, its activation, its matrices' forms.

Legend: X experts, S places, I input features, O rows of a matrix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.activations import Gating
from graphcore.kernels.gpu.epilogue import activated
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS, DeviceLayout
from graphcore.kernels.gpu.matrix import DENSE
from graphcore.kernels.gpu.packed.multiply_add import dot_each
from graphcore.kernels.gpu.packed.planes import tensor_scale
from graphcore.kernels.gpu.packed.vectors import weights_of_vector

BLOCK = tl.constexpr(512)  # columns that a program multiplies at once


class MixtureOperands(NamedTuple):
    """A layer's experts in the form that the kernels take.

    Attributes:
        weights: gate [S, F, D], up [S, F, D] and down [S, D, F], or [S, nbytes] uint8 packed for a device; each matrix
            is one run of bytes, on the device or page-locked.
        biases: gate [X, F], up [X, F], down [X, D], contiguous; None each for none.
        places: [X] int32 or int64 on the device, places of the experts, -1 for missing ones; None if i is at place i.
        gating: function that combines gate and up.
        forms: layouts of the three matrices; None for a dense one.
        features: number of hidden features of an expert, F.
        waiting: gate, up and down of all experts, [X, ...], page-locked: those of experts without a place are read
            there; None each if such experts are missing.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    places: Tensor | None
    gating: Gating
    forms: Sequence[DeviceLayout | None]
    features: int
    waiting: Sequence[Tensor | None] = (None,) * 3

    @property
    def num_experts(self) -> int:
        """The number of experts, X."""
        return len(self.weights[0]) if self.places is None else len(self.places)


def mixture_of(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Tensor | Sequence[int] | None,
    features: int,
    gating: Gating,
    formats: Sequence[str] = (DENSE,) * 3,
    device: torch.device | None = None,
    waiting: Sequence[Tensor] | None = None,
) -> MixtureOperands:
    """Return the operands; places given as a list are copied to `device`, which a captured graph must not do."""
    if places is not None and not isinstance(places, Tensor):
        places = torch.tensor(places, dtype=torch.int32, device=device)
    # A view of a larger tensor would be read wrongly; weights bound to slots are never such views.
    weights = [weight if weight[:1].is_contiguous() else weight.contiguous() for weight in weights]
    forms = [None if name == DENSE else DEVICE_LAYOUTS[name] for name in formats]
    return MixtureOperands(weights, list(biases) or [None] * 3, places, gating, forms, features, waiting or [None] * 3)


@triton.jit
def place_of(expert, places):
    """Return an expert's place, int64; negative if there is no expert, or it is missing."""
    place = expert.to(tl.int64)
    if places is not None:
        place = tl.load(places + place, mask=place >= 0, other=-1).to(tl.int64)
    return place


@triton.jit
def has_matrix(expert, place, waiting):
    """Return whether there is an expert, and a matrix of it: at a place, or where all experts wait."""
    return place >= 0 if waiting is None else expert >= 0


@triton.jit
def matrix_at(expert, place, matrices, waiting, stride):
    """Return the pointer to an expert's matrix: at its place, or where it waits if it has none."""
    matrix = matrices + place * stride
    if waiting is not None:
        matrix = tl.where(place >= 0, matrix, waiting + expert.to(tl.int64) * stride)
    return matrix


@triton.jit
def biased(sums, bias, at, is_there):
    """Return float32 sums, to which the biases at `at` are added if there are any."""
    if bias is not None:
        sums += tl.load(bias + at, mask=is_there, other=0.0).to(tl.float32)
    return sums


@triton.jit
def gated_sums(gate, up, limit, alpha, GATING: tl.constexpr):
    """Return gate and up, float32, joined by a function of graphcore/activations.py, a kernel_name of `Gating`."""
    if GATING == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        features = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    else:
        features = activated(gate, GATING) * up
    return features


@triton.jit
def row_sums(
    x, matrices, first, num_rows, columns: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr
):
    """Return the products of rows first .. first + ROWS - 1 of each of some matrices [O, I] with a vector [I].

    Args:
        matrices: tuple of pointers to matrices of one form; packed ones are multiplied with one preparation of x.
        first: a multiple of ROWS.
        L: DeviceLayout of packed matrices; None for dense ones.
        VECTORS: vectors that are read at once, as G in `packed.multiply_add.dot_rows`.

    Returns:
        [ROWS] float32 for each matrix, as a tuple.
    """
    products = ()
    if L is None:
        for index in tl.static_range(len(matrices)):
            products = products + (_dense_sums(x, matrices[index], first, num_rows, columns, ROWS),)
    else:
        is_even: tl.constexpr = columns // weights_of_vector(L) % VECTORS == 0
        sums = dot_each(x, columns, 1, matrices, first, num_rows, columns, L, 1, ROWS, VECTORS, is_even)
        for index in tl.static_range(len(matrices)):
            scale = tensor_scale(matrices[index], num_rows, columns, L)
            products = products + (tl.reshape(sums[index], [ROWS]) * scale,)
    return products


@triton.jit
def _dense_sums(x, matrix, first, num_rows, columns, ROWS: tl.constexpr):
    rows = first + tl.arange(0, ROWS)
    starts = rows.to(tl.int64) * columns
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_there = at < columns
        fed = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
        mask = (rows < num_rows)[:, None] & is_there[None, :]
        total += tl.load(matrix + starts[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32) * fed[None, :]
    return tl.sum(total, axis=1)
