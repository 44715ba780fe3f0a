"""The files of `trace=true`, in the run's folder: copies and computation over time while tokens were made.

    trace.json     Chrome trace, for chrome://tracing or ui.perfetto.dev; all events that were kept
    timeline.png   picture of the last passes
    timeline.html  page that plays the run, for any browser (timeline_page.py)

Format of the JSON: "Trace Event Format" of the Chromium project (JSON object form; "M" metadata, "X" complete events).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from graphcore.streaming.timeline import Event
from graphcore.tasks.report.console import Console
from graphcore.tasks.report.output_files import write_text
from graphcore.tasks.report.timeline_page import write_timeline_page
from graphcore.tasks.report.timeline_plot import lane_name, lanes_of, plot_timeline
from graphcore.tasks.task import Record

JSON_NAME = "trace.json"
PICTURE_NAME = "timeline.png"
PAGE_NAME = "timeline.html"
PROCESS = 1  # an arbitrary number for the only process


def write_trace(folder: Path, events: Sequence[Event], title: str, plan: Record, console: Console) -> None:
    """Write the trace files and print their paths; without events, print a note instead.

    Args:
        folder: folder of the run.
        events: events of the measured interval, in any order.
        title: description of the run: model, policy, graph.
        plan: record of `what_if.plan_record`.

    Raises:
        OutputError: the folder cannot be written to, or the disk is full.
    """
    if not events:
        console.note("trace: nothing was streamed, so there is nothing to draw; use streaming=on or streaming=auto")
        return
    write_text(folder / JSON_NAME, json.dumps(chrome_trace(events, title)) + "\n")
    plot_timeline(folder / PICTURE_NAME, events, title)
    write_timeline_page(folder / PAGE_NAME, events, title, plan)
    console.note(
        f"trace: {folder / PICTURE_NAME}, {PAGE_NAME} (any browser), {JSON_NAME} (chrome://tracing or ui.perfetto.dev)"
    )


def chrome_trace(events: Sequence[Event], title: str) -> Record:
    """Return the events as a Chrome trace: a thread for each lane and worker, times relative to the first event.

    Args:
        events: at least one event.
        title: name of the process.
    """
    lanes = lanes_of(events)
    threads = {lane: number for number, lane in enumerate(lanes, start=1)}
    zero = min(event.begin for event in events)
    names = [_metadata("process_name", 0, name=title)]
    for lane, thread in threads.items():
        names.append(_metadata("thread_name", thread, name=lane_name(lane, lanes)))
        names.append(_metadata("thread_sort_index", thread, sort_index=thread))
    timed = sorted(events, key=lambda event: event.begin)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": names + [_complete(event, threads[event.lane, event.worker], zero) for event in timed],
    }


def _metadata(kind: str, thread: int, **values: str | int) -> Record:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "ts": 0, "name": kind, "args": values}


def _complete(event: Event, thread: int, zero: float) -> Record:
    """Return an event in the trace's form, with start and duration in microseconds."""
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": thread,
        "ts": round((event.begin - zero) * 1e6, 3),
        "dur": round((event.end - event.begin) * 1e6, 3),
        "name": f"group {event.group}",
        "cat": event.lane,
        "args": {"group": event.group, "bytes": event.nbytes},
    }
