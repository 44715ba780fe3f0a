"""Rebuilds a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen, gpt-oss, SmolLM) from a GGUF vocabulary.

text -> [NFC] -> special tokens cut out -> words (splitters.py) -> bytes as printable letters -> merges -> ids
"""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from graphcore.errors import TokenizerError
from graphcore.tokenizer.gguf_vocab import GGUFVocab
from graphcore.tokenizer.parts import bos_eos_processor
from graphcore.tokenizer.splitters import Splitter, find_splitter


def build_bpe(vocab: GGUFVocab) -> tokenizers.Tokenizer:
    """Return the tokenizer, without its special tokens.

    Raises:
        TokenizerError: the splitter is unknown or a merge names a token that the vocabulary lacks.
    """
    splitter = find_splitter(vocab.pre, len(vocab.tokens), vocab.source)
    model = models.BPE(dict(vocab.ids), _merges(vocab), ignore_merges=splitter.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if splitter.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(splitter)
    backend.decoder = decoders.ByteLevel()
    adds_bos = splitter.adds_bos if vocab.add_bos is None else vocab.add_bos
    backend.post_processor = bos_eos_processor(
        vocab.bos_id if adds_bos else None, vocab.eos_id if vocab.add_eos else None
    )
    return backend


def _pre_tokenizer(splitter: Splitter) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in splitter.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _merges(vocab: GGUFVocab) -> list[tuple[str, str]]:
    """Return the merges as pairs; byte-level spellings hold no spaces, so the first space separates."""
    pairs = []
    for rank, merge in enumerate(vocab.merges):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.ids.keys():
            raise TokenizerError(
                f"{vocab.source}: tokenizer.ggml.merges has '{merge}' at {rank}, whose parts are not in the "
                "vocabulary; the file is damaged"
            )
        pairs.append((left, right))
    return pairs
