"""Errors, tolerances and verdicts on numbers worked out by hand."""

import math

import pytest
import torch

from graphcore.tasks.reference.comparison import (
    Errors,
    Outputs,
    Tolerance,
    allowed,
    cached_record,
    compare,
    compare_llama_cpp,
    first_beyond,
    greedy_record,
    verdict,
)
from graphcore.tasks.task import Record


def outputs(*values: float) -> Outputs:
    """One token, a stream of one layer, and logits of these values."""
    tensor = torch.tensor([values])
    return Outputs((tensor, 2 * tensor), 3 * tensor)


def test_errors_are_absolute_and_per_layer() -> None:
    record = compare(outputs(1.0, 2.0), outputs(1.5, 2.0), outputs(1.0, 1.0))
    assert [layer["name"] for layer in record["layers"]] == ["embed_tokens", "layers.0"]
    ours, theirs = 11 / math.sqrt(5 * 25), 7 / math.sqrt(2 * 25)  # (2, 4) . (3, 4), and (2, 2) . (3, 4)
    assert record["layers"][1] == {
        "name": "layers.0",
        "max": 1.0,
        "mean": 0.5,
        "cosine": pytest.approx(ours),
        "lowest_cosine": pytest.approx(ours),
        "not_finite": 0,
        "largest": 4.0,
        "transformers": {
            "max": 2.0,
            "mean": 1.5,
            "cosine": pytest.approx(theirs),
            "lowest_cosine": pytest.approx(theirs),
            "not_finite": 0,
        },
    }
    assert (record["logits"]["max"], record["logits"]["mean"]) == (1.5, 0.75)
    assert compare(outputs(1.0), outputs(1.0), None)["logits"]["transformers"] is None


def test_the_cosine_is_each_tokens_own() -> None:
    """A token of large values does not hide another one."""
    errors = Errors.of(
        torch.tensor([[1000.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1000.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    )
    assert errors.cosine == pytest.approx((1 + math.sqrt(0.5) + 1) / 3)
    assert errors.lowest_cosine == pytest.approx(math.sqrt(0.5))
    assert Errors.of(torch.zeros(1, 2), torch.ones(1, 2)).cosine == 0


def test_an_error_with_something_not_a_number_is_not_a_number() -> None:
    errors = Errors.of(torch.tensor([[1.0, math.nan], [1.0, math.inf], [1.0, 1.0]]), torch.ones(3, 2))
    assert math.isnan(errors.max)
    assert math.isnan(errors.mean)
    assert math.isnan(errors.cosine)
    assert errors.not_finite == 2


def test_the_tolerance_is_as_asked_or_follows_the_dtype() -> None:
    narrow, exact = (
        compare(outputs(1.0, 2.0), outputs(1.0, 2.0), outputs(1.0, 1.0)),
        compare(outputs(1.0), outputs(1.0), None),
    )
    assert allowed(0.3, None, torch.bfloat16, narrow).value == 0.3
    assert allowed(None, None, torch.float32, exact) == Tolerance(1e-4, "float32", 0.99999)
    found = allowed(None, None, torch.bfloat16, narrow)
    assert found.value == pytest.approx(2 * 3.0)
    assert found.cosine == pytest.approx(1 - 4 * (1 - 3 / math.sqrt(10)))  # (1, 1) . (1, 2)
    assert allowed(None, 0.5, torch.bfloat16, narrow).cosine == 0.5


def test_greedy_agreement_counts_tokens_and_margins() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.5], [1.0, 1.0]])
    assert greedy_record(logits, [1, 1, 1]) == {"tokens": 3, "agreeing": 2, "largest_margin": 1.5}


def test_the_cache_is_compared_with_the_whole_sequence() -> None:
    record = cached_record(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.5], [1.0, 0.0]]))
    assert (record["max"], record["tokens"], record["agreeing"], record["lowest_cosine"]) == (1.0, 2, 1, 0.0)


def line(name: str, error: float = 0.0, cosine: float = 1.0, largest: float = 1.0, not_finite: int = 0) -> Record:
    """Return a line of the comparison in float32."""
    errors = {"max": error, "cosine": cosine, "not_finite": not_finite, "largest": largest}
    return {"name": name, **errors, "transformers": None}


def compared(**changed: object) -> Record:
    """Return a comparison of two layers without any error, but for what is changed."""
    return {
        "layers": [line("layers.0"), line("layers.1")],
        "logits": line("logits"),
        "greedy": {"largest_margin": 0.0, "tokens": 3},
        "cached": line("cached"),
        "llama_cpp": None,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "tolerance", "said"),
    [
        ({}, 1e-4, None),
        ({"logits": line("logits", 1e-5)}, 1e-4, None),
        ({"logits": line("logits", 2e-4)}, 1e-4, "the logits differ by 0.0002, allowed are 0.0001"),
        (
            {"greedy": {"largest_margin": 3e-4, "tokens": 3}},
            1e-4,
            "a greedy token is 0.0003 below transformers' choice, allowed are 0.0002",
        ),
        ({"logits": line("logits", math.nan)}, 1e-4, "the logits differ by nan"),
        ({"logits": line("logits", math.nan, not_finite=7)}, 1e-4, "7 logits are not finite"),
        ({}, math.nan, "there is nothing to compare with"),
        ({"logits": line("logits", cosine=0.9998)}, 1e-4, "the cosine of logits is 0.9998000, allowed are 0.9999900"),
        (
            {"layers": [line("layers.0"), line("layers.1", cosine=0.8)]},
            1e-4,
            "the cosine of layers.1 is 0.8000000, allowed are 0.9999900; layers.1 is the first layer beyond",
        ),
        (
            {"layers": [line("layers.0"), line("layers.1", cosine=math.nan)]},
            1e-4,
            "the cosine of layers.1 is nan, allowed are 0.9999900; layers.1 is the first layer beyond",
        ),
        ({"cached": line("cached", 3e-4)}, 1e-4, None),
        (
            {"cached": line("cached", cosine=0.9998)},
            1e-4,
            "decode steps over the KV cache with the whole sequence is 0.9998000, allowed are 0.9999600",
        ),
        ({"cached": line("cached", math.nan, not_finite=5)}, 1e-4, "5 logits of decode steps over the KV cache"),
        ({"greedy": {"largest_margin": 0.0, "tokens": 0}}, 1e-4, "decode steps over the KV cache are not finite"),
        (
            {"llama_cpp": {"layers": [line("layers.0", cosine=0.97)], "logits": None, "cosine_tolerance": 0.99}},
            1e-4,
            "the cosine of layers.0 with llama.cpp's is 0.9700000, the first one below 0.9900000",
        ),
        (
            {"llama_cpp": {"layers": [], "logits": line("logits", cosine=math.nan), "cosine_tolerance": 0.99}},
            1e-4,
            "the cosine of logits with llama.cpp's is nan",
        ),
    ],
)
def test_the_verdict_says_what_was_beyond_what(changed: Record, tolerance: float, said: str | None) -> None:
    result = verdict(compared(**changed), Tolerance(tolerance, "because"))
    if said is None:
        assert result == {"status": "ok", "first_beyond": None}
    else:
        assert result["status"] == "failed"
        assert said in result["error"]


def test_the_first_layer_beyond_is_found_by_its_error_in_proportion_its_cosine_or_values_that_are_not_finite() -> None:
    tolerance = Tolerance(1e-4, "because")
    large = line("layers.0", error=5e-4, largest=10.0)  # as 5e-5 beside logits of 1
    for bad in (line("layers.1", 2e-4), line("layers.1", cosine=0.9), line("layers.1", not_finite=1)):
        assert first_beyond(compared(layers=[large, bad, bad]), tolerance) == "layers.1"
    assert first_beyond(compared(layers=[large], logits=line("logits", 1.0)), tolerance) == "logits"
    assert first_beyond(compared(layers=[large]), tolerance) is None
    theirs = {**line("layers.1", error=0.3), "transformers": {"max": 0.1}}
    assert first_beyond(compared(layers=[theirs]), Tolerance(1.0, "because")) == "layers.1"


def test_layers_of_llama_cpp_begin_after_the_first_block() -> None:
    ours = Outputs((torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2)), torch.ones(1, 2))
    theirs = Outputs((torch.ones(1, 2), torch.tensor([[1.0, 0.0]])), torch.ones(1, 2))
    record = compare_llama_cpp(ours, theirs, 0.99)
    assert [(each["name"], each["cosine"]) for each in record["layers"]] == [
        ("layers.0", pytest.approx(1.0)),
        ("layers.1", pytest.approx(math.sqrt(0.5))),
    ]
    assert record["logits"]["max"] == 0
    cut = Outputs(ours.layers[:2], ours.logits)  # model.num_hidden_layers=1
    assert compare_llama_cpp(cut, theirs, 0.99)["logits"] is None
