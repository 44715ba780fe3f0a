"""A Hugging Face tokenizer becomes GGUF metadata that means the same."""

import json
from pathlib import Path

import pytest
import tokenizers
from support.golden_vocab import NAMES, golden_tokenizer, golden_vocab
from tokenizers import models, pre_tokenizers

from graphcore.errors import TokenizerError
from graphcore.tokenizer.gguf_fields import gguf_fields
from graphcore.tokenizer.gguf_tokenizer import read_gguf
from graphcore.tokenizer.hf_folder import read_folder
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.tokenizer.tokenizer_parts import TokenizerParts

LISTED = tuple(
    name for name in NAMES if name not in ("llama-spm", "phi-3", "gemma3")
)  # vocabularies with a list of merges


def as_folder(name: str, folder: Path) -> TokenizerParts:
    """Return a golden vocabulary's tokenizer as it is read from a Hugging Face folder."""
    parts = read_gguf(golden_vocab(name).metadata, name, None)
    parts.backend.save(str(folder / "tokenizer.json"))
    config = {**parts.template_variables, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_folder(folder)


def fields_of(name: str, folder: Path, rows: int | None = None) -> dict[str, object]:
    parts, architecture = as_folder(name, folder), name.replace("-", "")
    found = gguf_fields(parts, rows or len(golden_vocab(name).metadata["tokenizer.ggml.tokens"]), architecture)
    found["general.architecture"] = architecture
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


@pytest.mark.parametrize("name", LISTED)
def test_tokens_types_merges_and_splitter_are_those_of_the_published_gguf(name: str, tmp_path: Path) -> None:
    found, published = fields_of(name, tmp_path), golden_vocab(name).metadata
    for key in ("model", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id"):
        assert found.get(f"tokenizer.ggml.{key}") == published.get(f"tokenizer.ggml.{key}"), key
    same = {"starcoder": "smollm"}  # two names of one splitter
    assert found.get("tokenizer.ggml.pre") == same.get(name, published.get("tokenizer.ggml.pre"))
    assert found["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("name", NAMES)
def test_text_becomes_the_published_ids_again(name: str, tmp_path: Path) -> None:
    golden, tokenizer = golden_vocab(name), Tokenizer.from_gguf(fields_of(name, tmp_path), name)
    for text, ids in golden.cases:
        assert golden.in_full(tokenizer.encode(text, add_special_tokens=False)) == ids
        assert tokenizer.encode(text) == golden_tokenizer(name).encode(text)


@pytest.mark.parametrize("name", ["llama-spm", "gemma3"])
def test_sentencepiece_keeps_its_spaces_and_bytes(name: str, tmp_path: Path) -> None:
    found, published = fields_of(name, tmp_path), golden_vocab(name).metadata
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"] == published["tokenizer.ggml.tokens"]
    assert found["tokenizer.ggml.add_space_prefix"] == (name == "llama-spm")
    kinds = zip(found["tokenizer.ggml.token_type"], published["tokenizer.ggml.token_type"], strict=True)
    assert sum(ours != theirs for ours, theirs in kinds) <= 1  # Gemma's file has <unk> as a control token


def test_a_folder_that_names_a_class_of_transformers_is_written_as_its_tokenizer_json_says(tmp_path: Path) -> None:
    golden = as_folder("llama-spm", tmp_path)
    config = {**golden.template_variables, "tokenizer_class": "LlamaTokenizer", "split_special_tokens": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(TokenizerError, match="GGUF has no name"):
        gguf_fields(read_folder(tmp_path), golden.backend.get_vocab_size(), "llama")
    stored = gguf_fields(read_folder(tmp_path, is_as_stored=True), golden.backend.get_vocab_size(), "llama")
    assert stored["tokenizer.ggml.tokens"] == list(golden_vocab("llama-spm").metadata["tokenizer.ggml.tokens"])


def test_rows_without_a_token_are_padding_and_tokens_without_a_row_are_left_out(tmp_path: Path) -> None:
    num_tokens = len(golden_vocab("qwen2").metadata["tokenizer.ggml.tokens"])
    padded = fields_of("qwen2", tmp_path, num_tokens + 3)
    assert padded["tokenizer.ggml.tokens"][-1] == f"[PAD{num_tokens + 2}]"
    assert padded["tokenizer.ggml.token_type"][-3:] == (5, 5, 5)
    cut = fields_of("gpt-2", tmp_path, 400)
    assert len(cut["tokenizer.ggml.tokens"]) == 400


def byte_level(folder: Path, splitter: pre_tokenizers.PreTokenizer) -> TokenizerParts:
    backend = as_folder("gpt-2", folder).backend
    backend.pre_tokenizer = splitter
    backend.save(str(folder / "tokenizer.json"))
    return read_folder(folder)


def test_a_splitter_that_gguf_cannot_name_is_refused_with_an_example(tmp_path: Path) -> None:
    every_letter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex("[a-z]"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    with pytest.raises(TokenizerError, match=r"GGUF has no name for how this tokenizer cuts text: .*would become"):
        gguf_fields(byte_level(tmp_path, every_letter), 10_000, "gpt2")


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="a tokenizer of type WordPiece has no GGUF form here; only BPE"):
        gguf_fields(read_folder(tmp_path), 1, "gpt2")


def test_a_tokenizer_without_merges_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="has no merges"):
        gguf_fields(read_folder(tmp_path), 1, "gpt2")


def test_every_end_of_generation_has_its_key(tmp_path: Path) -> None:
    as_folder("llama-bpe", tmp_path)
    ends = {"eos_token_id": [3, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    parts = read_folder(tmp_path)
    found = gguf_fields(parts, len(golden_vocab("llama-bpe").metadata["tokenizer.ggml.tokens"]), "llama")
    named = {found.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    assert named == set(parts.eos_ids)
    assert found["tokenizer.ggml.eos_token_id"] == golden_vocab("llama-bpe").metadata["tokenizer.ggml.eos_token_id"]
