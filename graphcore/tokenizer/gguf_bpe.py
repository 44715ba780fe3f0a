r"""Rebuilds a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen, gpt-oss, SmolLM) from a GGUF vocabulary.

text -> [NFC] -> special tokens cut out -> words (Splitter) -> bytes as printable letters -> merges -> ids

`tokenizer.ggml.pre` names how text is split into words. Patterns are those of each model's published `tokenizer.json`,
not llama.cpp's versions of them: its `gpt-4o` drops `\p{M}` and so splits Hindi, Bengali, Tamil, Burmese and Khmer
words, and it applies no Unicode normalisation.
"""

from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from graphcore.errors import TokenizerError
from graphcore.tokenizer.gguf_vocab import GGUFVocab, merge_pairs
from graphcore.tokenizer.tokenizer_parts import bos_eos_processor

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)

LLAMA3_VOCAB = 128256
"""Tokens of Llama 3's vocabulary, which BitNet b1.58 2B-4T shares: its GGUF files have no `tokenizer.ggml.pre`."""


@dataclass(frozen=True)
class Splitter:
    r"""One way to split text into words.

    Attributes:
        names: values of `tokenizer.ggml.pre` that select it.
        patterns: regular expressions, applied one inside the other; every match and every gap is a word.
        ignore_merges: True if a word in the vocabulary is one token, whatever the merges say (tiktoken's rule).
        composes: True if text is first normalised to Unicode's NFC.
        adds_bos: True if text starts with BOS when the file does not say.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    composes: bool = False
    adds_bos: bool = False


LLAMA3 = Splitter(("llama-bpe", "llama3", "llama-v3", "falcon3"), (_LLAMA3,), ignore_merges=True, adds_bos=True)
SPLITTERS = (
    LLAMA3,
    Splitter(("smaug-bpe", "dbrx"), (_LLAMA3,)),
    Splitter(("qwen2", "deepseek-r1-qwen"), (_QWEN2,), composes=True),
    Splitter(("qwen35",), (_QWEN35,), composes=True),
    Splitter(("gpt-4o", "llama4"), (_O200K,), ignore_merges=True),
    Splitter(("gpt-2", "phi-2", "mpt", "olmo"), (GPT2_PATTERN,)),
    Splitter(("smollm", "starcoder", "refact"), (r"\p{N}", GPT2_PATTERN)),
)


def find_splitter(pre: str | None, vocab_size: int, source: str) -> Splitter:
    """Return the splitter that `tokenizer.ggml.pre` names; None and "default" mean that the file does not say.

    Raises:
        TokenizerError: the name is unknown, or it is missing and the vocabulary is not Llama 3's.
    """
    table = {name: splitter for splitter in SPLITTERS for name in splitter.names}
    if pre is None or pre == "default":
        if vocab_size == LLAMA3_VOCAB:
            return LLAMA3
        raise TokenizerError(
            f"{source}: tokenizer.ggml.pre is {pre or 'missing'}, so how to cut text into words is not known for this "
            f"vocabulary of {vocab_size} tokens; convert the model again with a newer llama.cpp converter, which "
            "writes the key, or run on token ids (prompt_ids)"
        )
    if pre not in table:
        raise TokenizerError(f"{source}: tokenizer.ggml.pre '{pre}' is unknown; known: {', '.join(sorted(table))}")
    return table[pre]


def build_bpe(vocab: GGUFVocab) -> tokenizers.Tokenizer:
    """Return the tokenizer, without its special tokens.

    Raises:
        TokenizerError: the splitter is unknown, or a merge names a token that the vocabulary lacks.
    """
    splitter = find_splitter(vocab.pre, len(vocab.tokens), vocab.source)
    model = models.BPE(dict(vocab.ids), merge_pairs(vocab), ignore_merges=splitter.ignore_merges)
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
