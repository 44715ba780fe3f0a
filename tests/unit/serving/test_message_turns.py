"""Messages of one role beside each other are one turn."""

from graphcore.serving.message_turns import joined_turns


def test_contents_thoughts_and_calls_are_joined() -> None:
    first = {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}
    second = {"role": "assistant", "content": "", "reasoning_content": "x"}
    third = {"role": "assistant", "content": "b", "reasoning_content": "y", "tool_calls": [{"id": "2"}]}
    calls = [{"id": "1"}, {"id": "2"}]
    joined = {"role": "assistant", "content": "a\n\nb", "reasoning_content": "x\n\ny", "tool_calls": calls}
    assert joined_turns([first, second, third]) == [joined]
    assert first == {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}


def test_other_roles_and_results_of_tools_stay_apart() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "tool", "tool_call_id": "2", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert joined_turns(messages) == messages
