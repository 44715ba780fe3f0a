"""Prompts of every form become token ids, and a checkpoint without a tokenizer takes ids alone."""

import pytest
import torch
from tiny_models import add_tokenizer

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
