"""Turns that a template refuses or leaves out are put into others, and the rest is rendered as transformers does it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from support.chat_templates import GUARDED_TEMPLATES
from support.golden_vocab import golden_vocab
from support.tool_texts import SILENT, SOURCES, TOOLS
from test_chat_template import BITNET
from test_template_bounds import LOOPS
from transformers import PreTrainedTokenizerFast

from graphcore.errors import TemplateError
from graphcore.serving.tool_formats.families import tool_format_of
from graphcore.serving.tool_formats.template_messages import template_messages
from graphcore.tokenizer import chat_template
from graphcore.tokenizer.bounded_process import Bounds
from graphcore.tokenizer.chat_template import ChatTemplate
from graphcore.tokenizer.message_turns import TRIALS, fitted_turns, joined_turns
from graphcore.tokenizer.tokenizer import Tokenizer

TEMPLATES = {**SOURCES, **GUARDED_TEMPLATES, "bitnet": BITNET}
VARIABLES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
CONVERSATIONS = (
    *("U", "SU", "SSU", "SSSUAU", "DU", "SDU", "DDUAU", "S", "SS", "SA", "AU", "SAU", "SSAU"),
    *("USU", "SUS", "SUASU", "SUSAU", "SUASSU", "SUADU", "UU", "UUUAU", "SUUAUU", "UAAU", "SUAAAU", "SUEU", "UEEU"),
    *("SUCTU", "SUCTS", "SUCTSU", "UCTAU", "UCTUAU", "SUCTCTUU", "UCTTUAU", "UACTAU", "SUCTSCTSAU", "SCTAU"),
    *("UCTEU", "SUCU", "UCUT", "UTU", "SUATAU", "UATTUAU", "UCTAUATU"),
)
"""Orders of turns: systems, developers, users, answers, empty ones, calls and results."""

BY_ACCIDENT = (
    *(("gemma2", "USU"), ("gemma3", "USU"), ("gemma3", "SUS")),
    ("gpt_oss", "UCTAUATU"),
    *((name, letters) for name in ("mistral_list", "ministral") for letters in ("UATTUAU", "UCTAUATU")),
)
"""Templates and conversations that they take by accident: for the number of turns, or as a result of another call."""

ROLES = {"S": "system", "D": "developer", "U": "user", "A": "assistant", "E": "assistant"}


def conversation(letters: str) -> list[dict[str, Any]]:
    """Return a conversation whose turns say different words, and whose calls and results belong together."""
    turns: list[dict[str, Any]] = []
    for at, letter in enumerate(letters):
        if letter == "C":
            calls = len(letters[at + 1 :]) - len(letters[at + 1 :].lstrip("T"))
            made = [
                {"id": f"call{at}{number}abc", "type": "function", "function": {"name": "search_2", "arguments": {}}}
                for number in range(max(calls, 1))
            ]
            turns.append({"role": "assistant", "content": "", "tool_calls": made})
        elif letter == "T":
            asked = letters[:at].rfind("C") if "A" not in letters[letters[:at].rfind("C") + 1 : at] else -1
            call_id = f"call{asked}{letters[asked:at].count('T')}abc" if asked >= 0 else f"call9{at}xyz"
            turns.append({"role": "tool", "tool_call_id": call_id, "content": f"word{at}."})
        else:
            turns.append({"role": ROLES[letter], "content": "" if letter == "E" else f"word{at}."})
    return turns


def is_shown(letters: str, text: str) -> bool:
    """Return whether the words of all turns are in a text, in order.

    A first system's may be further down, and those of a result further up, behind its call.
    """
    places = {at: text.find(f"word{at}.") for at, letter in enumerate(letters) if letter not in "CE"}
    first = len(letters) - len(letters.lstrip("SD"))
    order = [*range(first, len(letters))]
    if "CUT" in letters and (at := letters.index("CUT")) and places[at + 2] < places[at + 1]:
        order[at + 1 - first : at + 3 - first] = at + 2, at + 1
    rest = [places[at] for at in order if at in places]
    head = [place for at, place in places.items() if at < first]
    return min(places.values()) >= 0 and rest == sorted(rest) and head == sorted(head)


def tokenizers_of(template: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    metadata = golden_vocab("qwen2").metadata
    ours = Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": template}, "m.gguf")
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend, **VARIABLES)
    theirs.chat_template = template
    return ours, theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_shows_is_as_transformers_renders_it_and_the_rest_is_shown_too(name: str) -> None:
    """Each word is in the prompt, in its place, with tools and without."""
    ours, theirs = tokenizers_of(TEMPLATES[name])
    known = tool_format_of(TEMPLATES[name], "")
    num_changed = 0
    for letters in CONVERSATIONS:
        if set("CT") & set(letters) and name in ("gemma2", "gemma3", "bitnet"):  # which know no calls
            continue
        takes_tools = known.knows_tools and known.messages.tools_variable == "tools"
        for tools in (None, TOOLS) if takes_tools and set(letters) & {"C", "D", "T"} else (None,):
            messages = template_messages(known, conversation(letters), tools or ())
            try:
                text = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            except (TypeError, ValueError, jinja2.TemplateError):
                text = ""
            found = ours.render_chat(messages, True, tools, VARIABLES)
            is_silent = name in SILENT and "AC" in letters  # about what is said beside a call
            assert is_shown(letters, found) or is_silent, (letters, tools is not None, found)
            is_taken = is_shown(letters, text) and (name, letters) not in BY_ACCIDENT
            assert found == text or not is_taken, (letters, tools is not None)
            num_changed += found != text
            if letters in ("SSSUAU", "SUCTSU"):
                ids = theirs(found, add_special_tokens=False)["input_ids"]
                assert ours.encode_chat(messages, tools=tools, options=VARIABLES) == ids, letters
    assert bool(num_changed) == bool(ours.refused_turns())


def test_only_what_a_template_refuses_is_changed_and_in_its_place() -> None:
    system, other, user, answer = conversation("SSUA")
    call, result = conversation("CT")
    late = {"role": "system", "content": "late", "name": "n"}
    as_user = {**late, "role": "user"}
    cases: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("two systems", [system, other, user], [{**system, "content": "word0.\n\nword1."}, user]),
        ("two systems", [system, user, late], [system, user, late]),
        ("later system", [system, user, answer, late, user], [system, user, answer, as_user, user]),
        (
            "system before a last result",
            [system, user, call, result],
            [{**user, "content": "word0.\n\nword2."}, call, result],
        ),
        ("system before a last result", [system, user, answer, user], [system, user, answer, user]),
        ("later system, neighbouring users", [user, late], [{**user, "name": "n", "content": "word2.\n\nlate"}]),
        ("system", [system, other, user, late], [{"role": "user", "content": "word0.\n\nword1.\n\nword2."}, as_user]),
        ("system", [system, answer], [{**system, "role": "user"}, answer]),
        ("developer", [{**system, "role": "developer"}, user], [system, user]),
        ("no user", [system], [system, {"role": "user", "content": ""}]),
        ("no user", [user, answer], [user, answer]),
        ("answer first", [system, answer, user], [system, {"role": "user", "content": ""}, answer, user]),
        ("user behind a result", [user, call, result, late, user], [user, call, result, late, user]),
        (
            "user behind a result, later system",
            [user, call, result, late, user],
            [user, call, {**result, "name": "n", "content": "word1.\n\nlate\n\nword2."}],
        ),
        ("empty answer", [user, {"role": "assistant", "content": ""}, user], [user, user]),
        ("empty answer", [user, call, result], [user, call, result]),
        ("call without a result", [user, call, user], [user, {"role": "assistant", "content": ""}, user]),
        ("call without a result, empty answer", [user, call, user], [user, user]),
        ("call without a result", [user, call, result, call], [user, call, result, call]),
        ("call without a result", [call, user, result, answer], [call, result, user, answer]),
        ("result without a call", [call, user, result], [call, user, result]),
        ("result without a call", [user, call, result, result], [user, call, result, result]),
        ("result without a call", [user, result, call, result], [user, {**result, "role": "user"}, call, result]),
        ("result without a call", [call, result, answer, result], [call, result, answer, {**result, "role": "user"}]),
        ("empty answer", [user, {"role": "assistant", "content": ""}], [user]),
        ("neighbouring answers", [user, user, answer, call], [user, user, {**call, "content": "word3."}]),
        ("neighbouring users", [user, answer, answer], [user, answer, answer]),
    ]
    for refused, messages, expected in cases:
        before = [dict(message) for message in messages]
        assert fitted_turns(messages, refused.split(", ")) == expected, refused
        assert list(messages) == before
        assert set(refused.split(", ")) <= set(TRIALS)
        assert fitted_turns(messages, ()) == before
    empty = {"role": "assistant", "content": ""}
    assert fitted_turns([user, empty, empty], ["empty answer"], continues_last=True) == [user, empty]


def test_contents_thoughts_and_calls_are_joined() -> None:
    first = {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}
    second = {"role": "assistant", "content": "", "reasoning_content": "x"}
    third = {"role": "assistant", "content": "b", "reasoning_content": "y", "tool_calls": [{"id": "2"}]}
    calls = [{"id": "1"}, {"id": "2"}]
    joined = {"role": "assistant", "content": "a\n\nb", "reasoning_content": "x\n\ny", "tool_calls": calls}
    assert joined_turns([first, second, third]) == [joined]
    assert first == {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}
    part = {"type": "text", "text": "p"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\n\n"}, part]
    assert joined_turns([first, {"role": "assistant", "content": [part]}])[0]["content"] == parts


def test_other_roles_and_results_of_tools_stay_apart() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "tool", "tool_call_id": "2", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    assert joined_turns(messages, ["system", "assistant"]) == messages
    assert joined_turns(messages) == [*messages[:-2], {"role": "user", "content": "e\n\nf"}]


def test_a_template_is_tried_once_and_an_ordinary_chat_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Sequence[Any], *rest: Any, **named: Any) -> str:
        asked.append(len(messages))
        return render(self, messages, *rest, **named)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    tokenizer, _ = tokenizers_of(GUARDED_TEMPLATES["gemma3"])
    for _ in range(2):
        tokenizer.render_chat(conversation("UAUAU"))
    assert asked == [5, 5]
    for _ in range(2):
        tokenizer.render_chat(conversation("SUS"))
    assert len(asked) <= 2 + 2 + len(TRIALS) + 2


def test_a_slow_start_of_the_process_is_no_slow_template(monkeypatch: pytest.MonkeyPatch) -> None:
    now, text_of = [0.0], ChatTemplate._text_of

    def after_start(self: ChatTemplate, inputs: Any) -> str:
        now[0] = 60.0  # as on a busy machine
        return text_of(self, inputs)

    monkeypatch.setattr(ChatTemplate, "_text_of", after_start)
    monkeypatch.setattr(chat_template, "time", SimpleNamespace(monotonic=lambda: now[0]))
    without_systems = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
    assert "system" in ChatTemplate(without_systems, "m").refused({})


def test_trials_end_where_a_template_takes_long_or_is_broken() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    slow = ChatTemplate("{% if messages[0].role == 'system' %}" + LOOPS + "{% endif %}" + plain, "m", Bounds(0.2))
    assert slow.fitted(conversation("SU"), {}, False) == conversation("SU")
    assert slow.render(conversation("UU"), {}) == "word0.word1."
    broken = ChatTemplate("{% if %}", "m")
    assert broken.fitted(conversation("SU"), {}, False) == conversation("SU")
    with pytest.raises(TemplateError, match="line 1: "):
        broken.render(conversation("SU"), {})


def test_an_error_offers_nothing_that_a_client_cannot_set() -> None:
    template = ChatTemplate("{{ raise_exception('Never.') }}", "m")
    with pytest.raises(TemplateError, match=r"Never\.; change the messages, or give the prompt as plain text$"):
        template.render(conversation("U"), {})
