r"""How byte-level BPE vocabularies cut text into words before merging, by the name in `tokenizer.ggml.pre`.

Patterns are those of each model's published `tokenizer.json`, not llama.cpp's adaptations of them: its `gpt-4o` drops
`\p{M}` and so cuts Hindi, Bengali, Tamil, Burmese and Khmer words apart, and it applies no Unicode normalisation.
"""

from dataclasses import dataclass

from graphcore.errors import TokenizerError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)

LLAMA3_VOCAB = 128256
"""Tokens of Llama 3's vocabulary, which BitNet b1.58 2B-4T shares: its GGUF files have no `tokenizer.ggml.pre`."""


@dataclass(frozen=True)
class Splitter:
    r"""One way to cut text into words.

    Attributes:
        names: values of `tokenizer.ggml.pre` that mean it.
        patterns: regular expressions, applied one inside the other; every match and every gap is a word.
        ignore_merges: a word that is in the vocabulary is one token, whatever the merges say (tiktoken's rule).
        composes: text is brought to Unicode's NFC first.
        adds_bos: text starts with BOS when the file does not say.
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
    Splitter(("gpt-4o", "llama4"), (_O200K,), ignore_merges=True),
    Splitter(("gpt-2", "phi-2", "mpt", "olmo"), (GPT2_PATTERN,)),
    Splitter(("smollm", "starcoder", "refact"), (r"\p{N}", GPT2_PATTERN)),
)


def find_splitter(pre: str | None, vocab_size: int, source: str) -> Splitter:
    """Return the splitter that `tokenizer.ggml.pre` names; None and "default" both mean that the file does not say.

    Raises:
        TokenizerError: the name is unknown, or there is none and the vocabulary is not Llama 3's.
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
