"""Writes a Hugging Face folder's tokenizer as the metadata of a GGUF file: the reverse of `gguf_tokenizer`.

    byte-level BPE   tokens, types, merges, and the name of the splitter (`pre`)
    SentencePiece    tokens, types, scores: minus the rank of the first merge that makes the token
    Gemma 4          tokens, types, merges

GGUF names a splitter and cannot describe a new one, so every tokenizer is tried before it is written: the tokenizer
that a reader of the file would build must encode `PROBES` as the source does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from graphcore.errors import TokenizerError
from graphcore.tokenizer.gguf_splitters import GPT2_PATTERN, SPLITTERS, Splitter
from graphcore.tokenizer.gguf_spm import SPACE
from graphcore.tokenizer.gguf_tokenizer import read_gguf
from graphcore.tokenizer.gguf_vocab import BYTE_LEVEL, GEMMA4, SENTENCEPIECE, TokenType
from graphcore.tokenizer.tokenizer_parts import TokenizerParts

FieldValue: TypeAlias = bool | int | str | Sequence[str] | Sequence[int] | Sequence[float]
Fields = dict[str, FieldValue]

PROBES = (
    "Hello, world! It's John's dog; they'll say WE'RE LATE, I'd've gone.",
    "  leading, trailing and   several    spaces  ",
    "tabs\tand\n\nline breaks\r\n \n  \n\tmixed   \n",
    "0 12 345 6789 12345678 3.14159 1,000,000 2024-12-31 0x1F 1st 42nd",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2} != None  # comment",
    "camelCase snake_case SCREAMING HTTPServer iPhone don\u2019t (a+b)/c==d && !e || f<<2",
    "\u00e9clair na\u00efve \u00fcber e\u0301 A\u030a \u1e9b\u0323 \ufb01",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u05e9\u05dc \u0645\u0631",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2163 \u00bd \u00b2 \u2014 \u2026 \u20ac100 \u00a0x\u3000y",
    "Vi\u1ec7t Nam \u0130stanbul stra\u00dfe \u01c5 \u2581 x\u2581y </s> <unk> [UNK] <|x|>",
    "a", " a", "a ", "", " ", "\n",
)  # fmt: skip
SPECIAL_PROBES = 4  # number of special tokens that are tried inside a text
PAD_SCORE = -1e6
SHOWN_IN_GEMMA4 = frozenset(
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
)
"""Control tokens that files of Gemma 4 have as user-defined ones, so that llama.cpp shows them in an answer."""


def gguf_fields(parts: TokenizerParts, vocab_size: int, architecture: str) -> Fields:
    """Return the `tokenizer.` metadata of a tokenizer.

    Args:
        parts: parts of a Hugging Face folder's tokenizer.
        vocab_size: rows of the model's embedding: ids beyond them are left out, rows without a token are padding.
        architecture: GGUF's name of the model's architecture; llama.cpp has a kind of tokenizer for "gemma4", and the
            control tokens of "phi3" take the white space behind them.

    Raises:
        TokenizerError: GGUF cannot describe this tokenizer.
    """
    spec = json.loads(parts.backend.to_str())
    model = spec["model"]
    if model.get("type") != "BPE":
        raise TokenizerError(f"{parts.source}: a tokenizer of type {model.get('type')} has no GGUF form here; only BPE")
    if not model["merges"]:
        raise TokenizerError(f"{parts.source}: the tokenizer has no merges, and GGUF no empty list of them")
    kind = BYTE_LEVEL
    if model.get("byte_fallback"):
        kind = GEMMA4 if architecture == GEMMA4 else SENTENCEPIECE
    found = _vocabulary(parts, spec, vocab_size, kind) | _special_ids(parts, vocab_size)
    if parts.chat_template:
        found["tokenizer.chat_template"] = parts.chat_template
    if kind == SENTENCEPIECE:
        found["tokenizer.ggml.scores"] = _scores(found["tokenizer.ggml.tokens"], model)
        found["tokenizer.ggml.pre"] = "default"
    else:
        found["tokenizer.ggml.merges"] = _merges(model, set(_texts(found["tokenizer.ggml.tokens"])))
    if kind != BYTE_LEVEL:
        found["tokenizer.ggml.add_space_prefix"] = "Prepend" in json.dumps(spec.get("normalizer"))
    candidates = [found]
    if kind == BYTE_LEVEL:
        candidates = [found | {"tokenizer.ggml.pre": splitter.names[0]} for splitter in _likeliest_first(spec)]
    for candidate in candidates:
        if _first_difference(parts, candidate, architecture) is None:
            return candidate
    difference = _first_difference(parts, candidates[0], architecture)
    raise TokenizerError(f"{parts.source}: GGUF has no name for how this tokenizer cuts text: {difference}")


def _texts(values: FieldValue) -> list[str]:
    assert isinstance(values, list), "an array of texts"
    return values


def _vocabulary(parts: TokenizerParts, spec: Mapping[str, Any], vocab_size: int, model: str) -> Fields:
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    added = {entry["id"]: entry for entry in spec["added_tokens"]}
    unknown = spec["model"].get("unk_token")
    for text, token_id in parts.backend.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            continue
        kind = _type_of(text, added.get(token_id), unknown, model)
        is_run_of_spaces = model == SENTENCEPIECE and kind == TokenType.USER_DEFINED  # llama.cpp expects plain spaces
        tokens[token_id] = text.replace(SPACE, " ") if is_run_of_spaces else text
        types[token_id] = int(kind)
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }


def _type_of(text: str, added: Mapping[str, Any] | None, unknown: str | None, model: str) -> TokenType:
    if model == SENTENCEPIECE and text == unknown:
        return TokenType.UNKNOWN
    if added is not None:
        is_shown = model == GEMMA4 and text in SHOWN_IN_GEMMA4
        return TokenType.CONTROL if added["special"] and not is_shown else TokenType.USER_DEFINED
    is_byte = model != BYTE_LEVEL and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _special_ids(parts: TokenizerParts, vocab_size: int) -> Fields:
    """Return the ids that the file names, and whether BOS and EOS are added to a text."""
    backend = parts.backend
    bare, dressed = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
    before, after = dressed[: len(dressed) - len(bare)], dressed[len(bare) :]
    found: Fields = {
        "tokenizer.ggml.add_bos_token": parts.bos_id is not None and before[:1] == [parts.bos_id],
        "tokenizer.ggml.add_eos_token": bool(after) and after[-1] in parts.eos_ids and dressed[: len(bare)] == bare,
    }
    eos = parts.template_variables.get("eos_token")
    main = backend.token_to_id(eos) if eos is not None else None
    ends = [token_id for token_id in ([main] if main is not None else []) if token_id < vocab_size]
    ends += [token_id for token_id in parts.eos_ids if token_id not in ends and token_id < vocab_size]
    found |= {f"tokenizer.ggml.{name}_token_id": end for name, end in zip(("eos", "eot", "eom"), ends, strict=False)}
    unknown = parts.template_variables.get("unk_token")
    pad = parts.template_variables.get("pad_token")
    named = (("bos", parts.bos_id), ("unknown", _id(parts, unknown)), ("padding", _id(parts, pad)))
    found |= {
        f"tokenizer.ggml.{name}_token_id": token_id
        for name, token_id in named
        if token_id is not None and token_id < vocab_size
    }
    return found


def _id(parts: TokenizerParts, text: str | None) -> int | None:
    return None if text is None else parts.backend.token_to_id(text)


def _pairs(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the merges as pairs; older files have them as "left right"."""
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        yield left, right


def _merges(model: Mapping[str, Any], tokens: set[str]) -> list[str]:
    return [f"{left} {right}" for left, right in _pairs(model) if {left, right, left + right} <= tokens]


def _scores(tokens: FieldValue, model: Mapping[str, Any]) -> list[float]:
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_pairs(model)):
        ranks.setdefault(left + right, rank)
    return [-float(ranks[token]) if token in ranks else PAD_SCORE for token in _texts(tokens)]


def _likeliest_first(spec: Mapping[str, Any]) -> list[Splitter]:
    patterns, ignores = tuple(_patterns(spec.get("pre_tokenizer"))), bool(spec["model"].get("ignore_merges"))
    return sorted(SPLITTERS, key=lambda known: (known.patterns != patterns, known.ignore_merges != ignores))


def _patterns(step: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the regular expressions of a pre-tokenizer."""
    match step:
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            for inner in steps:
                yield from _patterns(inner)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            yield pattern
        case {"type": "Digits"}:
            yield r"\p{N}"
        case {"type": "ByteLevel", "use_regex": True}:
            yield GPT2_PATTERN


def _first_difference(parts: TokenizerParts, found: Mapping[str, FieldValue], architecture: str) -> str | None:
    """Return a line about the first probe that a reader of these fields encodes differently, or None."""
    metadata = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    read = read_gguf({"general.architecture": architecture, **metadata}, parts.source, None)
    specials = [token.content for token in parts.backend.get_added_tokens_decoder().values()][:SPECIAL_PROBES]
    num_tokens = len(_texts(found["tokenizer.ggml.tokens"]))
    for text in (*PROBES, " ".join(("Hi", *specials, "there")), "".join(("Hi", *specials, "there"))):
        expected = parts.backend.encode(text).ids
        if max(expected, default=0) >= num_tokens:
            continue  # the model's embedding has no row for it
        ids = read.backend.encode(text).ids
        if ids != expected:
            return f"{text!r} would become {ids[:12]} and not {expected[:12]}"
    return None
