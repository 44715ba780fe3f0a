"""Which replica a request goes to."""

import random
from collections import Counter

import pytest

from graphcore.serving.replicas import prefix_table
from graphcore.serving.replicas.prefix_table import PrefixTable, RoutingHint

FOUR = ["a", "b", "c", "d"]


def hint(*keys: str) -> RoutingHint:
    return RoutingHint([key.encode() for key in keys])


def test_a_chat_stays_where_its_longest_beginning_is() -> None:
    table = PrefixTable(slack=2)
    table.note_start(hint("one"), "b")
    table.note_start(hint("one", "two"), "c")
    for replica in ("b", "c"):
        table.note_end(replica)
    assert table.order(hint("one"), FOUR)[0] == "c", "the newest holder"
    assert table.order(hint("one", "two", "three"), FOUR)[0] == "c"
    table.note_start(hint("one"), "b")
    assert table.order(hint("one"), FOUR)[0] == "b"
    assert table.order(hint("one", "two"), FOUR)[0] == "c", "the longest, not the newest"


def test_a_busy_holder_is_left_unless_the_call_is_pinned() -> None:
    table = PrefixTable(slack=2)
    for _ in range(3):
        table.note_start(hint("one"), "a")
    assert table.order(hint("one"), ["a", "b"]) == ["b", "a"], "three more than the other"
    assert table.order(RoutingHint([b"one"], is_pinned=True), ["a", "b"]) == ["a", "b"]
    table.note_start(hint(), "b")
    assert table.order(hint("one"), ["a", "b"]) == ["a", "b"], "two more are within the slack"


def test_new_chats_are_spread_and_the_least_busy_replica_comes_first() -> None:
    table, chosen = PrefixTable(slack=4), Counter[str]()
    for chat in range(40):
        first = table.order(hint(f"chat {chat}"), FOUR)[0]
        table.note_start(hint(f"chat {chat}"), first)
        table.note_end(first)
        chosen[first] += 1
    assert set(chosen.values()) == {10}
    table.note_start(hint(), "a")
    assert table.order(hint(), FOUR)[-1] == "a"


def test_every_replica_is_in_the_order_once_and_excluded_ones_come_last() -> None:
    table, draw = PrefixTable(slack=1), random.Random(1)
    for number in range(300):
        excluded = frozenset(draw.sample(FOUR, draw.randint(0, 4)))
        asked = RoutingHint([str(draw.randint(0, 9)).encode()], excluded, draw.random() < 0.5)
        there = draw.sample(FOUR, draw.randint(1, 4))
        order = table.order(asked, there)
        assert sorted(order) == sorted(there)
        marks = [one in excluded for one in order]
        assert marks == sorted(marks), f"{number}: {order} without {excluded}"
        table.note_start(asked, order[0])
        if draw.random() < 0.7:
            table.note_end(order[0])


def test_a_holder_that_is_gone_is_not_waited_for() -> None:
    table = PrefixTable(slack=1)
    table.note_start(hint("one"), "a")
    assert table.order(hint("one"), ["b", "c"]) == ["b", "c"]


def test_the_oldest_beginnings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PrefixTable(slack=1000)
    monkeypatch.setattr(prefix_table, "MOST_KEYS", 10)
    for number in range(30):
        table.note_start(hint(f"{number}"), "d")
        table.note_end("d")
    table.note_start(hint(), "d")
    assert table.order(hint("29"), FOUR)[0] == "d"
    assert table.order(hint("19"), FOUR)[0] != "d"
