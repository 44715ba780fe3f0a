"""Prompts of every form become token ids, and a checkpoint without a tokenizer takes ids alone."""

import logging

import pytest
import torch
from support.golden_vocab import golden_tokenizer
from support.tiny_models import add_tokenizer

from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.errors import ConfigError, TokenizerError
from graphcore.tokenizer.tokenizer import Tokenizer

VOCAB = 200


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def test_a_text_and_its_ids_are_the_same_prompt(tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer, "here", "auto", VOCAB)
    ids = tokenizer.encode("abc")
    assert len(ids) >= 3
    assert encoder.prompt_ids("abc") == encoder.prompt_ids(ids) == encoder.prompt_ids(torch.tensor(ids)) == ids


def test_what_no_model_could_answer_is_refused(tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer, "here", "auto", VOCAB)
    with pytest.raises(ConfigError, match="give at least one character"):
        encoder.prompt_ids("")
    with pytest.raises(ConfigError, match="token id 200 is not in the vocabulary of 200 tokens"):
        encoder.prompt_ids([1, VOCAB])


def test_without_a_tokenizer_only_ids_are_prompts() -> None:
    encoder = PromptEncoder(None, "model.gguf", "auto", VOCAB)
    assert encoder.prompt_ids([3, 1]) == [3, 1]
    for prompt in ("abc", [{"role": "user", "content": "abc"}]):
        with pytest.raises(TokenizerError, match=r"model\.gguf has no tokenizer; give token ids"):
            encoder.prompt_ids(prompt)


def test_the_reason_why_a_tokenizer_is_not_read_is_said() -> None:
    encoder = PromptEncoder(None, "model.gguf", "auto", VOCAB, "model.gguf: 't5' is not supported")
    assert encoder.notes == ("model.gguf: 't5' is not supported",)
    assert encoder.prompt_ids([3, 1]) == [3, 1]
    with pytest.raises(TokenizerError, match="'t5' is not supported"):
        encoder.prompt_ids("abc")


@pytest.mark.parametrize(
    ("name", "bos"), [("llama-spm", "<s>"), ("llama-bpe", "<|begin_of_text|>"), ("gemma3", "<bos>")]
)
def test_a_text_that_begins_with_bos_has_it_once(name: str, bos: str, caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp warns of such a prompt: "the final prompt starts with 2 BOS tokens"."""
    tokenizer = golden_tokenizer(name)
    encoder = PromptEncoder(tokenizer, "m", "auto", 10**6)
    text = f"{bos}Hello world"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert plain[0] == tokenizer.bos_token_id != plain[1]
    with caplog.at_level(logging.WARNING):
        assert encoder.prompt_ids(text) == plain
    assert "begins with the BOS token" in caplog.text
    assert encoder.text_ids(f"{bos}{bos}Hello") == tokenizer.encode(f"{bos}{bos}Hello", add_special_tokens=False)
    assert encoder.text_ids("Hello world") == tokenizer.encode("Hello world")
    assert not encoder.spells_bos("Hello world")
    assert encoder.text_ids(f" {bos}x") == tokenizer.encode(f" {bos}x")


def test_bos_that_is_not_added_is_not_taken_away() -> None:
    tokenizer = golden_tokenizer("gpt-2")
    bos = "<|endoftext|>"
    encoder = PromptEncoder(tokenizer, "m", "auto", 10**6)
    assert encoder.text_ids(f"{bos}{bos}Hi") == tokenizer.encode(f"{bos}{bos}Hi")
    assert encoder.text_ids(f"{bos}{bos}Hi")[:2] == [tokenizer.bos_token_id] * 2


def test_bos_spelt_as_plain_text_is_text() -> None:
    tokenizer = golden_tokenizer("llama-spm")
    encoder = PromptEncoder(tokenizer, "m", "text", 10**6)
    assert encoder.text_ids("<s>Hi") == tokenizer.encode("<s>Hi", is_plain=True)
    assert not encoder.spells_bos("<s>Hi")
