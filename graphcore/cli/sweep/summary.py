"""All results of a sweep in one place: summary.csv, summary.md and, where there are figures, summary.png."""

import csv
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from graphcore.tasks.report.output_files import write_bytes, write_text

LONGEST_LABEL = 48  # characters
BAR_COLOUR = "#3b6ea8"
HEADERS = {
    "overrides": "overrides",
    "status": "status",
    "prefill": "prefill tokens/s",
    "decode": "decode tokens/s",
    "perplexity": "perplexity",
    "graph": "graph",
    "dtype": "dtype",
    "seconds": "seconds",
    "error": "error",
}

SHARABLE = ("status", "graph", "dtype", "error")  # columns that are stated once where all jobs have the same


@dataclass(frozen=True)
class SweepRow:
    """A job's row in the summary; numbers are None where the job has none.

    Attributes:
        prefill, decode: speeds in tokens per second.
        perplexity: perplexity of a text, with task=perplexity.
        seconds: run time of the job's process.
    """

    overrides: str
    status: str
    prefill: float | None
    decode: float | None
    perplexity: float | None
    graph: str | None
    dtype: str | None
    seconds: float
    error: str | None

    @classmethod
    def of(cls, overrides: Sequence[str], seconds: float, record: Mapping[str, Any]) -> "SweepRow":
        """Return the row of a job with these overrides, run time and result."""
        return cls(
            overrides=" ".join(overrides),
            status=record["status"],
            prefill=_speed(record, "prefill"),
            decode=_speed(record, "decode"),
            perplexity=record.get("perplexity"),
            graph=record.get("graph", {}).get("kind"),
            dtype=record.get("dtype"),
            seconds=seconds,
            error=record["error"],
        )

    def cells(self) -> list[str]:
        """Return the row as texts, empty where there is no value."""
        return [_cell(getattr(self, field.name)) for field in fields(self)]


def write_summary(folder: Path, rows: Sequence[SweepRow]) -> None:
    """Write summary.csv and summary.md, and summary.png if any job has a speed or a perplexity.

    Raises:
        OutputError: a file cannot be written.
    """
    write_text(folder / "summary.csv", as_csv(rows))
    write_text(folder / "summary.md", as_markdown(rows))
    panels = {title: [getattr(row, name) for row in rows] for name, title in list(HEADERS.items())[2:5]}
    if any(value is not None for values in panels.values() for value in values):
        plot_bars(folder / "summary.png", labels(rows), panels)


def as_csv(rows: Sequence[SweepRow]) -> str:
    """Return the rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADERS.values())
    writer.writerows(row.cells() for row in rows)
    return text.getvalue()


def as_markdown(rows: Sequence[SweepRow]) -> str:
    """Return the rows as a Markdown table of what varies, after a line with what all jobs share."""
    columns = dict(zip(HEADERS, zip(*(row.cells() for row in rows), strict=True), strict=True))
    same = [name for name in SHARABLE if len(rows) > 1 and len(set(columns[name])) == 1]
    shown = [name for name in HEADERS if name not in same and any(columns[name])]
    stated = [f"{HEADERS[name]} {columns[name][0]}" for name in same if columns[name][0]]
    shared = "; ".join(part for part in (" ".join(_shared_overrides(rows)), *stated) if part)
    columns["overrides"] = tuple(labels(rows))
    jobs = zip(*(columns[name] for name in shown), strict=True)
    lines = [[HEADERS[name] for name in shown], ["---"] * len(shown), *jobs]
    above = f"All {len(rows)} jobs: {_escaped(shared)}\n\n" if shared else ""
    return above + "".join(f"| {' | '.join(_escaped(cell) for cell in line)} |\n" for line in lines)


def labels(rows: Sequence[SweepRow]) -> list[str]:
    """Return each job's overrides without those that all jobs share."""
    shared = _shared_overrides(rows)
    return [" ".join(part for part in row.overrides.split(" ") if part not in shared) or row.overrides for row in rows]


def _shared_overrides(rows: Sequence[SweepRow]) -> list[str]:
    """Return the overrides that all jobs have, in their order; none of a single job."""
    if len(rows) < 2:
        return []
    return [part for part in rows[0].overrides.split(" ") if all(part in row.overrides.split(" ") for row in rows)]


def _speed(record: Mapping[str, Any], phase: str) -> float | None:
    """Return a phase's tokens per second: a bench's median, that of a generation's first request, or of scoring."""
    if phase in record:
        return float(record[phase]["tokens_per_second"])
    if record.get("path") == phase:
        return float(record["tokens_per_second"])
    speed = (record.get("timings") or {}).get(f"{phase}_tokens_per_second")
    return float(speed) if speed else None


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)


def _escaped(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())


def plot_bars(path: Path, labels: Sequence[str], panels: Mapping[str, Sequence[float | None]]) -> None:
    """Write a PNG with a panel of horizontal bars for each figure.

    Args:
        labels: labels of the jobs, from top to bottom.
        panels: values of the jobs by the panel's title; None draws no bar, and a panel without values is left out.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {title: values for title, values in panels.items() if any(value is not None for value in values)}
    figure = Figure(figsize=(3 + 4.5 * len(shown), 1.4 + 0.45 * len(labels)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(all_axes, shown.items(), strict=True):
        bars = axes.barh(range(len(labels)), [value or 0.0 for value in values], color=BAR_COLOUR, height=0.6)
        axes.bar_label(
            bars, [f"{value:,.1f}" if value is not None else "no result" for value in values], padding=3, fontsize=9
        )
        axes.set_yticks(range(len(labels)), [_short(label) for label in labels], parse_math=False, fontsize=9)
        axes.set_xlabel(title)
        axes.margins(x=0.2)
        axes.locator_params(axis="x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].invert_yaxis()
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the font may lack a character of a prompt
        figure.savefig(picture, format="png", dpi=110)
    write_bytes(path, picture.getvalue())


def _short(label: str) -> str:
    flat = " ".join(label.split())
    return flat if len(flat) <= LONGEST_LABEL else flat[: LONGEST_LABEL - 3] + "..."
