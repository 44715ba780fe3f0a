"""Shared code of the comparisons' reports: versions, spreads, bars."""

import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, THEIRS = "#1f6f8b", "#b8b8b8"


def is_ours(name: str) -> bool:
    return name.startswith("graphcore")


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def draw_bars(axis: "Axes", spreads: dict[str, dict[str, float]], title: str, digits: int = 0) -> None:
    """Draw a bar of tokens per second for each engine, with its spread; graphcore's have a colour of their own."""
    rows = list(spreads.values())
    medians = [row["median"] for row in rows]
    reach = [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]
    colours = [OURS if is_ours(name) else THEIRS for name in spreads]
    bars = axis.barh(list(spreads), medians, xerr=reach, color=colours, capsize=3)
    axis.bar_label(bars, [f"{value:.{digits}f}" for value in medians], padding=6)
    axis.set(title=title, xlabel="tokens/s")
    axis.margins(x=0.18)
    axis.invert_yaxis()
