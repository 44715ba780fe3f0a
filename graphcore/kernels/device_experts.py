"""A mixture of experts that are packed for a GPU (kernels/device_layout.py), as one custom op.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token, S places.

The op is known wherever torch is, so that a graph may be traced anywhere; Triton is imported when it runs. Weights may
lie in page-locked memory of the host while everything else is on the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.kernels.experts import Places, answers_fake

torch.library.define(
    "graphcore::device_experts",
    "(Tensor x, Tensor chosen, Tensor[] weights, Tensor[] biases, int[]? places, float limit, float alpha,"
    " str[] formats) -> Tensor",
)


def device_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Places,
    clamp: tuple[float, float],
    formats: Sequence[str],
) -> Tensor:
    """Return what each chosen expert makes of its token, summed in float32; x is not rounded.

    Args:
        x, chosen, places: [N, D], [N, C] and [X], as in kernels/experts.py.
        weights: gate, up and down, [S, nbytes] uint8 each.
        biases: gate [X, F], up [X, F] and down [X, D], compute dtype.
        clamp: limit and alpha of the activation.
        formats: of one expert's gate, up and down.

    Returns:
        [N, C, D] compute dtype; zeros for nobody and for experts that are not there.
    """
    op = torch.ops.graphcore.device_experts.default
    return op(x, chosen, weights, biases, places, *clamp, formats)  # type: ignore[no-any-return]


def _experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Places,
    limit: float,
    alpha: float,
    formats: Sequence[str],
) -> Tensor:
    from graphcore.kernels.gpu.experts import launch_experts

    return launch_experts(x, chosen, weights, biases, limit, alpha, places, formats)


def _dense_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    limit: float,
    alpha: float,
    places: Places = None,
) -> Tensor:
    from graphcore.kernels.gpu.experts import launch_experts

    return launch_experts(x, chosen, weights, biases, limit, alpha, places)


# Not as decorators: torch's would leave None under the functions' names. Without a GPU the interpreter runs it.
torch.library.register_fake("graphcore::device_experts", answers_fake)
torch.library.impl("graphcore::device_experts", "CompositeExplicitAutograd", _experts)
torch.library.impl("graphcore::experts", "CUDA", _dense_experts)
