r"""Tells how text is cut into words before the merges of a byte-level BPE, by the name in `tokenizer.ggml.pre`.

The names and flags are those of llama.cpp's src/llama-vocab.cpp. Patterns are those of each model's published
`tokenizer.json` where llama.cpp cites it, because its own versions lose categories: its `gpt-4o` and `tekken` do not
tell upper from lower case beyond ASCII and drop `\p{M}`, and so split Hindi, Bengali, Tamil, Burmese and Khmer words.
It applies no Unicode normalisation, either.
"""

from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _SYMBOLS + _SPACES
_QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _SYMBOLS + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_MINICPM5 = _CONTRACTIONS + _WORDS + r"|\p{N}+" + _SYMBOLS + _SPACES
_SEED_CODER = _CONTRACTIONS + _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_JAIS2 = (
    _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _SYMBOLS + r"|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)"
    r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)


def _cased(contractions: str, digits: str, extra: str = "", symbols: str = r"[\r\n/]*") -> str:
    """Return o200k's pattern, in which a capital begins a word; `extra` restricts its classes of letters."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{extra}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{extra}]"
    begin = r"[^\r\n\p{L}\p{N}]?"
    words = f"{begin}{upper}*{lower}+{contractions}|{begin}{upper}+{lower}*{contractions}"
    return f"{words}|{digits}| ?[^\\s\\p{{L}}\\p{{N}}]+{symbols}{_SPACES}"


_O200K = _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_KIMI = r"\p{Han}+|" + _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]*")
_AFMOE_DIGITS = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # a 1234567 b -> "a 1" "234" "567" " b"

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_SIGNED_WORDS = _ASCII_SIGN + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff"
)
_YOUTU_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK
)
_FINNISH = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, _SIGNED_WORDS + r"[\r\n]*" + _SPACES)


_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _DEEPSEEK_SIGNS, r"\s+$", _DEEPSEEK_CJK, r"\p{N}+")
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "([\\t\\n]|    |  )",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2_PATTERN,
)
_LIKE_GPT2 = (
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum",
    "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe",
)  # fmt: skip


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


LLAMA3 = Splitter(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    (_LLAMA3,),
    ignore_merges=True,
    adds_bos=True,
)
DEFAULT = Splitter(("default",), (r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"))
SPLITTERS = (
    LLAMA3,
    Splitter(("smaug-bpe", "dbrx", "chatglm-bpe"), (_LLAMA3,)),
    Splitter(("glm4", "glm5"), (_LLAMA3,), ignore_merges=True),
    Splitter(("qwen2", "deepseek-r1-qwen", "f2llmv2"), (_QWEN2,), composes=True),
    Splitter(("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "megrez"), (_QWEN2,)),
    Splitter(("qwen35",), (_QWEN35,), composes=True),
    Splitter(("gpt-4o", "llama4", "granite-embed-multi-97m"), (_O200K,), ignore_merges=True),
    Splitter(("kanana2", "talkie", "minimax-m2"), (_O200K,)),
    Splitter(("tekken",), (_TEKKEN,), ignore_merges=True, adds_bos=True),
    Splitter(("kimi-k2",), (_KIMI,)),
    Splitter(_LIKE_GPT2, (GPT2_PATTERN,)),
    Splitter(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (_DIGIT, GPT2_PATTERN),
    ),
    Splitter(("deepseek-llm",), _DEEPSEEK_LLM),
    Splitter(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)),
    Splitter(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3),
    Splitter(("spark2_5",), (r"\p{N}{1,3}", _CJK, _SIGNED_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", _DIGIT)),
    Splitter(("afmoe",), (_AFMOE_DIGITS, f"[{_ASIAN}]+", _SIGNED_WORDS + r"[\r\n]*" + _SPACES)),
    Splitter(("youtu",), (_YOUTU_ASIAN, _cased(_CONTRACTIONS + "?", _DIGIT)), ignore_merges=True),
    Splitter(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")),
    Splitter(("bloom", "poro-chat", "gpt3-finnish"), (_FINNISH,)),
    Splitter(("viking",), (_FINNISH, _DIGIT)),
    Splitter(("chameleon",), _CHAMELEON, adds_bos=True),
    Splitter(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    Splitter(("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    Splitter(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    Splitter(("seed-coder",), (_SEED_CODER,)),
    Splitter(("ufakzeka",), (_QWEN2.removeprefix(_CONTRACTIONS + "|"),)),
    Splitter(("laguna",), (r"[^\n]+|[\n]+", _QWEN2)),
    Splitter(("exaone-moe",), (_EXAONE_MOE,)),
    Splitter(("jais-2",), (_JAIS2,)),
    Splitter(("minicpm5",), (r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    DEFAULT,
)
SPM_LIKE = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""Names whose vocabularies spell spaces and bytes as SentencePiece does, and list their merges (`gguf_spm`)."""
