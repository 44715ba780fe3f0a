"""A sweep's speeds as bars: one panel per phase, one bar per job."""

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from graphcore.tasks.output import write_bytes

LONGEST_LABEL = 48  # characters
BAR_COLOUR = "#3b6ea8"


def plot_bars(path: Path, labels: Sequence[str], panels: Mapping[str, Sequence[float | None]]) -> None:
    """Write a PNG.

    Args:
        labels: one per job, from top to bottom.
        panels: title to one value per job; None draws no bar. A panel without values is left out.

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
        warnings.simplefilter("ignore", UserWarning)  # a font without some character of a prompt
        figure.savefig(picture, format="png", dpi=110)
    write_bytes(path, picture.getvalue())


def _short(label: str) -> str:
    flat = " ".join(label.split())
    return flat if len(flat) <= LONGEST_LABEL else flat[: LONGEST_LABEL - 3] + "..."
