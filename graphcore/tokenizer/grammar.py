"""Grammars of answers: JSON schemas, regular expressions, Lark and GBNF grammars, and choices, by llguidance.

A grammar is compiled, and its masks are computed, in the thread of its mask (engine/masks.py), while steps run.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graphcore.errors import ConfigError
from graphcore.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FORMS = ("json_schema", "regex", "lark", "gbnf", "choice")


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
        return LLTokenizer(self.tokenizer.serialized(), n_vocab=self.vocab, eos_token=sorted(self.end_ids))


@dataclass
class GrammarMask:
    """A mask (`TokenMask`) that allows the texts of a grammar; its tokens without a choice are forced.

    Attributes:
        form: one of FORMS.
        grammar: a JSON schema as a mapping or a text, a grammar as a text, or a sequence of texts to choose from.
    """

    tokens: GrammarTokens
    form: str
    grammar: Any
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
            from llguidance import LLMatcher

            if not self._compiled:
                compiled = LLMatcher(self.tokens.known, llguidance_source(self.form, self.grammar))
                self._check(compiled)
                self._compiled.append(compiled)
            self._matcher = self._compiled[0].deep_copy()
        return self._matcher

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
        return GrammarMask(self.tokens, self.form, self.grammar, state, self._compiled)

    def _check(self, matcher: "LLMatcher") -> None:
        if matcher.is_error():
            reason = " ".join(matcher.get_error().partition("<state>")[0].split())  # the parser's state is long
            raise ConfigError(f"{self.form}: {reason:.300}")


def llguidance_source(form: str, grammar: Any) -> str:
    """Return a grammar as llguidance takes it.

    Raises:
        ConfigError: the grammar is of the wrong type, or no JSON.
    """
    from llguidance import LLMatcher, gbnf_to_lark

    if form == "choice":
        if isinstance(grammar, str) or not all(isinstance(text, str) for text in grammar) or not grammar:
            raise ConfigError(f"choice={grammar!r:.40} must be a list of texts")
        # one terminal, an automaton: thousands of alternatives of a rule would exceed the parser's limits
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in grammar))
    if form == "json_schema":
        try:
            text = grammar if isinstance(grammar, str) else json.dumps(grammar)
            return LLMatcher.grammar_from_json_schema(text)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"json_schema must be JSON: {error}") from error
    if not isinstance(grammar, str):
        raise ConfigError(f"{form}={grammar!r:.40} must be a text")
    if form == "regex":
        return LLMatcher.grammar_from_regex(grammar)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark.gbnf_to_lark(grammar) if form == "gbnf" else grammar)
    except Exception as error:  # the converter raises whatever its parser meets
        raise ConfigError(f"gbnf: {error}") from error


def grammar_mask(tokens: GrammarTokens, given: Mapping[str, Any]) -> GrammarMask:
    """Return the mask of the one grammar in `given`, by its form.

    Raises:
        ConfigError: there is none or more than one.
    """
    forms = [form for form in FORMS if given.get(form) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise ConfigError(f"grammar takes one of {', '.join(FORMS)}; found {found}")
    return GrammarMask(tokens, forms[0], given[forms[0]])
