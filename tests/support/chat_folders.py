"""Tiny folders with a chat template: one that chats, and one whose template knows tools."""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.tiny_models import BUILDERS, randomise

# The tiny Llama 3 checkpoint with a byte-level tokenizer and a chat template: what text and chat tests run on.

TINY = Path(__file__).parents[1] / "golden" / "tiny"
END = "<|end|>"
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'=()<>|/_:-"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_chat_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write the folder and return it; letters and digits are one token each, as are space and line break."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "config.json"):
        shutil.copy(TINY / "llama3" / name, folder / name)
    space_and_break = "\u0120\u010a"  # as byte-level tokenizers write them
    vocab = {character: index for index, character in enumerate(CHARACTERS + space_and_break)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"do_sample": false}', encoding="utf-8")  # greedy, as tests expect
    return folder


# A tiny random model whose chat template knows tools, as Qwen's do: what tests of tool calls and thinking serve.
#
# Its tokenizer has a token for each byte, so that it reads and writes any text, and one for each tag below. The tags of
# calls and thoughts are no special tokens, as in Qwen's tokenizers. A model of random weights writes noise. A grammar
# (`tool_choice=required`) makes it call validly, and `logit_bias` on single tokens makes it end thoughts and answers.

CONTROLS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TOKEN_IDS = {name: at for at, name in enumerate(CONTROLS + TAGS)}
"""Ids of controls and tags; the ids of bytes come after them."""

BYTES = pre_tokenizers.ByteLevel.alphabet()
VOCAB = len(TOKEN_IDS) + len(BYTES)
BYTE_IDS = {character: len(TOKEN_IDS) + at for at, character in enumerate(sorted(BYTES))}
"""Ids of bytes, as byte-level tokenizers write them: of a letter its own, of a space U+0120."""

BRIEF = {
    **dict.fromkeys([BYTE_IDS[character] for character in "\u0109\u010a\u010d\u0120"], -4.0),  # white space of JSON
    BYTE_IDS['"']: 2.0,
    TOKEN_IDS["<|im_end|>"]: 1.5,
}
"""A `logit_bias` for short texts and answers, and for little white space in JSON."""

TOOLS = (
    "{%- if tools %}<|im_start|>system\nTools:\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    '</tools>\nCall them so: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\n{% endif %}'
)
MESSAGES = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
)
TURN = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING_TURN = (
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{%- if enable_thinking is defined and not enable_thinking %}\n\n</think>\n\n{% endif %}{% endif %}"
)


def save_calling_folder(folder: Path, thinks: bool = False) -> Path:
    """Write a checkpoint folder and return it.

    Args:
        thinks: True for a template that begins each answer with thoughts, as Qwen 3.5's, unless `enable_thinking` is
            false.
    """
    model = BUILDERS["llama3"](vocab_size=VOCAB, max_position_embeddings=8192)
    randomise(model, seed=0)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={**TOKEN_IDS, **BYTE_IDS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROLS])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TOOLS + MESSAGES + (THINKING_TURN if thinks else TURN)
    config = {"eos_token": CONTROLS[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0], "do_sample": False}), encoding="utf-8"
    )
    return folder
