"""One line of status on a terminal on which text is being written: below that text, gone before more of it comes.

The capital of France is Par         text, its line not ended
token 9/128, group 5/18, 1.3 GB/s    the status; wiping it puts the cursor back after "Par"
"""

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text


class StatusLine:
    """A line that can be drawn again and wiped.

    Args:
        terminal: the one on which the text appears, too.
    """

    def __init__(self, terminal: RichConsole) -> None:
        self._terminal = terminal
        self._unended = ""  # text since the last line break
        self._is_drawn = False

    def wrote(self, text: str) -> None:
        """Say that text was written to the terminal, without a status line on it."""
        self._unended = (self._unended + text).rpartition("\n")[2]

    def draw(self, line: str) -> None:
        """Draw the line, over the one before."""
        width = self._terminal.width
        column = cell_len(self._unended) % width
        if self._unended and (column == 0 or not self._unended.isprintable()):
            return  # where the cursor is depends on the terminal, so it could not be put back
        if self._is_drawn:
            self._terminal.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        elif self._unended:
            self._terminal.file.write("\n")  # not a movement: at the bottom the terminal has to scroll
        text = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        text.truncate(width - 1, overflow="ellipsis")
        self._terminal.print(text, end="", soft_wrap=True)
        self._terminal.file.flush()
        self._is_drawn = True

    def wipe(self) -> None:
        """Take the line away and put the cursor back where text goes on."""
        if not self._is_drawn:
            return
        self._is_drawn = False
        self._terminal.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        if self._unended:
            column = cell_len(self._unended) % self._terminal.width
            up = Control((ControlType.CURSOR_UP, 1), (ControlType.CURSOR_MOVE_TO_COLUMN, column))
            self._terminal.control(up)
        self._terminal.file.flush()
