"""Prompt lookup finds the latest of the longest suffixes that occur before, as a search by plain Python does."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcore.engine.speculation.drafter import Draft
from graphcore.engine.speculation.prompt_lookup import LONGEST_MATCH, MATCHES, PromptLookup

TOKENS = st.lists(st.integers(0, 2), max_size=60)


def draft_of(token_ids: list[int], matched: int) -> Draft:
    """Return a draft after so many tokens that agree; each further token agrees with one more."""
    return Draft(token_ids, [MATCHES.of(matched + at) for at in range(len(token_ids))])


def searched(tokens: Sequence[int], most: int) -> Draft:
    """Return the draft by its definition."""
    for matched in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        suffix = list(tokens[-matched:])
        for end in range(len(tokens) - 1, matched - 1, -1):
            if list(tokens[end - matched : end]) == suffix:
                follows = list(tokens[end:])
                return draft_of([follows[at % len(follows)] for at in range(most)], matched)
    return Draft()


@given(TOKENS, st.lists(TOKENS, max_size=4), st.integers(1, 9))
def test_a_draft_is_what_followed_the_longest_match(first: list[int], more: list[list[int]], most: int) -> None:
    drafter, tokens = PromptLookup(first), list(first)
    for new in more:
        drafter.append(new)
        tokens += new
        assert drafter.num_tokens == len(tokens)
        assert drafter.propose(most) == searched(tokens, most)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([], Draft()),
        ([4], Draft()),
        ([4, 5, 6], Draft()),
        ([7, 1, 2, 3, 9, 1, 2], draft_of([3, 9, 1, 2], 2)),
        ([1, 2, 8, 1, 2, 9, 1, 2], draft_of([9, 1, 2, 9], 2)),  # the latest match; then it repeats from the end on
        ([5, 5, 5], draft_of([5, 5, 5, 5], 2)),
    ],
)
def test_drafts_of_short_sequences(tokens: list[int], draft: Draft) -> None:
    assert PromptLookup(tokens).propose(4) == draft
    assert PromptLookup(tokens).propose(0) == Draft()
