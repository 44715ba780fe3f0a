"""The mixture of experts of kernels/experts.py over packed weights, as one custom op.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token.

Each expert is a packed matrix of its own, [X, nbytes]; a decode step reads the bytes of the chosen ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.kernels.experts import ExpertFunction, all_on_every, clamped_swiglu, each_on_its_own
from graphcore.quant.packing import KernelPacking, Packing, StoredPacking

torch.library.define(
    "graphcore::packed_experts",
    "(Tensor x, Tensor chosen, Tensor shares, Tensor[] weights, Tensor[] biases, float limit, float alpha,"
    " str[] formats, str library, str rounding) -> Tensor",
)


def packed_experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    clamp: tuple[float, float],
    packings: Sequence[Packing],
    rounding: str,
) -> Tensor:
    """Return each token's sum of share times expert over the experts chosen for it.

    Args:
        x, chosen, shares: [N, D], [N, C] and [N, C], as in kernels/experts.py.
        weights: gate, up and down, [X, nbytes] uint8 each.
        biases: gate [X, F], up [X, F] and down [X, D], compute dtype.
        clamp: limit and alpha of the activation.
        packings: of one expert's gate, up and down.
        rounding: of the activations, as in kernels/packed.py.

    Returns:
        [N, D] compute dtype.
    """
    first = packings[0]
    library = first.library if isinstance(first, KernelPacking) else ""
    formats = [packing.format for packing in packings]
    op = torch.ops.graphcore.packed_experts.default
    return op(x, chosen, shares, weights, biases, *clamp, formats, library, rounding)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::packed_experts")  # type: ignore[untyped-decorator]  # torch does not type it
def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _looped(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *how: object,
) -> Tensor:
    return each_on_its_own(x, chosen, shares, len(weights[0]), _expert(x, weights, biases, *how))  # type: ignore[arg-type]  # the op's types


def _masked(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *how: object,
) -> Tensor:
    return all_on_every(x, chosen, shares, len(weights[0]), _expert(x, weights, biases, *how))  # type: ignore[arg-type]  # the op's types


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

    def run(tokens: Tensor, expert: int) -> Tensor:
        def project(values: Tensor, part: int) -> Tensor:
            return packings[part].linear(values, weights[part][expert], biases[part][expert], rounding)

        return project(clamped_swiglu(project(tokens, 0), project(tokens, 1), limit, alpha), 2)

    return run


# Not as decorators: torch's would leave None under the functions' names.
torch.library.impl("graphcore::packed_experts", "CPU", _looped)
torch.library.impl("graphcore::packed_experts", "CompositeExplicitAutograd", _masked)
