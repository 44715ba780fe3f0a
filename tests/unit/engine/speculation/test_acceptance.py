"""Shares of accepted draft tokens follow what was seen, and forget what is old."""

import pytest

from graphcore.engine.speculation.acceptance import Acceptance, Classes
from graphcore.engine.speculation.prompt_lookup import MATCHES
from graphcore.engine.speculation.self_speculation import PROBABILITIES

CLASSES = Classes((1, 2, 6, 20), (0.2, 0.4, 0.7, 0.9))


@pytest.mark.parametrize("classes", [MATCHES, PROBABILITIES])
def test_before_anything_is_known_higher_classes_promise_more(classes: Classes) -> None:
    shares = [Acceptance(classes).share(kind) for kind in range(len(classes.least))]
    assert shares == list(classes.first_guess) == sorted(set(shares))
    assert list(classes.least) == sorted(set(classes.least))


def test_the_share_follows_what_was_seen_and_forgets_what_is_old() -> None:
    acceptance = Acceptance(CLASSES)
    for _ in range(200):
        acceptance.record([3], accepted=0)
    assert acceptance.share(3) < 0.13
    assert acceptance.share_of_all < 0.05
    for _ in range(200):
        acceptance.record([3, 3, 3, 3], accepted=4)
    assert acceptance.share(3) > 0.98
    assert acceptance.share_of_all > 0.95
    assert acceptance.share(0) == CLASSES.first_guess[0]


def test_tokens_after_the_first_wrong_one_say_nothing() -> None:
    acceptance = Acceptance(CLASSES)
    acceptance.record([0, 1, 2, 2, 3], accepted=1)  # one right of class 0, one wrong of class 1
    assert acceptance.share(0) == pytest.approx((1 + 4 * 0.2) / 5)
    assert acceptance.share(1) == pytest.approx(4 * 0.4 / 5)
    assert acceptance.share(2) == 0.7
    assert acceptance.share_of_all == pytest.approx((0.99 + 4 * 0.55) / (1.99 + 4))
    assert (acceptance.drafted, acceptance.accepted) == ([1] * 5, [1, 0, 0, 0, 0])


def test_a_sequence_begins_with_what_others_have_shown() -> None:
    everyone = Acceptance(CLASSES)
    one = Acceptance(CLASSES, everyone)
    for _ in range(100):
        one.record([2], accepted=1)
    assert Acceptance(CLASSES, everyone).share(2) == everyone.share(2) > 0.85
    assert Acceptance(CLASSES, everyone).share_of_all == everyone.share_of_all > 0.85
    assert one.share(2) > everyone.share(2)


def test_numbers_below_the_first_class_are_in_it() -> None:
    assert [CLASSES.of(number) for number in (0, 1, 2, 5.9, 6, 1000)] == [0, 0, 1, 1, 2, 3]
