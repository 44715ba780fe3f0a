"""The tiny Llama 3 checkpoint with a byte-level tokenizer and a chat template: what text and chat tests run on."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TINY = Path(__file__).parent / "golden" / "tiny"
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
