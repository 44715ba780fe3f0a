"""The mixture of experts of kernels/experts.py over packed weights, as one custom op for the CPU and one for a GPU.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token, S places.

Each expert is a packed matrix of its own, [S, nbytes]; a decode step reads only the bytes of the chosen ones.

Experts packed for a device (device_packing.py) are multiplied by kernels/gpu/experts/, which registers itself, with
sums in float32 and without rounding x. They may lie in page-locked memory of the host, everything else on the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.kernels.device_packing import DevicePacking
from graphcore.kernels.experts import (
    ExpertFunction,
    Places,
    all_on_every,
    answers_fake,
    clamped_swiglu,
    each_on_its_own,
)
from graphcore.kernels.kernel_packing import KernelPacking
from graphcore.kernels.packing import Packing
from graphcore.kernels.stored_packing import StoredPacking

torch.library.define(
    "graphcore::packed_experts",
    "(Tensor x, Tensor chosen, Tensor[] weights, Tensor[] biases, int[]? places, float limit, float alpha,"
    " str[] formats, str library, str rounding) -> Tensor",
)
torch.library.define(
    "graphcore::device_experts",
    "(Tensor x, Tensor chosen, Tensor[] weights, Tensor[] biases, int[]? places, float limit, float alpha,"
    " str[] formats) -> Tensor",
)


def packed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Places,
    clamp: tuple[float, float],
    packings: Sequence[Packing],
    rounding: str,
) -> Tensor:
    """Return each chosen expert's answer for its token.

    Args:
        x, chosen, places: [N, D], [N, C] and [X], as in kernels/experts.py.
        weights: gate, up and down, [S, nbytes] uint8 each.
        biases: gate [X, F], up [X, F] and down [X, D], compute dtype.
        clamp: limit and alpha of the activation.
        packings: packings of one expert's gate, up and down.
        rounding: rounding of the activations, as in kernels/kernel_packing.py.

    Returns:
        [N, C, D] compute dtype; zeros for no expert and for missing experts.
    """
    first = packings[0]
    formats = [packing.format for packing in packings]
    if isinstance(first, DevicePacking):
        on_device = torch.ops.graphcore.device_experts.default
        return on_device(x, chosen, weights, biases, places, *clamp, formats)  # type: ignore[no-any-return]
    library = first.library if isinstance(first, KernelPacking) else ""
    op = torch.ops.graphcore.packed_experts.default
    return op(x, chosen, weights, biases, places, *clamp, formats, library, rounding)  # type: ignore[no-any-return]


torch.library.register_fake("graphcore::packed_experts", answers_fake)
torch.library.register_fake("graphcore::device_experts", answers_fake)


def _looped(
    x: Tensor, chosen: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], places: Places, *how: object
) -> Tensor:
    return each_on_its_own(x, chosen, len(biases[0]), places, _expert(x, weights, biases, *how))  # type: ignore[arg-type]  # the op's types


def _masked(
    x: Tensor, chosen: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], places: Places, *how: object
) -> Tensor:
    return all_on_every(x, chosen, len(biases[0]), places, _expert(x, weights, biases, *how))  # type: ignore[arg-type]  # the op's types


def _expert(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    limit: float,
    alpha: float,
    formats: Sequence[str],
    library: str,
    rounding: str,
) -> ExpertFunction:
    """Return the function that runs tokens [M, D] through one expert."""
    dim, hidden = x.shape[1], biases[0].shape[1]
    shapes = ((hidden, dim), (hidden, dim), (dim, hidden))
    packings = [
        KernelPacking(name, *shape, library) if library else StoredPacking(name, *shape)
        for name, shape in zip(formats, shapes, strict=True)
    ]

    def run(tokens: Tensor, expert: int, place: int) -> Tensor:
        def project(values: Tensor, part: int) -> Tensor:
            return packings[part].linear(values, weights[part][place], biases[part][expert], rounding)

        return project(clamped_swiglu(project(tokens, 0), project(tokens, 1), limit, alpha), 2)

    return run


# Not as decorators: torch's would leave None under the functions' names.
torch.library.impl("graphcore::packed_experts", "CPU", _looped)
torch.library.impl("graphcore::packed_experts", "CompositeExplicitAutograd", _masked)
