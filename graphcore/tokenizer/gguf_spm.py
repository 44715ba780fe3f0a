"""Rebuilds a SentencePiece BPE tokenizer (Llama 2, Gemma) from a GGUF vocabulary.

SentencePiece has no list of merges: of all neighbours whose concatenation is a token, it joins the pair whose token has
the highest score. That is BPE whose merges are every way to split every token in two, sorted by the token's score;
among equal scores the longer left part goes first, as in the `tokenizer.json` that Google publishes for Gemma (whose
514,906 merges this reproduces). A space is spelt U+2581; a character without a token becomes its UTF-8 bytes, tokens
`<0x00>` to `<0xFF>`.

Files of Gemma 4 list these merges (`tokenizer.ggml.model` is "gemma4"). llama.cpp adds BOS to their texts even where
`add_bos_token` says no, because early converters wrote that by mistake; it is added here, too.
"""

import tokenizers
from tokenizers import decoders, models, normalizers

from graphcore.tokenizer.gguf_merges import listed_merges
from graphcore.tokenizer.gguf_vocab import GEMMA4, GGUFVocab, TokenType
from graphcore.tokenizer.tokenizer_parts import bos_eos_processor

SPACE = "\u2581"
_NEVER_MERGED = {TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE}


def build_spm(vocab: GGUFVocab) -> tokenizers.Tokenizer:
    """Return the tokenizer, without its special tokens."""
    pieces = spm_pieces(vocab)
    listed = listed_merges(vocab) if vocab.model == GEMMA4 else None
    model = models.BPE(
        {piece: token_id for token_id, piece in enumerate(pieces)} if listed is None else listed.ids,
        spm_merges(vocab, pieces) if listed is None else listed.pairs,
        unk_token=None if vocab.unk_id is None else pieces[vocab.unk_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    unspaced = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        unspaced.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(unspaced)
    adds_bos = bool(vocab.add_bos) if vocab.pre == "sarvam-moe" else vocab.model == GEMMA4 or vocab.add_bos is not False
    backend.post_processor = bos_eos_processor(
        vocab.bos_id if adds_bos else None, vocab.eos_id if vocab.add_eos else None
    )
    return backend


def spm_pieces(vocab: GGUFVocab) -> tuple[str, ...]:
    """Return the tokens as the model spells them: converters write Gemma 3's runs of spaces as plain spaces."""
    if vocab.model == GEMMA4:
        return vocab.tokens
    pieces = list(vocab.tokens)
    for token_id, kind in enumerate(vocab.types):
        spelt = pieces[token_id].replace(" ", SPACE)
        if kind == TokenType.USER_DEFINED and spelt not in vocab.ids:
            pieces[token_id] = spelt
    return tuple(pieces)


def spm_merges(vocab: GGUFVocab, pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return every split of every piece into two pieces, in the order of merging.

    User-defined pieces count as score 0, the highest: SentencePiece gives them that score, GGUF files store -1000.
    """
    known = set(pieces)
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in zip(pieces, vocab.scores, vocab.types, strict=True):
        if kind in _NEVER_MERGED:
            continue
        rank = 0.0 if kind == TokenType.USER_DEFINED else -score
        for cut in range(1, len(piece)):
            if piece[:cut] in known and piece[cut:] in known:
                ranked.append((rank, -cut, cut - len(piece), piece[:cut], piece[cut:]))
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in ranked]
