"""The mixture of experts on a GPU: the implementations of its ops, and the op of a captured decode step.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C choices of a token, S places.

    experts               [N, D] -> answers [N, C, D]     up to FEW tokens: each choice alone; more: grouped
    add_expert_answers    adds the answers' weighted sum to the stream, best first, in the same two launches
"""

from collections.abc import Sequence

from torch import Tensor

from graphcore.activations import Gating
from graphcore.kernels.custom_ops import register_custom_op, register_implementation
from graphcore.kernels.gpu.experts.fetch import launch_take
from graphcore.kernels.gpu.experts.few_tokens import launch_few, launch_few_summed
from graphcore.kernels.gpu.experts.grouped import launch_many
from graphcore.kernels.gpu.experts.operands import MixtureOperands, mixture_of
from graphcore.kernels.gpu.matrix import DENSE
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.ops.expert_slots import ExpertSlots

FEW = 8  # largest number of tokens for which experts' bytes are not shared between tokens


def launch_add_experts(
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
    mixture = mixture_of(weights, biases, places, hidden, gating, formats, waiting=waiting)
    launch_few_summed(stream, x, chosen, shares, mixture, arrivals, next_norm)


def launch_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gating: Gating,
    places: Sequence[int] | None = None,
) -> Tensor:
    """Implement `experts` (kernels/ops/experts.py)."""
    return launch_packed_experts(x, chosen, weights, biases, places, weights[0].shape[1], gating, (DENSE,) * 3)


def launch_packed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    places: Sequence[int] | None,
    hidden: int,
    gating: Gating,
    formats: Sequence[str],
) -> Tensor:
    """Implement `device_experts` (kernels/ops/packed_experts.py)."""
    return _launch(x, chosen, mixture_of(weights, biases, places, hidden, gating, formats, x.device))


def launch_cached_experts(
    x: Tensor,
    chosen: Tensor,
    cache: ExpertSlots,
    biases: Sequence[Tensor],
    hidden: int,
    gating: Gating,
    formats: Sequence[str],
) -> Tensor:
    """Implement `cached_experts` (kernels/ops/expert_slots.py)."""
    launch_take(chosen.contiguous(), cache)
    mixture = mixture_of(cache.slots, biases, cache.places, hidden, gating, formats, waiting=cache.waiting)
    return _launch(x, chosen, mixture)


def _launch(x: Tensor, chosen: Tensor, mixture: MixtureOperands) -> Tensor:
    launch = launch_few if len(x) <= FEW else launch_many
    return launch(x.contiguous(), chosen.contiguous(), mixture)


add_expert_answers = register_custom_op(
    "gpu_add_experts", launch_add_experts, mutates_args=["stream", "arrivals", "next_norm_rows", "next_norm_squares"]
)
register_implementation("device_experts", "CompositeExplicitAutograd", launch_packed_experts)
register_implementation("experts", "CUDA", launch_experts)
register_implementation("cached_experts", "CUDA", launch_cached_experts)
