"""What is printed, and where: results on standard output, everything about them on standard error."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from graphcore.tasks.progress_text import TOKEN_STAGES, ProgressText
from graphcore.tasks.status_line import StatusLine

PLAIN_INTERVAL = 2.0  # seconds between the first lines about one stage where there is no terminal
LONGEST_PLAIN_INTERVAL = 30.0  # the same later: as long as the stage has taken until the line before, but no longer
PLAIN_TOKEN_INTERVAL = 10.0  # the same where tokens are made, which may take hours
PLAIN_WIDTH = 120  # characters of a table where there is no terminal
SLOW = 1.0  # seconds without new text after which tokens' progress is shown: text that flows is progress enough
REDRAW = 0.1  # seconds between two drawings of the status line
BAR_SHARE = 4  # one part in so many of a terminal's width is the bar
WIDEST_BAR = 30  # characters


class PipeConsole(RichConsole):
    """A console that passes on that its reader has left; Rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise it again, for the command line to end quietly."""
        raise BrokenPipeError


class SecondsColumn(ProgressColumn):
    """The seconds that a stage has taken, where nobody knows its end; they go on while nothing is reported."""

    def render(self, task: Task) -> Text:
        """Return "4 s", or nothing."""
        return Text(f"{task.elapsed:.0f} s" if task.total is None and task.elapsed else "")


@dataclass
class Stage:
    """What was reported last.

    Attributes:
        name: str, as the callback has it; "" before anything was reported.
        words: str, what was last said of it.
        began: float, seconds of the clock.
        is_endless: bool, whether nobody knows how much there is to do.
    """

    name: str
    words: str
    began: float
    is_endless: bool


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
        self._terminal = terminal or PipeConsole(stderr=True, highlight=False)
        self._words = ProgressText(clock)
        self._status = StatusLine(self._terminal)
        self._bar: Progress | None = None
        self._bar_task = TaskID(0)
        self._stage = Stage("", "", 0.0, False)
        self._last_time = 0.0  # of a line about progress
        self._is_mid_line = False  # the last text did not end its line
        self._quiet_since = 0.0  # since when no text has come

    def expect_groups(self, nbytes: Sequence[int]) -> None:
        """Say what a pass over the weights moves for each group, so that progress can tell how fast that is."""
        self._words.expect_groups(nbytes)

    def text(self, piece: str) -> None:
        """Print a piece of a result, without a line break."""
        self.end_progress()
        print(piece, end="", flush=True)
        self._is_mid_line = not piece.endswith("\n") if piece else self._is_mid_line
        self._quiet_since = self._clock()
        if sys.stdout.isatty():
            self._status.wrote(piece)

    def line(self, line: str = "") -> None:
        """Print a line of a result."""
        self.text(line + "\n")

    def note(self, line: str) -> None:
        """Print a line about the run, on a line of its own."""
        self.end_progress()
        self._end_line()
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
        PipeConsole(file=sys.stdout, highlight=False, markup=False, width=width).print(table)

    def progress(self, stage: str, group: int | None, done: int, total: int) -> None:
        """Say how far a stage is: an `on_progress` callback, see `graphcore.progress`."""
        if not self.shows_progress:
            return
        is_new = stage != self._stage.name
        if is_new:
            self._end_stage()
        now, words = self._clock(), self._words.take(stage, group, done, total)
        self._stage = Stage(stage, words, now if is_new else self._stage.began, total == 0)
        if stage in TOKEN_STAGES:
            self._show_tokens(words, is_new)
        elif self._terminal.is_terminal:
            self._show_bar(words, done, total, is_new)
        elif is_new or 0 < total == done or now - self._last_time > self._interval():
            self._print_progress(words)

    def announce(self, words: str) -> None:
        """Say on a terminal what takes a moment before progress can be told; drawn once, gone with what comes next."""
        if self.shows_progress and self._terminal.is_terminal:
            self._status.draw(words)

    def finish(self) -> None:
        """Take progress away, and end a line of text that something has cut: an error stands on a line of its own."""
        self.end_progress()
        self._end_line()

    def _end_line(self) -> None:
        if self._is_mid_line:
            self._is_mid_line = False
            print(flush=True)
            self._status.wrote("\n")

    def end_progress(self) -> None:
        """Take bar and status line away."""
        self._end_stage()
        self._status.wipe()
        self._stop_bar()

    def _end_stage(self) -> None:
        """Say in a plain line how long a stage took of which nobody knew the end, if that was long."""
        stage, seconds = self._stage, self._clock() - self._stage.began
        if stage.is_endless and not self._terminal.is_terminal and seconds > PLAIN_INTERVAL:
            print(f"{stage.words}: {seconds:.1f} s", file=sys.stderr, flush=True)
        self._stage.is_endless = False

    def _interval(self) -> float:
        """Return the seconds to wait with the next plain line of a stage, so that long ones have few."""
        return max(PLAIN_INTERVAL, min(self._last_time - self._stage.began, LONGEST_PLAIN_INTERVAL))

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

    def _show_bar(self, words: str, done: int, total: int, is_new: bool) -> None:
        """Draw one bar for whatever stage it is; a total of 0 is an end that is not known."""
        if self._bar is None:
            self._status.wipe()
            bar = BarColumn(bar_width=min(WIDEST_BAR, self._terminal.width // BAR_SHARE))
            text = TextColumn("{task.description}", table_column=Column(no_wrap=False))  # a narrow terminal folds it
            self._bar = Progress(bar, text, SecondsColumn(), console=self._terminal, transient=True)
            self._bar_task = self._bar.add_task(words, total=total or None)
            self._bar.start()
        elif is_new:  # a task that has had a total cannot lose it
            self._bar.remove_task(self._bar_task)
            self._bar_task = self._bar.add_task(words, total=total or None)
        self._bar.update(self._bar_task, description=words, completed=done, total=total or None)
