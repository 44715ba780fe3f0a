"""What is printed, and where: results on standard output, everything about them on standard error."""

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

PLAIN_INTERVAL = 2.0  # seconds between lines about one stage where there is no terminal
PLAIN_WIDTH = 120  # characters of a table where there is no terminal


class Console:
    """Prints text as it is made, and progress: a bar on a terminal, few plain lines elsewhere.

    Args:
        shows_progress: say what is happening while it is happening.
        clock: seconds, for the interval between plain lines.
        terminal: where the bar would be; None is standard error.
    """

    def __init__(
        self,
        shows_progress: bool,
        clock: Callable[[], float] = time.monotonic,
        terminal: RichConsole | None = None,
    ) -> None:
        self.shows_progress = shows_progress
        self._clock = clock
        self._terminal = terminal or RichConsole(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._bar_task = TaskID(0)
        self._last_stage = ""
        self._last_time = 0.0

    def text(self, piece: str) -> None:
        """Print a piece of a result, without a line break."""
        self.end_progress()
        print(piece, end="", flush=True)

    def line(self, line: str = "") -> None:
        """Print a line of a result."""
        self.end_progress()
        print(line, flush=True)

    def note(self, line: str) -> None:
        """Print a line about the run."""
        self.end_progress()
        print(line, file=sys.stderr, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a title and a table of results: the first column to the left, numbers to the right."""
        self.end_progress()
        table = Table()
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        print(title)
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        RichConsole(file=sys.stdout, highlight=False, markup=False, width=width).print(table)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is: an `on_progress` callback."""
        if not self.shows_progress:
            return
        if self._terminal.is_terminal:
            self._show_bar(stage, done, total)
            return
        now = self._clock()
        if stage != self._last_stage or done == total or now - self._last_time > PLAIN_INTERVAL:
            print(f"{stage} {_amount(done, total)}".strip(), file=sys.stderr, flush=True)
            self._last_stage, self._last_time = stage, now

    def end_progress(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_bar(self, stage: str, done: int, total: int) -> None:
        """Draw one bar for whatever stage it is; a total of 0 is an end that is not known."""
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[amount]}"))
            self._bar = Progress(*columns, console=self._terminal, transient=True)
            self._bar_task = self._bar.add_task(stage, amount="")
            self._bar.start()
        self._bar.update(
            self._bar_task, description=stage, completed=done, total=total or None, amount=_amount(done, total)
        )


def _amount(done: int, total: int) -> str:
    """Return "3/30", in MB where the numbers are bytes, or nothing where the end is not known."""
    if total <= 0:
        return ""
    return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if total > 1_000_000 else f"{done}/{total}"
