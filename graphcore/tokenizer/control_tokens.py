"""Encodes text that spells control tokens, either as the tokens or as plain text.

Control tokens are those that the vocabulary marks as special, and those that end an answer. In messages that are not
the model's answers, markup that the chat template itself writes (`<tool_response>`) counts, too, although the
vocabulary does not mark it.

The library parses every special token or none (`encode_special_tokens`), so plain text is a mode of the encoder, used
under a lock. Tokens that it parses in either mode are split in two first.
"""

import re
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

import tokenizers

from graphcore.errors import TokenizerError

_MARKUP = re.compile(r"[<\[]\S*[>\]]")
LONG = 20_000
"""Characters from which a text is encoded as a batch of one, during which other Python threads run.

The library holds Python's lock in `encode`, for a second in each megabyte. Shorter texts are not, because after a batch
the library prints a warning if the process is forked.
"""

_GUARD = "\U0010fffd"  # put before a text that is not at the beginning of the input; merges with nothing


class Spot(NamedTuple):
    """The position of a token: its number in an encoding, and [start, end) in the text."""

    token: int
    start: int
    end: int


class ControlTokens:
    """The control tokens of a vocabulary, and the two ways to encode text that spells them.

    Args:
        backend: the tokenizer's backend; nothing else may encode with it at the same time.
        ends: ids that end an answer.
        template: the chat template's source, empty if there is none.

    Attributes:
        always: ids of special tokens and of those that end an answer.
        of_template: ids in `always`, and ids of added tokens that the template's source spells.
    """

    def __init__(self, backend: tokenizers.Tokenizer, ends: Iterable[int], template: str) -> None:
        self._backend = backend
        self._is_split = backend.encode_special_tokens  # where a folder asks that all special tokens stay text
        self._lock = Lock()
        added = backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special and token.content.strip()}
        written = {
            token_id
            for token_id, token in added.items()
            if _MARKUP.fullmatch(token.content) and token.content in template
        }
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.always = frozenset(special | set(ends))
        self.of_template = self.always | written

    def spelling(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id."""
        return self._backend.id_to_token(token_id) or ""

    def spellings(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Return the spellings of ids, without empty ones."""
        return tuple(filter(None, map(self.spelling, ids)))

    def parsed(self, text: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        """Return the encoding of a text whose control tokens are parsed."""
        with self._lock:
            return self._encoded(text, add_special_tokens)

    def _encoded(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) <= LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def plain(self, text: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        """Return the encoding of a text in which no control token is parsed.

        Raises:
            TokenizerError: the text holds a control token of one character.
        """
        return self._backend.post_process(self._plain(text), None, add_special_tokens)

    def plain_section(self, text: str, is_first: bool) -> list[int]:
        """Return the ids of a stretch of plain text.

        Args:
            is_first: True if nothing comes before it. Otherwise a tokenizer that puts a space before every text puts
                none here, as after a control token.

        Raises:
            TokenizerError: the text holds a control token of one character.
        """
        if is_first or self._begins_anew_behind_control_tokens():
            return self._plain(text).ids
        return self.plain_behind_text(text).ids

    def plain_behind_text(self, text: str) -> tokenizers.Encoding:
        """Return the plain encoding of a text that continues another; its offsets are meaningless.

        Raises:
            TokenizerError: the text holds a control token of one character.
        """
        guard, encoding = self._plain(_GUARD).ids, self._plain(_GUARD + text)
        if encoding.ids[: len(guard)] != guard:
            return self._plain(text)
        encoding.truncate(len(encoding.ids) - len(guard), direction="left")
        return encoding

    def _plain(self, text: str) -> tokenizers.Encoding:
        with self._lock:
            self._backend.encode_special_tokens = True
            try:
                encoding = self._encoded(text, add_special_tokens=False)
            finally:
                self._backend.encode_special_tokens = self._is_split
        left = self.found(text, encoding, self.of_template)
        if not left:
            return encoding
        start, end = left[0].start, left[0].end
        if end - start < 2:
            raise TokenizerError(
                f"the text holds '{text[start:end]}', a control token that cannot be spelt as plain text; leave it out"
            )
        halves = [self._plain(text[: start + 1]), self.plain_behind_text(text[start + 1 :])]
        return tokenizers.Encoding.merge(halves, growing_offsets=True)

    def found(self, text: str, encoding: tokenizers.Encoding, ids: frozenset[int]) -> list[Spot]:
        """Return the positions of tokens with these ids in a text's encoding, except those of unknown words."""
        return [
            Spot(index, start, end)
            for index, (token_id, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True))
            if token_id in ids and self._spells(text[start:end], token_id)
        ]

    def _spells(self, text: str, token_id: int) -> bool:
        """Return whether a text is the spelling of the added token that it became, but for white space around it.

        A vocabulary without bytes gives an unknown word the id of `<unk>`, which is no control token there.
        """
        if token_id not in self._added:
            return True
        word, content, normalizer = text.strip(), self._added[token_id].strip(), self._backend.normalizer
        return word == content or (
            normalizer is not None and normalizer.normalize_str(word) == normalizer.normalize_str(content)
        )

    def _begins_anew_behind_control_tokens(self) -> bool:
        """Return whether text after a control token is encoded like text at the beginning of the input."""
        control = self.spelling(min(self.always))
        return self.parsed(control + "a").ids[1:] == self.parsed("a").ids
