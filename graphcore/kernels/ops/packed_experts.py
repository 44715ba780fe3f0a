"""The mixture of experts of kernels/ops/experts.py over packed weights, as one custom op for the CPU and one for a GPU.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token, S places.

Each expert is packed separately, [S, nbytes]; a decode step reads only the bytes of the chosen experts.

Experts packed for a device (device_packing.py) are multiplied by kernels/gpu/experts/, which registers itself, with
sums in float32 and without rounding x. Their weights may be in page-locked host memory, all other tensors are on the
device.
"""

from collections.abc import Sequence

from torch import Tensor

from graphcore.activations import Gating
from graphcore.kernels.cpu.experts import run_experts
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.custom_ops import register_custom_op, register_implementation
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


def _device_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Places,
    hidden: int,
    gating: Gating,
    formats: Sequence[str],
) -> Tensor:
    """Stand for `packed_experts` of matrices packed for a device, which kernels/gpu/experts/launch.py implements."""
    raise NotImplementedError


device_experts = register_custom_op("device_experts", _device_experts, empty_answers, dispatch_key=None)


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
        return device_experts(x, chosen, weights, biases, places, first.rows, gating, formats)
    library = first.library if isinstance(first, KernelPacking) else ""
    return _packed_experts(x, chosen, weights, biases, places, first.rows, gating, formats, library, rounding)


def _looped(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Places,
    hidden: int,
    gating: Gating,
    formats: Sequence[str],
    library: str,
    rounding: str,
) -> Tensor:
    packings = _packings(x.shape[1], hidden, formats, library)
    kernels = [one for one in packings if isinstance(one, KernelPacking)]
    if kernels and rounding != "float":
        where = range(len(weights[0])) if places is None else places
        return run_experts(x, chosen, weights, biases, where, gating, kernels, rounding)
    run = _expert(weights, biases, gating, packings, rounding)
    return each_on_its_own(x, chosen, num_experts_of(weights, places), places, run)


def _masked(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Places,
    hidden: int,
    gating: Gating,
    formats: Sequence[str],
    library: str,
    rounding: str,
) -> Tensor:
    run = _expert(weights, biases, gating, _packings(x.shape[1], hidden, formats, library), rounding)
    return all_on_every(x, chosen, num_experts_of(weights, places), places, run)


def _packings(dim: int, hidden: int, formats: Sequence[str], library: str) -> list[Packing]:
    """Return the packings of an expert's gate, up and down."""
    shapes = ((hidden, dim), (hidden, dim), (dim, hidden))
    return [
        KernelPacking(name, *shape, library) if library else StoredPacking(name, *shape)
        for name, shape in zip(formats, shapes, strict=True)
    ]


def _expert(
    weights: Sequence[Tensor], biases: Sequence[Tensor], gating: Gating, packings: Sequence[Packing], rounding: str
) -> ExpertFunction:
    """Return the function that runs tokens [M, D] through one expert."""

    def run(tokens: Tensor, expert: int, place: int) -> Tensor:
        def project(values: Tensor, part: int) -> Tensor:
            bias = biases[part][expert] if biases else None
            return packings[part].linear(values, weights[part][place], bias, rounding)

        return project(gated_features(project(tokens, 0), project(tokens, 1), gating), 2)

    return run


_packed_experts = register_custom_op("packed_experts", _masked, empty_answers)
register_implementation("packed_experts", "CPU", _looped)
