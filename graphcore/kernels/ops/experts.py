"""A mixture of gated experts, as one custom op: each token runs through the experts chosen for it.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token, S places (slots
for experts in the weight tensors).

    gate, up, down: [S, F, D], [S, F, D], [S, D, F] and, in some models, their biases [X, F], [X, F], [X, D]
    y = down(activation(gate x) * up x), or gpt-oss's clamped SwiGLU of the two (kernels/ops/gating.py)

An expert's matrices may be at any place, and a call may have only some of the chosen experts; an expert's output is
bit-identical in all cases. So outputs stay separate, one row per (token, expert) pair, and the caller adds them in the
experts' order. Biases are always complete.

On the CPU the op reads which experts were chosen, and only their weights. A GPU must not synchronise with the host:
`masked_experts` gathers the chosen weights of a few tokens, or runs every expert under a mask.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from graphcore.activations import Gating
from graphcore.kernels.custom_ops import register_custom_op, register_implementation
from graphcore.kernels.ops.gating import gated_features

ExpertFunction = Callable[[Tensor, int, int], Tensor]
Places = Sequence[int] | None
ALIGNMENT = 64  # bytes; a matrix product's summation order may depend on the alignment


def empty_answers(x: Tensor, chosen: Tensor) -> Tensor:
    """Return an empty tensor like the outputs, for tracing."""
    return x.new_empty((*chosen.shape, x.shape[1]))


def looped_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gating: Gating,
    places: Places = None,
) -> Tensor:
    """Implement `experts` expert by expert, without reading the weights of experts that no token chose."""
    return each_on_its_own(x, chosen, num_experts_of(weights, places), places, _runner(weights, biases, gating))


def num_experts_of(weights: Sequence[Tensor], places: Places) -> int:
    """Return the number of experts, X."""
    return len(weights[0]) if places is None else len(places)


def each_on_its_own(x: Tensor, chosen: Tensor, num_experts: int, places: Places, run: ExpertFunction) -> Tensor:
    """Return the outputs [N, C, D], running each expert on the tokens that chose it.

    Args:
        x, chosen, places: the same as in `experts`.
        num_experts: X.
        run: function from tokens [M, D], an expert and its place to the outputs [M, D].
    """
    flat = chosen.flatten()
    y = x.new_zeros(len(flat), x.shape[1])
    rows = flat.argsort(stable=True)  # [N C], rows of y by expert; those without an expert come first
    begin, *counts = (flat + 1).bincount(minlength=num_experts + 1).tolist()
    for expert, count in enumerate(counts):
        place = expert if places is None else places[expert]
        mine = rows[begin : begin + count]
        begin += count
        if count and place >= 0:
            y[mine] = run(x[mine // chosen.shape[1]], expert, place)
    return y.view(*chosen.shape, x.shape[1])


def _runner(weights: Sequence[Tensor], biases: Sequence[Tensor], gating: Gating) -> ExpertFunction:
    """Return the function that runs some tokens [M, D] through one expert."""

    def run(x: Tensor, expert: int, place: int) -> Tensor:
        def project(values: Tensor, part: int) -> Tensor:
            return linear(values, _matrix_at(weights[part], place), biases[part][expert] if biases else None)

        return project(gated_features(project(x, 0), project(x, 1), gating), 2)

    return run


def _matrix_at(weights: Tensor, place: int) -> Tensor:
    """Return one matrix at an aligned address; it is copied if it begins within a cache line."""
    matrix = weights[place]
    return matrix.clone() if matrix.data_ptr() % ALIGNMENT else matrix


def masked_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gating: Gating,
    places: Places = None,
) -> Tensor:
    """Return each chosen expert's output for its token, without synchronising with the host.

    Args:
        x: [N, D] compute dtype.
        chosen: [N, C] int64, distinct within a token; -1 for no expert.
        weights: gate [S, F, D], up [S, F, D] and down [S, D, F], compute dtype.
        biases: gate [X, F], up [X, F] and down [X, D], compute dtype; empty for none.
        gating: function of gate and up.
        places: place of each of the X experts among the S; -1 if it is missing. None if expert i is at place i.

    Returns:
        [N, C, D] compute dtype; zeros where no expert is chosen or the expert is missing.
    """
    num_experts = num_experts_of(weights, places)
    # With at most as many (token, expert) pairs as experts, the gathered copies are no larger than the layer's weights.
    if chosen.numel() <= num_experts:
        return _gathered(x, chosen, weights, biases, gating, places)
    return all_on_every(x, chosen, num_experts, places, _runner(weights, biases, gating))


def _gathered(
    x: Tensor,
    chosen: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gating: Gating,
    places: Places,
) -> Tensor:
    """Return the outputs [N, C, D] of a few tokens, with a copy of the weights that each of them uses."""
    flat = chosen.flatten()  # [N C]
    at = flat if places is None else torch.tensor(places, device=x.device, dtype=torch.int64)[flat]
    nobody = (flat < 0) | (at < 0)
    flat, at = flat.clamp(min=0), at.clamp(min=0)
    rows = x.repeat_interleave(chosen.shape[1], dim=0)  # [N C, D]

    def project(values: Tensor, part: int) -> Tensor:
        products = torch.bmm(weights[part][at], values[:, :, None])[:, :, 0]
        return products + biases[part][flat] if biases else products

    y = project(gated_features(project(rows, 0), project(rows, 1), gating), 2)  # [N C, D]
    return y.masked_fill_(nobody[:, None], 0).view(*chosen.shape, x.shape[1])


def all_on_every(x: Tensor, chosen: Tensor, num_experts: int, places: Places, run: ExpertFunction) -> Tensor:
    """Return the outputs [N, C, D] without synchronising with the host: every expert runs on all tokens."""
    y = x.new_zeros(*chosen.shape, x.shape[1])
    for expert in range(num_experts):
        place = expert if places is None else places[expert]
        if place >= 0:
            y = torch.where((chosen == expert)[..., None], run(x, expert, place)[:, None], y)
    return y


experts = register_custom_op("experts", masked_experts, empty_answers)
register_implementation("experts", "CPU", looped_experts)
