"""The errors of graphcore's outputs against a reference's, the tolerance for them, and the verdict.

    error      largest and mean absolute difference
    cosine     of a token's row in both outputs; over all tokens the mean, and the lowest

Legend: T tokens, D model dim, V vocab.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from graphcore.tasks.task import Record

FLOAT32_TOLERANCE = 1e-4
FLOAT32_COSINE = 1 - 1e-5
FACTOR = 2.0  # tolerance at other dtypes, as a multiple of transformers' own error in that dtype
PACKED_COSINE = 0.99  # llama.cpp rounds activations to 8 bits: 0.9995 at SmolLM2's worst layer, 0.996 at Gemma 3's


@dataclass(frozen=True)
class Outputs:
    """The outputs of one pass, float32 on the CPU.

    Attributes:
        layers: the residual stream after the embedding and after each block, [T, D] each.
        logits: the logits after each token, [T, V].
    """

    layers: tuple[Tensor, ...]
    logits: Tensor


@dataclass(frozen=True)
class Errors:
    """Differences of two tensors; NaN if either tensor has a NaN.

    Attributes:
        max, mean: largest and mean absolute difference.
        cosine: mean over the tokens of the cosine between both rows of a token.
        lowest_cosine: lowest of these cosines.
        not_finite: number of values of the first tensor that are not finite.
    """

    max: float
    mean: float
    cosine: float
    lowest_cosine: float
    not_finite: int

    @classmethod
    def of(cls, found: Tensor, expected: Tensor) -> "Errors":
        """Return the differences of two tensors of one shape, [T, D]."""
        difference = (found.float() - expected.float()).abs()
        rows = zip(found.double(), expected.double(), strict=True)
        cosines = torch.tensor([_cosine(*pair) for pair in rows], dtype=torch.float64, device="cpu")
        return cls(
            difference.max().item(),
            difference.mean().item(),
            cosines.mean().item(),
            cosines.min().item(),
            int((~found.isfinite()).sum()),
        )


def _cosine(found: Tensor, expected: Tensor) -> float:
    """Return the cosine of two rows; 1 if both are zero, 0 if one is."""
    norms: tuple[float, float] = (found.norm().item(), expected.norm().item())
    if 0 in norms:
        return float(norms[0] == norms[1])
    return float(torch.dot(found, expected)) / (norms[0] * norms[1])


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed error of the logits with the reason for it, and the lowest allowed cosine."""

    value: float
    reason: str
    cosine: float = FLOAT32_COSINE


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
        "layers": [
            {**line_record(name, found, right), "transformers": _errors(rounded, right)}
            for name, found, right, rounded in rows
        ],
        "logits": {
            **line_record("logits", ours.logits, expected.logits),
            "transformers": _errors(theirs.logits if theirs else None, expected.logits),
        },
    }


def line_record(name: str, found: Tensor, expected: Tensor) -> Record:
    """Return the errors of one tensor, with its name and the reference's largest magnitude."""
    return {"name": name, **asdict(Errors.of(found, expected)), "largest": expected.abs().max().item()}


def _errors(theirs: Tensor | None, expected: Tensor) -> Record | None:
    return None if theirs is None else asdict(Errors.of(theirs, expected))


def cached_record(decoded: Tensor, whole: Tensor) -> Record:
    """Return the errors of logits from decode steps against those of the whole sequence, [T, V] each."""
    agreeing = int((decoded.argmax(dim=1) == whole.argmax(dim=1)).sum())
    return {**asdict(Errors.of(decoded, whole)), "tokens": len(whole), "agreeing": agreeing}


def allowed(asked: float | None, cosine: float | None, dtype: torch.dtype, compared: Record) -> Tolerance:
    """Return the tolerance: as asked, else constants at float32, and twice transformers' error at other dtypes.

    An error that is twice as large makes the distance of the cosine from 1 four times as large.

    Args:
        asked: largest allowed error of the logits, if it was given.
        cosine: lowest allowed cosine, if it was given.
        compared: record of `compare`.
    """
    theirs = [line["transformers"] for line in (*compared["layers"], compared["logits"])]
    name = str(dtype).removeprefix("torch.")
    value, reason, lowest = FLOAT32_TOLERANCE, "float32", FLOAT32_COSINE
    if theirs[-1] is not None:
        value, reason = FACTOR * theirs[-1]["max"], f"{FACTOR:g} x the error of transformers in {name}"
        lowest = min(lowest, 1 - FACTOR**2 * (1 - min(errors["cosine"] for errors in theirs)))
    if asked is not None:
        value, reason = asked, "task.tolerance"
    return Tolerance(value, reason, lowest if cosine is None else cosine)


def greedy_record(expected: Tensor, new_ids: Sequence[int]) -> Record:
    """Return how far graphcore's greedy tokens agree with transformers' logits.

    Args:
        expected: [len(new_ids), V] float32, transformers' logits at these positions, given graphcore's earlier tokens.
        new_ids: graphcore's greedy tokens.

    Returns:
        Tokens compared, tokens that agree, and the largest margin by which transformers prefers another token.
    """
    if not new_ids:
        return {"tokens": 0, "agreeing": 0, "largest_margin": 0.0}
    chosen = expected.gather(1, torch.tensor(new_ids, dtype=torch.int64, device="cpu")[:, None])[:, 0]
    margins = expected.max(dim=1).values - chosen
    return {
        "tokens": len(new_ids),
        "agreeing": int((margins == 0).sum()),
        "largest_margin": margins.max().item(),
    }


def first_beyond(record: Record, tolerance: Tolerance) -> str | None:
    """Return the name of the first layer, or the logits, that is beyond the tolerance; None if none is.

    A layer's error is allowed in proportion to its largest value, or to transformers' own error at that layer.

    Args:
        record: record of `compare`.
    """
    logits = record["logits"]
    for line in (*record["layers"], logits):
        theirs, share = line["transformers"], line["largest"] / max(logits["largest"], 1e-30)
        most = tolerance.value * max(1.0, share)
        if line is not logits and theirs is not None:
            most = FACTOR * theirs["max"]
        if line["not_finite"] or not line["cosine"] >= tolerance.cosine or not line["max"] <= most:
            return str(line["name"])
    return None


def verdict(record: Record, tolerance: Tolerance) -> Record:
    """Return the status "ok", or "failed" with the reason and the first layer that is beyond the tolerance.

    Args:
        record: "layers", "logits", "greedy", "cached" and "llama_cpp" of result.json.
    """
    fault = _fault(record, tolerance)
    where = first_beyond(record, tolerance) if fault else None
    if fault and where not in (None, "logits"):
        fault = f"{fault}; {where} is the first layer beyond the tolerance"
    fault = fault or _fault_of_cache(record, tolerance) or _fault_of_llama_cpp(record["llama_cpp"])
    ending = {"status": "failed", "error": f"VerifyError: {fault}"} if fault else {"status": "ok"}
    return {"first_beyond": where, **ending}


def _fault(record: Record, tolerance: Tolerance) -> str | None:
    """Return how the outputs deviate too far from transformers'; None if they do not.

    Logits within the tolerance of the reference can prefer a token that is at most twice the tolerance below its best.
    """
    value, logits, greedy = tolerance.value, record["logits"], record["greedy"]
    if not math.isfinite(value):
        return f"{tolerance.reason} is {value}: there is nothing to compare with"
    if logits["not_finite"]:
        return f"{logits['not_finite']} logits are not finite"
    if not logits["max"] <= value:
        return f"the logits differ by {logits['max']:.3g}, allowed are {value:.3g} ({tolerance.reason})"
    lowest = min((*record["layers"], logits), key=lambda line: line["cosine"] if line["cosine"] >= -1 else -2)
    if not lowest["cosine"] >= tolerance.cosine:
        return f"the cosine of {lowest['name']} is {lowest['cosine']:.7f}, allowed are {tolerance.cosine:.7f}"
    if not greedy["largest_margin"] <= 2 * value:
        margin = f"{greedy['largest_margin']:.3g}"
        return f"a greedy token is {margin} below transformers' choice, allowed are {2 * value:.3g}"
    return None


def _fault_of_cache(record: Record, tolerance: Tolerance) -> str | None:
    """Return how decode steps deviate too far from the whole sequence; both may be off by the tolerance.

    Only the cosine is checked: where activations are rounded to 8 bits, a value halfway between two steps may round
    either way.
    """
    cached = record["cached"]
    if cached["not_finite"] or not record["greedy"]["tokens"]:
        return f"{cached['not_finite']} logits of decode steps over the KV cache are not finite"
    lowest = 1 - FACTOR**2 * (1 - tolerance.cosine)
    if not cached["cosine"] >= lowest:
        return (
            f"the cosine of decode steps over the KV cache with the whole sequence is {cached['cosine']:.7f}, allowed "
            f"are {lowest:.7f}"
        )
    return None


def compare_llama_cpp(ours: Outputs, expected: Outputs, cosine: float) -> Record:
    """Return the errors against llama.cpp, whose layers begin after the first block, and the lowest allowed cosine.

    The logits are left out if llama.cpp runs more layers than graphcore.
    """
    lines = [
        line_record(f"layers.{index}", found, right)
        for index, (found, right) in enumerate(zip(ours.layers[1:], expected.layers, strict=False))
    ]
    has_all = len(lines) == len(expected.layers)
    logits = line_record("logits", ours.logits, expected.logits) if has_all else None
    return {"layers": lines, "logits": logits, "cosine_tolerance": cosine}


def _fault_of_llama_cpp(record: Record | None) -> str | None:
    """Return the first layer whose cosine against llama.cpp is too low, in words; None if there is none."""
    if record is None:
        return None
    lines = [*record["layers"], *([] if record["logits"] is None else [record["logits"]])]
    for line in lines:
        if not line["cosine"] >= record["cosine_tolerance"]:
            return (
                f"the cosine of {line['name']} with llama.cpp's is {line['cosine']:.7f}, the first one below "
                f"{record['cosine_tolerance']:.7f}"
            )
    return None
