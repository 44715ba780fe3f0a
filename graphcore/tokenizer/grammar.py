"""Grammars of answers: JSON schemas, regular expressions, Lark and GBNF grammars, and choices, by llguidance.

A grammar is compiled, and its masks are computed, in the thread of its mask (engine/masks.py), while steps run. Before
that it is tried in a process of its own (grammar_sandbox.py): what ends that process ends nothing here.
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from graphcore.errors import ConfigError
from graphcore.tokenizer.bounded_process import BoundedProcess, Bounds, NoAnswerError
from graphcore.tokenizer.bounded_worker import TEXT, UNREADABLE
from graphcore.tokenizer.deep_stack import run_in_deep_stack
from graphcore.tokenizer.schema_bounds import with_kept_bounds
from graphcore.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    from llguidance._lib import JsonCompileOptions

FORMS = ("json_schema", "regex", "lark", "gbnf", "choice")
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": "[ \\t\\r\\n]{0,40}"}
"""llguidance's options for JSON schemas (`x-guidance`). White space between tokens of JSON is limited to 40 characters:
without a limit small models write white space until they reach the length limit."""

MOST_TRIALS = 4  # grammars that are tried at once: a slow one must not keep the others waiting
MOST_KNOWN = 4096  # grammars whose trial is remembered
_INLINE_SCHEMA = re.compile(r"%json\s*(?=\{)")


class GrammarTrials:
    """Tries grammars in processes of their own, and remembers by hash which ones can be compiled.

    Args:
        description: the tokens, as `grammar_sandbox.grammar_answers` takes them.
    """

    def __init__(self, description: bytes, bounds: Bounds | None = None) -> None:
        self._description, self._bounds = description, bounds or Bounds()
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_TRIALS)
        self._idle: list[BoundedProcess] = []
        self._known: OrderedDict[bytes, str] = OrderedDict()  # reasons by hash, empty for those that can be compiled

    def start(self) -> None:
        """Start the first process without waiting for it.

        Raises:
            NoAnswerError: the machine cannot start a process.
        """
        self._idle.append(self._started())

    def problem(self, source: str) -> str:
        """Return why llguidance cannot compile a grammar, in its JSON format or in Lark's; empty if it can."""
        text = source.encode("utf-8", "surrogatepass")
        key = hashlib.sha256(text).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        try:
            kind, reason = self._tried(text)
        except NoAnswerError as error:  # not remembered: a machine that is busy may be the cause
            return f"the grammar {error}"
        if kind == UNREADABLE:  # nor this: the process had no room for a thread or its stack
            return reason
        reason = "" if kind == TEXT else reason
        with self._lock:
            self._known[key] = reason
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return reason

    def _tried(self, text: bytes) -> tuple[bytes, str]:
        with self._room:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None or not process.is_usable:
                process = self._started()
            answer = process.ask(text)
            with self._lock:
                self._idle.append(process)
        return answer

    def _started(self) -> BoundedProcess:
        return BoundedProcess("grammar", self._description, self._bounds)


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
        self._wrapped = GrammarTokenizer(self, known)
        return LLTokenizer(cast("TokenizerWrapper", self._wrapped), n_vocab=self.vocab, eos_token=ends)

    @cached_property
    def trials(self) -> GrammarTrials:
        """The processes in which grammars are tried.

        Raises:
            ConfigError: no token ends an answer.
        """
        return GrammarTrials(self.description)

    @property
    def description(self) -> bytes:
        """The tokens as these processes get them, JSON.

        Raises:
            ConfigError: no token ends an answer.
        """
        _ = self.known
        tokens, special_ids = self._wrapped.tokens, self._wrapped.special_token_ids
        specials = {token_id: tokens[token_id].decode("latin-1") for token_id in special_ids}
        return json.dumps({"vocab": self.vocab, "ends": sorted(self.end_ids), "specials": specials}).encode()

    def prepare(self) -> None:
        """Read the tokens, and start the process in which grammars are tried.

        Raises:
            ConfigError: no token ends an answer, or the machine cannot start a process.
        """
        try:
            self.trials.start()
        except NoAnswerError as error:
            raise ConfigError(f"grammars {error}") from error

    def schema_problem(self, schema: Mapping[str, Any]) -> str:
        """Return why answers cannot be kept to a JSON schema; empty if they can."""
        try:
            return self.trials.problem(llguidance_source("json_schema", schema))
        except ConfigError as error:
            return str(error).removeprefix("json_schema: ")


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
                source = self.source()
                if problem := self.tokens.trials.problem(source):
                    raise ConfigError(f"{self.form}: {problem}")
                compiled = run_in_deep_stack(lambda: self._compile(source), len(source))
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

    def _compile(self, source: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self.tokens.known, source)

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
        from graphcore.tokenizer.grammar_sandbox import matcher_refusal  # imports llguidance

        if reason := matcher_refusal(matcher):
            raise ConfigError(f"{self.form}: {reason}")


def llguidance_source(form: str, grammar: Any) -> str:
    """Return a grammar as llguidance takes it.

    Raises:
        ConfigError: the grammar is of the wrong type, or not valid JSON, or has numbers that cannot be kept.
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
            schema = json.loads(grammar if isinstance(grammar, str) else json.dumps(grammar))
            return json.dumps({"grammars": [{"json_schema": _kept_schema(schema)}]}, allow_nan=False)
        except ConfigError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema must be JSON: {error}") from error
    if not isinstance(grammar, str):
        raise ConfigError(f"{form}={grammar!r:.40} must be a text")
    if form == "regex":
        return LLMatcher.grammar_from_regex(grammar)
    if form == "lark":
        return LLMatcher.grammar_from_lark(_with_kept_schemas(grammar))
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark.gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises whatever its parser meets
        raise ConfigError(f"gbnf: {error}") from error


def _kept_schema(schema: Any) -> Any:
    """Return a JSON schema with bounds that are kept, and with `JSON_OPTIONS` unless it has options of its own."""
    kept = with_kept_bounds({} if schema is True else schema)
    if not isinstance(kept, dict):
        return kept  # llguidance says why not
    given = kept.get("x-guidance", {})
    return {**kept, "x-guidance": {**JSON_OPTIONS, **given} if isinstance(given, dict) else given}


def _with_kept_schemas(lark: str) -> str:
    """Return a Lark grammar whose inline JSON schemas have bounds that are kept."""
    pieces, done = list[str](), 0
    for found in _INLINE_SCHEMA.finditer(lark):
        if found.start() < done:
            continue  # inside a schema
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
            pieces += [lark[done : found.end()], json.dumps(with_kept_bounds(schema), allow_nan=False)]
        except ConfigError:
            raise
        except (ValueError, RecursionError):
            continue  # llguidance says what is wrong
        done = end
    return "".join([*pieces, lark[done:]])


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
