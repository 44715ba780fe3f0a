"""The tokenizers of real GGUF files give the ids that llama.cpp gives (and Google's own, where llama.cpp is wrong)."""

import json
from pathlib import Path

import pytest
from support.golden_vocab import FOLDER

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.tokenizer.tokenizer import Tokenizer


def check(name: str, tokenizer: Tokenizer) -> None:
    stored = json.loads((FOLDER / f"{name}_real.json").read_text(encoding="utf-8"))
    assert len(stored["cases"]) == 412
    wrong = [text for text, ids in stored["cases"] if tokenizer.encode(text, add_special_tokens=False) != ids]
    assert wrong == []


@pytest.mark.real
def test_smollm2_has_the_golden_ids(smollm2_gguf: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(GGUFCheckpoint(smollm2_gguf).metadata, str(smollm2_gguf), tmp_path)
    check("smollm2", tokenizer)
    assert tokenizer.eos_token_id == [0, 2, 4]  # 4 is <reponame>, at which llama.cpp ends, too
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3


@pytest.mark.slow
@pytest.mark.real
def test_gemma3_has_the_golden_ids(gemma3_gguf: Path, tmp_path: Path) -> None:
    metadata = GGUFCheckpoint(gemma3_gguf).metadata
    built = Tokenizer.from_gguf(metadata, str(gemma3_gguf), tmp_path)
    check("gemma3", built)
    check("gemma3", Tokenizer.from_gguf(metadata, str(gemma3_gguf), tmp_path))
    assert built.eos_token_id == [1, 106]
    assert built.encode("Hi")[0] == built.bos_token_id == 2
    assert built.vocab_size == 262144
