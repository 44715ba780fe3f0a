"""Finds literal texts in a text that comes in pieces."""

import re
from collections.abc import Iterable


class LiteralSearch:
    """A set of literal texts to look for.

    Args:
        literals: the texts; none is the beginning of another.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        known = [literal for literal in literals if literal]
        self._pattern = re.compile("|".join(map(re.escape, known)) or "(?!)")
        self._beginnings = {literal[:size] for literal in known for size in range(1, len(literal))}
        self._endings = self._beginnings.union(known)
        self._longest = max(map(len, known), default=0)

    def search(self, text: str, at: int) -> tuple[int, str]:
        """Return the position of the first literal and the literal; the text's length and "" if there is none."""
        match = self._pattern.search(text, at)
        return (match.start(), match[0]) if match else (len(text), "")

    def held(self, text: str, at: int, with_whole: bool = False) -> int:
        """Return the size of the text's end, at or after a position, that may become a literal.

        Args:
            with_whole: whether an end that is a literal already counts, too.
        """
        endings = self._endings if with_whole else self._beginnings
        for size in range(min(self._longest, len(text) - at), 0, -1):
            if text[-size:] in endings:
                return size
        return 0
