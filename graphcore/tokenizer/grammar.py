"""Grammars of answers: JSON schemas, regular expressions, Lark and GBNF grammars, and choices, by llguidance.

A grammar is compiled, and its masks are computed, in the thread of its mask (engine/masks.py), while steps run.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from graphcore.errors import ConfigError
from graphcore.tokenizer.deep_stack import run_in_deep_stack
from graphcore.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    from llguidance._lib import JsonCompileOptions

FORMS = ("json_schema", "regex", "lark", "gbnf", "choice")
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": "[ \\t\\r\\n]{0,40}"}
"""llguidance's options for JSON schemas (`x-guidance`). White space between tokens of JSON is limited to 40 characters:
without a limit small models write white space until they reach the length limit."""

ENDLESS = "NoExtensionBias"  # llguidance's message on rules such as `start: start`


@dataclass
class GrammarTokens:
    """A tokenizer's tokens as llguidance takes them, made at the first use: that takes about a second.

    Attributes:
        vocab: number of tokens V of the model, which may be larger than the tokenizer's.
        end_ids: tokens that end an answer.
    """

    tokenizer: Tokenizer
    vocab: int
    end_ids: Collection[int]

    @cached_property
    def known(self) -> "LLTokenizer":
        """The tokens.

        Raises:
            ConfigError: no token ends an answer.
        """
        from llguidance import LLTokenizer

        if not self.end_ids:
            raise ConfigError("a grammar ends with an end token, and the checkpoint names none (eos_token_id)")
        ends = sorted(self.end_ids)
        known = LLTokenizer(self.tokenizer.serialized(), n_vocab=self.vocab, eos_token=ends)
        return LLTokenizer(cast("TokenizerWrapper", GrammarTokenizer(self, known)), n_vocab=self.vocab, eos_token=ends)


class GrammarTokenizer:
    """A tokenizer as llguidance takes it: tags such as <tool_call> are text, and no text becomes a control token.

    llguidance itself takes each added token between angle brackets for a special one: no text of a grammar would allow
    it, though the tokenizer encodes that text as this token. And it would encode a grammar's text that spells a control
    token as that token, which ends an answer in the middle.

    Args:
        tokens: the tokens.
        known: the same tokenizer as llguidance reads it.

    Attributes:
        eos_token_id: a token that ends an answer.
        bos_token_id: None; no grammar needs it.
        tokens: bytes of each token.
        special_token_ids: tokens that no text allows.
        is_tokenizer_wrapper: True, by which llguidance knows such an object.
    """

    def __init__(self, tokens: GrammarTokens, known: "LLTokenizer") -> None:
        self._tokenizer, self._known = tokens.tokenizer, known
        tags = tokens.tokenizer.tag_ids
        self.eos_token_id, self.bos_token_id = min(tokens.end_ids), None
        self.tokens = [known.decode_bytes([token_id]) for token_id in range(known.vocab_size)]
        self.special_token_ids = [
            token_id
            for token_id in range(known.vocab_size)
            if known.is_special_token(token_id) and token_id not in tags
        ]
        self._controls = frozenset(self.special_token_ids)
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ids of a text in an answer, without the space that some tokenizers put before a text.

        If it spells a control token, all of it is encoded as plain text.
        """
        decoded = text.decode() if isinstance(text, bytes) else text
        ids = self._known.tokenize_str(decoded)
        return ids if self._controls.isdisjoint(ids) else self._tokenizer.encode_continuation(decoded)


@dataclass
class GrammarMask:
    """A mask (`TokenMask`) that allows the texts of a grammar; its tokens without a choice are forced.

    Attributes:
        form: one of FORMS.
        grammar: a JSON schema as a mapping or a text, a grammar as a text, or a sequence of texts to choose from.
        frame: Lark grammar of a whole answer, in which `@answer` stands for the grammar; empty if it is the whole.
    """

    tokens: GrammarTokens
    form: str
    grammar: Any
    frame: str = ""
    _matcher: "LLMatcher | None" = field(default=None, repr=False)
    _compiled: "list[LLMatcher]" = field(
        default_factory=list, repr=False
    )  # shared by copies, each compiles at most once

    @property
    def matcher(self) -> "LLMatcher":
        """The state of the grammar, compiled at the first use.

        Raises:
            ConfigError: the grammar is invalid, or exceeds llguidance's limits.
        """
        if self._matcher is None:
            if not self._compiled:
                compiled = run_in_deep_stack(self._compile, len(str(self.grammar)))
                self._check(compiled)
                self._compiled.append(compiled)
            self._matcher = self._compiled[0].deep_copy()
        return self._matcher

    def prepare(self) -> None:
        """Compile the grammar now, instead of when its request waits.

        Raises:
            ConfigError: the grammar is invalid, or exceeds llguidance's limits.
        """
        _ = self.matcher

    def _compile(self) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self.tokens.known, self.source())

    def source(self) -> str:
        """Return the grammar in llguidance's JSON format.

        Raises:
            ConfigError: the grammar is of the wrong type, or no JSON.
        """
        source = llguidance_source(self.form, self.grammar)
        if not self.frame:
            return source
        is_json = self.form in ("json_schema", "regex")
        framed = json.loads(source)["grammars"][0] if is_json else {"lark_grammar": source}
        return json.dumps({"grammars": [{"lark_grammar": self.frame}, {**framed, "name": "answer"}]})

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take tokens of the answer.

        Raises:
            ConfigError: the grammar is invalid, or does not allow them.
        """
        matcher = self.matcher
        if token_ids and not matcher.is_stopped():
            matcher.consume_tokens(list(token_ids))
            self._check(matcher)

    def forced(self) -> Sequence[int]:
        """Return the tokens that come next whatever the model says."""
        return [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()

    def take(self) -> np.ndarray:
        """Return the tokens that may come next as words of 32, [ceil(V / 32)] int32; end tokens after the grammar."""
        words = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.int32)
        self._check(self.matcher)
        return words

    def copy(self) -> "GrammarMask":
        """Return a mask in the same state."""
        state = None if self._matcher is None else self._matcher.deep_copy()
        return GrammarMask(self.tokens, self.form, self.grammar, self.frame, state, self._compiled)

    def _check(self, matcher: "LLMatcher") -> None:
        if matcher.is_error():
            reason = " ".join(matcher.get_error().partition("<state>")[0].split())  # the parser's state is long
            if reason == ENDLESS:
                reason = "no text matches it, because its rules never end"
            raise ConfigError(f"{self.form}: {reason:.300}")


def llguidance_source(form: str, grammar: Any) -> str:
    """Return a grammar as llguidance takes it.

    Raises:
        ConfigError: the grammar is of the wrong type, or no JSON.
    """
    from llguidance import LLMatcher, gbnf_to_lark

    if form == "choice":
        is_list = isinstance(grammar, Sequence) and not isinstance(grammar, str)
        if not is_list or not grammar or not all(isinstance(text, str) for text in grammar):
            raise ConfigError(f"choice={grammar!r:.40} must be a list of at least one text, and of nothing else")
        # one terminal, an automaton: thousands of alternatives of a rule would exceed the parser's limits
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in grammar))
    if form == "json_schema":
        try:
            text = json.dumps(json.loads(grammar) if isinstance(grammar, str) else grammar)
            return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema must be JSON: {error}") from error
    if not isinstance(grammar, str):
        raise ConfigError(f"{form}={grammar!r:.40} must be a text")
    if form == "regex":
        return LLMatcher.grammar_from_regex(grammar)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark.gbnf_to_lark(grammar) if form == "gbnf" else grammar)
    except Exception as error:  # the converter raises whatever its parser meets
        raise ConfigError(f"gbnf: {error}") from error


def grammar_mask(tokens: GrammarTokens, given: Mapping[str, Any], frame: str = "") -> GrammarMask:
    """Return the mask of the one grammar in `given`, by its form.

    Args:
        frame: as in `GrammarMask`.

    Raises:
        ConfigError: there is none or more than one.
    """
    forms = [form for form in FORMS if given.get(form) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise ConfigError(f"grammar takes one of {', '.join(FORMS)}; found {found}")
    return GrammarMask(tokens, forms[0], given[forms[0]], frame)
