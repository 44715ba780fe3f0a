"""A report in result.json and in words, against numbers worked out by hand."""

from graphcore.streaming.report import Measured, StreamingReport, TierMemory, report_streaming
from graphcore.streaming.timeline import Event
from graphcore.tasks.report.stream_watch import streaming_lines, streaming_record

# two steps in 4 s; 3 GB in the 2 s from 0 to 1 and from 2 to 3; 0.5 s of them waited for group 2, 0.25 s for group 1
EVENTS = (
    Event("copy", 1, 0, 1, 1_000_000_000),
    Event("stall", 1, 0.75, 1.0),
    Event("copy", 2, 2, 3, 2_000_000_000),
    Event("stall", 2, 2.5, 3.0),
)


UNKNOWN = TierMemory()


def report_of(device: TierMemory = UNKNOWN, host: TierMemory = UNKNOWN) -> StreamingReport:
    return report_streaming(EVENTS, Measured(0, 4, 2, 3, raw_link=2e9, device=device, host=host))


def test_a_record_has_rates_in_gb_per_second_and_the_rest_as_it_is() -> None:
    report = report_of(TierMemory(290_000_000, 300_000_000), TierMemory(10, 20))
    assert streaming_record("auto", report, expert_hit_rate=0.625, expert_link_nbytes=77) == {
        "policy": "auto",
        "link_gb_per_second": 1.5,
        "wall_gb_per_second": 0.75,
        "raw_link_gb_per_second": 2.0,
        "link_share": 0.75,
        "bytes_per_token": 1_500_000_000,
        "overlap": 0.625,
        "copy_seconds": 2.0,
        "hidden_by_drafts_seconds": 0.0,
        "draft_seconds": 0.0,
        "stall_seconds": 0.75,
        "stall_seconds_per_group": [0.0, 0.25, 0.5],
        "device_peak_bytes": 290_000_000,
        "device_budget_bytes": 300_000_000,
        "host_peak_bytes": 10,
        "host_budget_bytes": 20,
        "expert_hit_rate": 0.625,
        "expert_link_bytes": 77,
    }


def test_drafting_is_told_of_where_there_is_some() -> None:
    events = (*EVENTS, Event("draft", 0, 2.25, 2.75))
    report = report_streaming(events, Measured(0, 4, 2, 3))
    assert streaming_record("on", report)["hidden_by_drafts_seconds"] == 0.25
    (_, waits, *_) = streaming_lines("on", report)
    assert waits.startswith("62% of 2.00 s of copying hidden; 0.25 s of it behind 0.50 s of drafting; waited 0.75 s of")


def test_with_streaming_off_the_same_fields_are_null() -> None:
    nothing = streaming_record("off", None)
    assert nothing.keys() == streaming_record("on", report_of()).keys()
    assert {key for key, value in nothing.items() if value is not None} == {"policy"}


def test_a_report_is_told_in_three_lines() -> None:
    report = report_of(TierMemory(290_000_000, 300_000_000), TierMemory(2_000_000_000))
    assert streaming_lines("on", report, 0.625) == [
        "streaming=on: 1.40 GiB per step, 1.40 GiB/s while copying (75% of the raw link's 1.86 GiB/s), "
        "715.3 MiB/s over all the time",
        "62% of 2.00 s of copying hidden; waited 0.75 s of 4.00 s, longest for group 2 (0.50 s)",
        "device peak 276.6 MiB of 286.1 MiB allowed; host peak 1.86 GiB; "
        "62% of routed experts were on the device already",
    ]


def test_a_raw_link_that_was_slower_than_the_run_is_left_out() -> None:
    (link, *_) = streaming_lines("on", report_streaming(EVENTS, Measured(0, 4, 2, 3, raw_link=1.4e9)))
    assert link == "streaming=on: 1.40 GiB per step, 1.40 GiB/s while copying, 715.3 MiB/s over all the time"


def test_what_is_not_known_is_left_out() -> None:
    report = report_streaming([], Measured(0, 1, 1, 1))
    assert streaming_lines("auto", report) == ["streaming=auto: nothing moved", "waited 0.00 s of 1.00 s"]
