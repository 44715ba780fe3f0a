"""Sliding windows score every token once, with enough before it; what the tokenizer puts before a text is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcore.errors import ConfigError
from graphcore.tasks.measuring.sliding_windows import TokenizedText, Window, cut_windows


class FakeTokenizer:
    """A token per character, with ids before and after where they are wanted."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        self.before, self.after = before, after

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(character) for character in text]
        return [*self.before, *ids, *self.after] if add_special_tokens else ids


def text_of(tokens: int, prefix: int = 0) -> TokenizedText:
    return TokenizedText(list(range(900, 900 + prefix)), list(range(tokens)))


@given(tokens=st.integers(2, 60), prefix=st.integers(0, 2), window=st.integers(4, 20), stride=st.integers(1, 17))
def test_every_token_that_has_one_before_it_is_scored_once_and_in_order(
    tokens: int, prefix: int, window: int, stride: int
) -> None:
    text = text_of(tokens, prefix)
    stride = min(stride, window - max(prefix, 1))
    windows = cut_windows(text, window, stride)
    scored = [index for each in windows for index in range(each.first, each.end)]
    assert scored == list(range(0 if prefix else 1, tokens))
    for each in windows:
        ids, first = text.ids_of(each)
        assert len(ids) <= window
        assert ids == [*text.prefix, *range(each.begin, each.end)]
        assert ids[first] == each.first
        assert first >= 1
        assert each.begin == 0 or each.first - each.begin >= window - prefix - stride


@given(tokens=st.integers(2, 60), window=st.integers(2, 20), stride=st.integers(1, 19))
def test_windows_are_those_of_transformers_guide(tokens: int, window: int, stride: int) -> None:
    stride = min(stride, window - 1)
    expected, previous = [], 0
    for begin in range(0, tokens, stride):  # huggingface.co/docs/transformers/perplexity
        end = min(begin + window, tokens)
        expected.append((begin, end, end - previous))
        previous = end
        if end == tokens:
            break
    found = [(each.begin, each.end, each.end - each.first) for each in cut_windows(text_of(tokens), window, stride)]
    assert found[1:] == expected[1:]
    assert found[0] == (expected[0][0], expected[0][1], expected[0][2] - 1)  # its first label is dropped by the shift


def test_a_text_shorter_than_the_window_is_one_window() -> None:
    assert cut_windows(text_of(5), 8, 4) == [Window(0, 5, 1)]
    assert cut_windows(text_of(7, prefix=1), 8, 4) == [Window(0, 7, 0)]


@pytest.mark.parametrize(("prefix", "window", "stride", "most"), [(0, 8, 8, 7), (1, 8, 8, 7), (2, 8, 7, 6)])
def test_a_stride_that_leaves_a_token_without_context_is_refused(
    prefix: int, window: int, stride: int, most: int
) -> None:
    with pytest.raises(ConfigError, match=rf"task\.stride={stride} .* task\.window={window}; .* 1 to {most} tokens"):
        cut_windows(text_of(30, prefix), window, stride)
    assert cut_windows(text_of(30, prefix), window, most)


@pytest.mark.parametrize("before", [[], [1], [1, 2], [ord("a")]])
@pytest.mark.parametrize("after", [[], [3]])
def test_what_stands_before_a_text_is_kept_and_what_would_follow_is_not(before: list[int], after: list[int]) -> None:
    text = TokenizedText.of(FakeTokenizer(before, after), "abc")
    assert (text.prefix, text.token_ids) == (before, [97, 98, 99])
    assert text.num_scored == (3 if before else 2)
