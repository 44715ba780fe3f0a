"""The mixture of experts of kernels/ops/experts.py over packed weights, as one custom op for the CPU and one for a GPU.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token, S places.

Each expert is packed separately, [S, nbytes]; a decode step reads only the bytes of the chosen experts.

Experts packed for a device (device_packing.py) are multiplied by kernels/gpu/experts/, which registers itself, with
sums in float32 and without rounding x. Their weights may be in page-locked host memory, all other tensors are on the
device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphcore.activations import Gating
from graphcore.kernels.cpu.experts import run_experts
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.ops.experts import (
    ExpertFunction,
    Places,
    all_on_every,
    each_on_its_own,
    empty_answers,
    num_experts_of,
)
from graphcore.kernels.ops.gating import gated_features
from graphcore.kernels.packing import Packing
from graphcore.kernels.stored_packing import StoredPacking

torch.library.define(
    "graphcore::device_experts",
    "(Tensor x, Tensor chosen, Tensor[] weights, Tensor[] biases, int[]? places, int hidden, str activation,"
    " float limit, float alpha, str[] formats) -> Tensor",
)
torch.library.register_fake("graphcore::device_experts", lambda x, chosen, *_: empty_answers(x, chosen))


def packed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Places,
    gating: Gating,
    packings: Sequence[Packing],
    rounding: str,
) -> Tensor:
    """Return each chosen expert's output for its token.

    Args:
        x, chosen, places: [N, D], [N, C] and [X], as in kernels/ops/experts.py.
        weights: gate, up and down, [S, nbytes] uint8 each.
        biases: gate [X, F], up [X, F] and down [X, D], compute dtype; empty for none.
        gating: function of gate and up.
        packings: packings of one expert's gate, up and down.
        rounding: rounding of the activations, as in kernels/cpu/kernel_packing.py.

    Returns:
        [N, C, D] compute dtype; zeros where no expert is chosen or the expert is missing.
    """
    first = packings[0]
    formats = [packing.format for packing in packings]
    if isinstance(first, DevicePacking):
        on_device = torch.ops.graphcore.device_experts.default
        return on_device(x, chosen, weights, biases, places, first.rows, *gating, formats)  # type: ignore[no-any-return]
    library = first.library if isinstance(first, KernelPacking) else ""
    op = torch.ops.graphcore.packed_experts.default
    how = (first.rows, *gating, formats, library, rounding)
    return op(x, chosen, weights, biases, places, *how)  # type: ignore[no-any-return]


class _How(NamedTuple):
    """The last arguments of the op `packed_experts`."""

    hidden: int
    activation: str
    limit: float
    alpha: float
    formats: Sequence[str]
    library: str
    rounding: str

    def matrices(self, dim: int) -> list[tuple[str, int, int]]:
        """Return format, rows and columns of an expert's gate, up and down."""
        shapes = ((self.hidden, dim), (self.hidden, dim), (dim, self.hidden))
        return [(name, *shape) for name, shape in zip(self.formats, shapes, strict=True)]


def _looped(
    x: Tensor, chosen: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], places: Places, *how: Any
) -> Tensor:
    asked = _How(*how)
    if asked.library and asked.rounding != "float":
        where = range(len(weights[0])) if places is None else places
        gating = Gating(asked.activation, asked.limit, asked.alpha)
        kernels = [KernelPacking(*one, asked.library) for one in asked.matrices(x.shape[1])]
        return run_experts(x, chosen, weights, biases, where, gating, kernels, asked.rounding)
    run = _expert(x.shape[1], weights, biases, asked)
    return each_on_its_own(x, chosen, num_experts_of(weights, places), places, run)


def _masked(
    x: Tensor, chosen: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], places: Places, *how: Any
) -> Tensor:
    run = _expert(x.shape[1], weights, biases, _How(*how))
    return all_on_every(x, chosen, num_experts_of(weights, places), places, run)


def _expert(dim: int, weights: Sequence[Tensor], biases: Sequence[Tensor], how: _How) -> ExpertFunction:
    """Return the function that runs tokens [M, D] through one expert."""
    packings = [KernelPacking(*one, how.library) if how.library else StoredPacking(*one) for one in how.matrices(dim)]

    def run(tokens: Tensor, expert: int, place: int) -> Tensor:
        def project(values: Tensor, part: int) -> Tensor:
            bias = biases[part][expert] if biases else None
            return packings[part].linear(values, weights[part][place], bias, how.rounding)

        features = gated_features(project(tokens, 0), project(tokens, 1), how.activation, how.limit, how.alpha)
        return project(features, 2)

    return run


register_custom_op(
    "packed_experts",
    _masked,
    empty_answers,
    schema="(Tensor x, Tensor chosen, Tensor[] weights, Tensor[] biases, int[]? places, int hidden, str activation,"
    " float limit, float alpha, str[] formats, str library, str rounding) -> Tensor",
)
torch.library.impl("graphcore::packed_experts", "CPU", _looped)
