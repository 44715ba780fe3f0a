"""Ends a text at the first stop string, even if it arrives in pieces.

Text that could be the beginning of a stop string is held back until it is known not to be one, so that no part of a
stop string is ever printed. The text ends where a stop string is first completed, which does not depend on how it was
cut into pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple

from graphcore.errors import ConfigError


class StopResult(NamedTuple):
    """What may be printed, and whether the text ends with it."""

    text: str
    is_stopped: bool


class StopStrings:
    """Watches a stream of text for stop strings.

    Args:
        stops: texts that end the generation and are not part of it.

    Raises:
        ConfigError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ConfigError("stop holds an empty string, which would end every text at once; leave it out")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Take the next piece of text and return what is certain of all that came so far."""
        seen = self._held + text
        found = [(seen.find(stop) + len(stop), seen.find(stop)) for stop in self._stops if stop in seen]
        if found:
            self._held = ""
            return StopResult(seen[: min(found)[1]], True)
        held = max((_overlap(seen, stop) for stop in self._stops), default=0)
        self._held = seen[len(seen) - held :]
        return StopResult(seen[: len(seen) - held], False)

    def flush(self) -> str:
        """Return the text that was held back, which no stop string followed."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
