"""Errors, tolerances and verdicts on numbers worked out by hand."""

import math

import pytest
import torch

from graphcore.tasks.reference.comparison import Errors, Tolerance, allowed, compare, greedy_record, verdict
from graphcore.tasks.reference.transformers_model import Outputs


def outputs(*values: float) -> Outputs:
    """One token, a stream of one layer, and logits of these values."""
    tensor = torch.tensor([values])
    return Outputs((tensor, 2 * tensor), 3 * tensor)


def test_errors_are_absolute_and_per_layer() -> None:
    record = compare(outputs(1.0, 2.0), outputs(1.5, 2.0), outputs(1.0, 1.0))
    assert [layer["name"] for layer in record["layers"]] == ["embed_tokens", "layers.0"]
    assert record["layers"][1] == {
        "name": "layers.0",
        "max": 1.0,
        "mean": 0.5,
        "largest": 4.0,
        "transformers": {"max": 2.0, "mean": 1.5},
    }
    assert (record["logits"]["max"], record["logits"]["mean"]) == (1.5, 0.75)
    assert compare(outputs(1.0), outputs(1.0), None)["logits"]["transformers"] is None


def test_an_error_with_something_not_a_number_is_not_a_number() -> None:
    errors = Errors.of(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0]))
    assert math.isnan(errors.max)


def test_the_tolerance_is_as_asked_or_follows_the_dtype() -> None:
    expected, theirs = outputs(1.0), outputs(1.5)
    assert allowed(0.3, torch.bfloat16, theirs, expected).value == 0.3
    assert allowed(None, torch.float32, None, expected).value == 1e-4
    assert allowed(None, torch.bfloat16, theirs, expected).value == pytest.approx(2 * 1.5)


def test_greedy_agreement_counts_tokens_and_margins() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.5], [1.0, 1.0]])
    assert greedy_record(logits, [1, 1, 1]) == {"tokens": 3, "agreeing": 2, "largest_margin": 1.5}


@pytest.mark.parametrize(
    ("error", "margin", "tolerance", "said"),
    [
        (1e-5, 1e-4, 1e-4, None),
        (2e-4, 0.0, 1e-4, "the logits differ by 0.0002, allowed are 0.0001"),
        (1e-5, 3e-4, 1e-4, "a greedy token is 0.0003 below transformers' choice, allowed are 0.0002"),
        (math.nan, 0.0, 1e-4, "the logits differ by nan"),
        (1e-5, 0.0, math.nan, "there is nothing to compare with"),
    ],
)
def test_the_verdict_says_what_was_beyond_what(error: float, margin: float, tolerance: float, said: str | None) -> None:
    result = verdict({"max": error}, {"largest_margin": margin}, Tolerance(tolerance, "because"))
    if said is None:
        assert result == {"status": "ok"}
    else:
        assert result["status"] == "failed"
        assert said in result["error"]
