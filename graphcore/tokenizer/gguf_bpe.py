"""Rebuilds a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen, gpt-oss, SmolLM) from a GGUF vocabulary.

text -> [NFC] -> special tokens cut out -> words (Splitter) -> bytes as printable letters -> merges -> ids

`tokenizer.ggml.pre` names how text is split into words (`gguf_splitters`).
"""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from graphcore.errors import quoted
from graphcore.tokenizer.gguf_merges import listed_merges
from graphcore.tokenizer.gguf_splitters import DEFAULT, LLAMA3, SPLITTERS, Splitter
from graphcore.tokenizer.gguf_vocab import GGUFVocab
from graphcore.tokenizer.tokenizer_parts import bos_eos_processor

LLAMA3_VOCAB = 128256
"""Tokens of Llama 3's vocabulary, which BitNet b1.58 2B-4T shares: its GGUF files have no `tokenizer.ggml.pre`."""


def find_splitter(pre: str | None, vocab_size: int) -> Splitter:
    """Return the splitter that `tokenizer.ggml.pre` names; llama.cpp's default for a missing or unknown name.

    Args:
        pre: the name; None if the file has none.
        vocab_size: number of tokens, which tells Llama 3's vocabulary if the file does not.
    """
    if pre in (None, "default") and vocab_size == LLAMA3_VOCAB:
        return LLAMA3
    return next((splitter for splitter in SPLITTERS if pre in splitter.names), DEFAULT)


def note_on_splitter(pre: str | None, vocab_size: int, source: str) -> tuple[str, ...]:
    """Return a note if the default splitter is used, which may not be the model's own."""
    if find_splitter(pre, vocab_size) is not DEFAULT:
        return ()
    problem = "missing" if pre is None else f"{quoted(pre)}{'' if pre in DEFAULT.names else ', which is unknown'}"
    return (
        f"{source}: tokenizer.ggml.pre is {problem}: text may be cut into other tokens than the model was trained "
        "with, which makes answers worse; convert the model again with a newer llama.cpp",
    )


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
