"""gpt-oss's harmony format over its own vocabulary, cut down: what is shown, what ends, what goes back to the template.

The answers are those of the format's description, with the tokens that it names.
"""

import json
from pathlib import Path

import pytest
from support.golden_vocab import golden_tokenizer, golden_vocab

from graphcore.tasks.chat.conversation import final_message
from graphcore.tokenizer.text_stream import IncrementalDecoder
from graphcore.tokenizer.tokenizer import Tokenizer

THOUGHT = "<|channel|>analysis<|message|>User asks: 2 + 2? Simple.<|end|>"
ANSWER = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.sum <|constrain|>json<|message|>{"a": 2}<|call|>'
STOPS = {199999, 200002, 200012}
# The parts of the published template that a question and its history go through, in the same constructs.
TEMPLATE = """
{%- macro header(role) -%}{{ "<|start|>" + role }}{%- endmacro -%}
{{- header("system") }}<|message|>{{ "Reasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") }}
{{- "\\nCurrent date: " + strftime_now("%Y") if false }}<|end|>
{%- set last = namespace(role="") -%}
{%- for message in messages -%}
  {%- if message.role == "assistant" -%}
    {%- if "<|channel|>final<|message|>" in message.content -%}
      {{- raise_exception("channels in the content") }}
    {%- endif -%}
    {{- header("assistant") }}<|channel|>final<|message|>{{ message.content }}<|end|>
  {%- else -%}{{- header(message.role) }}<|message|>{{ message.content }}<|end|>{%- endif -%}
  {%- set last.role = message.role -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ header("assistant") }}{%- endif -%}
"""


@pytest.fixture
def tokenizer() -> Tokenizer:
    return golden_tokenizer("gpt-4o")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ANSWER, "2 + 2 = 4."),
        (ANSWER.removesuffix("<|return|>"), "2 + 2 = 4."),
        ("<|channel|>final<|message|>Hi.<|end|>", "Hi."),
        (THOUGHT, ""),
        ("<|channel|>analysis<|message|>WindowedText off here", ""),
        ("<|channel|>final", ""),
        (THOUGHT + CALL, ""),
        (f"{ANSWER}<|start|>assistant<|channel|>final<|message|> And more.", "2 + 2 = 4. And more."),
        (f"{ANSWER}<|start|>assistant<|message|>no channel", "2 + 2 = 4."),
        ("The plain text of a base model.", None),
        ("", None),
    ],
)
def test_what_was_said_is_the_final_channel(text: str, said: str | None, tokenizer: Tokenizer) -> None:
    assert final_message(tokenizer, tokenizer.encode(text)) == said


def test_special_tokens_are_not_shown_neither_whole_nor_while_they_come(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    shown = "analysisUser asks: 2 + 2? Simple.assistantfinal2 + 2 = 4."
    assert tokenizer.decode(ids) == shown
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == shown


def test_a_generation_ends_at_return_at_a_call_and_at_the_end_of_text_but_not_between_messages(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    golden = golden_vocab("gpt-4o")
    assert set(golden.in_full(list(tokenizer.eos_token_ids))) == STOPS
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>", "bos_token": None}))
    named = {"eos_token_id": [tokenizer.encode(text)[0] for text in ("<|return|>", "<|endoftext|>", "<|call|>")]}
    (tmp_path / "generation_config.json").write_text(json.dumps(named))
    folder = Tokenizer(str(tmp_path))
    assert folder.eos_token_ids == tokenizer.eos_token_ids
    assert all(folder.encode(text, False) == ids for text, ids in _encoded(tokenizer))


def _encoded(tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    return [(text, tokenizer.encode(text, False)) for text, _ in golden_vocab("gpt-4o").cases]


def test_a_conversation_goes_through_the_template_with_final_texts_alone(tokenizer: Tokenizer) -> None:
    metadata = {**golden_vocab("gpt-4o").metadata, "tokenizer.chat_template": TEMPLATE}
    chat = Tokenizer.from_gguf(metadata, "harmony")
    said = final_message(tokenizer, tokenizer.encode(ANSWER))
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    text = (
        "<|start|>system<|message|>Reasoning: medium<|end|><|start|>user<|message|>2 + 2?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|end|>"
        "<|start|>user<|message|>And 3 + 3?<|end|><|start|>assistant"
    )
    assert chat.render_chat(messages) == text
    ids = chat.encode_chat(messages)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert sum(token_id in chat.special_ids for token_id in ids) == text.count("<|")
