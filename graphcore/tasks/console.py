"""What is printed, and where: results on standard output, everything about them on standard error."""

import sys
import time
from collections.abc import Callable

from rich.console import Console as RichConsole
from rich.status import Status

PLAIN_INTERVAL = 2.0  # seconds between lines about one stage where there is no terminal


class Console:
    """Prints text as it is made, and progress: one changing line on a terminal, few plain lines elsewhere.

    Args:
        shows_progress: say what is happening while it is happening.
        clock: seconds, for the interval between plain lines.
    """

    def __init__(self, shows_progress: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.shows_progress = shows_progress
        self._clock = clock
        self._rich = RichConsole(stderr=True, highlight=False)
        self._status: Status | None = None
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

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is: an `on_progress` callback."""
        if not self.shows_progress:
            return
        line = f"{stage} {_amount(done, total)}".strip()
        if self._rich.is_terminal:
            if self._status is None:
                self._status = self._rich.status(line)
                self._status.start()
            self._status.update(line)
            return
        now = self._clock()
        if stage != self._last_stage or done == total or now - self._last_time > PLAIN_INTERVAL:
            print(line, file=sys.stderr, flush=True)
            self._last_stage, self._last_time = stage, now

    def end_progress(self) -> None:
        """Take the changing line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _amount(done: int, total: int) -> str:
    """Return "3/30", in MB where the numbers are bytes, or nothing where the end is not known."""
    if total <= 0:
        return ""
    return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if total > 1_000_000 else f"{done}/{total}"
