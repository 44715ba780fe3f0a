"""Printing: results on standard output, notes and progress on standard error."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.control import Control
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.segment import ControlType
from rich.table import Column, Table
from rich.text import Text

from graphcore.tasks.report.progress_text import TOKEN_STAGES, ProgressText

PLAIN_INTERVAL = 2.0  # seconds between the first lines about one stage where there is no terminal
LONGEST_PLAIN_INTERVAL = 30.0  # most seconds between later lines; the interval grows with the time of the stage
PLAIN_TOKEN_INTERVAL = 10.0  # seconds between lines about tokens, which may be made for hours
PLAIN_WIDTH = 120  # characters of a table's width where there is no terminal
SLOW = 1.0  # seconds without new text after which progress of tokens is shown; until then the text shows it
REDRAW = 0.1  # seconds between two drawings of the status line
BAR_SHARE = 4  # the bar takes 1 / BAR_SHARE of a terminal's width
WIDEST_BAR = 30  # characters


class StatusLine:
    """A status line below the text on a terminal; it is wiped before more text is written.

        The capital of France is Par         text, its line not ended
        token 9/128, group 5/18, 1.31 GiB/s    the status; wiping it puts the cursor back after "Par"

    Args:
        terminal: terminal on which the text also appears.
    """

    def __init__(self, terminal: RichConsole) -> None:
        self._terminal = terminal
        self._unended = ""  # text since the last line break
        self._is_drawn = False

    def wrote(self, text: str) -> None:
        """Record that text was written to the terminal while there was no status line."""
        self._unended = (self._unended + text).rpartition("\n")[2]

    def draw(self, line: str) -> None:
        """Draw the line in place of the one before."""
        width = self._terminal.width
        column = cell_len(self._unended) % width
        if self._unended and (column == 0 or not self._unended.isprintable()):
            return  # the cursor's column depends on the terminal, so that it could not be restored
        if self._is_drawn:
            self._terminal.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        elif self._unended:
            self._terminal.file.write("\n")  # a newline, because at the bottom the terminal has to scroll
        text = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        text.truncate(width - 1, overflow="ellipsis")
        self._terminal.print(text, end="", soft_wrap=True)
        self._terminal.file.flush()
        self._is_drawn = True

    def wipe(self) -> None:
        """Erase the line and put the cursor back to the end of the text."""
        if not self._is_drawn:
            return
        self._is_drawn = False
        self._terminal.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        if self._unended:
            column = cell_len(self._unended) % self._terminal.width
            up = Control((ControlType.CURSOR_UP, 1), (ControlType.CURSOR_MOVE_TO_COLUMN, column))
            self._terminal.control(up)
        self._terminal.file.flush()


class PipeConsole(RichConsole):
    """A console that raises BrokenPipeError if its reader has left; Rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise the current error again, so that the command line ends quietly."""
        raise BrokenPipeError


class SecondsColumn(ProgressColumn):
    """A column with the seconds of a stage whose total is unknown; it counts even while nothing is reported."""

    def render(self, task: Task) -> Text:
        """Return "4 s", or an empty text where the total is known."""
        return Text(f"{task.elapsed:.0f} s" if task.total is None and task.elapsed else "")


@dataclass
class Stage:
    """The stage that was reported last.

    Attributes:
        name: str, name of the stage in the callback; "" before the first report.
        words: str, the last report in words.
        began: float, start time, in seconds of the clock.
        is_endless: bool, True if the total is unknown.
    """

    name: str
    words: str
    began: float
    is_endless: bool


class Console:
    """The console of a task: text as it is generated, and progress as a bar on a terminal or as plain lines elsewhere.

    While tokens are generated the bar is a status line below their text, shown only if no text comes for a while.

    Args:
        shows_progress: True prints progress.
        clock: clock in seconds, for speeds and for the interval between lines.
        terminal: console of the bar; None is standard error.
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
        self._last_time = 0.0  # time of the last line about progress
        self._is_mid_line = False  # the last text did not end its line
        self._quiet_since = 0.0  # time of the last text

    def expect_groups(self, nbytes: Sequence[int]) -> None:
        """Set the bytes that a pass over the weights moves for each group, from which progress computes the speed."""
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
        """Show the progress of a stage; this is an `on_progress` callback (see `graphcore.progress`)."""
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
        """Show on a terminal what is happening before progress can be shown; the next output replaces it."""
        if self.shows_progress and self._terminal.is_terminal:
            self._status.draw(words)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Remove progress and end an unended line of text, so that an error stands on a line of its own."""
        self.end_progress()
        self._end_line()

    def _end_line(self) -> None:
        if self._is_mid_line:
            self._is_mid_line = False
            print(flush=True)
            self._status.wrote("\n")

    def end_progress(self) -> None:
        """Remove bar and status line."""
        self._end_stage()
        self._status.wipe()
        self._stop_bar()

    def _end_stage(self) -> None:
        """Print in a plain line how long a stage with unknown total took, if that was long."""
        stage, seconds = self._stage, self._clock() - self._stage.began
        if stage.is_endless and not self._terminal.is_terminal and seconds > PLAIN_INTERVAL:
            print(f"{stage.words}: {seconds:.1f} s", file=sys.stderr, flush=True)
        self._stage.is_endless = False

    def _interval(self) -> float:
        """Return the seconds until the next plain line of a stage; long stages get longer intervals."""
        return max(PLAIN_INTERVAL, min(self._last_time - self._stage.began, LONGEST_PLAIN_INTERVAL))

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_tokens(self, words: str, is_new: bool) -> None:
        """Show the progress of tokens, unless text was printed a moment ago."""
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
        """Draw the bar of a stage; a total of 0 is an unknown total."""
        if self._bar is None:
            self._status.wipe()
            bar = BarColumn(bar_width=min(WIDEST_BAR, self._terminal.width // BAR_SHARE))
            text = TextColumn("{task.description}", table_column=Column(no_wrap=False))  # folds on a narrow terminal
            self._bar = Progress(bar, text, SecondsColumn(), console=self._terminal, transient=True)
            self._bar_task = self._bar.add_task(words, total=total or None)
            self._bar.start()
        elif is_new:  # Rich cannot reset a task's total to unknown
            self._bar.remove_task(self._bar_task)
            self._bar_task = self._bar.add_task(words, total=total or None)
        self._bar.update(self._bar_task, description=words, completed=done, total=total or None)
