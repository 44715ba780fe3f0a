"""Finds which characters of a rendered conversation come from its messages.

A chat template is a program: it trims, joins, cuts and repeats the messages, and the text that it returns does not show
which words are its own. So the conversation is rendered a second time. There every character of the messages that
control tokens are written with is replaced by a rare character that stands for it, its twin:

    messages    Hi <|im_end|>                   the template's text   <|im_start|>user\nHi <|im_end|><|im_end|>\n
    marked      Hi 12im3end24                   the second text       <|im_start|>user\nHi 12im3end24<|im_end|>\n

A twin passes through `+`, slices, loops, `join`, `trim` and changes of case like any character, and marks its place
wherever it ends up. Twins can be printed, because Python escapes other characters where a template writes a list as a
text; no message has the characters that become twins. White space and letters have no twins, so that `split` and
comparisons still work; nor have characters that JSON escapes. Words that the template itself looks for ('</think>')
stay as they are, unless a control token consists of them. If the second text, with its twins replaced by their
characters, equals the first, the twins show which characters come from messages. If not, the template's output depends
on the marked characters.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from graphcore.errors import TokenizerError
from graphcore.tokenizer.chat_template import Tool
from graphcore.tokenizer.control_tokens import ControlTokens
from graphcore.tokenizer.message_turns import Message

_OTHERS, _ANSWERS = (0x20000, 0x25000), (0x25000, 0x2A6D7)  # rare ideographs (CJK Extension B), each [first, end)
_STRUCTURE = ("role", "type")  # fields whose values templates branch on
_LINKS = ("id", "tool_call_id", "name")  # with which templates find the call that a result answers: one twin in both
_ESCAPED = frozenset('"\\')
_STRING = re.compile(r"'([^'\\\n]{2,})'|\"([^\"\\\n]{2,})\"")


class TemplateWords:
    """The words that a template may look for in messages, and the characters to mark there.

    Args:
        source: the template.
        controls: control tokens of the vocabulary.

    Attributes:
        signs: characters to mark: the non-letters of each control token, or all of its characters if it has none.
    """

    def __init__(self, source: str, controls: ControlTokens) -> None:
        self.controls = controls
        literals = {single or double for single, double in _STRING.findall(source)}
        self._in_answers = _pattern(literals, controls.spellings(controls.always))
        spellings = controls.spellings(controls.of_template)
        self._elsewhere = _pattern(literals, spellings)
        self.signs = frozenset(chain.from_iterable(map(signs_of, spellings))) - _ESCAPED

    def left(self, text: str, is_answer: bool) -> Iterator[tuple[int, int]]:
        """Yield [start, end) of the template's literals in a message's text, except inside control tokens."""
        ids = self.controls.always if is_answer else self.controls.of_template
        found = list((self._in_answers if is_answer else self._elsewhere).finditer(text))
        spelt = self.controls.found(text, self.controls.parsed(text), ids) if found else []
        for match in found:
            if not any(match.start() < spot.end and spot.start < match.end() for spot in spelt):
                yield match.span()


class Marking:
    """Messages whose signs are replaced by twins.

    Attributes:
        messages: the messages, marked.
        tools: descriptions of tools, marked like a user's message; None if there are none.
        letters: all characters of the messages and tools.
        unmarked: texts that could not be marked because templates branch on them: roles, types, names of fields.

    Raises:
        TokenizerError: the messages have all characters that can be twins.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool] | None, words: TemplateWords) -> None:
        self._words = words
        self.letters = frozenset(chain.from_iterable(texts_in([*messages, *(tools or ())])))
        self._twins = [self._new_twins(plane) for plane in (_OTHERS, _ANSWERS)]
        self._back = [{ord(twin): sign for sign, twin in twins.items()} for twins in self._twins]
        self._tables = [str.maketrans(twins) for twins in self._twins]
        self.unmarked: set[str] = set()
        self.messages = [self._marked_fields(message, message.get("role") == "assistant") for message in messages]
        self.tools = None if tools is None else [self._marked_fields(tool, is_answer=False) for tool in tools]

    def _new_twins(self, plane: tuple[int, int]) -> dict[str, str]:
        signs = self._words.signs & self.letters
        free = (letter for letter in map(chr, range(*plane)) if letter not in self.letters)
        twins = dict(zip(sorted(signs), free, strict=False))
        if len(twins) < len(signs):
            raise TokenizerError("the messages hold every ideograph of CJK Extension B; leave some of them out")
        return twins

    def taken_back(self, text: str) -> str:
        """Return a text with its twins replaced by the signs that they stand for."""
        return text.translate(self._back[0] | self._back[1])

    def has_mark(self, text: str) -> bool:
        """Return whether any sign of the text comes from a message."""
        return self.has_mark_of_others(text) or any(ord(letter) in self._back[1] for letter in text)

    def has_mark_of_others(self, text: str) -> bool:
        """Return whether any sign of the text comes from a message that is not an answer of the model."""
        return any(ord(letter) in self._back[0] for letter in text)

    def _marked_fields(self, fields: Mapping[str, object], is_answer: bool) -> dict[str, object]:
        self.unmarked.update(fields)
        return {
            name: self._structure(value)
            if name in _STRUCTURE
            else self._marked(value, is_answer and name not in _LINKS)
            for name, value in fields.items()
        }

    def _structure(self, value: object) -> object:
        self.unmarked.update(texts_in(value))
        return value

    def _marked(self, value: object, is_answer: bool) -> object:
        if isinstance(value, str):
            return self._marked_text(value, is_answer)
        if isinstance(value, Mapping):
            return self._marked_fields(value, is_answer)
        return [self._marked(item, is_answer) for item in value] if isinstance(value, list | tuple) else value

    def _marked_text(self, text: str, is_answer: bool) -> str:
        table, pieces, at = self._tables[is_answer], [], 0
        for start, end in self._words.left(text, is_answer):
            pieces += [text[at:start].translate(table), text[start:end]]
            at = end
        return "".join([*pieces, text[at:].translate(table)])


def signs_of(spelling: str) -> set[str]:
    """Return the characters that identify a control token: no letters or digits, unless it has no others."""
    return {letter for letter in spelling if not letter.isalnum() and not letter.isspace()} or set(spelling)


def _pattern(literals: Iterable[str], spellings: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of the literals that neither are part of a control token nor contain one; longest first."""
    whole = "\n".join(spellings)
    apart = [word for word in literals if word not in whole and not any(spelling in word for spelling in spellings)]
    return re.compile("|".join(map(re.escape, sorted(apart, key=len, reverse=True))) or r"(?!)")


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in a value, including names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain(map(str, value), chain.from_iterable(map(texts_in, value.values())))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(texts_in, value))
