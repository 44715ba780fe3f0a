"""Conversations with every kind of turn, and chat templates in the constructs of published ones."""

import re
from pathlib import Path

# The templates are written for the tests. They use what those of Qwen 3, Qwen 3.5 and Gemma 4 use: macros that call
# each other, namespaces, scans of neighbouring messages, `previtem` and `nextitem`, dictsort, tojson, thoughts that are
# cut out of earlier answers, tool calls as JSON and as tags, and a generation prompt that `enable_thinking` changes.


def template_file(name: str) -> str:
    """Return a chat template of golden/templates."""
    folder = Path(__file__).parents[1] / "golden" / "templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says the weather, e.g. "rain" <b>',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "a town, like Z\u00fcrich"},
                "days": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}


def call(name: str, arguments: object, call_id: str) -> dict[str, object]:
    """Return a call of a tool, as an answer has it."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": " What is the weather\n in Z\u00fcrich? "}
CALLS = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning_content": "\nThe user asks for weather.\n",
    "tool_calls": [
        call("weather", {"place": "Z\u00fcrich", "days": [1, 2], "deep": {"b": None, "a": 1.5}, "now": True}, "c1"),
        call("clock", {}, "c2"),
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"sky": "rain <b>"}'},
    {"role": "tool", "tool_call_id": "c2", "name": "clock", "content": "12:00"},
]
ANSWERED = {"role": "assistant", "content": "<think>\nIt rains.\n</think>\n\nRain."}
CHANNELLED = {"role": "assistant", "content": "<|channel>thought\nIt rains.\n<channel|>Rain."}
BRIEF = {"role": "system", "content": " Be brief. "}
CHATS: dict[str, list[dict[str, object]]] = {
    "question": [ASKED],
    "system": [BRIEF, ASKED],
    "turns": [ASKED, ANSWERED, {"role": "user", "content": "And tomorrow?"}],
    "channels": [BRIEF, ASKED, CHANNELLED, {"role": "user", "content": "And tomorrow?"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": " Two."}]}],
    "calls": [BRIEF, ASKED, CALLS],
    "results": [BRIEF, ASKED, CALLS, *RESULTS],
    "after": [ASKED, CALLS, *RESULTS, ANSWERED, {"role": "user", "content": "Thanks."}],
    "silent": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call("clock", {}, "c3")]}, RESULTS[1]],
}

QWEN3 = template_file("qwen3")

QWEN35 = template_file("qwen35")

GEMMA4 = template_file("gemma4")

TEMPLATES = {"qwen3": QWEN3, "qwen3_5": QWEN35, "gemma4": GEMMA4}


# Chat templates of more families, in the constructs of published ones, written for the tests.
#
# They use what the published templates of Mistral, LFM2, OLMo 3, GLM, Granite, Phi 4 mini, SmolLM3, EXAONE 4 and
# DeepSeek use: ids of calls that must have nine characters, `raise_exception` for roles that do not alternate, parts
# with thoughts, `strftime_now`, `selectattr`, slices and `namespace`, `tojson` with `ensure_ascii` and `indent`,
# filters on conditions of a loop, `continue`, `{% generation %}`, templates that show nothing of an answer but its
# content, and such as show no tools.

MISTRAL_LIST = template_file("mistral_list")

MISTRAL_NAMED = template_file("mistral_named")

MISTRAL_IDS = MISTRAL_NAMED.replace("+ '[ARGS]'", "+ '[CALL_ID]' + tool['id'] + '[ARGS]'").replace("THINK]", "DRAFT]")

LFM2 = template_file("lfm2")

LFM2_FIRST = template_file("lfm2_first")

OLMO3 = template_file("olmo3")

GLM4 = template_file("glm4")

GLM45 = template_file("glm45")

GLM47 = template_file("glm47")

GRANITE3 = template_file("granite3")

GRANITE4 = template_file("granite4")

PHI4_MINI = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{{ '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

SMOLLM3 = template_file("smollm3")

EXAONE4 = template_file("exaone4")


def _tokens(template: str) -> str:
    """Return a template of DeepSeek, whose tokens have a wide bar and a low block for a space."""
    return re.sub(r"<\|(\w+)\|>", lambda match: "<\uff5c" + match[1].replace("_", "\u2581") + "\uff5c>", template)


DEEPSEEK_V3 = _tokens(template_file("deepseek_v3"))

DEEPSEEK_V31 = _tokens(template_file("deepseek_v31"))

GEMMA2 = template_file("gemma2")

GEMMA3 = template_file("gemma3")

SILENT_CHANNELS = template_file("silent_channels")

ASKING = template_file("asking")

MINISTRAL = MISTRAL_NAMED.replace(
    "{%- for message in loop_messages %}",
    """{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('Alternate.') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}""",
    1,
)

GUARDED_TEMPLATES = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "silent_channels": SILENT_CHANNELS,
    "asking": ASKING,
    "ministral": MINISTRAL,
}
"""Templates that refuse turns or leave them out, in the constructs of Gemma, gpt-oss, Qwen 3.5 and Ministral."""

FAMILY_TEMPLATES = {
    "mistral_list": MISTRAL_LIST,
    "mistral_named": MISTRAL_NAMED,
    "mistral_ids": MISTRAL_IDS,
    "lfm2": LFM2,
    "lfm2_first": LFM2_FIRST,
    "olmo3": OLMO3,
    "glm4": GLM4,
    "glm45": GLM45,
    "glm47": GLM47,
    "granite3": GRANITE3,
    "granite4": GRANITE4,
    "phi4_mini": PHI4_MINI,
    "smollm3": SMOLLM3,
    "exaone4": EXAONE4,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}
