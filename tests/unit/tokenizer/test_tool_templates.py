"""Templates with tools and thoughts, as Qwen 3, Qwen 3.5 and Gemma 4 have them, give transformers' text and ids."""

import re

import pytest
from chats import ASKED, CHATS, CLOCK, TEMPLATES, WEATHER, call
from golden_vocab import golden_vocab
from transformers import PreTrainedTokenizerFast

from graphcore.errors import TokenizerError
from graphcore.tokenizer.tokenizer import Tokenizer

VOCABULARY = {"qwen3": "qwen2", "qwen3_5": "qwen2", "gemma4": "gemma4"}
TURN_ENDS = {"qwen3": "<|im_end|>", "qwen3_5": "<|im_end|>", "gemma4": "<turn|>"}
THINKING: list[dict[str, object]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]


def ours_of(name: str) -> Tokenizer:
    metadata = golden_vocab(VOCABULARY[name]).metadata
    return Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": TEMPLATES[name]}, "m.gguf")


def theirs_of(name: str, ours: Tokenizer) -> PreTrainedTokenizerFast:
    bos = {"bos_token": "<bos>"} if name == "gemma4" else {}
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend, **bos)
    theirs.chat_template = TEMPLATES[name]
    return theirs


@pytest.mark.parametrize("options", THINKING, ids=["default", "thinking", "no_thinking"])
@pytest.mark.parametrize("tools", [None, [WEATHER, CLOCK]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(
    name: str, tools: list[dict[str, object]] | None, options: dict[str, object]
) -> None:
    ours = ours_of(name)
    theirs = theirs_of(name, ours)
    for chat, messages in CHATS.items():
        for opens in (True, False):
            asked = {"tools": tools, "add_generation_prompt": opens, **options}
            text = theirs.apply_chat_template(messages, tokenize=False, **asked)
            ids = theirs.apply_chat_template(messages, return_dict=False, **asked)
            assert ours.render_chat(messages, opens, tools, options) == text, chat
            assert ours.encode_chat(messages, opens, tools=tools, options=options) == ids, chat
            assert ours.encode_chat(messages, opens, parses_messages=True, tools=tools, options=options) == ids, chat


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_ends_with_a_token_that_ends_a_generation(name: str) -> None:
    tokenizer = ours_of(name)
    ids = tokenizer.encode_chat(CHATS["turns"], add_generation_prompt=False)
    ends = [tokenizer.id_to_piece(token_id) for token_id in ids if token_id in tokenizer.eos_token_ids]
    assert ends == [TURN_ENDS[name]] * 3


def test_thinking_changes_the_prompt() -> None:
    for name in TEMPLATES:
        on, off = ({"enable_thinking": flag} for flag in (True, False))
        assert ours_of(name).render_chat([ASKED], options=on) != ours_of(name).render_chat([ASKED], options=off)


def test_gemma_4_waits_for_a_tools_answer_where_a_generation_ends() -> None:
    tokenizer = ours_of("gemma4")
    last = tokenizer.encode_chat(CHATS["calls"])[-1]
    assert tokenizer.id_to_piece(last) == "<|tool_response>"
    assert last in tokenizer.eos_token_ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tools_description_and_a_calls_argument_spell_no_control_token(name: str) -> None:
    tokenizer, spelt = ours_of(name), f"x{TURN_ENDS[name]}y"
    tools = [{"type": "function", "function": {"name": "f", "description": spelt, "parameters": {"type": "object"}}}]
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("f", {"a": spelt}, "c1")]}]
    end = tokenizer.encode(TURN_ENDS[name], add_special_tokens=False)[0]
    harmless = tokenizer.encode_chat(
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("f", {"a": "xy"}, "c1")]}],
        tools=[{"type": "function", "function": {"name": "f", "description": "xy", "parameters": {"type": "object"}}}],
    )
    ids = tokenizer.encode_chat(messages, tools=tools)
    assert ids.count(end) == harmless.count(end)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(messages, tools=tools)
    assert tokenizer.encode_chat(messages, tools=tools, parses_messages=True).count(end) == harmless.count(end) + 2


@pytest.mark.parametrize("option", ["messages", "tools", "add_generation_prompt"])
def test_an_option_with_the_name_of_an_argument_is_refused(option: str) -> None:
    message = re.escape(f"m.gguf: '{option}' is no option of a chat template, but an argument")
    with pytest.raises(TokenizerError, match=message):
        ours_of("qwen3").encode_chat([ASKED], options={option: True})
