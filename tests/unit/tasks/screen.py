"""A terminal that is only its screen: what somebody would see after what was written to it."""

import io
import re

SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


class Screen(io.StringIO):
    """Takes text with the control sequences of ECMA-48 that a progress line needs; scrolls, and wraps long lines.

    Args:
        width, height: characters and lines.
    """

    def __init__(self, width: int = 40, height: int = 6) -> None:
        super().__init__()
        self.width, self.height = width, height
        self.rows = [[" "] * width for _ in range(height)]
        self.row = self.column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for arguments, command, control, letter in SEQUENCE.findall(text):
            if command:
                self._command(command, arguments)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.column = 0  # a terminal's driver adds the carriage return
                self._down()
            else:
                if self.column == self.width:  # only the letter after a full line begins the next one
                    self.column = 0
                    self._down()
                self.rows[self.row][self.column] = letter
                self.column += 1
        return len(text)

    @property
    def lines(self) -> list[str]:
        """What is seen, without what is empty at the bottom."""
        seen = ["".join(row).rstrip() for row in self.rows]
        while seen and not seen[-1]:
            seen.pop()
        return seen

    def _down(self) -> None:
        self.row += 1
        if self.row == self.height:
            self.rows = [*self.rows[1:], [" "] * self.width]
            self.row -= 1

    def _command(self, command: str, arguments: str) -> None:
        if command == "A":
            self.row = max(0, self.row - int(arguments or 1))
        elif command == "G":
            self.column = int(arguments or 1) - 1
        elif command == "K":
            assert arguments == "2", f"erasing in a line with {arguments}"
            self.rows[self.row] = [" "] * self.width
        else:
            assert command in "mhl", f"a terminal would do something at {command}"  # colours, the cursor shown or not
