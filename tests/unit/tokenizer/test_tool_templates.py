"""Templates with tools and thoughts, as Qwen 3, Qwen 3.5 and Gemma 4 have them, give transformers' text and ids."""

import re
from itertools import product as every_pair

import jinja2
import pytest
from support.cases import in_case
from support.chat_templates import ASKED, CHATS, CLOCK, TEMPLATES, WEATHER, call
from support.golden_vocab import golden_vocab
from transformers import PreTrainedTokenizerFast

from graphcore.errors import TokenizerError
from graphcore.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.thorough

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


def test_text_and_ids_are_those_of_transformers() -> None:
    for options, tools, name in every_pair(THINKING, [None, [WEATHER, CLOCK]], TEMPLATES):
        with in_case(options, tools, name):
            ours = ours_of(name)
            theirs = theirs_of(name, ours)
            for chat, messages in CHATS.items():
                for opens in (True, False):
                    asked = {"tools": tools, "add_generation_prompt": opens, **options}
                    text = theirs.apply_chat_template(messages, tokenize=False, **asked)
                    ids = theirs.apply_chat_template(messages, return_dict=False, **asked)
                    assert ours.render_chat(messages, opens, tools, options) == text, chat
                    assert ours.encode_chat(messages, opens, tools=tools, options=options) == ids, chat
                    assert (
                        ours.encode_chat(messages, opens, parses_messages=True, tools=tools, options=options) == ids
                    ), chat


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


CHATML = r"""{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls %}{{ '<|im_start|>assistant\n' }}{%- if message.content -%}
{{ message.content }}{%- endif -%}{%- for call in message.tool_calls -%}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\n</tool_call>' -}}
{%- endfor -%}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' -%}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA31 = r"""{{- bos_token }}{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}{%- if not message.tool_calls | length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
{{- "<|eot_id|>" }}{%- elif message.role == "tool" or message.role == "ipython" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
GEMMA3 = r"""{{ bos_token }}{%- for message in messages -%}
{%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}
{%- endif -%}{{ '<start_of_turn>' + role + '\n' }}{%- if message['content'] is string -%}
{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}
{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- else -%}
{{ raise_exception("Invalid content type") }}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
MISTRAL = r"""{{- bos_token }}{%- for message in messages %}
{%- if message["role"] == "user" %}{{- "[INST] " + message["content"] + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if tool_call.id is undefined or tool_call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
{%- endfor %}{%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
{%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + message.content | string }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"""
PUBLISHED = {"chatml": CHATML, "llama 3.1": LLAMA31, "gemma 3": GEMMA3, "mistral": MISTRAL}


def called(arguments: object, **fields: object) -> list[dict[str, object]]:
    """Return a conversation with a tool's call, whose message has other fields, and its result."""
    calls = [{"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    result = {"role": "tool", "content": "20", "tool_call_id": "abcdef123", "name": "weather"}
    return [ASKED, {"role": "assistant", **fields, "tool_calls": calls}, result]


CALLED = {
    "no content": called({"city": "Paris"}),
    "null content": called({"city": "Paris"}, content=None),
    "empty content": called({"city": "Paris"}, content=""),
    "a text beside the call": called({"city": "Paris"}, content="I look."),
    "arguments as text": called('{"city": "Paris"}', content=None),
    "null fields": called({"city": "Paris"}, content=None, refusal=None, audio=None),
    "no calls": [ASKED, {"role": "assistant", "content": "Hi", "tool_calls": None}, ASKED],
    "an empty list of calls": [ASKED, {"role": "assistant", "content": "Hi", "tool_calls": []}, ASKED],
    "a null answer": [ASKED, {"role": "assistant", "content": None}, ASKED],
    "a null question": [{"role": "user", "content": None}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]}],
    "reasoning": [ASKED, {"role": "assistant", "content": "Hi", "reasoning": "hm"}, ASKED],
}


REFUSED = {  # by transformers, and by us
    "chatml": {"a null answer", "a null question", "parts"},
    "llama 3.1": {"an empty list of calls"},
    "gemma 3": set(),
    "mistral": {"a null question", "parts"},
}


@pytest.mark.parametrize("template", PUBLISHED)
def test_calls_without_content_are_rendered_as_in_transformers(template: str) -> None:
    """Fields that are null are as if absent, and a template that refuses does so in both."""
    metadata = golden_vocab("qwen2").metadata
    ours = Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": PUBLISHED[template]}, "m.gguf")
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    theirs.chat_template = PUBLISHED[template]
    options = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    refused = set()
    for name, messages in CALLED.items():
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TypeError, jinja2.TemplateError):
            refused.add(name)
            with pytest.raises(TokenizerError, match="the chat template refuses"):
                ours.render_chat(messages, options=options)
            continue
        assert ours.render_chat(messages, options=options) == text, name
        ids = theirs.apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
        assert ours.encode_chat(messages, options=options) == ids, name
    assert refused == REFUSED[template]


def test_reasoning_is_under_every_name_that_templates_read() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}"
    metadata = golden_vocab("qwen2").metadata
    ours = Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": template}, "m.gguf")
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend)
    theirs.chat_template = template
    chat = [
        {"role": "assistant", "content": "x", name: "hm"} for name in ("reasoning_content", "thinking", "reasoning")
    ]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("call_id", ["call_1f", "toolu-1", "a|b", "<turn|>"])
def test_a_template_finds_the_call_of_a_result_by_an_id_with_a_sign_of_control_tokens(call_id: str) -> None:
    def asked(own_id: str) -> list[dict[str, object]]:
        answer = {"role": "assistant", "content": "", "tool_calls": [call("clock", {}, own_id)]}
        return [ASKED, answer, {"role": "tool", "tool_call_id": own_id, "content": "12:00", "name": "clock"}]

    for name in TEMPLATES:
        tokenizer = ours_of(name)
        assert tokenizer.encode_chat(asked(call_id), tools=[CLOCK]) == tokenizer.encode_chat(asked("c1"), tools=[CLOCK])
