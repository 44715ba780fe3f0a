"""The family of a checkpoint is told by its chat template."""

import pytest
from support.cases import in_case
from support.chat_templates import TEMPLATES
from support.tool_texts import GPT_OSS, LLAMA3, SOURCES, THINK

from graphcore.serving.tool_formats.families import FAMILIES, tool_format_of
from graphcore.serving.tool_formats.tool_format import CallSyntax
from graphcore.tokenizer.chat_template import CHATML

NAMES = {
    **dict.fromkeys(("qwen3", "granite4", "smollm3", "exaone4"), "hermes"),
    "qwen3_5": "qwen_xml",
    "lfm2_first": "lfm2",
    "mistral_ids": "mistral_named",
}
OWN_CALLS = "{% if tools %}<tool_call>{name}\n<key>{k}</key>{{ tc.arguments }}</tool_call>{% endif %}</think>"
DEEPSEEK = (
    "{{ '<\uff5cAssistant\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>' + message.tool_calls[0].function.name }}"
)
PHI3 = "{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}{% endif %}"
LLAMA_3_0 = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
GEMMA3 = "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}"


def test_each_familys_template_is_known() -> None:
    for name in SOURCES:
        with in_case(name):
            assert tool_format_of(SOURCES[name], "").name == NAMES.get(name, name)


@pytest.mark.parametrize(
    "template", [None, "", CHATML, LLAMA_3_0, GEMMA3, OWN_CALLS, DEEPSEEK, PHI3, THINK, "{{ messages }} {{ tools }}"]
)
def test_a_template_without_a_known_markup_has_no_tools(template: str | None) -> None:
    found = tool_format_of(template, "qwen3")
    assert found.name == "plain"
    assert not found.knows_tools
    assert found.knows_reasoning == (template in (OWN_CALLS, THINK))


def test_thoughts_are_known_where_the_template_speaks_of_them() -> None:
    assert tool_format_of(TEMPLATES["qwen3"], "").knows_reasoning
    assert not tool_format_of(TEMPLATES["qwen3"].replace("think>", "b>"), "").knows_reasoning
    assert not tool_format_of(LLAMA3, "").knows_reasoning
    assert tool_format_of(LLAMA3 + "{# </think> #}", "").knows_reasoning
    assert tool_format_of(GPT_OSS, "").knows_reasoning


def test_a_fine_tuned_model_keeps_to_its_template() -> None:
    assert tool_format_of(TEMPLATES["qwen3"], "llama").name == "hermes"
    assert tool_format_of(CHATML, "gemma4").name == "plain"
    assert tool_format_of("{% for tool in tools %}{{ tool }}{% endfor %}", "gemma4_text").name == "gemma4"


def test_what_families_can_is_in_their_tables() -> None:
    known = {family.name: family for family in FAMILIES}
    assert {name for name, family in known.items() if not family.is_parallel} == {"plain", "llama3", "gpt_oss", "glm4"}
    assert known["llama3"].stop_token_names == ("<|eom_id|>",)
    assert "<|call|>" in known["gpt_oss"].stop_token_names
    assert known["plain"].syntax is None
    assert known["qwen_xml"].syntax is CallSyntax.TAGS
