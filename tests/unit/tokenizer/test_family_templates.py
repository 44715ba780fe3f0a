"""Templates in the constructs of more families give transformers' text and ids, and both refuse the same chats."""

import json
from typing import Any

import jinja2
import pytest
from support.cases import in_case
from support.chat_templates import ASKED, BRIEF, CALLS, CHATS, CLOCK, FAMILY_TEMPLATES, WEATHER
from support.golden_vocab import golden_vocab
from support.tool_texts import format_named
from transformers import PreTrainedTokenizerFast

from graphcore.errors import TokenizerError
from graphcore.serving.tool_formats.template_messages import template_messages
from graphcore.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.thorough

TOOLS = [WEATHER, CLOCK]
VARIABLES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def tokenizers_of(name: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    metadata = golden_vocab("qwen2").metadata
    ours = Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": FAMILY_TEMPLATES[name]}, "m.gguf")
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend, **VARIABLES)
    theirs.chat_template = FAMILY_TEMPLATES[name]
    return ours, theirs


def asked_of(name: str) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool, dict[str, Any]]]:
    """Return messages, tools, whether an answer is opened, and options, for chats as they are and as a server sends."""
    chats = [*CHATS.values(), *(template_messages(format_named(name), chat, TOOLS) for chat in CHATS.values())]
    return [
        (messages, tools, opens, options)
        for messages in chats
        for tools in (None, TOOLS)
        for opens in (True, False)
        for options in ({}, {"enable_thinking": True}, {"enable_thinking": False, "xml_tools": tools, "controls": {}})
    ]


def test_text_and_ids_are_those_of_transformers() -> None:
    for name in FAMILY_TEMPLATES:
        with in_case(name):
            ours, theirs = tokenizers_of(name)
            num_refused = 0
            for messages, tools, opens, options in asked_of(name):
                asked = {"tools": tools, "add_generation_prompt": opens, **options}
                try:
                    text = theirs.apply_chat_template(messages, tokenize=False, **asked)
                except (TypeError, ValueError, jinja2.TemplateError):
                    num_refused += 1
                    with pytest.raises(TokenizerError, match="the chat template refuses"):
                        ours.render_chat(messages, opens, tools, {**VARIABLES, **options})
                    continue
                if messages[0] == BRIEF and "Be brief." not in text:  # test_message_turns.py has what becomes of it
                    assert "Be brief." in ours.render_chat(messages, opens, tools, {**VARIABLES, **options})
                    continue
                assert ours.render_chat(messages, opens, tools, {**VARIABLES, **options}) == text
                ids = theirs(text, add_special_tokens=False)["input_ids"]
                assert ours.encode_chat(messages, opens, True, tools, {**VARIABLES, **options}) == ids
            assert num_refused <= len(asked_of(name)) // 3  # chats that fit few templates: parts, calls with other ids


def test_a_conversation_with_calls_is_taken_as_a_server_sends_it() -> None:
    """Every template shows the call, its arguments and its result."""
    for name in FAMILY_TEMPLATES:
        with in_case(name):
            ours, _ = tokenizers_of(name)
            asked = {**ASKED, "content": "What is it?"}
            results = [
                {"role": "tool", "tool_call_id": call_id, "content": said}
                for call_id, said in (("c1", "rainy"), ("c2", "noon"))
            ]
            messages = template_messages(format_named(name), [asked, CALLS, *results], TOOLS)
            text = ours.render_chat(messages, True, TOOLS, VARIABLES)
            for said in ("weather", "clock", "Z\u00fcrich", "rainy", "noon"):
                assert said in text, said
            assert json.dumps("Z\u00fcrich") not in text
