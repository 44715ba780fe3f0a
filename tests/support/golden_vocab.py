"""Reads tests/golden/tokenizer: cut-down vocabularies with the ids that other programs gave (README.md there)."""

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graphcore.tokenizer.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "golden" / "tokenizer"
NAMES = ("gpt-2", "gpt-4o", "llama-bpe", "qwen2", "smollm", "starcoder", "llama-spm", "phi-3", "gemma3", "gemma4")


@dataclass(frozen=True)
class GoldenVocab:
    metadata: dict[str, object]
    original_ids: list[int]
    cases: list[tuple[str, list[int]]]

    def in_full(self, ids: list[int]) -> list[int]:
        return [self.original_ids[token_id] for token_id in ids]


@cache
def golden_vocab(name: str) -> GoldenVocab:
    stored = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    metadata = {key: tuple(value) if isinstance(value, list) else value for key, value in stored["metadata"].items()}
    return GoldenVocab(metadata, stored["original_ids"], [(text, ids) for text, ids in stored["cases"]])


@cache
def golden_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(golden_vocab(name).metadata, name)
