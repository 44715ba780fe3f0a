"""Builds the parts of a `Tokenizer` from a GGUF file's metadata, and caches them.

Building Gemma's 262,144 tokens takes seconds, and loading them from a file a fraction of one. So the result is stored
as `<cache_dir>/tokenizers/<sha256 of the vocabulary>.json`, with its own hash beside it (`graphcore.checked_file`).
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from graphcore.checked_file import read_checked, write_checked
from graphcore.errors import quoted
from graphcore.tokenizer.chat_template import CHATML, has_tags
from graphcore.tokenizer.gguf_bpe import build_bpe, note_on_splitter
from graphcore.tokenizer.gguf_merges import bytes_of_pieces
from graphcore.tokenizer.gguf_spellings import END_OF_TEXT, ends_of_turn
from graphcore.tokenizer.gguf_splitters import SPLITTERS
from graphcore.tokenizer.gguf_spm import build_spm, spm_pieces
from graphcore.tokenizer.gguf_vocab import BYTE_LEVEL, GEMMA4, GGUFVocab, TokenType, read_token_id, read_vocab
from graphcore.tokenizer.tokenizer_json import parse_tokenizer_json
from graphcore.tokenizer.tokenizer_parts import TokenizerParts

_BUILD = 2  # raise this when the same vocabulary should give a different tokenizer

_STRIPS_NOTHING = ("<unk>", "<s>", "<|endoftext|>")

_log = logging.getLogger(__name__)


def has_vocab(metadata: Mapping[str, object]) -> bool:
    """Return whether the file has a vocabulary."""
    return "tokenizer.ggml.tokens" in metadata and metadata.get("tokenizer.ggml.model") not in ("none", "no_vocab")


def read_gguf(metadata: Mapping[str, object], source: str, cache_dir: Path | None) -> TokenizerParts:
    """Return the parts of a tokenizer that behaves like the model's own published one.

    Args:
        metadata: the file's key-value pairs; arrays as tuples.
        source: the file, for messages.
        cache_dir: folder that keeps built tokenizers; None builds anew each time.

    Raises:
        TokenizerError: the vocabulary is wrong; see `read_vocab`.
    """
    vocab = read_vocab(metadata, source)
    backend = _build(vocab) if cache_dir is None else _cached(vocab, cache_dir / "tokenizers")
    pieces, (template, on_template) = bytes_of_pieces(backend, vocab), _chat_template(metadata, source)
    return TokenizerParts(
        backend=backend,
        source=source,
        bos_id=vocab.bos_id,
        eos_ids=_eos_ids(metadata, vocab),
        chat_template=template,
        template_variables=_template_variables(metadata, vocab),
        same_as=vocab.same_as,
        bytes_of_pieces=pieces,
        notes=(*_notes(vocab, len(pieces)), *on_template),
    )


def _chat_template(metadata: Mapping[str, object], source: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the chat template, with U+FFFD for bytes that are not UTF-8, and notes; None if no message enters it."""
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return None, ()
    text = template.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if text == "chatml":
        return CHATML, ()
    if not has_tags(text):
        return None, (f"{source}: tokenizer.chat_template {quoted(text)} is no Jinja template; it is left out",)
    return text, ()


def _notes(vocab: GGUFVocab, num_pieces: int) -> tuple[str, ...]:
    on_splitter = note_on_splitter(vocab.pre, len(vocab.tokens), vocab.source) if vocab.model == BYTE_LEVEL else ()
    on_merges = f"{vocab.source}: tokenizer.ggml.merges names {num_pieces} pieces that are no tokens"
    return (*vocab.notes, *on_splitter, *([on_merges] if num_pieces else []))


def _cached(vocab: GGUFVocab, folder: Path) -> tokenizers.Tokenizer:
    """Return the cached tokenizer, or build and cache it; a damaged cache file is built again."""
    built_from = repr((_BUILD, tokenizers.__version__, SPLITTERS, vocab.digest()))
    path = folder / f"{hashlib.sha256(built_from.encode()).hexdigest()}.json"
    kept = read_checked(path)
    if kept is not None:
        return parse_tokenizer_json(kept, str(path))
    backend = _build(vocab)
    try:
        write_checked(path, backend.to_str().encode())
    except OSError as error:
        reason = error.strerror or str(error)
        _log.warning("%s: the built tokenizer cannot be kept (%s); the next start builds it again", path, reason)
    return backend


def _build(vocab: GGUFVocab) -> tokenizers.Tokenizer:
    is_bytes = vocab.model == BYTE_LEVEL
    backend = build_bpe(vocab) if is_bytes else build_spm(vocab)
    num_pieces = backend.get_vocab_size()
    spelt = tuple(zip(vocab.tokens if is_bytes else spm_pieces(vocab), vocab.types, strict=True))
    kinds = {TokenType.CONTROL, TokenType.UNKNOWN}
    if vocab.model == GEMMA4:  # its control tokens around tool calls and thoughts are stored as user-defined ones
        kinds.add(TokenType.USER_DEFINED)
    special = [text for text, kind in spelt if kind in kinds]
    added = [text for text, kind in spelt if kind == TokenType.USER_DEFINED and kind not in kinds]
    # Each has an id in the vocabulary already: adding any other would give it an id beyond the model's embedding.
    for texts, is_special in ((special, True), (added, False)):
        backend.add_tokens([_added_token(text, is_special, vocab.strips_behind_tokens) for text in texts])
    assert backend.get_vocab_size() == num_pieces, f"{vocab.source}: special tokens got ids of their own"
    return backend


def _added_token(text: str, is_special: bool, strips: bool) -> tokenizers.AddedToken:
    """Return an added token.

    Args:
        strips: True if control tokens strip the white space on their right (rstrip), as Phi 3's do, all except
            `_STRIPS_NOTHING`.
    """
    rstrip = strips and text not in _STRIPS_NOTHING
    return tokenizers.AddedToken(text, normalized=False, special=is_special, rstrip=rstrip)


def _eos_ids(metadata: Mapping[str, object], vocab: GGUFVocab) -> tuple[int, ...]:
    named = {vocab.eos_id, *(read_token_id(metadata, name, vocab) for name in ("eot_token_id", "eom_token_id"))}
    ends = ends_of_turn(vocab.ids)
    named |= {at for at in ends if vocab.tokens[at] != END_OF_TEXT or vocab.types[at] == TokenType.CONTROL}
    return tuple(sorted(token_id for token_id in named if token_id is not None))


def _template_variables(metadata: Mapping[str, object], vocab: GGUFVocab) -> dict[str, str]:
    ids = {
        "bos_token": vocab.bos_id,
        "eos_token": vocab.eos_id,
        "unk_token": vocab.unk_id,
        "pad_token": read_token_id(metadata, "padding_token_id", vocab),
    }
    return {name: vocab.tokens[token_id] for name, token_id in ids.items() if token_id is not None}
