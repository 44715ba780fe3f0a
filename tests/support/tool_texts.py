"""Answers with calls as the families' chat templates render them, and a tokenizer that knows their special tokens."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tokenizers

from graphcore.serving.chat_call import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from graphcore.serving.tool_formats.answer_parser import AnswerParser
from graphcore.serving.tool_formats.families import tool_format_of
from graphcore.serving.tool_formats.template_messages import template_messages
from graphcore.serving.tool_formats.tool_format import ToolFormat
from graphcore.tokenizer.chat_template import ChatTemplate
from support.chat_templates import FAMILY_TEMPLATES, TEMPLATES, call, template_file
from support.golden_vocab import golden_tokenizer

LLAMA3 = template_file("llama3")

GPT_OSS = template_file("gpt_oss")

THINK = template_file("think")

SOURCES = {**TEMPLATES, "llama3": LLAMA3, "gpt_oss": GPT_OSS, **FAMILY_TEMPLATES}
PARALLEL = tuple(name for name in SOURCES if name not in ("llama3", "gpt_oss", "glm4"))
WHOLE = ("qwen3_5", "gemma4", "lfm2", "lfm2_first", "olmo3", "glm45", "glm47")  # whose arguments come whole
STREAMED = tuple(name for name in SOURCES if name not in WHOLE)
THINKING = ("qwen3", "qwen3_5", "gemma4", "gpt_oss", "mistral_named", "lfm2", "glm45", "glm47")
"""Families whose templates show an answer's thoughts."""
SILENT = ("llama3", "gpt_oss", "mistral_list", "glm4")  # whose templates show no text beside a call
ENDS = (
    *("<|im_end|>\n", "<turn|>\n", "<|tool_response>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>"),
    *("</s>", "<|end_of_text|>\n", "<|end|>", "[|endofturn|]\n", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
SPECIAL = (
    *("<|python_tag|>", "<|eom_id|>", "<|eot_id|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"),
    *("<channel|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "</s>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|end_of_text|>"),
    *(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("calls\u2581begin", "calls\u2581end", "sep")),
    *(f"<\uff5ctool\u2581call\u2581{name}\uff5c>" for name in ("begin", "end")),
    *("[|endofturn|]", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "count": {"type": "integer"},
        "exact": {"type": "boolean"},
        "items": {"type": "array", "items": {}},
        "limits": {"type": "object"},
        "none": {"type": "null"},
        "share": {"type": "number"},
    },
    "required": ["city"],
}
SEARCH = {"type": "function", "function": {"name": "search_2", "description": "Looks.", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock.now-utc", "description": "", "parameters": {"type": "object"}}}
TOOLS = [SEARCH, CLOCK]
ASKED = {"role": "user", "content": "Do it, with <think> and <tool_call>."}


@cache
def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate(SOURCES[name], name)


def format_named(name: str) -> ToolFormat:
    return tool_format_of(SOURCES[name], "", SPECIAL)


def template_options(name: str, thinks: bool = True) -> dict[str, Any]:
    """Return the variables that a template reads besides messages and tools."""
    is_quiet = name in ("glm47", "exaone4") and not thinks  # their templates write that an answer has no thoughts
    ends = {"eos_token": "</s>"} if name.startswith("mistral") else {"eos_token": ""}
    return {"enable_thinking": not is_quiet, "bos_token": "", "xml_tools": TOOLS, **ends}


def rendered(name: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt and the answer's text as the template writes them, the answer with its end token."""
    known, options = format_named(name), template_options(name, "reasoning_content" in answer)
    template = chat_template(name)
    prompt = template.render(template_messages(known, [ASKED], TOOLS), options, True, TOOLS)
    whole = template.render(template_messages(known, [ASKED, answer], TOOLS), options, False, TOOLS)
    if not whole.startswith(prompt):  # the prompt opens thoughts, and the answer has none
        prompt = prompt.removesuffix("<think>\n")
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :]


def turn(*calls: tuple[str, dict[str, Any]], content: str = "", thoughts: str = "") -> dict[str, Any]:
    """Return an assistant's turn."""
    made = [call(function, arguments, f"c{number}") for number, (function, arguments) in enumerate(calls)]
    said = {"role": "assistant", "content": content, "tool_calls": made}
    return {**said, "reasoning_content": thoughts} if thoughts else said


@dataclass
class Parsed:
    """An answer put together from its parts."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def values(self) -> list[tuple[str, Any]]:
        """The calls with their arguments as values."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Reasoning(text=text):
                    self.reasoning += text
                case Content(text=text):
                    self.content += text
                case ToolCallBegin(index=index, call_id=call_id, name=name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                    self.ids.append(call_id)
                case ToolCallArguments(index=index, text=text):
                    assert index == len(self.calls) - 1
                    self.calls[index] = (self.calls[index][0], self.calls[index][1] + text)
                case _:
                    raise AssertionError(f"no part of an answer: {part}")


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def parsed(
    known: ToolFormat, texts: Sequence[str], prompt: str = "", tools: Sequence[dict[str, Any]] = tuple(TOOLS)
) -> Parsed:
    """Return an answer that is parsed from pieces of its text."""
    parser, found = AnswerParser(known, tools, prompt), Parsed()
    for text in texts:
        found.add(parser.push(text))
    found.add(parser.finish())
    return found


@cache
def tokenizer_text() -> str:
    """Return the tokenizer.json of a cut-down SmolLM2 vocabulary with every family's special tokens."""
    known = json.loads(golden_tokenizer("smollm").serialized())
    first = 1 + max([*known["model"]["vocab"].values(), *(token["id"] for token in known["added_tokens"])])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    known["added_tokens"] += [{"id": first + at, "content": name, **flags} for at, name in enumerate(SPECIAL)]
    return json.dumps(known)


@cache
def special_ids() -> dict[str, int]:
    """Return the id of each special token of that vocabulary."""
    return {token.content: at for at, token in tokenizer().get_added_tokens_decoder().items() if token.special}


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_text())
