"""Chat templates render as transformers renders them, inside a sandbox."""

import re
from datetime import datetime
from itertools import product as every_pair

import pytest
from support.cases import in_case
from support.golden_vocab import golden_tokenizer, golden_vocab
from transformers import PreTrainedTokenizerFast

from graphcore.errors import TokenizerError
from graphcore.tokenizer.chat_template import ChatTemplate, named_templates
from graphcore.tokenizer.tokenizer import Tokenizer

SMOLLM2 = golden_vocab("smollm").metadata["tokenizer.chat_template"]
HEADERS = """{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim %}
    {%- if loop.index0 == 0 %}{%- set content = bos_token + content %}{%- endif %}
    {{- content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
ALTERNATING = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
TOOLS = """{% set ns = namespace(last=-1) %}
{% for message in messages %}
  {% if message.role == 'tool' %}{% continue %}{% endif %}
  {% set ns.last = loop.index0 %}
<|{{ message.role }}|>
{% generation %}
{% set inner = message.content %}
{{ inner }}{% endgeneration %}

{{ {'a': 'ü<b>', 'k': [1, none, true]} | tojson }} {{ {'b': 1, 'a': 2} | tojson(indent=2) }}
{{ dict(x=1).items() | list }} {{ message.content.split('</think>')[-1].lstrip('\n') }}
{% endfor %}
{{ ns.last }} {{ tools is none }} {{ eos_token }} {{ unknown_thing is defined }} {{ strftime_now('%d %b %Y') }}
"""
BITNET = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ 'Human: ' + message['content'] + '\n\nBITNETAssistant: ' + eos_token }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"smollm2": SMOLLM2, "bitnet": BITNET, "headers": HEADERS, "alternating": ALTERNATING, "tools": TOOLS}
CHATS = [
    [{"role": "user", "content": "  Hi <b>\u00fc</b> "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c\n"},
    ],
]


def with_template(template: object, name: str = "smollm") -> Tokenizer:
    return Tokenizer.from_gguf({**golden_vocab(name).metadata, "tokenizer.chat_template": template}, "model.gguf")


def reference_with(template: str) -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer of the same tokens with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=golden_tokenizer("smollm")._backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.thorough
def test_text_and_ids_are_those_of_transformers() -> None:
    for given, add_generation_prompt, template in every_pair(CHATS, [True, False], TEMPLATES):
        with in_case(given, add_generation_prompt, template):
            ours, chat = with_template(TEMPLATES[template]), given
            theirs = reference_with(TEMPLATES[template])
            if template == "bitnet" and given[0]["role"] == "system":  # it would leave the system's turn out
                chat = [{"role": "user", "content": "\n\n".join(turn["content"] for turn in given)}]
            text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
            ids = theirs.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, return_dict=False)
            assert ours.render_chat(given, add_generation_prompt) == text
            assert ours.encode_chat(given, add_generation_prompt) == ids


def test_bos_is_not_doubled() -> None:
    tokenizer = Tokenizer.from_gguf(
        {**golden_vocab("llama-bpe").metadata, "tokenizer.chat_template": HEADERS}, "model.gguf"
    )
    ids = tokenizer.encode_chat(CHATS[0])
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert "<|eot_id|>" in {tokenizer.id_to_piece(token_id) for token_id in ids}


def test_without_a_template_a_chat_is_refused_and_text_still_works() -> None:
    tokenizer = golden_tokenizer("gpt-2")
    assert not tokenizer.has_chat_template
    assert golden_tokenizer("smollm").has_chat_template
    with pytest.raises(TokenizerError, match="gpt-2: has no chat template"):
        tokenizer.render_chat(CHATS[0])


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(TokenizerError, match=r"^model\.gguf: .*roles must alternate"):
        with_template(ALTERNATING).render_chat([CHATS[0][0], *[{"role": "tool", "content": "a"}] * 2])


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(TokenizerError, match="at least one message"):
        with_template(HEADERS).render_chat([])


def test_a_template_cannot_leave_the_sandbox() -> None:
    for escape in [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'system'}) %}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ]:
        with in_case(escape):
            with pytest.raises(TokenizerError, match=r"^m: the chat template refuses these messages: \S") as caught:
                ChatTemplate(escape, "m").render(CHATS[0], {})
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["{{ 1 // 0 }}", "{{ messages[7].role }}", "{{ none + 'a' }}", "{{ 'a' | int / 0 }}"])
def test_a_template_that_fails_is_named(fault: str) -> None:
    with pytest.raises(TokenizerError, match=r"^m: the chat template refuses"):
        ChatTemplate(fault, "m").render(CHATS[0], {})


def test_a_template_that_is_no_template_is_named_with_its_line() -> None:
    with pytest.raises(TokenizerError, match=r"^m: the chat template cannot be read: line 2: "):
        ChatTemplate("\n{% if %}", "m").render(CHATS[0], {})


def test_an_entry_is_one_template_or_several_with_names() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}, {"name": 3, "template": "x"}]
    assert named_templates(named, "m") == named_templates({"tool_use": "t", "default": "d"}, "m")
    assert named_templates(named, "m") == {"tool_use": "t", "default": "d"}
    assert named_templates("x", "m") == {"default": "x"}
    assert named_templates(None, "m") == {}
    with pytest.raises(TokenizerError, match="m: chat_template is int"):
        named_templates(3, "m")


def test_a_date_in_the_template_is_today() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", "m").render(CHATS[0], {})
    assert re.fullmatch(r"\d{4}", text)
    assert abs(int(text) - datetime.now().year) <= 1
