'''The input of a chat, typed or from a pipe: texts of one line or several, and commands.

a line that ends with \\            continues in the next one
"""                                 begins a text of several lines, and ends it at the end of a line
/name ...                           a command; with a space before it, a text
'''

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from graphcore.errors import ConfigError
from graphcore.tasks.requests.text_input import LONGEST_PROMPT
from graphcore.tasks.termination import Terminated

MORE = ". "
MOST_LINES = 1000  # of a history
BLOCK = '"""'
DEADLY = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
INTERRUPTED = "[Ctrl-C stops an answer; /exit or Ctrl-D ends the chat, /help lists the commands]"


@dataclass(frozen=True)
class Entry:
    """A text or a command that the user entered.

    Attributes:
        where: place of the entry for messages, such as "line 3"; empty at a terminal.
    """

    text: str
    is_command: bool
    where: str = ""


class ChatLines:
    """Standard input as entries; lines at a terminal can be edited where Python has readline.

    Attributes:
        is_terminal: True if standard input is a terminal.
        is_edited: True if lines can be edited.
    """

    def __init__(self, mark: Callable[[], str]) -> None:
        """Prepare the terminal, if there is one.

        Args:
            mark: function that returns what stands before a line that is typed.
        """
        self.is_terminal = sys.stdin.isatty()
        self._is_shown = self.is_terminal and sys.stdout.isatty()
        self.is_edited = self._is_shown and find_spec("readline") is not None
        self._mark = mark
        self._number = 0
        if self.is_edited:
            import_module("readline")  # from now on input() knows arrow keys and earlier lines

    def __iter__(self) -> Iterator[Entry]:
        """Yield entries until the input ends.

        Raises:
            ConfigError: a pipe ends within a text of several lines.
            KeyboardInterrupt: Ctrl-C during a pipe; at a terminal Ctrl-C drops the entry that is being typed. A
                signal that ends the process.
        """
        while True:
            try:
                entry = self._entry()
            except KeyboardInterrupt as interrupt:
                if not self.is_terminal or isinstance(interrupt, Terminated):
                    raise
                print(f"\n{INTERRUPTED}", file=sys.stderr)
                continue
            if entry is None:
                return
            if entry.text.strip():
                yield entry

    def _entry(self) -> Entry | None:
        """Return the next entry, which may be blank; None at the end of the input."""
        line = self._line(self._mark() if self.is_terminal else "")
        if line is None:
            return None
        where = "" if self.is_terminal else f"standard input, line {self._number}"
        if line.startswith(BLOCK):
            return self._long(line.removeprefix(BLOCK), BLOCK, where)
        if line.endswith("\\"):
            return self._long(line, "\\", where)
        is_command = line.startswith("/") and "\n" not in line.strip()  # a pasted text may have several lines
        return Entry(line.strip(), is_command, where)

    def _long(self, line: str, how: str, where: str) -> Entry | None:
        """Return a text of several lines, whose first line has been read."""
        lines, length = [line], len(line)
        while lines[-1].endswith("\\") if how == "\\" else not lines[-1].rstrip().endswith(BLOCK):
            following = self._line(MORE)
            if following is None:
                if not self.is_terminal:
                    raise ConfigError(f"{where}: the input ends within the text that begins here; end it")
                return None
            lines.append(following)
            length += len(following) + 1  # the line break
            _check_length(length, where)
        if how == "\\":
            return Entry("\n".join([*(line[:-1] for line in lines[:-1]), lines[-1]]).strip(), False, where)
        return Entry("\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n"), False, where)

    def _line(self, mark: str) -> str | None:
        """Return the next line without its line break; None at the end."""
        self._number += 1
        if self._is_shown:
            try:
                return input(mark)
            except EOFError:  # Ctrl-D leaves the cursor behind the mark
                print(file=sys.stderr)
                return None
        if self.is_terminal:
            print(mark, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline(LONGEST_PROMPT + 1)
        _check_length(len(line), f"standard input, line {self._number}")
        return line.removesuffix("\n") if line else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep typed input off the screen while an answer is printed, and leave it for the next entry.

        In canonical mode a terminal would cut typed lines at 4,095 bytes, and end its input at once at Ctrl-D. Readline
        later reads the input unchanged. Ctrl-C still interrupts.
        """
        if not self.is_terminal or find_spec("termios") is None:
            yield
            return
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        silent = [*before]
        silent[3] &= ~(termios.ECHO | (termios.ICANON if self._is_shown else 0))

        def restore() -> None:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(terminal, termios.TCSANOW, before)  # keeps input that was typed

        with _before_dying(restore):
            termios.tcsetattr(terminal, termios.TCSANOW, silent)
            try:
                yield
            finally:
                restore()


@contextmanager
def kept_history(file: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Load readline's history from a file, and append the lines typed meanwhile to it at the end (mode 0600).

    Args:
        note: function that prints a line, for a file that cannot be read or written.
    """
    readline = import_module("readline")
    if not file.is_absolute():
        note("[no home folder is known: typed lines are not kept; set XDG_STATE_HOME]")
        yield
        return
    try:
        with suppress(FileNotFoundError):
            readline.read_history_file(file)
    except OSError as error:
        note(f"[{file} cannot be read ({error.strerror}); the history begins anew]")
    readline.set_history_length(MOST_LINES)
    num_read = readline.get_current_history_length()
    try:
        yield
    finally:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.chmod(0o600)  # before it holds the lines, if it existed
            num_new = readline.get_current_history_length() - num_read
            if hasattr(readline, "append_history_file"):  # lines that another chat has written meanwhile stay
                readline.append_history_file(max(num_new, 0), file)
            else:
                readline.write_history_file(file)
        except OSError as error:
            note(f"[{file} cannot be written ({error.strerror}); the lines are not kept]")


def _check_length(length: int, where: str) -> None:
    """Refuse a text that is too long, such as one without an end."""
    if length > LONGEST_PROMPT:
        raise ConfigError(f"{where}: the text that begins here has more than {LONGEST_PROMPT} characters; end it")


@contextmanager
def _before_dying(restore: Callable[[], None]) -> Iterator[None]:
    """Call `restore` before a signal ends the process, unless the signal has another handler."""

    def end(number: int, _frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    deadly = [number for number in DEADLY if signal.getsignal(number) is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in deadly:
            signal.signal(number, signal.SIG_DFL)
