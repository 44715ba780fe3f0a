"""The files of trace=true: a Chrome trace with every event, and a picture with the last passes."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.streaming import plan_of, ring_events

from graphcore.streaming.timeline import Event
from graphcore.tasks.report.chrome_trace import chrome_trace, write_trace
from graphcore.tasks.report.console import Console
from graphcore.tasks.report.timeline_plot import PALETTE, RESIDENT, STALL, colours_of, last_passes, plot_timeline

PLAN = plan_of(4, frozenset({1}), 24_000_000_000)
EVENTS = (
    Event("copy", 1, 10.002, 10.004, 4096, worker=1),
    Event("copy", 1, 10.001, 10.0035, 8192, worker=0),
    Event("stall", 1, 10.0015, 10.004),
    Event("compute", 1, 10.004, 10.0045),
)


def pixels_of(path: Path) -> NDArray[np.uint8]:
    """Return [height, width, 3] red, green and blue."""
    from matplotlib.image import imread

    pixels: NDArray[np.uint8] = (imread(path)[:, :, :3] * 255).round().astype(np.uint8)
    return pixels


def rows_with(pixels: NDArray[np.uint8], colour: str) -> int:
    """Return how many rows of pixels have the colour "#rrggbb"; the legend's patches have a few."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((pixels == parts).all(axis=2).any(axis=1).sum())


def test_a_trace_has_each_event_once_in_its_lane_with_group_and_bytes() -> None:
    trace = chrome_trace(EVENTS, "a model")
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    found = [
        (names[event["tid"]], event["name"], event["ts"], event["dur"], event["args"])
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]
    assert found == [
        ("copy 0", "group 1", 0.0, 2500.0, {"group": 1, "bytes": 8192}),
        ("stall", "group 1", 500.0, 2500.0, {"group": 1, "bytes": 0}),
        ("copy 1", "group 1", 1000.0, 2000.0, {"group": 1, "bytes": 4096}),
        ("compute", "group 1", 3000.0, 500.0, {"group": 1, "bytes": 0}),
    ]


def test_every_entry_of_a_trace_has_what_the_format_asks_for() -> None:
    trace = json.loads(json.dumps(chrome_trace(ring_events(2, 4, frozenset({1, 3})), "a model")))
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name", "args"} <= event.keys()
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"] in ("copy", "stall", "compute")
    named = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert named == {event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"}
    process = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert process == ["a model"]


def test_one_worker_is_a_lane_without_a_number() -> None:
    trace = chrome_trace([Event("copy", 0, 0, 1, 8)], "")
    assert [event["args"] for event in trace["traceEvents"] if event["name"] == "thread_name"] == [{"name": "copy"}]


def test_a_device_s_lanes_come_from_compute_down_to_the_threads_that_read(tmp_path: Path) -> None:
    events = [Event("read", 2, 0, 1, 8, worker=1), Event("read", 1, 0, 1, 8), Event("copy", 1, 1, 2, 8)]
    events += [Event("stall", 1, 0, 2), Event("compute", 1, 2, 3)]
    trace = chrome_trace(events, "")
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["compute", "stall", "copy", "read 0", "read 1"]
    assert colours_of(events)[2] in PALETTE  # though it has only been read so far
    plot_timeline(tmp_path / "timeline.png", events, "a device")
    assert rows_with(pixels_of(tmp_path / "timeline.png"), PALETTE[1]) > 20


def test_the_last_two_passes_are_drawn_and_one_where_they_have_many_groups() -> None:
    few, many = ring_events(5, 4, frozenset({1}), 0.0, 1.0), ring_events(5, 80, frozenset({1}), 0.0, 1.0)
    window = last_passes(few)
    assert (window.begin, window.end, window.borders, window.num_passes) == (112, 120, (112, 116), 5)
    window = last_passes(many)
    assert (window.begin, window.end, window.borders, window.num_passes) == (420, 500, (420,), 5)


def test_a_first_pass_begins_with_its_first_copy() -> None:
    window = last_passes([Event("compute", 0, 5, 6), Event("copy", 0, 2, 5, 8)])
    assert (window.begin, window.end, window.borders, window.num_passes) == (2, 6, (2,), 1)


def test_two_steps_of_one_group_are_of_one_pass() -> None:
    steps = [Event("compute", group, at, at + 1) for at, group in enumerate((0, 1, 1, 2, 0, 1, 1, 2))]
    assert last_passes(steps).borders == (0, 4)


def test_steps_of_the_only_group_are_passes() -> None:
    assert last_passes([Event("compute", 7, at, at + 1) for at in range(5)]).borders == (3, 4)


def test_a_last_pass_that_was_only_begun_is_not_drawn() -> None:
    whole = [Event("compute", group, at, at + 1) for at, group in enumerate((0, 1, 2) * 3)]
    window = last_passes([*whole, Event("compute", 0, 9, 9.5), Event("copy", 1, 8.5, 11, 8)])
    assert (window.begin, window.end, window.borders, window.num_passes) == (3, 9, (3, 6), 3)


def test_streamed_groups_have_colours_and_resident_ones_are_grey() -> None:
    colours = colours_of(ring_events(1, 6, frozenset({1, 2, 4})))
    assert [colours[group] for group in range(6)] == [RESIDENT, *PALETTE[:2], RESIDENT, PALETTE[2], RESIDENT]


@pytest.mark.parametrize(("copy_seconds", "stalls"), [(0.030, True), (0.001, False)])
def test_a_picture_is_1600_pixels_wide_and_red_where_it_was_waited(
    tmp_path: Path, copy_seconds: float, stalls: bool
) -> None:
    first_is_there = [event for event in ring_events(3, 4, frozenset({1, 3}), copy_seconds) if event.begin >= 100.05]
    plot_timeline(tmp_path / "timeline.png", first_is_there, "a $model_with signs")
    pixels = pixels_of(tmp_path / "timeline.png")
    assert pixels.shape[1] == 1600
    drawn = {colour: rows_with(pixels, colour) > 20 for colour in (*PALETTE[:3], RESIDENT, STALL)}
    assert drawn == {PALETTE[0]: True, PALETTE[1]: True, PALETTE[2]: False, RESIDENT: True, STALL: stalls}


def test_files_lie_in_the_runs_folder_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path, EVENTS, "a model", PLAN, Console(shows_progress=False))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.html").read_text().startswith("<!doctype html>")
    said = capsys.readouterr().err.replace("\n", "")
    assert f"{tmp_path / 'timeline.png'}, timeline.html" in said


def test_without_events_there_is_a_line_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path, [], "a model", PLAN, Console(shows_progress=False))
    assert list(tmp_path.iterdir()) == []
    assert "streaming=on" in capsys.readouterr().err


def test_the_choice_of_the_last_token_is_no_pass_of_its_own() -> None:
    """A captured step ends with it, in group 0, which is an earlier one than the head's."""
    steps = [Event("compute", group, float(at), at + 0.5) for at, group in enumerate([0, 1, 2, 0, 1, 2, 0])]
    window = last_passes(steps)
    assert window.num_passes == 2
    assert window.borders == (0.0, 3.0)
