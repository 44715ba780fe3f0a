"""Rebuilds a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen, gpt-oss, SmolLM) from a GGUF vocabulary.

text -> [NFC] -> special tokens cut out -> words (Splitter) -> bytes as printable letters -> merges -> ids

`tokenizer.ggml.pre` names how text is split into words (`gguf_splitters`).
"""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from graphcore.tokenizer.gguf_merges import listed_merges
from graphcore.tokenizer.gguf_splitters import Splitter, find_splitter
from graphcore.tokenizer.gguf_vocab import GGUFVocab
from graphcore.tokenizer.tokenizer_parts import bos_eos_processor


def build_bpe(vocab: GGUFVocab) -> tokenizers.Tokenizer:
    """Return the tokenizer, without its special tokens."""
    splitter, merges = find_splitter(vocab.pre, len(vocab.tokens)), listed_merges(vocab)
    backend = tokenizers.Tokenizer(models.BPE(merges.ids, merges.pairs, ignore_merges=splitter.ignore_merges))
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
