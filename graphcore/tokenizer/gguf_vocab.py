"""Reads and checks the vocabulary in a GGUF file's metadata.

Keys: `tokenizer.ggml.{model, pre, tokens, token_type, merges, scores, add_bos_token, add_eos_token, add_space_prefix,
bos_token_id, ...}` (docs/gguf.md of ggml). Defaults for missing keys are those of llama.cpp's src/llama-vocab.cpp, so
that a file means the same in both.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np

from graphcore.checkpoint.token_ids import token_id_of
from graphcore.errors import TokenizerError, UnreadTokenizerError, quoted
from graphcore.tokenizer.gguf_spellings import END_OF_TEXT, control_spellings, distinct_spellings, shown_spellings
from graphcore.tokenizer.gguf_splitters import SPM_LIKE

T = TypeVar("T")

BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"
GEMMA4 = "gemma4"
_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_PARSED = frozenset((TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED))


@dataclass(frozen=True)
class GGUFVocab:
    """A vocabulary as the file stores it.

    Attributes:
        source: the file, for messages.
        model: "gpt2" (byte-level BPE), "llama" (SentencePiece) or "gemma4" (SentencePiece's pieces with listed merges).
        pre: the splitter's name, None if the file has none.
        tokens: one distinct spelling per id.
        types: one `TokenType` per id.
        same_as: for ids whose stored spelling cannot be theirs alone, the id that decodes in their place, or None.
        merges: merges as "left right", best first; empty for SentencePiece.
        scores: one score per id, higher ones merge first; empty where merges are listed.
        bos_id, eos_id, unk_id: special ids; None if the vocabulary has none.
        add_bos, add_eos: True if `encode` adds the token; None if the file does not say.
        add_space_prefix: True if a space is put before text (SentencePiece only).
        strips_behind_tokens: True if control tokens take the white space behind them, as those of Phi 3 do.
        notes: lines for the user about what was ignored or assumed.
    """

    source: str
    model: str
    pre: str | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    same_as: Mapping[int, int | None]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool
    strips_behind_tokens: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The id of each spelling."""
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def digest(self) -> str:
        """Return a sha256 over everything that the rebuilt tokenizer depends on (not the source)."""
        settings = (self.model, self.pre, self.bos_id, self.eos_id, self.unk_id, self.add_bos, self.add_eos)
        on_spaces = (self.add_space_prefix, self.strips_behind_tokens)
        sha = hashlib.sha256(repr((*settings, *on_spaces, len(self.tokens))).encode())
        for texts in (self.tokens, self.merges):
            sha.update("\0".join(texts).encode("utf-8", "surrogatepass") + b"\0\0")
        sha.update(np.asarray(self.types, dtype=np.int32).tobytes())
        sha.update(np.asarray(self.scores, dtype=np.float32).tobytes())
        return sha.hexdigest()


def read_vocab(metadata: Mapping[str, object], source: str) -> GGUFVocab:
    """Return the vocabulary in a GGUF file's metadata.

    Raises:
        TokenizerError: a key is missing, of the wrong type or length, or the tokenizer is of a kind that graphcore does
            not rebuild.
    """
    reader = _Reader(metadata, source)
    model, pre = reader.required("model", str), reader.optional("pre", str)
    if model == BYTE_LEVEL and pre in SPM_LIKE:
        model = GEMMA4
    if model not in (BYTE_LEVEL, SENTENCEPIECE, GEMMA4):
        raise UnreadTokenizerError(
            f"{source}: tokenizer.ggml.model '{model}' is not supported; known: gpt2, llama, gemma4; run on token ids "
            "(prompt_ids)"
        )
    spm = model == SENTENCEPIECE
    spelt = distinct_spellings(reader.array("tokens", str), source)
    tokens = spelt.tokens
    reader.notes += spelt.notes
    eos_id = reader.token_id("eos_token_id", len(tokens), 2 if spm else None)
    types, scores = _types(reader, tokens, eos_id), _scores(reader, len(tokens)) if spm else ()
    merges = () if spm else _merges(reader, pre)
    if malformed := sum(merge.find(" ", 1) < 0 for merge in merges):
        reader.note("merges", f"has {malformed} entries that do not name two tokens; they are left out")
    return GGUFVocab(
        source=source,
        model=model,
        pre=pre,
        tokens=tokens,
        types=tuple(int(TokenType.UNUSED) if at in spelt.same_as else kind for at, kind in enumerate(types)),
        same_as=spelt.same_as,
        merges=merges,
        scores=scores,
        bos_id=reader.token_id("bos_token_id", len(tokens), 1 if spm else None),
        eos_id=eos_id,
        unk_id=reader.token_id("unknown_token_id", len(tokens), 0 if spm else None),
        add_bos=reader.optional("add_bos_token", bool),
        add_eos=reader.optional("add_eos_token", bool),
        add_space_prefix=spm and reader.optional("add_space_prefix", bool) is not False,
        strips_behind_tokens=spm and _is_phi3(metadata),
        notes=tuple(reader.notes),
    )


def _is_phi3(metadata: Mapping[str, object]) -> bool:
    """Return whether a file with SentencePiece's tokens is of Phi 3: by its architecture or, as in llama.cpp, its name.

    GGUF has no key for the white space that tokens take; in the published tokenizer.json they have `rstrip`.
    """
    name = str(metadata.get("general.name", "")).lower()
    return metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _types(reader: "_Reader", tokens: Sequence[str], eos_id: int | None) -> tuple[int, ...]:
    """Return the types of the tokens; those of control tokens by spelling, if the file has none or ordinary ones."""
    stated, known = reader.per_token("token_type", int, len(tokens)), frozenset(tokens)
    if not stated:
        reader.note("token_type", "is missing; control tokens are told by their spelling")
    control, shown = control_spellings(known), shown_spellings(known)
    if stated and (eos_id is None or tokens[eos_id] != END_OF_TEXT):
        control -= {END_OF_TEXT}
    spelt = control | shown
    types = list(stated or (int(TokenType.NORMAL),) * len(tokens))
    wrong = [at for at, token in enumerate(tokens) if token in spelt and types[at] not in _PARSED]
    for at in wrong:
        types[at] = int(TokenType.CONTROL if tokens[at] in control else TokenType.USER_DEFINED)
    if stated and wrong:
        listed = quoted(", ".join(tokens[at] for at in wrong))
        reader.note("token_type", f"has ordinary tokens with the spelling of control tokens ({listed}), which they are")
    return tuple(types)


def _merges(reader: "_Reader", pre: str | None) -> tuple[str, ...]:
    """Return the merges. llama.cpp takes an empty list for any model, and a missing one for Kimi K2."""
    if reader.is_empty("merges") or (pre == "kimi-k2" and reader.is_missing("merges")):
        reader.note("merges", "names no merges; text may be cut into other tokens")
        return ()
    return reader.array("merges", str)


def _scores(reader: "_Reader", count: int) -> tuple[float, ...]:
    """Return the scores of the tokens; equal ones if the file has none, as in llama.cpp."""
    scores = reader.per_token("scores", float, count)
    if scores:
        return scores
    reader.note("scores", "is missing; text may be cut into other tokens")
    return (0.0,) * count


def read_token_id(metadata: Mapping[str, object], name: str, vocab: GGUFVocab) -> int | None:
    """Return the id in `tokenizer.ggml.<name>`; None if the file has no such key or the vocabulary no such id."""
    return _Reader(metadata, vocab.source).token_id(name, len(vocab.tokens), None)


class _Reader:
    """Reads `tokenizer.ggml.` keys, and names a key that is wrong.

    Attributes:
        notes: lines for the user about what was ignored.
    """

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source
        self.notes: list[str] = []

    def note(self, name: str, problem: str) -> None:
        """Note that a key is not as it should be."""
        self.notes.append(f"{self._source}: {_PREFIX}{name} {problem}")

    def optional(self, name: str, kind: type[T]) -> T | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            return value
        raise self._error(name, f"is {value!r}, where {kind.__name__} is expected")

    def required(self, name: str, kind: type[T]) -> T:
        value = self.optional(name, kind)
        if value is None:
            raise self._error(name, "is missing; without it text has no token ids")
        return value

    def is_missing(self, name: str) -> bool:
        return self._metadata.get(_PREFIX + name) is None

    def is_empty(self, name: str) -> bool:
        """Return whether the file has an array without elements."""
        return self._metadata.get(_PREFIX + name) == ()

    def array(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """Return an array; GGUF arrays have elements of one type, so only the first element is checked."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            raise self._error(name, "is missing; without it text has no token ids")
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self._error(name, "is not an array with elements")
        if not isinstance(value[0], (int, float) if kind is float else kind):
            raise self._error(name, f"holds {type(value[0]).__name__}, where {kind.__name__} is expected")
        return tuple(value)

    def per_token(self, name: str, kind: type[T], count: int) -> tuple[T, ...]:
        """Return the first `count` elements of an array with one per token; empty if the file has no such key."""
        if self.is_missing(name):
            return ()
        values = self.array(name, kind)
        surplus = f"has {len(values)} elements for {count} tokens"
        if len(values) < count:
            raise self._error(name, surplus)
        if len(values) > count:
            self.note(name, f"{surplus}; the first ones count")
        return values[:count]

    def token_id(self, name: str, count: int, default: int | None) -> int | None:
        """Return the stated id, or the default where it is absent or outside the vocabulary, as in llama.cpp."""
        stated = token_id_of(self._metadata.get(_PREFIX + name), count)
        return token_id_of(default, count) if stated is None else stated

    def _error(self, name: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self._source}: {_PREFIX}{name} {problem}")
