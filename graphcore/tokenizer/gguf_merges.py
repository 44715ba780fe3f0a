"""The listed merges of a GGUF vocabulary, as the `tokenizers` library takes them.

llama.cpp applies a merge even if its parts or its result are no tokens. A piece that is no token in the end becomes the
tokens of its bytes. The library merges tokens only, so such pieces get ids beyond the vocabulary, which are replaced
after encoding:

    merges  "a b", "ab c"     tokens  a b c abc     abc -> [abc]     abx -> [ab] -> [a, b], [x]

Source: llama.cpp, src/llama-vocab.cpp: `llm_tokenizer_bpe_session::tokenize`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers

from graphcore.tokenizer.gguf_spellings import is_unicode
from graphcore.tokenizer.gguf_vocab import BYTE_LEVEL, GGUFVocab


@dataclass(frozen=True)
class ListedMerges:
    """The merges of a vocabulary.

    Attributes:
        ids: id by spelling; pieces that are no tokens have ids from the number of tokens on.
        pairs: left and right part of each merge, best first.
    """

    ids: dict[str, int]
    pairs: list[tuple[str, str]]


def listed_merges(vocab: GGUFVocab) -> ListedMerges:
    """Return the merges, with ids for pieces that are no tokens. Of equal merges, the first counts."""
    ids, pairs = dict(vocab.ids), dict[tuple[str, str], None]()
    for merge in vocab.merges:
        cut = merge.find(" ", 1)
        if cut < 0 or (not merge.isascii() and not is_unicode(merge)):
            continue
        left, right = merge[:cut], merge[cut + 1 :]
        if right:
            pairs[left, right] = None
            for piece in (left, right, left + right):
                ids.setdefault(piece, len(ids))
    return ListedMerges(ids, list(pairs))


def bytes_of_pieces(backend: tokenizers.Tokenizer, vocab: GGUFVocab) -> Mapping[int, tuple[int, ...]]:
    """Return the tokens that stand for each id beyond the vocabulary, in text order."""
    beyond = range(len(vocab.tokens), backend.get_vocab_size())
    return {token_id: _byte_tokens(backend.id_to_token(token_id) or "", vocab) for token_id in beyond}


def _byte_tokens(piece: str, vocab: GGUFVocab) -> tuple[int, ...]:
    """Return the tokens of a piece's bytes; bytes without a token are left out, as in llama.cpp."""
    names = [chr(byte) if vocab.model == BYTE_LEVEL and byte < 128 else f"<0x{byte:02X}>" for byte in piece.encode()]
    return tuple(vocab.ids[name] for name in names if name in vocab.ids)
