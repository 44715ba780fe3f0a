"""What is printed, and where: results on standard output, everything about them on standard error."""

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from graphcore.tasks.progress_text import TOKEN_STAGES, ProgressText
from graphcore.tasks.status_line import StatusLine

PLAIN_INTERVAL = 2.0  # seconds between lines about one stage where there is no terminal
PLAIN_TOKEN_INTERVAL = 10.0  # the same where tokens are made, which may take hours
PLAIN_WIDTH = 120  # characters of a table where there is no terminal
SLOW = 1.0  # seconds without new text after which tokens' progress is shown: text that flows is progress enough
REDRAW = 0.1  # seconds between two drawings of the status line


class Console:
    """Prints text as it is made, and progress: a bar on a terminal, few plain lines elsewhere.

    While tokens are made the bar is a status line below their text, and is there only when none comes for a while.

    Args:
        shows_progress: say what is happening while it is happening.
        clock: seconds, for speeds and for the interval between lines.
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
        self._words = ProgressText(clock)
        self._status = StatusLine(self._terminal)
        self._bar: Progress | None = None
        self._bar_task = TaskID(0)
        self._last_stage = ""
        self._last_time = 0.0  # of a line about progress
        self._quiet_since = 0.0  # since when no text has come

    def expect_groups(self, nbytes: Sequence[int]) -> None:
        """Say what a pass over the weights moves for each group, so that progress can tell how fast that is."""
        self._words.expect_groups(nbytes)

    def text(self, piece: str) -> None:
        """Print a piece of a result, without a line break."""
        self.end_progress()
        print(piece, end="", flush=True)
        self._quiet_since = self._clock()
        if sys.stdout.isatty():
            self._status.wrote(piece)

    def line(self, line: str = "") -> None:
        """Print a line of a result."""
        self.text(line + "\n")

    def note(self, line: str) -> None:
        """Print a line about the run."""
        self.end_progress()
        print(line, file=sys.stderr, flush=True)
        self._status.wrote("\n")

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

    def progress(self, stage: str, group: int | None, done: int, total: int) -> None:
        """Say how far a stage is: an `on_progress` callback, see `graphcore.progress`."""
        if not self.shows_progress:
            return
        words, is_new = self._words.take(stage, group, done, total), stage != self._last_stage
        self._last_stage = stage
        if stage in TOKEN_STAGES:
            self._show_tokens(words, is_new)
        elif self._terminal.is_terminal:
            self._show_bar(words, done, total)
        elif is_new or done == total or self._clock() - self._last_time > PLAIN_INTERVAL:
            self._print_progress(words)

    def end_progress(self) -> None:
        """Take bar and status line away."""
        self._status.wipe()
        self._stop_bar()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_tokens(self, words: str, is_new: bool) -> None:
        """Show how far tokens are, unless text flows."""
        now = self._clock()
        if is_new:
            self._quiet_since = now
        if now - self._quiet_since <= SLOW:
            return
        if not self._terminal.is_terminal:
            if now - self._last_time > PLAIN_TOKEN_INTERVAL:
                self._print_progress(words)
        elif now - self._last_time > REDRAW:
            self._stop_bar()
            self._status.draw(words)
            self._last_time = now

    def _print_progress(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)
        self._last_time = self._clock()

    def _show_bar(self, words: str, done: int, total: int) -> None:
        """Draw one bar for whatever stage it is; a total of 0 is an end that is not known."""
        if self._bar is None:
            self._status.wipe()
            columns = (BarColumn(bar_width=30), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._terminal, transient=True)
            self._bar_task = self._bar.add_task(words)
            self._bar.start()
        self._bar.update(self._bar_task, description=words, completed=done, total=total or None)
