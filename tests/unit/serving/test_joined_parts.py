"""Pieces of an answer that come together are sent together."""

from graphcore.serving.answering import joined_parts
from graphcore.serving.chat_call import Content, Reasoning, TokenRecord, ToolCallArguments, ToolCallBegin


def test_neighbouring_texts_of_one_kind_and_answer_become_one() -> None:
    parts = [Content("a"), Content("x", 1), Content("b"), Reasoning("r", 1), Content("y", 1), Content("c")]
    assert joined_parts(parts) == [Content("abc"), Content("x", 1), Reasoning("r", 1), Content("y", 1)]


def test_calls_stay_apart() -> None:
    begin, second = ToolCallBegin(0, "i", "f"), ToolCallBegin(1, "j", "g")
    parts = [begin, ToolCallArguments(0, "{"), ToolCallArguments(0, "}"), second, ToolCallArguments(1, "{}")]
    assert joined_parts(parts) == [begin, ToolCallArguments(0, "{}"), second, ToolCallArguments(1, "{}")]


def test_log_probabilities_come_before_the_texts() -> None:
    first, second = TokenRecord(1, -1.0, ()), TokenRecord(2, -2.0, ())
    assert joined_parts([first, Content("a"), second, Content("b")]) == [first, second, Content("ab")]
