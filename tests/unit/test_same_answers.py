"""The comparing half of benchmarks/same_answers.py finds what differs, what is new and what is missing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from answers.differences import Difference, differences

BEFORE = {
    "models/a": {"greedy": [[1, 2, 3], [4]], "logits": "x"},
    "commands/b": {"status": 1, "stderr": ["one line", "another"], "results": []},
}


def test_equal_answers_have_no_difference() -> None:
    assert differences(BEFORE, BEFORE) == []


def test_a_value_that_differs_is_named_with_its_field() -> None:
    after = {
        "models/a": {"greedy": [[1, 9, 3], [4]], "logits": "x"},
        "commands/b": {"status": True, "stderr": ["one line", "an other"], "results": []},
    }
    assert differences(BEFORE, after) == [
        Difference("commands/b", "status", "1", "True"),
        Difference("commands/b", "stderr[1]", "'another'", "'an other'"),
        Difference("models/a", "greedy[0][1]", "2", "9"),
    ]


def test_a_list_of_another_length_is_shown_whole() -> None:
    after = {**BEFORE, "models/a": {"greedy": [[1, 2, 3], [4, 5]], "logits": "x"}}
    assert differences(BEFORE, after) == [Difference("models/a", "greedy[1]", "[4]", "[4, 5]")]


def test_a_key_that_only_one_has_is_found() -> None:
    after = {**BEFORE, "models/a": {"greedy": [[1, 2, 3], [4]], "logits": "x", "new": None}}
    (found,) = differences(BEFORE, after)
    assert (found.field, found.before, found.after) == ("new", "'(none)'", "None")


def test_cases_that_only_one_has_are_found() -> None:
    after = {"models/a": BEFORE["models/a"], "models/c": {}}
    assert differences(BEFORE, after) == [
        Difference("commands/b", "the case", "there", "is missing"),
        Difference("models/c", "the case", "is missing", "there"),
    ]
