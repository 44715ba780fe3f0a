"""The families whose tool calls and thoughts are known, one entry each, and the choice of one by a chat template.

Sources: the chat templates that Qwen, Meta, Google and OpenAI publish with their checkpoints.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from graphcore.serving.tool_formats.tool_format import CallSyntax, ToolFormat

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

_LLAMA3_TURN = "<|start_header_id|>assistant<|end_header_id|>"
_TURNS = ("<|im_start|>assistant", _LLAMA3_TURN, "<\uff5cAssistant\uff5c>")  # the last is DeepSeek's

PLAIN = ToolFormat(
    name="plain",
    turn_starts=_TURNS,
    controls=(*_CHATML, "<|end_of_text|>", "<|eot_id|>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)

HERMES = ToolFormat(  # Qwen 2.5 and 3, and all others that write JSON between these tags
    name="hermes",
    syntax=CallSyntax.JSON,
    call_open="<tool_call>",
    call_close="</tool_call>",
    turn_starts=_TURNS,
    controls=(*_CHATML, "<|end_of_text|>", "<|eot_id|>"),
    is_parallel=True,
)

QWEN_XML = replace(HERMES, name="qwen_xml", syntax=CallSyntax.XML)  # Qwen 3 Coder, 3.5 and 3.6

LLAMA3 = ToolFormat(
    name="llama3",
    syntax=CallSyntax.JSON,
    call_open="<|python_tag|>",
    has_tag_tokens=True,
    begins_bare=True,
    arguments_key="parameters",
    turn_starts=(_LLAMA3_TURN,),
    controls=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    stop_token_names=("<|eom_id|>",),
)

GEMMA4 = ToolFormat(
    name="gemma4",
    syntax=CallSyntax.GEMMA,
    call_open="<|tool_call>",
    call_close="<tool_call|>",
    has_tag_tokens=True,
    reasoning_open="<|channel>thought\n",
    reasoning_close="<channel|>",
    has_reasoning_tokens=True,
    turn_starts=("<|turn>model\n", "<tool_response|>"),
    controls=("<turn|>", "<|tool_response>", "<eos>"),
    is_parallel=True,
    stop_token_names=("<|tool_response>",),
)

GPT_OSS = ToolFormat(
    name="gpt_oss",
    syntax=CallSyntax.CHANNELS,
    call_close="<|call|>",
    has_tag_tokens=True,
    reasoning_open="<|channel|>analysis<|message|>",
    reasoning_close="<|end|>",
    has_reasoning_tokens=True,
    turn_starts=("<|start|>assistant",),
    controls=("<|end|>", "<|return|>", "<|call|>"),
    joins_content_to_thoughts=True,
    stop_token_names=("<|call|>", "<|return|>"),
)

FAMILIES = (PLAIN, HERMES, QWEN_XML, LLAMA3, GEMMA4, GPT_OSS)

_JSON_KEYS = re.compile(r'\\?"arguments\\?"')


def tool_format_of(
    chat_template: str | None, model_type: str, special_tokens: Collection[str] = frozenset()
) -> ToolFormat:
    """Return the format in which a checkpoint writes calls and thoughts.

    The template decides, since a fine-tuned checkpoint keeps its architecture but not always its markup.

    Args:
        chat_template: Jinja source; None if the checkpoint has none.
        model_type: architecture, such as "gemma4"; it decides only where a template knows tools but not their markup.
        special_tokens: texts of the vocabulary's special tokens; in some checkpoints </think> is one of them.
    """
    template = chat_template or ""
    if "<|channel|>" in template and "<|message|>" in template:
        return GPT_OSS
    if "<|tool_call>" in template or (model_type.startswith("gemma4") and "tool" in template):
        is_first = "tool_responses" in template and "tool_call_id" not in template  # as published at the release
        return replace(GEMMA4, embeds_results=is_first)
    return _with_thoughts(_tagged_format(template), template, special_tokens)


def _tagged_format(template: str) -> ToolFormat:
    if "<function=" in template and "<parameter=" in template and "<tool_call>" in template:
        return QWEN_XML
    if "<tool_call>" in template and _JSON_KEYS.search(template):
        return HERMES
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA3
    return PLAIN


def _with_thoughts(known: ToolFormat, template: str, special_tokens: Collection[str]) -> ToolFormat:
    if "</think>" not in template:
        return known
    are_tokens = {"<think>", "</think>"} <= set(special_tokens)
    return replace(known, reasoning_open="<think>", reasoning_close="</think>", has_reasoning_tokens=are_tokens)
