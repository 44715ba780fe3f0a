"""Which replica a request goes to."""

import random
from collections import Counter

import pytest

from graphcore.serving.replicas import prefix_table
from graphcore.serving.replicas.prefix_table import PrefixTable, RoutingHint

FOUR = ["a", "b", "c", "d"]


def hint(*keys: str) -> RoutingHint:
    return RoutingHint([key.encode() for key in keys])


def run(table: PrefixTable, asked: RoutingHint, replica: str) -> None:
    """Let a replica have a request that does not end yet."""
    table.note_sent(replica)
    table.note_taken(asked, replica)


def test_a_chat_stays_where_its_longest_beginning_is() -> None:
    table = PrefixTable(slack=2)
    run(table, hint("one"), "b")
    run(table, hint("one", "two"), "c")
    for replica in ("b", "c"):
        table.note_end(replica)
    assert table.order(hint("one"), FOUR)[0] == "c", "the newest holder"
    assert table.order(hint("one", "two", "three"), FOUR)[0] == "c"
    run(table, hint("one"), "b")
    assert table.order(hint("one"), FOUR)[0] == "b"
    assert table.order(hint("one", "two"), FOUR)[0] == "c", "the longest, not the newest"


def test_a_busy_holder_is_left_unless_the_call_is_pinned() -> None:
    table = PrefixTable(slack=2)
    for _ in range(3):
        run(table, hint("one"), "a")
    assert table.order(hint("one"), ["a", "b"]) == ["b", "a"], "three more than the other"
    assert table.order(RoutingHint([b"one"], is_pinned=True), ["a", "b"]) == ["a", "b"]
    run(table, hint(), "b")
    assert table.order(hint("one"), ["a", "b"]) == ["a", "b"], "two more are within the slack"


def test_new_chats_are_spread_and_the_least_busy_replica_comes_first() -> None:
    table, chosen = PrefixTable(slack=4), Counter[str]()
    for chat in range(40):
        first = table.order(hint(f"chat {chat}"), FOUR)[0]
        run(table, hint(f"chat {chat}"), first)
        table.note_end(first)
        chosen[first] += 1
    assert set(chosen.values()) == {10}
    run(table, hint(), "a")
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
        run(table, asked, order[0])
        if draw.random() < 0.7:
            table.note_end(order[0])


def test_a_holder_that_is_gone_is_not_waited_for() -> None:
    table = PrefixTable(slack=1)
    run(table, hint("one"), "a")
    assert table.order(hint("one"), ["b", "c"]) == ["b", "c"]


def test_requests_that_come_together_are_spread_before_any_is_sent() -> None:
    table = PrefixTable(slack=4)
    assert sorted(table.order(hint(), FOUR, f"{number}")[0] for number in range(8)) == sorted(2 * FOUR)


def test_a_request_that_is_given_up_counts_for_a_second_and_one_that_was_refused_not_at_all() -> None:
    now = [0.0]
    table = PrefixTable(slack=0, clock=lambda: now[0])
    table.note_taken(hint("one"), "a")
    table.order(hint("one"), ["a", "b"], "given up")
    assert table.order(hint("one"), ["a", "b"])[0] == "b"
    now[0] = 1.5
    assert table.order(hint("one"), ["a", "b"])[0] == "a"
    for _ in range(20):  # Ray says that a request has ended also if the replica has refused it
        table.note_sent("b")
        table.note_end("b")
    run(table, hint(), "b")
    assert table.order(hint(), ["a", "b"])[0] == "a"


def test_the_oldest_beginnings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PrefixTable(slack=1000)
    monkeypatch.setattr(prefix_table, "MOST_KEYS", 10)
    for number in range(30):
        run(table, hint(f"{number}"), "d")
        table.note_end("d")
    run(table, hint(), "d")
    assert table.order(hint("29"), FOUR)[0] == "d"
    assert table.order(hint("19"), FOUR)[0] != "d"
