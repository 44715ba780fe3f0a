"""Every name of `tokenizer.ggml.pre` that llama.cpp knows cuts text as llama.cpp does (tests/golden/tokenizer)."""

import gzip
import json
import unicodedata
from functools import cache
from typing import Any

import pytest
from support.cases import in_case
from support.golden_vocab import FOLDER

from graphcore.tokenizer.gguf_splitters import SPLITTERS, SPM_LIKE
from graphcore.tokenizer.tokenizer import Tokenizer

COMPOSING = {"qwen2", "deepseek-r1-qwen", "f2llmv2", "qwen35"}
CASED = {"kimi-k2", "tiny_aya", "cohere2moe", "youtu"}
MARKED = {"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken", "kimi-k2"}


@cache
def golden() -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / "pre.json.gz").read_bytes()))


def read(pre: str | None) -> Tokenizer:
    metadata = golden()["metadata"] | ({} if pre is None else {"tokenizer.ggml.pre": pre})
    stored = {key: tuple(value) if isinstance(value, list) else value for key, value in metadata.items()}
    return Tokenizer.from_gguf(stored, "m.gguf")


def is_cut_otherwise(pre: str, text: str) -> bool:
    """Return whether llama.cpp cuts a text otherwise than the model's own tokenizer.json (`gguf_splitters`).

    It composes nothing to NFC, has no marks and no cases beyond ASCII in some patterns, and no wide digits or spaces.
    """
    return (
        (pre in COMPOSING and unicodedata.normalize("NFC", text) != text)
        or (pre in MARKED and any(unicodedata.category(letter) in ("Mn", "Mc") for letter in text))
        or (pre in CASED and "camelCase" in text)
        or (pre.startswith("deepseek-") and "\u3000" in text)
        or (pre == "superbpe" and "\u0661" in text)
        or (pre in ("gpt-4o", "llama4") and text == "unreachable")
    )


def test_ids_are_those_of_llama_cpp() -> None:
    for pre in sorted(set(golden()["names"]) - {""}):
        with in_case(pre):
            tokenizer, recorded = read(pre), golden()
            wanted = recorded["ids"][recorded["names"][pre]]
            compared = [text for text in recorded["texts"] if not is_cut_otherwise(pre, text)]
            assert len(compared) > 50
            wrong = [
                (text, found, ids)
                for text, ids in zip(recorded["texts"], wanted, strict=True)
                if text in compared and (found := tokenizer.encode(text)) != ids
            ]
            assert wrong == []


@pytest.mark.parametrize("pre", ["gpt-4o", "llama4"])
def test_a_word_that_is_a_token_needs_no_merges(pre: str) -> None:
    """So it is in the published tokenizer.json, whose BPE ignores merges; llama.cpp merges."""
    tokens = golden()["metadata"]["tokenizer.ggml.tokens"]
    assert read(pre).encode("unreachable") == [tokens.index("unreachable")]


@pytest.mark.parametrize("pre", sorted(COMPOSING))
def test_letters_are_composed_where_the_published_tokenizer_composes_them(pre: str) -> None:
    tokenizer = read(pre)
    assert tokenizer.encode("caf\u0065\u0301") == tokenizer.encode("caf\u00e9")
    assert read("gpt-2").encode("caf\u0065\u0301") != read("gpt-2").encode("caf\u00e9")


def test_every_name_has_golden_ids() -> None:
    names = [name for splitter in SPLITTERS for name in splitter.names]
    assert sorted(names) == sorted(set(golden()["names"]) - {""})
    assert not set(names) & set(SPM_LIKE)


@pytest.mark.parametrize(
    ("pre", "problem"),
    [(None, "is missing:"), ("default", "is 'default':"), ("qwen53", "is 'qwen53', which is unknown:")],
)
def test_without_a_known_name_the_default_is_used_with_a_warning(pre: str | None, problem: str) -> None:
    tokenizer, recorded = read(pre), golden()
    assert recorded["names"][""] == recorded["names"]["default"]
    wanted = recorded["ids"][recorded["names"]["default"]]
    assert [tokenizer.encode(text) for text in recorded["texts"]] == wanted
    (note,) = tokenizer.notes
    assert note.startswith(f"m.gguf: tokenizer.ggml.pre {problem} text may be cut into other tokens")
    assert read("gpt-2").notes == ()


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-4o", "\u0939\u093f\u0928\u094d\u0926\u0940 x", ["\u0939\u093f\u0928\u094d\u0926\u0940", " x"]),
        ("tekken", "\u00e9\u00c9\u0301a we'll", ["\u00e9", "\u00c9\u0301a", " we", "'ll"]),
        ("kimi-k2", "aB\u4f60\u597dc", ["a", "B", "\u4f60\u597d", "c"]),
        ("tiny_aya", "12345 aB", ["12", "345", " a", "B"]),
    ],
)
def test_published_patterns_count_where_llama_cpp_loses_categories(pre: str, text: str, words: list[str]) -> None:
    """The words are what the pattern says, which llama.cpp's source quotes from each model's tokenizer.json."""
    splitter = read(pre)._backend.pre_tokenizer
    found = [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)]
    assert found == words
