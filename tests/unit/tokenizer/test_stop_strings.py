"""Stop strings end a text wherever they are cut, and are never printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcore.errors import ConfigError
from graphcore.tokenizer.text_stream import StopStrings


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The shortest beginning of the text that ends with a stop string, less the longest stop string it ends with."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    watcher, printed = StopStrings(stops), ""
    for piece in pieces:
        result = watcher.push(piece)
        printed += result.text
        if result.is_stopped:
            assert watcher.flush() == ""
            return printed, True
    return printed + watcher.flush(), False


@given(
    st.lists(st.text("ab", max_size=2), max_size=25),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=2),
)
def test_any_cut_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == reference("".join(pieces), stops)


@pytest.mark.parametrize("stop", ["b", "bc", "bbc", "bcbd"])
def test_one_character_at_a_time_stops_where_the_whole_text_does(stop: str) -> None:
    for text in ("aabcbde", "abbbcbcbd", "bbcbcbdbcbd"):
        assert run(list(text), [stop]) == reference(text, [stop])


def test_a_stop_string_that_spans_pieces_is_never_printed() -> None:
    watcher = StopStrings(["\n\nUser:"])
    assert watcher.push("Fine.\n") == ("Fine.", False)
    assert watcher.push("\n") == ("", False)
    assert watcher.push("Us") == ("", False)
    assert watcher.push("er: hi") == ("", True)


def test_text_that_turns_out_not_to_stop_is_printed_late_but_whole() -> None:
    watcher = StopStrings(["</end>"])
    assert watcher.push("a</e") == ("a", False)
    assert watcher.push("m>b") == ("</em>b", False)
    assert watcher.push("<") == ("", False)
    assert watcher.flush() == "<"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStrings([]).push("abc") == ("abc", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty string"):
        StopStrings(["a", ""])


@pytest.mark.parametrize("pieces", [["xabcd"], ["xa", "bcd"], ["x", "a", "b", "c", "d"]])
def test_the_stop_string_that_is_complete_first_counts_and_not_the_one_that_begins_first(pieces: list[str]) -> None:
    assert run(pieces, ["abcd", "bc"]) == ("xa", True)
