"""The timeline as a picture: lanes over time, a colour for each streamed group, stalls in red."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from graphcore.config.byte_sizes import in_words, rate_in_words
from graphcore.streaming.report import Measured, report_streaming
from graphcore.streaming.timeline import Event
from graphcore.tasks.lanes import LaneKey, lane_name, lanes_of
from graphcore.tasks.output import write_bytes

WIDTH, DPI = 16.0, 100  # inches, dots per inch: 1600 pixels
LANE_HEIGHT = 0.42  # inches
PASSES = 2  # that are drawn: the last ones
CROWDED = 90  # steps from which on they are fewer, so that bars keep room for their numbers
STALL, RESIDENT = "#e02020", "#c9ccd1"
PALETTE = ("#4c78a8", "#f2b134", "#54a24b", "#9467bd", "#72b7b2", "#a67c52", "#8fb8de", "#c5d86d")  # none is red
BORDER: dict[str, Any] = {"color": "black", "linewidth": 1.0}  # between passes
LIGHT = {RESIDENT, "#f2b134", "#72b7b2", "#8fb8de", "#c5d86d"}  # black letters on these
AXES_PIXELS, LETTER_PIXELS = 1480, 6.5  # about what the lanes are wide, and a label's character
FONT = 8.5
LONG = 10.0  # seconds from which on the axis counts seconds, not milliseconds


@dataclass(frozen=True)
class Window:
    """The part of a timeline that is drawn.

    Attributes:
        begin, end: seconds of time.perf_counter.
        borders: where its passes begin; the first is `begin`.
        num_passes: of the whole timeline, each to its end.
    """

    begin: float
    end: float
    borders: tuple[float, ...]
    num_passes: int


def last_passes(events: Sequence[Event]) -> Window:
    """Return the window of the last two passes over the weights; of one if they have many groups, or there is one.

    A pass begins where the group that computes is an earlier one than before; the first, with the first event. A last
    one that ends before the pass before it did was not finished, and is left out.

    Args:
        events: at least one, in any order.
    """
    steps = sorted((event for event in events if event.lane == "compute"), key=lambda event: event.begin)
    borders = [min(event.begin for event in events)]
    is_one = len({step.group for step in steps}) == 1  # and then each of its steps is a pass
    borders += [step.begin for before, step in pairwise(steps) if is_one or step.group < before.group]
    end = max(event.end for event in events)
    if len(borders) > 1 and _last_group(steps, borders[-1], end) < _last_group(steps, borders[-2], borders[-1]):
        end = borders.pop()  # it was begun ahead, or interrupted
    is_crowded = PASSES * len(steps) / len(borders) > CROWDED
    shown = tuple(borders[-1:] if is_crowded else borders[-PASSES:])
    return Window(shown[0], end, shown, len(borders))


def _last_group(steps: Sequence[Event], begin: float, end: float) -> int:
    """Return how far a pass came, the number of a group; -1 if nothing was computed."""
    return max((step.group for step in steps if begin <= step.begin < end), default=-1)


def plot_timeline(path: Path, events: Sequence[Event], title: str) -> None:
    """Write a PNG, 1600 pixels wide, of the last passes.

    Args:
        events: at least one, in any order.
        title: what ran.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    window = last_passes(events)
    colours = colours_of(events)
    shown = [event for event in events if event.end > window.begin and event.begin < window.end]
    lanes = lanes_of([*shown, Event("stall", 0, window.begin, window.begin)])  # an empty lane says that none was
    figure = Figure(figsize=(WIDTH, 1.7 + LANE_HEIGHT * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, [event for event in shown if (event.lane, event.worker) == lane], window, colours)
    _finish(axes, lanes, window)
    axes.set_title(_headline(title, shown, window), loc="left", fontsize=11, parse_math=False)
    _add_legend(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    write_bytes(path, picture.getvalue())


def colours_of(events: Sequence[Event]) -> dict[int, str]:
    """Return a colour for each group; neighbours among the streamed ones differ, resident ones are all grey."""
    streamed = sorted({event.group for event in events if event.lane in ("copy", "read")})
    colours = {event.group: RESIDENT for event in events}
    return colours | {group: PALETTE[index % len(PALETTE)] for index, group in enumerate(streamed)}


def _draw_lane(axes: Any, row: int, events: Sequence[Event], window: Window, colours: dict[int, str]) -> None:
    """Draw a bar for each event, and the group's number over each run of bars of one group that has room for it."""
    scale = 1.0 if _is_long(window) else 1e3
    events = sorted(events, key=lambda event: event.begin)
    for group, members in groupby(events, key=lambda event: event.group):
        bars = [
            (max(event.begin, window.begin) - window.begin, min(event.end, window.end) - window.begin)
            for event in members
        ]
        is_stall = events[0].lane == "stall"
        colour = STALL if is_stall else colours[group]
        # an edge of the bar's own colour: what is narrower than a pixel is still seen
        spans = [(begin * scale, (end - begin) * scale) for begin, end in bars]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=colour, edgecolor=colour, linewidth=0.5)
        first, last = bars[0][0], bars[-1][1]
        pixels = (last - first) / (window.end - window.begin) * AXES_PIXELS
        label = next((text for text in (f"group {group}", str(group)) if len(text) * LETTER_PIXELS < pixels - 4), "")
        ink = "black" if colour in LIGHT else "white"
        axes.text((first + last) / 2 * scale, row, label, ha="center", va="center_baseline", color=ink, fontsize=FONT)


def _finish(axes: Any, lanes: Sequence[LaneKey], window: Window) -> None:
    """Name lanes and axis, and mark where passes begin."""
    scale, unit = (1.0, "s") if _is_long(window) else (1e3, "ms")
    axes.set_yticks(range(len(lanes)), [lane_name(lane, lanes) for lane in lanes], fontsize=10)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_xlim(0, (window.end - window.begin) * scale)
    axes.set_xlabel(unit)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for border in window.borders[1:]:
        axes.axvline((border - window.begin) * scale, **BORDER, zorder=0.5)  # below the bars and their numbers


def _headline(title: str, events: Sequence[Event], window: Window) -> str:
    """Return the title, which passes are drawn, and what they came to."""
    num_shown, num_groups = len(window.borders), 1 + max(event.group for event in events)
    report = report_streaming(events, Measured(window.begin, window.end, num_shown, num_groups))
    which = f"pass {window.num_passes}" if num_shown == 1 else f"passes {window.num_passes - 1} and {window.num_passes}"
    which += f" of {window.num_passes}"
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


def _is_long(window: Window) -> bool:
    return window.end - window.begin >= LONG
