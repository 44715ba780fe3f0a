"""Messages as the families' templates read them: rendered by these, and unchanged where nothing is to change."""

import json
import time
from copy import deepcopy

import pytest
from support.cases import in_case
from support.golden_vocab import golden_vocab
from support.tool_texts import ASKED, SOURCES, TOOLS, call, chat_template, format_named, template_options, turn

from graphcore.serving.tool_formats.families import GRANITE3, MISTRAL_LIST, tool_format_of
from graphcore.serving.tool_formats.template_messages import StandIns, template_messages
from graphcore.tokenizer.tokenizer import Tokenizer

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
RESULT_ROLES = ("tool", "observation", "tool_response")
EMPTY = {"role": "assistant", "content": "Hi.", "tool_calls": []}


def test_a_chat_with_calls_and_results_is_rendered() -> None:
    for name in SOURCES:
        with in_case(name):
            before = deepcopy(CHAT)
            messages = template_messages(format_named(name), CHAT)
            text = chat_template(name).render(messages, template_options(name), True, TOOLS)
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


def test_results_have_the_name_of_their_call() -> None:
    for name in SOURCES:
        with in_case(name):
            messages = template_messages(format_named(name), CHAT)
            names = {message["content"]: message["name"] for message in messages if message["role"] in RESULT_ROLES}
            assert names == {"found": "search_2", "noon": "clock.now-utc"}


def test_a_result_keeps_its_own_name_and_one_of_no_call_has_none() -> None:
    named = {"role": "tool", "tool_call_id": "c1", "name": "mine", "content": ""}
    lost = {"role": "tool", "tool_call_id": "c9", "content": "lost"}
    for name in ("qwen3", "llama3"):
        found = template_messages(format_named(name), [TWO, named, lost])
        assert [message for message in found if message["role"] == "tool"] == [named, lost]


def test_calls_without_ids_of_their_own_have_a_result_each() -> None:
    """Clients leave ids out, or give all calls of a turn the same one."""
    for name in SOURCES:
        for given in (None, "", "same"):
            ids = {} if given is None else {"tool_call_id": given}
            calls = [{**call("search_2", {"city": "x"}, "c"), "id": given}, {**call("f", {}, "c"), "id": given}]
            calls = [{key: value for key, value in one.items() if value is not None} for one in calls]
            said = {"role": "assistant", "content": "", "tool_calls": calls}
            results = [{"role": "tool", **ids, "content": content} for content in ("found", "noon")]
            messages = template_messages(format_named(name), [ASKED, said, *results])
            text = chat_template(name).render(messages, template_options(name), True, TOOLS)
            assert (text.count("found"), text.count("noon")) == (1, 1), (name, given)
            named = [(each["name"], each["content"]) for each in messages if each["role"] in RESULT_ROLES]
            assert named == [("search_2", "found"), ("f", "noon")], (name, given)


def test_thousands_of_calls_with_one_id_take_no_longer_than_thousands_of_others() -> None:
    count = 20_000
    calls = [call(f"f{at}", {}, "same") for at in range(count)]
    results = [{"role": "tool", "tool_call_id": "same", "content": str(at)} for at in range(count + 1)]
    turn_with_calls = {"role": "assistant", "content": "", "tool_calls": calls}
    began = time.process_time()
    for name in ("qwen3", "llama3"):
        answered = [one for one in template_messages(format_named(name), [turn_with_calls, *results]) if "name" in one]
        # The last call has the results that are left.
        assert [one["name"] for one in answered] == [*(f"f{at}" for at in range(count)), f"f{count - 1}"]
        assert sorted(int(one["content"]) for one in answered) == list(range(count + 1))
    assert time.process_time() - began < 30  # an hour where each result looks at all calls and results


def test_a_list_of_no_calls_is_left_out() -> None:
    for name in SOURCES:
        with in_case(name):
            messages = template_messages(format_named(name), [ASKED, EMPTY])
            assert messages[1] == {"role": "assistant", "content": "Hi."}
            assert "Hi." in chat_template(name).render(messages, template_options(name), False, TOOLS)


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
    assert first.messages.embeds_results
    later = "<|tool_call> {{ message['tool_responses'] }} {{ answer['tool_call_id'] }}"
    assert not tool_format_of(later, "gemma4").messages.embeds_results
    assert not tool_format_of("<|tool_call> {{ message.content }}", "gemma4").messages.embeds_results
    messages = template_messages(first, CHAT)
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant", "user"]
    assert messages[1]["tool_responses"] == [
        {"name": "clock.now-utc", "response": "noon"},
        {"name": "search_2", "response": "found"},
    ]


def test_ids_of_calls_have_nine_letters_where_mistrals_templates_want_them() -> None:
    messages = template_messages(MISTRAL_LIST, CHAT)
    made = [one["id"] for one in messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:4]] == made[::-1]
    assert len(set(made)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in made)
    kept = template_messages(MISTRAL_LIST, [{"role": "tool", "tool_call_id": "abcdef123", "content": ""}])
    assert kept[0]["tool_call_id"] == "abcdef123"


def test_calls_of_glm_4_are_turns_with_metadata() -> None:
    messages = template_messages(format_named("glm4"), CHAT)
    roles = [message["role"] for message in messages[1:6]]
    assert roles == ["assistant", "assistant", "observation", "assistant", "observation"]
    assert messages[1]["content"] == "Both."
    assert [messages[at].get("metadata") for at in (2, 4)] == ["search_2", "clock.now-utc"]
    assert json.loads(messages[2]["content"]) == {"city": "x"}
    assert (messages[3]["content"], messages[5]["content"]) == ("found", "noon")


def test_thoughts_are_parts_of_the_content_where_mistrals_templates_read_them() -> None:
    messages = template_messages(format_named("mistral_named"), CHAT)
    assert messages[1]["content"] == [
        {"type": "thinking", "thinking": "I need two."},
        {"type": "text", "text": "Both."},
    ]
    assert messages[4]["content"] == "Done."


def test_tools_are_a_text_of_the_systems_turn_where_phi_4_reads_them() -> None:
    for given in ([ASKED], [{"role": "system", "content": "Be brief."}, ASKED]):
        first, *rest = template_messages(format_named("phi4_mini"), given, TOOLS)
        assert json.loads(first["tools"]) == [tool["function"] for tool in TOOLS]
        assert first["role"] == "system"
        assert rest == [ASKED]
        text = chat_template("phi4_mini").render([first, *rest], template_options("phi4_mini"))
        assert text.index("<|tool|>[") < text.index("search_2") < text.index("<|/tool|>") < text.index("Do it")
    assert template_messages(format_named("phi4_mini"), [ASKED]) == [ASKED]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("granite3", '<|tool_call|>[{"name": "search_2", "arguments": {"city": "x"}}, {"name": "clock.now-utc", '),
        ("phi4_mini", '<|tool_call|>[{"name": "search_2", "arguments": {"city": "x"}}, {"name": "clock.now-utc", '),
        ("lfm2_first", '<|tool_call_start|>[search_2(city="x"), clock.now-utc()]<|tool_call_end|>'),
        ("smollm3", '<tool_call>\n{"name": "search_2", "arguments": {"city": "x"}}\n</tool_call>\n<tool_call>\n{'),
    ],
)
def test_calls_are_written_where_a_template_shows_an_answers_content_alone(name: str, said: str) -> None:
    answer = template_messages(format_named(name), CHAT)[1]
    assert answer["content"].startswith("Both." + said)
    assert "tool_calls" not in answer


def granite_tokenizer() -> Tokenizer:
    """Return a tokenizer with Granite's template, in which <|im_end|> and <|im_start|> are control tokens."""
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    return Tokenizer.from_gguf({**golden_vocab("qwen2").metadata, "tokenizer.chat_template": template}, "m.gguf")


def test_a_written_tag_is_a_token_and_one_that_a_message_spells_is_text() -> None:
    tag, tokenizer = "<|im_end|>", granite_tokenizer()
    said = turn(("search_2", {"city": f"x{tag}\ue000"}))
    stand_ins = StandIns([ASKED, said])
    known = GRANITE3
    messages = template_messages(known, [ASKED, said], mark=lambda markup: stand_ins(markup and tag))
    assert "\ue000" not in stand_ins.markup
    assert stand_ins.markup == {"\ue001": tag}
    end = tokenizer.encode(tag, add_special_tokens=False)[0]
    ids = tokenizer.encode_chat(messages, markup=stand_ins.markup)
    assert ids.count(end) == 3  # two turns end, and a call opens
    spelt = tokenizer.render_chat(messages).replace("\ue001", tag)
    assert tokenizer.decode(ids, skip_special_tokens=False) == spelt
