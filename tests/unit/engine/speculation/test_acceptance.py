"""Shares of accepted draft tokens follow what was seen, and forget what is old."""

import pytest

from graphcore.engine.speculation.acceptance import FIRST_GUESS, Acceptance, class_of


def test_before_anything_is_known_longer_matches_promise_more() -> None:
    shares = [Acceptance().share(matched) for matched in range(1, 40)]
    assert shares[0] == FIRST_GUESS[0]
    assert shares == sorted(shares)


def test_the_share_follows_what_was_seen_and_forgets_what_is_old() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.record(matched=30, drafted=1, accepted=0)
    assert acceptance.share(30) < 0.13
    for _ in range(200):
        acceptance.record(matched=30, drafted=4, accepted=4)
    assert acceptance.share(30) > 0.98
    assert acceptance.share(1) == FIRST_GUESS[0]


def test_tokens_after_the_first_wrong_one_say_nothing() -> None:
    acceptance = Acceptance()
    acceptance.record(matched=1, drafted=5, accepted=1)  # one right after 1, one wrong after 2
    assert acceptance.share(1) == pytest.approx((1 + 4 * FIRST_GUESS[0]) / 5)
    assert acceptance.share(2) == pytest.approx(4 * FIRST_GUESS[1] / 5)
    assert acceptance.share(3) == FIRST_GUESS[2]
    assert (acceptance.drafted, acceptance.accepted) == ([1] * 5, [1, 0, 0, 0, 0])


def test_a_sequence_begins_with_what_others_have_shown() -> None:
    everyone = Acceptance()
    one = Acceptance(everyone)
    for _ in range(100):
        one.record(matched=7, drafted=1, accepted=1)
    assert Acceptance(everyone).share(7) == everyone.share(7) > 0.85
    assert one.share(7) > everyone.share(7)


def test_classes_begin_at_one() -> None:
    assert [class_of(matched) for matched in (0, 1, 2, 5, 6, 1000)] == [0, 0, 1, 3, 4, len(FIRST_GUESS) - 1]
