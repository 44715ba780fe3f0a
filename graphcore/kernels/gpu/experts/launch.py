"""The mixture of experts on a GPU: the implementations of its ops, and the op of a captured decode step.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C choices of a token, S places.

    experts               [N, D] -> answers [N, C, D]     up to FEW tokens: each choice alone; more: grouped
    add_expert_answers    adds the answers' weighted sum to the stream, best first, in the same two launches
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.activations import Gating
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.experts.fetch import launch_take
from graphcore.kernels.gpu.experts.few_tokens import launch_few, launch_few_summed
from graphcore.kernels.gpu.experts.grouped import launch_many
from graphcore.kernels.gpu.experts.operands import mixture_of
from graphcore.kernels.gpu.matrix import DENSE
from graphcore.kernels.gpu.mean_squares import FusedNorm, fused_norm_of

FEW = 8  # largest number of tokens for which experts' bytes are not shared between tokens


def add_expert_answers(
    stream: Tensor,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Tensor | None,
    hidden: int,
    gating: Gating,
    formats: Sequence[str],
    arrivals: Tensor | None = None,
    waiting: Sequence[Tensor] | None = None,
    next_norm: FusedNorm | None = None,
) -> None:
    """Add the chosen experts' weighted outputs for a few tokens to the residual stream, best first.

    Args:
        stream: [N, D] float32, contiguous.
        x: [N, D] compute dtype, contiguous; N up to 8.
        chosen: [N, C] int64; -1 for no expert.
        shares: [N, C] any float dtype.
        weights: gate [S, F, D], up [S, F, D] and down [S, D, F], or [S, nbytes] uint8 packed for a device
            (kernels/gpu/layout.py); on the device, or page-locked in RAM.
        biases: gate [X, F], up [X, F] and down [X, D]; empty for none.
        places: [X] integers on the device, the experts' places; None if expert i is at place i.
        hidden: F.
        gating: function that combines gate and up.
        formats: formats of gate, up and down: "dense", or the stored format's name.
        arrivals: counters, as in `few_tokens.launch_few_summed`.
        waiting: gate, up and down of all experts, as in `MixtureOperands`; None if every expert has a place.
        next_norm: as in `few_tokens.launch_few_summed`.
    """
    op = torch.ops.graphcore.gpu_add_experts.default
    norm = next_norm or (None, None, None)
    op(stream, x, chosen, shares, weights, biases, places, hidden, *gating, formats, arrivals, waiting, *norm)


def launch_add_experts(
    stream: Tensor,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Tensor | None,
    hidden: int,
    activation: str,
    limit: float,
    alpha: float,
    formats: Sequence[str],
    arrivals: Tensor | None = None,
    waiting: Sequence[Tensor] | None = None,
    norm_weight: Tensor | None = None,
    norm_rows: Tensor | None = None,
    squares: Tensor | None = None,
) -> None:
    """Implement `add_expert_answers`."""
    gating = Gating(activation, limit, alpha)
    mixture = mixture_of(weights, biases, places, hidden, gating, formats, waiting=waiting)
    launch_few_summed(stream, x, chosen, shares, mixture, arrivals, fused_norm_of(norm_weight, norm_rows, squares))


def launch_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    limit: float,
    alpha: float,
    places: Sequence[int] | None = None,
) -> Tensor:
    """Implement `experts` (kernels/ops/experts.py)."""
    hidden, dense = weights[0].shape[1], (DENSE,) * 3
    return launch_packed_experts(x, chosen, weights, biases, places, hidden, activation, limit, alpha, dense)


def launch_packed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Sequence[int] | None,
    hidden: int,
    activation: str,
    limit: float,
    alpha: float,
    formats: Sequence[str],
) -> Tensor:
    """Implement `device_experts` (kernels/ops/packed_experts.py)."""
    launch = launch_few if len(x) <= FEW else launch_many
    mixture = mixture_of(weights, biases, places, hidden, Gating(activation, limit, alpha), formats, x.device)
    return launch(x.contiguous(), chosen.contiguous(), mixture)


def launch_cached_experts(
    x: Tensor,
    chosen: Tensor,
    waiting: Sequence[Tensor],
    slots: Sequence[Tensor],
    places: Tensor,
    holders: Tensor,
    last_use: Tensor,
    tallies: Tensor,
    biases: Sequence[Tensor],
    hidden: int,
    activation: str,
    limit: float,
    alpha: float,
    formats: Sequence[str],
) -> Tensor:
    """Implement `cached_experts` (kernels/ops/expert_slots.py)."""
    chosen = chosen.contiguous()
    launch_take(chosen, waiting, slots, places, holders, last_use, tallies)
    gating = Gating(activation, limit, alpha)
    mixture = mixture_of(slots, biases, places, hidden, gating, formats, waiting=waiting)
    launch = launch_few if len(x) <= FEW else launch_many
    return launch(x.contiguous(), chosen, mixture)


register_custom_op("gpu_add_experts", launch_add_experts, mutates_args=["stream", "arrivals", "norm_rows", "squares"])
torch.library.impl("graphcore::device_experts", "CompositeExplicitAutograd", launch_packed_experts)
torch.library.impl("graphcore::experts", "CUDA", launch_experts)
torch.library.impl("graphcore::cached_experts", "CUDA", launch_cached_experts)
