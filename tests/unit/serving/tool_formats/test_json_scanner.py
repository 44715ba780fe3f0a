"""JSON is checked while it comes as json.loads checks it whole."""

import json

from hypothesis import given
from hypothesis import strategies as st
from support.cases import in_case

from graphcore.serving.tool_formats.json_scanner import JsonScanner, is_json

VALID = [
    '{"a": [1, -0.5e+3, true, {}, [], null, "\\u00e9\\n"]}',
    "0",
    "-1",
    '""',
    " [ ] ",
    "1e5",
    "0.0",
    "[0]",
    "[[1],[2]]",
]
INVALID = [
    "",
    "01",
    "1.",
    "-",
    "+1",
    "1e",
    ".5",
    "tru",
    "nulL",
    "[1,]",
    "{,}",
    '{"a"}',
    '{"a": 1,}',
    "{1: 2}",
    "[1}",
    "]",
]
INVALID += [
    '"\\x"',
    '"\\u12g4"',
    '"a\nb"',
    '"',
    "NaN",
    "Infinity",
    "1 2",
    "{} x",
    "'a'",
    "[",
    '{"a":',
    "[1 2]",
    '{"a" 1}',
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def loads(text: str) -> bool:
    """Return whether json.loads reads a text, without the words that it adds to JSON."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def test_text_is_json_where_json_loads_reads_it() -> None:
    for text in [*VALID, *INVALID]:
        with in_case(text):
            assert is_json(text) == loads(text) == (text in VALID)


@given(text=st.text(alphabet='{}[]",:0123eE.+-truefalsn \\u/', max_size=12))
def test_any_text_is_judged_as_by_json_loads(text: str) -> None:
    assert is_json(text) == loads(text)


@given(value=values, is_ascii=st.booleans(), after=st.sampled_from(["", " x", "}", ", 1", "\n</tool_call>"]))
def test_a_value_ends_where_it_ends(value: object, is_ascii: bool, after: str) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    scanner, at = JsonScanner(), 0
    for letter in text + after:
        taken = scanner.scan(letter)
        at += taken
        if taken < 1 or scanner.is_whole:
            break
    assert not scanner.is_broken
    assert at == len(text)
    if after or not isinstance(value, int | float) or isinstance(value, bool):
        assert scanner.is_whole


def test_deep_json_is_refused_without_a_deep_stack() -> None:
    assert is_json("[" * 200 + "]" * 200)
    assert not is_json("[" * 201 + "]" * 201)
    assert not is_json("[" * 200_000)
