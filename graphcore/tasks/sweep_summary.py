"""All results of a sweep in one place: summary.csv, summary.md and, where there are figures, summary.png."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from graphcore.tasks.output import write_text
from graphcore.tasks.sweep_plot import plot_bars

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


@dataclass(frozen=True)
class SweepRow:
    """One job's line in the summary; numbers are None where the job has none.

    Attributes:
        prefill, decode: tokens per second.
        perplexity: of a text, with task=perplexity.
        seconds: of the job's process.
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
        """Return the row as texts, empty where there is nothing to say."""
        return [_cell(getattr(self, field.name)) for field in fields(self)]


def write_summary(folder: Path, rows: Sequence[SweepRow]) -> None:
    """Write the table twice, and the picture if any job has a speed or a perplexity.

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
    """Return the rows as a Markdown table."""
    lines = [list(HEADERS.values()), ["---"] * len(HEADERS), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(_escaped(cell) for cell in line)} |\n" for line in lines)


def labels(rows: Sequence[SweepRow]) -> list[str]:
    """Return each job's overrides without those that all jobs share."""
    split = [row.overrides.split(" ") for row in rows]
    shared = set.intersection(*(set(parts) for parts in split)) if len(rows) > 1 else set()
    return [
        " ".join(part for part in parts if part not in shared) or row.overrides
        for parts, row in zip(split, rows, strict=True)
    ]


def _speed(record: Mapping[str, Any], phase: str) -> float | None:
    """Return a bench's median speed, that of a generation's first request, or that of scoring a text."""
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
