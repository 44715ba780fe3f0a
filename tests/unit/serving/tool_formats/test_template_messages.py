"""Messages as the families' templates read them: rendered by these, and unchanged where nothing is to change."""

from copy import deepcopy

import pytest
from tool_texts import ASKED, SOURCES, TOOLS, call, chat_template, format_named

from graphcore.serving.tool_formats.families import tool_format_of
from graphcore.serving.tool_formats.template_messages import template_messages

TWO = {
    "role": "assistant",
    "content": "Both.",
    "reasoning_content": "I need two.",
    "tool_calls": [call("search_2", {"city": "x"}, "c1"), call("clock.now-utc", {}, "c2")],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
]
CHAT = [ASKED, TWO, *RESULTS, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
EMPTY = {"role": "assistant", "content": "Hi.", "tool_calls": []}


@pytest.mark.parametrize("name", SOURCES)
def test_a_chat_with_calls_and_results_is_rendered(name: str) -> None:
    before = deepcopy(CHAT)
    messages = template_messages(format_named(name), CHAT)
    text = chat_template(name).render(messages, {"bos_token": ""}, True, TOOLS)
    assert before == CHAT
    for said in ("search_2", "clock.now-utc", "found", "noon", "Done.", "Thanks."):
        assert said in text
    assert text.index("search_2", text.index("Do it")) < text.index("found")


@pytest.mark.parametrize("name", ["llama3", "gpt_oss"])
def test_calls_become_turns_of_their_own_where_a_turn_has_one(name: str) -> None:
    messages = template_messages(format_named(name), CHAT)
    assert [message["role"] for message in messages[1:5]] == ["assistant", "tool", "assistant", "tool"]
    assert [message.get("content") for message in messages[2:5:2]] == ["found", "noon"]
    assert [len(message["tool_calls"]) for message in messages[1:5:2]] == [1, 1]
    assert "reasoning_content" not in messages[3]
    text = chat_template(name).render(messages, {}, True, TOOLS)
    assert text.index("found") < text.index("clock.now-utc", text.index("found")) < text.index("noon")


@pytest.mark.parametrize("name", SOURCES)
def test_results_have_the_name_of_their_call(name: str) -> None:
    messages = template_messages(format_named(name), CHAT)
    names = {message["content"]: message["name"] for message in messages if message["role"] == "tool"}
    assert names == {"found": "search_2", "noon": "clock.now-utc"}


def test_a_result_keeps_its_own_name_and_one_of_no_call_has_none() -> None:
    named = {"role": "tool", "tool_call_id": "c1", "name": "mine", "content": ""}
    lost = {"role": "tool", "tool_call_id": "c9", "content": "lost"}
    for name in ("qwen3", "llama3"):
        found = template_messages(format_named(name), [TWO, named, lost])
        assert [message for message in found if message["role"] == "tool"] == [named, lost]


@pytest.mark.parametrize("name", SOURCES)
def test_a_list_of_no_calls_is_left_out(name: str) -> None:
    messages = template_messages(format_named(name), [ASKED, EMPTY])
    assert messages[1] == {"role": "assistant", "content": "Hi."}
    assert "Hi." in chat_template(name).render(messages, {"bos_token": ""}, False, TOOLS)


def test_arguments_become_a_mapping_where_they_are_one() -> None:
    texts = ['{"a": 1}', "[1]", "{broken", ""]
    turn = {"role": "assistant", "content": "", "tool_calls": [call("f", text, "c1") for text in texts]}
    calls = template_messages(format_named("qwen3"), [turn])[0]["tool_calls"]
    assert [made["function"]["arguments"] for made in calls] == [{"a": 1}, "[1]", "{broken", {}]


def test_text_beside_a_call_joins_the_thoughts_where_the_template_takes_one_of_them() -> None:
    messages = template_messages(format_named("gpt_oss"), CHAT)
    assert (messages[1]["reasoning_content"], messages[1]["content"]) == ("I need two.\nBoth.", "")
    assert template_messages(format_named("qwen3"), CHAT)[1]["content"] == "Both."


def test_results_are_put_into_the_turn_where_the_first_template_of_gemma_4_reads_them() -> None:
    first = tool_format_of("<|tool_call> {{ message['tool_responses'] }}", "gemma4")
    assert first.embeds_results
    later = "<|tool_call> {{ message['tool_responses'] }} {{ answer['tool_call_id'] }}"
    assert not tool_format_of(later, "gemma4").embeds_results
    assert not tool_format_of("<|tool_call> {{ message.content }}", "gemma4").embeds_results
    messages = template_messages(first, CHAT)
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant", "user"]
    assert messages[1]["tool_responses"] == [
        {"name": "clock.now-utc", "response": "noon"},
        {"name": "search_2", "response": "found"},
    ]
