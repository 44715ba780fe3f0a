"""The families whose tool calls and thoughts are known, one entry each, and the choice of one by a chat template.

Sources: the chat templates that are published with the checkpoints; for what DeepSeek's, Granite's, LFM2's and Phi 4
mini's models write, also their model cards, and the parsers of vLLM (vllm/tool_parsers) and llama.cpp
(common/chat.cpp).
"""

import re
from collections.abc import Collection
from dataclasses import replace

from graphcore.serving.tool_formats.tool_format import CallSyntax, CallTags, MessageForm, ToolFormat

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

_LLAMA3_TURN = "<|start_header_id|>assistant<|end_header_id|>"
_MISTRAL_TURNS = ("[/INST]", "[/TOOL_RESULTS]")
_DEEPSEEK_TURNS = (
    "<\uff5cAssistant\uff5c>",
    "<\uff5ctool\u2581output\u2581end\uff5c>",
    "<\uff5ctool\u2581outputs\u2581end\uff5c>",
)
_TURNS = (
    "<|im_start|>assistant",
    _LLAMA3_TURN,
    *_DEEPSEEK_TURNS,
    "<|assistant|>",  # GLM, Phi, OLMo 2, StableLM
    "<|start_of_role|>assistant<|end_of_role|>",  # Granite
    "[|assistant|]",  # EXAONE
    "<start_of_turn>model\n",  # Gemma 1 to 3
    *_MISTRAL_TURNS,
)
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"

PLAIN = ToolFormat(
    name="plain",
    turn_starts=_TURNS,
    controls=(*_CHATML, "<|end_of_text|>", "<|eot_id|>", "<end_of_turn>", _DEEPSEEK_END),
)

HERMES = ToolFormat(  # Qwen 2.5 and 3, SmolLM3, Granite 4, EXAONE 4, and all others that write JSON between these tags
    name="hermes",
    syntax=CallSyntax.JSON,
    call_open="<tool_call>",
    call_close="</tool_call>",
    turn_starts=_TURNS,
    controls=(*_CHATML, "<|end_of_text|>", "<|eot_id|>", "[|endofturn|]"),
    is_parallel=True,
)

QWEN_XML = replace(  # Qwen 3 Coder, 3.5 and 3.6
    HERMES,
    name="qwen_xml",
    syntax=CallSyntax.TAGS,
    tags=CallTags(
        name_open="<function=",
        name_close=">",
        key_open="<parameter=",
        key_close=">",
        value_open="",
        value_close="</parameter>",
        end="</function>",
        pads_values=True,
    ),
)

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
    stop_token_names=("<|call|>", "<|return|>"),
    messages=MessageForm(joins_content_to_thoughts=True),
)

MISTRAL_LIST = ToolFormat(  # Mistral and Mixtral with the tokenizers v3 to v7
    name="mistral_list",
    syntax=CallSyntax.JSON,
    call_open="[TOOL_CALLS]",
    list_marks=("[", ", ", "]"),
    has_tag_tokens=True,
    turn_starts=_MISTRAL_TURNS,
    controls=("</s>",),
    is_parallel=True,
    messages=MessageForm(id_length=9),
)

MISTRAL_NAMED = replace(  # v11 and v13: Mistral Small 3.2, Magistral, Devstral, Ministral 3
    MISTRAL_LIST, name="mistral_named", syntax=CallSyntax.NAMED, list_marks=(), name_end="[ARGS]"
)

LFM2 = ToolFormat(
    name="lfm2",
    syntax=CallSyntax.PYTHON,
    call_open="<|tool_call_start|>",
    call_close="<|tool_call_end|>",
    list_marks=("[", ", ", "]"),
    has_tag_tokens=True,
    turn_starts=_TURNS[:1],
    controls=_CHATML,
    is_parallel=True,
)

OLMO3 = ToolFormat(
    name="olmo3",
    syntax=CallSyntax.PYTHON,
    call_open="<function_calls>",
    call_close="</function_calls>",
    list_marks=("", "\n", ""),
    turn_starts=_TURNS[:1],
    controls=_CHATML,
    is_parallel=True,
)

GLM4 = ToolFormat(  # GLM 4 and Z1 0414
    name="glm4",
    syntax=CallSyntax.NAMED,
    begins_bare=True,
    name_end="\n",
    turn_starts=("<|assistant|>",),
    begins_line=True,
    controls=("<|user|>", "<|observation|>", "<|endoftext|>"),
    stop_token_names=("<|observation|>", "<|user|>"),
    messages=MessageForm(calls_are_metadata=True, result_role="observation"),
)

GLM45 = ToolFormat(  # GLM 4.5 and 4.6
    name="glm45",
    syntax=CallSyntax.TAGS,
    call_open="<tool_call>",
    call_close="</tool_call>",
    tags=CallTags(
        name_open="",
        name_close="",
        key_open="<arg_key>",
        key_close="</arg_key>",
        value_open="<arg_value>",
        value_close="</arg_value>",
        end="",
    ),
    turn_starts=("<|assistant|>",),
    begins_line=True,
    controls=("<|user|>", "<|observation|>", "<|endoftext|>"),
    is_parallel=True,
    stop_token_names=("<|observation|>", "<|user|>"),
)

assert GLM45.tags is not None, "it is given above"
GLM47 = replace(GLM45, name="glm47", tags=replace(GLM45.tags, line_break=""))

GRANITE3 = ToolFormat(
    name="granite3",
    syntax=CallSyntax.JSON,
    call_open="<|tool_call|>",
    more_opens=("<tool_call>",),  # of 3.1
    list_marks=("[", ", ", "]"),
    has_tag_tokens=True,
    turn_starts=("<|start_of_role|>assistant<|end_of_role|>",),
    controls=("<|end_of_text|>",),
    is_parallel=True,
    messages=MessageForm(writes_calls=True, result_role="tool_response"),
)

PHI4_MINI = ToolFormat(
    name="phi4_mini",
    syntax=CallSyntax.JSON,
    call_open="<|tool_call|>",
    call_close="<|/tool_call|>",
    list_marks=("[", ", ", "]"),
    has_tag_tokens=True,
    turn_starts=("<|assistant|>",),
    controls=("<|end|>", "<|endoftext|>"),
    is_parallel=True,
    messages=MessageForm(writes_calls=True, result_role="tool_response", tools_in_system=True),
)

DEEPSEEK_V3 = ToolFormat(  # V3 and R1
    name="deepseek_v3",
    syntax=CallSyntax.NAMED,
    call_open="<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>",
    call_close="\n```<\uff5ctool\u2581call\u2581end\uff5c>",
    calls_open="<\uff5ctool\u2581calls\u2581begin\uff5c>",
    calls_close="<\uff5ctool\u2581calls\u2581end\uff5c>",
    name_end="\n```json\n",
    turn_starts=_DEEPSEEK_TURNS,
    controls=(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        _DEEPSEEK_END,
    ),
    is_parallel=True,
)

DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    call_open="<\uff5ctool\u2581call\u2581begin\uff5c>",
    call_close="<\uff5ctool\u2581call\u2581end\uff5c>",
    name_end="<\uff5ctool\u2581sep\uff5c>",
)

FAMILIES = (
    PLAIN,
    HERMES,
    QWEN_XML,
    LLAMA3,
    GEMMA4,
    GPT_OSS,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    LFM2,
    OLMO3,
    GLM4,
    GLM45,
    GLM47,
    GRANITE3,
    PHI4_MINI,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
)

_JSON_KEYS = re.compile(r'\\?"arguments\\?"')
_READS_TOOLS = re.compile(r"\b(?:in|if|and|or|not|is)\s+tools\b|[({=|~+]\s*tools\b|\btools\s*(?:\||\bis\b|\[)")
_TOKENS = re.compile(r"<\|[^<>]+>|\[[A-Z_/]+\]|<[^<>]+>")


def tool_format_of(
    chat_template: str | None, model_type: str, special_tokens: Collection[str] = frozenset()
) -> ToolFormat:
    """Return the format in which a checkpoint writes calls and thoughts.

    The template decides, since a fine-tuned checkpoint keeps its architecture but not always its markup. A template
    that shows the model no tools has none, even if it shows the calls of earlier turns, as DeepSeek's own do.

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
        return replace(GEMMA4, messages=replace(GEMMA4.messages, embeds_results=is_first))
    known = _with_own_messages(_family_of(template), template)
    return _with_thoughts(_with_tokens(known, special_tokens), template, special_tokens)


def _family_of(template: str) -> ToolFormat:
    """Return the family that writes calls in the template's markup, besides Gemma 4 and gpt-oss."""
    reads_tools = _READS_TOOLS.search(template) is not None
    if "<|tool|>" in template and "<|/tool|>" in template:
        return PHI4_MINI
    if not reads_tools and "xml_tools" not in template:
        return PLAIN
    if "<function=" in template and "<parameter=" in template and "<tool_call>" in template:
        return QWEN_XML
    if "<arg_key>" in template and "<arg_value>" in template:
        return GLM47 if "</arg_key><arg_value>" in template else GLM45
    if "<\uff5ctool\u2581call\u2581begin\uff5c>" in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "[TOOL_CALLS]" in template:
        return _mistral(template)
    if "<|tool_list_start|>" in template or "List of tools: [" in template:
        return LFM2
    if "<|start_of_role|>" in template and "<|tool_call|>" in template:
        return GRANITE3
    if "<tool_call>" in template and _JSON_KEYS.search(template):
        return HERMES
    if "<function_calls>" in template:
        return OLMO3
    if "<|observation|>" in template and "metadata" in template:
        return GLM4
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA3
    return PLAIN


def _mistral(template: str) -> ToolFormat:
    if "[ARGS]" not in template:
        return MISTRAL_LIST
    return replace(MISTRAL_NAMED, id_open="[CALL_ID]") if "[CALL_ID]" in template else MISTRAL_NAMED


def _with_own_messages(known: ToolFormat, template: str) -> ToolFormat:
    """Return a format whose messages fit the template: those of one family differ between its versions."""
    form = known.messages
    if known.knows_tools and not form.calls_are_metadata and "tool_calls" not in template:
        form = replace(form, writes_calls=True)
    if known is HERMES and not _READS_TOOLS.search(template):
        form = replace(form, tools_variable="xml_tools")
    if "[THINK]" in template and re.search(r"['\"]thinking['\"]", template):
        form = replace(form, has_thinking_parts=True)
    return replace(known, messages=form)


def _with_tokens(known: ToolFormat, special_tokens: Collection[str]) -> ToolFormat:
    """Return a format with the vocabulary's answer to whether the tags around calls are special tokens."""
    tags = _TOKENS.findall(known.calls_open + known.call_open + known.calls_close + known.call_close)
    if not tags or not special_tokens:
        return known
    return replace(known, has_tag_tokens=all(tag in special_tokens for tag in tags))


def _with_thoughts(known: ToolFormat, template: str, special_tokens: Collection[str]) -> ToolFormat:
    if "[/THINK]" in template:
        opened, closed = "[THINK]", "[/THINK]"
    elif "</think>" in template:
        opened, closed = "<think>", "</think>"
    else:
        return known
    are_tokens = {opened, closed} <= set(special_tokens)
    return replace(known, reasoning_open=opened, reasoning_close=closed, has_reasoning_tokens=are_tokens)
