"""A text whose last white space is held back until it is known what follows."""

from collections.abc import Callable


class HeldText:
    """Writes a text, but for the white space at its end.

    Args:
        write: called with each piece.
        spaces: characters that are held back; None for all white space.

    Attributes:
        has_text: whether anything was written.
        skips_newlines: whether line breaks before the first other character are left out.
    """

    def __init__(self, write: Callable[[str], None], spaces: str | None = None) -> None:
        self.has_text = False
        self.skips_newlines = False
        self._write = write
        self._spaces = spaces
        self._held: list[str] = []

    def push(self, text: str) -> None:
        """Take a piece of the text."""
        if self.skips_newlines:
            text = text.lstrip("\n")
            self.skips_newlines = not text
        body = text.rstrip(self._spaces)
        if body:
            self._write(self.taken() + body)
            self.has_text = True
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def taken(self) -> str:
        """Return the white space that is held, and hold it no longer."""
        held = "".join(self._held)
        self._held.clear()
        return held
