"""A picture of the timeline: lanes over time, a colour for each streamed group, stalls in red."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from graphcore.config.byte_sizes import in_words, rate_in_words
from graphcore.streaming.report import Measured, report_streaming
from graphcore.streaming.timeline import Event, Lane
from graphcore.tasks.report.output_files import write_bytes

WIDTH, DPI = 16.0, 100  # inches, dots per inch: 1600 pixels
LANE_HEIGHT = 0.42  # inches
PASSES = 2  # number of passes that are drawn, from the end
CROWDED = 90  # steps from which on fewer passes are drawn, so that bars have room for their numbers
STALL, RESIDENT = "#e02020", "#c9ccd1"
PALETTE = ("#4c78a8", "#f2b134", "#54a24b", "#9467bd", "#72b7b2", "#a67c52", "#8fb8de", "#c5d86d")  # no red
BORDER: dict[str, Any] = {"color": "black", "linewidth": 1.0}  # between passes
LIGHT = {RESIDENT, "#f2b134", "#72b7b2", "#8fb8de", "#c5d86d"}  # colours that take black letters
AXES_PIXELS, LETTER_PIXELS = 1480, 6.5  # approximate widths of the lanes and of a label's character
FONT = 8.5
LONG = 10.0  # seconds from which on the axis counts seconds, not milliseconds
LANE_ORDER: tuple[Lane, ...] = (
    "compute",
    "draft",
    "stall",
    "copy",
    "read",
)  # from top to bottom: computation, a draft model, stalls, then each worker that copied or read

LaneKey = tuple[Lane, int]  # lane and worker's number


@dataclass(frozen=True)
class DrawnPart:
    """The part of a timeline that is drawn.

    Attributes:
        begin, end: seconds of time.perf_counter.
        borders: start times of its passes; the first is `begin`.
        num_passes: number of complete passes of the whole timeline.
    """

    begin: float
    end: float
    borders: tuple[float, ...]
    num_passes: int


def last_passes(events: Sequence[Event]) -> DrawnPart:
    """Return the part of the last two passes over the weights; one pass if they have many steps, or there is one only.

    A pass begins where the computing group is an earlier one than before; the first begins with the first event. If the
    last pass ends at an earlier group than the pass before it, it was not finished and is left out.

    Args:
        events: at least one event, in any order.
    """
    steps, borders = _steps(events), pass_starts(events)
    end = max(event.end for event in events)
    if len(borders) > 1 and _last_group(steps, borders[-1], end) < _last_group(steps, borders[-2], borders[-1]):
        end = borders.pop()  # the pass was begun ahead, or interrupted
    is_crowded = PASSES * len(steps) / len(borders) > CROWDED
    shown = tuple(borders[-1:] if is_crowded else borders[-PASSES:])
    return DrawnPart(shown[0], end, shown, len(borders))


def pass_starts(events: Sequence[Event]) -> list[float]:
    """Return the times at which passes over the weights begin, as `last_passes` says, unfinished ones included.

    Args:
        events: at least one event, in any order.
    """
    steps = _steps(events)
    is_one = len({step.group for step in steps}) == 1  # with one group each step is a pass
    starts = [step.begin for before, step in pairwise(steps) if is_one or step.group < before.group]
    return [min(event.begin for event in events), *starts]


def _steps(events: Sequence[Event]) -> list[Event]:
    return sorted((event for event in events if event.lane == "compute"), key=lambda event: event.begin)


def _last_group(steps: Sequence[Event], begin: float, end: float) -> int:
    """Return the highest group that a pass computed; -1 if it computed none."""
    return max((step.group for step in steps if begin <= step.begin < end), default=-1)


def plot_timeline(path: Path, events: Sequence[Event], title: str) -> None:
    """Write a PNG, 1600 pixels wide, of the last passes.

    Args:
        events: at least one event, in any order.
        title: description of the run.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = last_passes(events)
    colours = colours_of(events)
    shown = [event for event in events if event.end > drawn.begin and event.begin < drawn.end]
    lanes = lanes_of([*shown, Event("stall", 0, drawn.begin, drawn.begin)])  # always shows the lane of stalls
    figure = Figure(figsize=(WIDTH, 1.7 + LANE_HEIGHT * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, [event for event in shown if (event.lane, event.worker) == lane], drawn, colours)
    _finish(axes, lanes, drawn)
    axes.set_title(_headline(title, shown, drawn), loc="left", fontsize=11, parse_math=False)
    _add_legend(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    write_bytes(path, picture.getvalue())


def colours_of(events: Sequence[Event]) -> dict[int, str]:
    """Return a colour for each group: neighbours among streamed groups differ, resident groups are grey."""
    streamed = sorted({event.group for event in events if event.lane in ("copy", "read")})
    colours = {event.group: RESIDENT for event in events}
    return colours | {group: PALETTE[index % len(PALETTE)] for index, group in enumerate(streamed)}


def _draw_lane(axes: Any, row: int, events: Sequence[Event], drawn: DrawnPart, colours: dict[int, str]) -> None:
    """Draw a bar for each event, with the group's number over adjacent bars of one group if it has room."""
    scale = 1.0 if _is_long(drawn) else 1e3
    events = sorted(events, key=lambda event: event.begin)
    for group, members in groupby(events, key=lambda event: event.group):
        bars = [
            (max(event.begin, drawn.begin) - drawn.begin, min(event.end, drawn.end) - drawn.begin) for event in members
        ]
        lane = events[0].lane
        colour = {"stall": STALL, "draft": RESIDENT}.get(lane, colours[group])
        # an edge of the bar's own colour makes bars narrower than a pixel visible
        spans = [(begin * scale, (end - begin) * scale) for begin, end in bars]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=colour, edgecolor=colour, linewidth=0.5)
        first, last = bars[0][0], bars[-1][1]
        pixels = (last - first) / (drawn.end - drawn.begin) * AXES_PIXELS
        texts = () if lane == "draft" else (f"group {group}", str(group))  # a draft model has no groups
        label = next((text for text in texts if len(text) * LETTER_PIXELS < pixels - 4), "")
        ink = "black" if colour in LIGHT else "white"
        axes.text((first + last) / 2 * scale, row, label, ha="center", va="center_baseline", color=ink, fontsize=FONT)


def _finish(axes: Any, lanes: Sequence[LaneKey], drawn: DrawnPart) -> None:
    """Label lanes and axis, and mark the start of each pass."""
    scale, unit = (1.0, "s") if _is_long(drawn) else (1e3, "ms")
    axes.set_yticks(range(len(lanes)), [lane_name(lane, lanes) for lane in lanes], fontsize=10)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_xlim(0, (drawn.end - drawn.begin) * scale)
    axes.set_xlabel(unit)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for border in drawn.borders[1:]:
        axes.axvline((border - drawn.begin) * scale, **BORDER, zorder=0.5)  # below the bars and their numbers


def _headline(title: str, events: Sequence[Event], drawn: DrawnPart) -> str:
    """Return the title, with the passes that are drawn and their figures."""
    num_shown, num_groups = len(drawn.borders), 1 + max(event.group for event in events)
    report = report_streaming(events, Measured(drawn.begin, drawn.end, num_shown, num_groups))
    which = f"pass {drawn.num_passes}" if num_shown == 1 else f"passes {drawn.num_passes - 1} and {drawn.num_passes}"
    which += f" of {drawn.num_passes}"
    facts = [f"{in_words(report.nbytes)} moved in {report.seconds:.3g} s"]
    if report.busy_link is not None and report.overlap is not None:
        facts.append(f"{rate_in_words(report.busy_link)} while copying")
        facts.append(f"{report.overlap:.0%} of the copy time hidden")
    facts.append(f"waited {report.stall_seconds:.3g} s")
    return f"{title}\n{which}: {', '.join(facts)}"


def _add_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    meanings = {
        "streamed group, with its number": PALETTE[0],
        "resident group": RESIDENT,
        "stall: waiting for a group": STALL,
    }
    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in meanings.items()]
    handles.append(Line2D([], [], **BORDER, label="next pass begins"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=9, frameon=False)


def _is_long(drawn: DrawnPart) -> bool:
    return drawn.end - drawn.begin >= LONG


def lanes_of(events: Sequence[Event]) -> list[LaneKey]:
    """Return the lanes that have events, from top to bottom."""
    found = {(event.lane, event.worker) for event in events}
    return sorted(found, key=lambda lane: (LANE_ORDER.index(lane[0]), lane[1]))


def lane_name(lane: LaneKey, lanes: Sequence[LaneKey]) -> str:
    """Return "copy", or "copy 2" where there are several."""
    kind, worker = lane
    is_alone = sum(other == kind for other, _ in lanes) == 1
    return kind if is_alone else f"{kind} {worker}"
