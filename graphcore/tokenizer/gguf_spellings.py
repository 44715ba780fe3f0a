"""Spellings of a GGUF file's tokens: those that a token cannot have for itself, and those of control tokens.

Empty tokens get llama.cpp's names. If a spelling has two ids, the later one is used to encode, as in llama.cpp's and
transformers' tables; both decode to it. A token whose bytes are not UTF-8 is part of no text and decodes to nothing.

The lists are those of llama.cpp's src/llama-vocab.cpp (`llama_vocab::impl::load`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from graphcore.errors import quoted

END_OF_TURN = (
    "<|im_end|>",  # Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3, before a tool call
    "<end_of_turn>",  # Gemma
    "<turn|>",  # Gemma 4
    "<|tool_response>",  # Gemma 4, after a tool call
    "<|return|>",  # gpt-oss
    "<|call|>",  # gpt-oss, before a tool call; <|end|> only ends one of its messages
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|flush|>",  # Solar Open
    "<|calls|>",  # Solar Open, before a tool call
    "<end_of_utterance>",  # SmolVLM
    "<EOT>",
    "_<EOT>",
    "[EOT]",  # Kimi K2
    "[EOS]",  # Kimi K2
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "[e~[",  # MiniMax M2
    "<eos>",
    "<|end|>",  # Phi 3
)
"""Spellings that end a generation, whatever types the file gives the tokens. A file names one eos_token_id, but models
end their turn with other tokens, too."""

NOT_AN_END = (("<|end|>", ("<|return|>", "<|call|>")), ("<|end|>", ("<|flush|>", "<|calls|>")),
              ("</s>", ("<|tool_response>",)))  # fmt: skip
"""Spellings that end nothing in a vocabulary that has all of the others."""

_CODE = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>",
    "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>",
    "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>",
)  # fmt: skip
_ENDS_OF_CODE = (
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
)  # fmt: skip
END_OF_TEXT = "</s>"
"""Ends a generation only as a control token: Qwen and Gemma have it as markup of a web page."""
_CONTROL = frozenset((*END_OF_TURN, *_CODE, *_ENDS_OF_CODE, END_OF_TEXT))
_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"))  # gpt-oss

_NOBODYS = "\U0010fffe"  # begins spellings that no text has: a noncharacter


@dataclass(frozen=True)
class Spellings:
    """The spellings of a vocabulary.

    Attributes:
        tokens: one distinct spelling per id.
        same_as: for ids whose stored spelling cannot be theirs alone, the id that decodes in their place, or None.
        notes: lines for the user.
    """

    tokens: tuple[str, ...]
    same_as: Mapping[int, int | None]
    notes: tuple[str, ...]


def distinct_spellings(stored: Sequence[str], source: str) -> Spellings:
    """Return a vocabulary's spellings.

    Args:
        stored: spellings as in the file; bytes that are not UTF-8 as surrogates.
        source: the file, for messages.
    """
    named = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(stored)]
    last = {token: token_id for token_id, token in enumerate(named)}
    if len(last) == len(named) and all(token.isascii() or is_unicode(token) for token in named):
        return Spellings(tuple(named), {}, ())
    same_as: dict[int, int | None] = {}
    for token_id, token in enumerate(named):
        if not is_unicode(token):
            same_as[token_id] = None
        elif last[token] != token_id:
            same_as[token_id] = last[token]
    tokens = tuple(f"{_NOBODYS}{at}" if at in same_as else token for at, token in enumerate(named))
    twice = [stored[at] for at, other in same_as.items() if other is not None]
    notes = [f"{source}: {len(twice)} of tokenizer.ggml.tokens stand there twice ({quoted(twice[0])})"] if twice else []
    if broken := len(same_as) - len(twice):
        notes.append(f"{source}: {broken} of tokenizer.ggml.tokens are not UTF-8; no text is encoded with them")
    return Spellings(tokens, same_as, tuple(notes))


def is_unicode(text: str) -> bool:
    """Return whether a text has no surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def ends_of_turn(ids: Mapping[str, int]) -> list[int]:
    """Return the ids of the spellings that end a generation, given the ids by spelling; see `END_OF_TEXT`."""
    ends = (*END_OF_TURN, *_ENDS_OF_CODE, END_OF_TEXT)
    return [ids[spelling] for spelling in ends if spelling in ids and spelling not in _kept_out(ids)]


def control_spellings(tokens: Collection[str]) -> frozenset[str]:
    """Return the spellings of a vocabulary that are control tokens, whatever the file says of their types."""
    return _CONTROL - _kept_out(tokens)


def shown_spellings(tokens: Collection[str]) -> frozenset[str]:
    """Return the spellings of a vocabulary that are parsed like control tokens, but shown in an answer."""
    return _SHOWN & _kept_out(tokens) | _SHOWN - _CONTROL


def _kept_out(tokens: Collection[str]) -> set[str]:
    return {spelling for spelling, others in NOT_AN_END if all(other in tokens for other in others)}
