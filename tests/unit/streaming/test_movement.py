"""Running totals of a timeline, asked in any rhythm, against one count over all events."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcore.streaming import movement
from graphcore.streaming.movement import MovementTotals
from graphcore.streaming.report import Measured, report_streaming
from graphcore.streaming.timeline import Event, Lane, Timeline, join_copies, split

TICKS = st.integers(0, 20)
LANES: tuple[Lane, ...] = ("copy", "read", "stall", "compute", "draft")
EVENTS = st.lists(st.builds(Event, st.sampled_from(LANES), st.just(0), TICKS, TICKS, st.integers(0, 9)), max_size=20)


def finished(events: list[Event]) -> list[Event]:
    """Return events that end after they begin, in the order in which they end."""
    spans = [(one, min(one.begin, one.end), max(one.begin, one.end) + 1) for one in events]
    turned = [Event(one.lane, 0, begin, end, one.nbytes * (one.lane == "copy")) for one, begin, end in spans]
    return sorted(turned, key=lambda event: event.end)


@given(EVENTS, st.lists(st.integers(0, 20), max_size=5))
def test_totals_are_those_of_all_events_at_once(events: list[Event], asked_at: list[int]) -> None:
    timeline = Timeline()
    totals = MovementTotals(timeline)
    for at, event in enumerate(finished(events)):
        timeline.add(event)
        if at in asked_at:
            totals.now()
    expected = report_streaming(finished(events), Measured(0.0, 30.0, 1, 1))
    found = totals.now()
    assert found == totals.now()
    assert (found.nbytes, found.copy_seconds) == (expected.nbytes, expected.copy_seconds)
    assert (found.hidden_seconds, found.stall_seconds) == (expected.hidden_seconds, expected.stall_seconds)
    assert found.hidden_by_drafts_seconds == expected.hidden_by_drafts_seconds


def test_of_older_times_only_the_sums_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "MOST_RECENT", 40)
    chance = random.Random(0)
    timeline, begin = Timeline(), 0.0
    totals = MovementTotals(timeline)
    for number in range(1000):
        begin += chance.random()
        end = begin + chance.random()
        timeline.add(Event(("stall", "draft", "copy", "copy", "copy")[number % 5], 0, begin, end, 7))
        timeline.add(Event("draft", 0, begin, begin + 0.4))
        if number % 10 == 9:
            found = totals.now()
            assert len(totals._copies) + len(totals._stalls) + len(totals._drafts) <= 3 * 40
    expected = report_streaming(list(timeline.events), Measured(0.0, 2000.0, 1, 1))
    assert found.copy_seconds == pytest.approx(expected.copy_seconds, rel=1e-9)
    assert found.hidden_seconds == pytest.approx(expected.hidden_seconds, rel=1e-9)
    assert found.stall_seconds == pytest.approx(expected.stall_seconds, rel=1e-9)
    assert 0 < found.hidden_by_drafts_seconds == pytest.approx(expected.hidden_by_drafts_seconds, rel=1e-9)


def test_a_reader_gets_each_event_once_and_the_newest_in_order() -> None:
    timeline, events = Timeline(), [Event("copy", at, at, at + 1, 1) for at in range(10)]
    read: list[Event] = []
    seen = 0
    for at, event in enumerate(events):
        timeline.add(event)
        if at % 4 == 3:
            new, seen = timeline.after(seen)
            read += new
    new, seen = timeline.after(seen)
    assert [*read, *new] == events
    assert seen == 10
    assert timeline.after(seen) == ([], 10)
    assert timeline.newest(3) == events[-3:]
    assert timeline.newest(100) == events


def test_split_cuts_what_covers_a_time() -> None:
    assert split([(0, 5), (7, 8)], 3) == ([(0, 3)], [(3, 5), (7, 8)])
    assert split([(0, 5), (7, 8)], 6) == ([(0, 5)], [(7, 8)])
    assert split([], 1) == ([], [])


def test_copies_of_one_thread_for_one_group_are_joined() -> None:
    events = [
        Event("copy", 1, 0.0, 1.0, 10, 0),
        Event("copy", 1, 1.00001, 2.0, 20, 0),  # the next job
        Event("copy", 1, 1.0, 2.0, 30, 1),  # of another thread
        Event("copy", 1, 2.1, 3.0, 40, 0),  # after a pause
        Event("copy", 2, 3.0, 4.0, 50, 0),  # of another group
        Event("compute", 1, 3.0, 4.0),
        Event("compute", 1, 4.0, 5.0),  # a step of its own
    ]
    assert join_copies(reversed(events)) == [
        Event("copy", 1, 0.0, 2.0, 30, 0),
        Event("copy", 1, 1.0, 2.0, 30, 1),
        Event("copy", 1, 2.1, 3.0, 40, 0),
        Event("compute", 1, 3.0, 4.0),
        Event("copy", 2, 3.0, 4.0, 50, 0),
        Event("compute", 1, 4.0, 5.0),
    ]
