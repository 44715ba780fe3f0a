"""Grammars are tried in a process of their own: what ends llguidance is one line, and what it rounds is named."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.comparisons import letter_tokens

from graphcore.errors import ConfigError
from graphcore.tokenizer import grammar
from graphcore.tokenizer.bounded_process import Bounds
from graphcore.tokenizer.bounded_worker import TEXT, UNREADABLE
from graphcore.tokenizer.grammar import GrammarMask, GrammarTokens, GrammarTrials, llguidance_source
from graphcore.tokenizer.schema_bounds import with_kept_bounds

pytestmark = pytest.mark.thorough

SECONDS = 60.0
TESTS = Path(__file__).parents[2]
LOW, HIGH = -(2**63), 2**63 - 1
HUGE = 10**309  # beyond the range of floats
LONG = 'start: "' + "ab" * 200_000 + '"'


@pytest.fixture(scope="module")
def tokens() -> GrammarTokens:
    return letter_tokens()


def unchecked(schema: object) -> str:
    """Return a grammar whose numbers nobody has looked at."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


@pytest.mark.parametrize(
    ("source", "bounds", "said"),
    [
        # llguidance recurses over the negation of the smallest int64
        (unchecked({"type": "integer", "minimum": LOW, "maximum": LOW}), Bounds(), r"ended its process \(SIGSEGV\)"),
        (unchecked({"enum": ["", -1e300], "type": "integer"}), Bounds(), r"ended its process \(SIGSEGV\)"),
        (unchecked({"type": "number", "multipleOf": 1000003}), Bounds(seconds=0.3), r"takes more than 0\.3 s"),
        (LONG, Bounds(nbytes=110 << 20), r"ended its process \(SIGABRT\); it takes too much memory"),
        (unchecked({"type": "nothing"}), Bounds(), "Invalid type: nothing"),
        ("start: start", Bounds(), "no text matches it, because its rules never end"),
    ],
    ids=["integers", "enum", "time", "memory", "invalid", "endless"],
)
def test_what_ends_llguidance_is_one_line_and_the_next_grammar_is_tried(
    tokens: GrammarTokens, source: str, bounds: Bounds, said: str
) -> None:
    trials = GrammarTrials(tokens.description, bounds)
    reason = trials.problem(source)
    assert reason.isprintable()
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(reason)
    assert trials.problem('start: "a"') == ""


def test_a_machine_without_processes_is_said(tokens: GrammarTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = GrammarTrials(tokens.description)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "could not be started in a process of its own (No such file" in trials.problem('start: "a"')


class CountedProcess:
    """A process that answers when it is let to.

    Attributes:
        asked: all grammars that any of them got.
        slow: grammar that waits for `is_free`.
    """

    asked: list[bytes]
    slow = b"slow"
    is_free: threading.Event
    is_usable = True

    def __init__(self, *_: object) -> None: ...

    def ask(self, source: bytes) -> tuple[bytes, str]:
        self.asked.append(source)
        if source == self.slow:
            self.is_free.wait(SECONDS)
        return TEXT, ""


def test_a_grammar_is_tried_once_and_a_slow_one_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    CountedProcess.asked, CountedProcess.is_free = [], threading.Event()
    monkeypatch.setattr(grammar, "BoundedProcess", CountedProcess)
    monkeypatch.setattr(grammar, "MOST_KNOWN", 3)
    trials = GrammarTrials(b"")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(trials.problem, "slow")
        for name in ("a", "b", "a", "c", "a", "b"):
            assert trials.problem(name) == ""
        assert not slow.done()
        assert [source for source in CountedProcess.asked if source != b"slow"] == [b"a", b"b", b"c"]
        trials.problem("d")  # the fourth: "c" was asked for least lately
        trials.problem("c")
        assert CountedProcess.asked[-2:] == [b"d", b"c"]
        CountedProcess.is_free.set()
        assert slow.result(SECONDS) == ""


class FullProcess:
    """A process that has no room for a thread the first time."""

    is_usable = True
    answers = ((UNREADABLE, "ThreadLimitError: thread graphcore-grammar cannot be started"), (TEXT, ""))

    def __init__(self, *_: object) -> None:
        self._left = list(self.answers)

    def ask(self, _source: bytes) -> tuple[bytes, str]:
        return self._left.pop(0)


def test_a_grammar_that_had_no_room_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "BoundedProcess", FullProcess)
    trials = GrammarTrials(b"")
    assert trials.problem("a").startswith("ThreadLimitError")
    assert trials.problem("a") == ""


def test_a_process_that_has_ended_while_it_waited_is_replaced(tokens: GrammarTokens) -> None:
    trials = GrammarTrials(tokens.description)
    trials.start()
    (process,) = trials._idle
    process._process.kill()  # as the kernel does for lack of memory
    process._process.wait(SECONDS)
    assert trials.problem('start: "a"') == ""


def allows(tokens: GrammarTokens, schema: object, text: str) -> bool:
    """Return whether a text is a whole answer under a schema."""
    ids = {tokens.known.decode_bytes([token_id]): token_id for token_id in range(256)}
    matcher = GrammarMask(tokens, "json_schema", schema).copy().matcher
    taken = matcher.try_consume_tokens([ids[bytes([byte])] for byte in text.encode()])
    return taken == len(text) and matcher.is_accepting()


NUMBERS = (0, 0.5, 1, 3, 100, 255, 2**31 - 1, 2**53 - 1, 10**17, 10**18 - 1024, 10**18, 2**62, 2**63 - 1, 2**63, 2**64)
SIGNED = sorted({sign * number for number in NUMBERS for sign in (1, -1)})


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_bound_that_is_taken_is_kept_exactly(tokens: GrammarTokens, kind: str, key: str) -> None:
    kept = 0
    for bound in SIGNED:
        schema = {"type": kind, key: bound}
        try:
            is_dropped = key not in with_kept_bounds(schema)
        except ConfigError as error:
            assert f"{key}={bound!r} cannot be kept; " in str(error)  # noqa: PT017 - most bounds are taken
            continue
        kept += 1
        for number in {int(bound) + step for step in (-1024, -2, -1, 0, 1, 2, 1024)}:
            holds = {
                "minimum": number >= bound,
                "maximum": number <= bound,
                "exclusiveMinimum": number > bound,
                "exclusiveMaximum": number < bound,
            }[key]
            assert allows(tokens, schema, str(number)) == (holds or is_dropped), (schema, number)
    assert kept > len(SIGNED) // 2


def test_ends_of_types_are_dropped_and_other_bounds_beside_them_kept(tokens: GrammarTokens) -> None:
    ends: list[dict[str, Any]] = [
        {"type": "integer", "minimum": LOW, "maximum": HIGH},
        {"type": "integer", "minimum": -9223372036854776000, "maximum": 9223372036854776000},  # as JavaScript writes it
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    ]
    for schema in ends:
        assert allows(tokens, schema, "17"), schema
        assert allows(tokens, schema, "-17") == (schema["minimum"] != 0), schema
    long = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": HIGH}
    assert (allows(tokens, long, "[1]"), allows(tokens, long, "[1,1]")) == (False, True)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "minimum": 2**63}, r"minimum=9223372036854775808 cannot be kept; numbers above -2\*\*63"),
        ({"type": "integer", "minimum": LOW, "maximum": LOW}, "maximum=-9223372036854775808 cannot be kept"),
        ({"type": "integer", "minimum": -(2**64), "maximum": LOW - 1}, "minimum=-18446744073709551616 cannot be kept"),
        (
            {"properties": {"a": {"items": [{"exclusiveMinimum": 2**53}]}}},
            r"properties\.a\.items\[0\]\.exclusiveMinimum=",
        ),
        ({"type": "integer", "minimum": 2**53, "exclusiveMinimum": True}, "minimum=9007199254740992 cannot be kept"),
        pytest.param({"minimum": -HUGE}, "minimum=-10{38} cannot be kept", id="huge minimum"),
        pytest.param({"maximum": HUGE}, "maximum=10{39} cannot be kept", id="huge maximum"),
        pytest.param({"multipleOf": HUGE}, "multipleOf=10{39} cannot be kept", id="huge multipleOf"),
        pytest.param({"exclusiveMinimum": HUGE, "maximum": 0.5}, "exclusiveMinimum=10{39} ", id="huge open end"),
        pytest.param({"exclusiveMinimum": 0, "minimum": HUGE, "maximum": 0.5}, "minimum=10{39} ", id="huge beside one"),
        ({"maximum": 2**53 + 1}, "maximum=9007199254740993 cannot be kept; 9007199254740992 is the nearest"),
        ({"minimum": 1e-70}, "minimum=1e-70 cannot be kept"),
        ({"$defs": {"a": {"const": 2**53 + 1}}, "$ref": "#/$defs/a"}, r"\$defs\.a\.const=9007199254740993 cannot"),
        ({"enum": [{"a": -1e300}]}, r"enum\[0\]\.a=-1e\+300 cannot be kept"),
        ({"multipleOf": 10**6 + 3}, "multipleOf=1000003 cannot be kept; up to 100000 units"),
        ({"multipleOf": 1e-12}, "multipleOf=1e-12 cannot be kept"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, r"multipleOf=65539 cannot be kept; with allOf"),
        ({"minLength": 2**32}, "minLength=4294967296 cannot be kept; up to 4294967295 characters"),
    ],
    ids=str,
)
def test_a_number_that_would_be_rounded_is_refused_by_name(tokens: GrammarTokens, schema: object, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^json_schema: .*{said}"):
        GrammarMask(tokens, "json_schema", schema).prepare()
    lark = GrammarMask(tokens, "lark", f"start: %json {json.dumps(schema)}")
    with pytest.raises(ConfigError, match=said):
        lark.prepare()


def test_an_open_end_beside_a_near_bound_is_open(tokens: GrammarTokens) -> None:
    for schema, inside, outside in (
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0.5", "0.0001"), ("0", "0.0", "0.51")),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ("1.5", "1.0001"), ("1", "1.0", "2")),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, ("1.5", "1.0001"), ("1", "1.0", "2")),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("-0.5", "-0.0001"), ("0", "-0", "-0.6")),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ("-1.5", "-1.0001"), ("-1", "-1.0", "-2")),
    ):
        typed = {"type": "number", **schema}
        assert [text for text in (*inside, *outside) if allows(tokens, typed, text)] == [*inside], schema


def test_names_and_values_are_no_bounds() -> None:
    """Of what only looks like a bound nothing is dropped."""
    schema = {
        "properties": {"minimum": {"type": "integer"}, "enum": {"maximum": 5}, "const": True},
        "required": ["minimum"],
        "default": {"minimum": 2**64},
        "examples": [{"const": 2**64}],
        "description": "minimum: 2**64",
    }
    assert with_kept_bounds(schema) == schema


def test_a_boolean_schema_has_a_meaning(tokens: GrammarTokens) -> None:
    assert allows(tokens, True, '{"a": [1]}')
    with pytest.raises(ConfigError, match="json_schema: Unsatisfiable schema"):
        GrammarMask(tokens, "json_schema", False).prepare()
    source = json.loads(llguidance_source("json_schema", {"x-guidance": {"whitespace_flexible": False}}))
    assert source["grammars"][0]["json_schema"]["x-guidance"].keys() == {"whitespace_flexible", "whitespace_pattern"}


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_schemas_end_no_process_and_their_answers_are_valid(count: int) -> None:
    """In a process of their own, which is where a schema that ends it shows."""
    command = [sys.executable, str(TESTS / "random_schemas.py"), "0", str(count)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=20 * SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr[-1000:]
    *odd, last = ran.stdout.strip().splitlines()
    found = json.loads(last)
    assert not odd, "\n".join(odd)
    assert found["compiled"] > count // 2
    assert found["valid"] > count // 3
