"""The errors of graphcore's outputs against transformers', and the tolerance for them.

Legend: T tokens, D model dim, V vocab.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from graphcore.tasks.reference.transformers_model import Outputs
from graphcore.tasks.task import Record

FLOAT32_TOLERANCE = 1e-4
FACTOR = 2.0  # tolerance at other dtypes, as a multiple of transformers' own error in that dtype


@dataclass(frozen=True)
class Errors:
    """Maximum and mean of the absolute differences of two tensors; NaN if either tensor has a NaN."""

    max: float
    mean: float

    @classmethod
    def of(cls, found: Tensor, expected: Tensor) -> "Errors":
        """Return the differences of two tensors of one shape."""
        difference = (found.float() - expected.float()).abs()
        return cls(difference.max().item(), difference.mean().item())


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed error of the logits, and the reason for it."""

    value: float
    reason: str


def compare(ours: Outputs, expected: Outputs, theirs: Outputs | None) -> Record:
    """Return the errors of each layer and of the logits.

    Args:
        ours: graphcore's outputs in the compute dtype.
        expected: transformers' outputs in float32.
        theirs: transformers' outputs in the compute dtype; None where that is float32.
    """
    names = ["embed_tokens", *(f"layers.{index}" for index in range(len(ours.layers) - 1))]
    their_layers: Sequence[Tensor | None] = theirs.layers if theirs else [None] * len(names)
    rows = zip(names, ours.layers, expected.layers, their_layers, strict=True)
    return {
        "layers": [_record(name, found, right, rounded) for name, found, right, rounded in rows],
        "logits": _record("logits", ours.logits, expected.logits, theirs.logits if theirs else None),
    }


def _record(name: str, ours: Tensor, expected: Tensor, theirs: Tensor | None) -> Record:
    return {
        "name": name,
        **asdict(Errors.of(ours, expected)),
        "largest": expected.abs().max().item(),
        "transformers": asdict(Errors.of(theirs, expected)) if theirs is not None else None,
    }


def allowed(asked: float | None, dtype: torch.dtype, theirs: Outputs | None, expected: Outputs) -> Tolerance:
    """Return the tolerance: `asked` if given, else 1e-4 at float32 and twice transformers' error at other dtypes."""
    if asked is not None:
        return Tolerance(asked, "task.tolerance")
    if theirs is None:
        return Tolerance(FLOAT32_TOLERANCE, "float32")
    name = str(dtype).removeprefix("torch.")
    error = Errors.of(theirs.logits, expected.logits).max
    return Tolerance(FACTOR * error, f"{FACTOR:g} x the error of transformers in {name}")


def greedy_record(expected: Tensor, new_ids: Sequence[int]) -> Record:
    """Return how far graphcore's greedy tokens agree with transformers' logits.

    Args:
        expected: [len(new_ids), V] float32, transformers' logits at each choice, after graphcore's own tokens.
        new_ids: tokens that graphcore chose.

    Returns:
        Tokens compared, tokens that agree, and the largest margin by which transformers prefers another token.
    """
    chosen = expected.gather(1, torch.tensor(new_ids, dtype=torch.int64, device="cpu")[:, None])[:, 0]
    margins = expected.max(dim=1).values - chosen
    return {
        "tokens": len(new_ids),
        "agreeing": int((margins == 0).sum()),
        "largest_margin": margins.max().item(),
    }


def verdict(logits: Record, greedy: Record, tolerance: Tolerance) -> Record:
    """Return the status "ok", or "failed" with the reason.

    Logits within the tolerance of the reference can prefer a token that is at most twice the tolerance below its best.
    """
    value = tolerance.value
    if not math.isfinite(value):
        return _failed(f"{tolerance.reason} is {value}: there is nothing to compare with")
    if not logits["max"] <= value:
        return _failed(f"the logits differ by {logits['max']:.3g}, allowed are {value:.3g} ({tolerance.reason})")
    if not greedy["largest_margin"] <= 2 * value:
        return _failed(
            f"a greedy token is {greedy['largest_margin']:.3g} below transformers' choice, allowed are {2 * value:.3g}"
        )
    return {"status": "ok"}


def _failed(reason: str) -> Record:
    return {"status": "failed", "error": f"VerifyError: {reason}"}
