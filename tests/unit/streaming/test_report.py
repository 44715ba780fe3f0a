"""A report's numbers, against cases worked out by hand and against sets of whole seconds."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcore.streaming.report import Measured, TierMemory, report_streaming
from graphcore.streaming.timeline import Event

# seconds     0  1  2  3  4  5  6  7  8  9 10
# copy 0      [--- 1 ---]           [- 0 -]        100 + 60 bytes
# copy 1         [--- 1 ---]                       120 bytes
# stall          [1 ]              [0]             of group 1 from 2 to 3, of group 0 from 7 to 7.5
# compute     [0 ]  [---- 1 ----]      [-- 0 --]
BY_HAND = (
    Event("copy", 1, 0, 3, 100, worker=0),
    Event("compute", 0, 0, 1),
    Event("stall", 1, 2, 3),
    Event("copy", 1, 1, 4, 120, worker=1),
    Event("compute", 1, 3, 7),
    Event("stall", 0, 7, 7.5),
    Event("copy", 0, 7, 9, 60, worker=0),
    Event("compute", 0, 7.5, 10),
)


def test_a_case_worked_out_by_hand() -> None:
    measured = Measured(0, 10, num_passes=2, num_groups=3, raw_link=70.0)
    report = report_streaming(BY_HAND, measured)
    assert report.seconds == 10
    assert report.nbytes == 280
    assert report.nbytes_per_pass == 140
    assert report.copy_seconds == 6  # 0 to 4 and 7 to 9
    assert report.hidden_seconds == 4.5  # less 2 to 3 and 7 to 7.5
    assert report.overlap == 0.75
    assert report.busy_link == pytest.approx(280 / 6)
    assert report.wall_link == 28
    assert report.busy_link_share == pytest.approx(2 / 3)
    assert report.stall_seconds == 1.5
    assert report.stall_seconds_per_group == (0.5, 1.0, 0.0)
    assert report.compute_seconds == 7.5


def test_drafting_hides_what_is_copied_while_nobody_waits() -> None:
    drafting = (Event("draft", 0, 1.5, 2.5), Event("draft", 0, 3.5, 4.5), Event("draft", 0, 8, 9.5))
    report = report_streaming((*BY_HAND, *drafting), Measured(0, 10, num_passes=2, num_groups=3))
    assert report.draft_seconds == 3.5
    assert report.hidden_by_drafts_seconds == 2  # 1.5 to 2, 3.5 to 4 and 8 to 9
    assert (report.copy_seconds, report.hidden_seconds) == (6, 4.5)
    assert report_streaming(BY_HAND, Measured(0, 10, 2, 3)).hidden_by_drafts_seconds == 0


def test_events_that_reach_out_of_the_interval_count_by_the_part_inside() -> None:
    report = report_streaming(BY_HAND, Measured(2, 8, num_passes=1, num_groups=2))
    assert report.nbytes == round(100 / 3 + 120 * 2 / 3 + 60 / 2)
    assert report.copy_seconds == 3  # 2 to 4 and 7 to 8
    assert report.compute_seconds == 4.5
    assert report.stall_seconds_per_group == (0.5, 1.0)


def test_a_copy_that_took_no_time_counts_with_all_its_bytes() -> None:
    events = [Event("copy", 0, at, at, 8) for at in (1.0, 2.0, 3.0)]
    assert report_streaming(events, Measured(1, 3, 1, 1)).nbytes == 16  # the end is outside


def test_what_is_read_on_its_way_to_a_device_is_under_way_and_counts_once() -> None:
    """Read from 0 to 4 and copied from 3 to 5, while compute waits from 1 to 5."""
    events = [Event("read", 0, 0, 4, 50), Event("copy", 0, 3, 5, 50), Event("stall", 0, 1, 5)]
    report = report_streaming(events, Measured(0, 10, num_passes=1, num_groups=1))
    assert (report.nbytes, report.copy_seconds, report.hidden_seconds) == (50, 5, 1)


def test_nothing_moved_is_no_rate_and_no_overlap() -> None:
    report = report_streaming([Event("compute", 0, 0, 1)], Measured(0, 1, num_passes=0, num_groups=1))
    assert (report.nbytes, report.copy_seconds, report.stall_seconds) == (0, 0, 0)
    assert report.busy_link is report.busy_link_share is report.overlap is report.nbytes_per_pass is None
    assert report.wall_link == 0


def test_budgets_are_handed_through() -> None:
    device, host = TierMemory(90, 100), TierMemory(None, None)
    report = report_streaming([], Measured(0, 1, 1, 1, None, device, host))
    assert (report.device, report.host) == (device, host)


EVENTS = st.lists(
    st.builds(
        lambda lane, group, begin, length, nbytes: Event(lane, group, begin, begin + length, nbytes),
        st.sampled_from(["copy", "stall", "compute"]),
        st.integers(0, 3),
        st.integers(0, 30),
        st.integers(1, 12),
        st.integers(0, 1000),
    ),
    max_size=20,
)


def seconds_of(events: list[Event], begin: int, end: int) -> set[int]:
    """Return the whole seconds of the interval in which any of the events was under way."""
    return {second for event in events for second in range(int(event.begin), int(event.end)) if begin <= second < end}


@given(EVENTS, st.integers(0, 20), st.integers(1, 25))
def test_a_report_is_what_counting_seconds_one_by_one_gives(events: list[Event], begin: int, length: int) -> None:
    end = begin + length
    report = report_streaming(events, Measured(begin, end, num_passes=3, num_groups=4))
    lanes = {lane: [event for event in events if event.lane == lane] for lane in ("copy", "stall", "compute")}
    copy, stall = seconds_of(lanes["copy"], begin, end), seconds_of(lanes["stall"], begin, end)
    nbytes = sum(
        (
            Fraction(event.nbytes, int(event.end - event.begin)) * len(seconds_of([event], begin, end))
            for event in lanes["copy"]
        ),
        start=Fraction(0),
    )
    assert abs(report.nbytes - nbytes) <= Fraction(1, 2) + Fraction(1, 10**6)
    assert report.copy_seconds == len(copy)
    assert report.hidden_seconds == len(copy - stall)
    assert report.compute_seconds == len(seconds_of(lanes["compute"], begin, end))
    assert report.stall_seconds == len(stall)
    for group, seconds in enumerate(report.stall_seconds_per_group):
        assert seconds == len(seconds_of([event for event in lanes["stall"] if event.group == group], begin, end))
    assert report.overlap == (len(copy - stall) / len(copy) if copy else None)
