"""What a decode step costs, by its number of tokens, as it is measured while steps run."""

from collections import deque
from collections.abc import Callable
from statistics import median

KEPT = 8  # measurements of each number of tokens
LATEST = 256  # steps after which a measurement counts no more


class StepCosts:
    """Seconds of decode steps by their number of tokens.

    Args:
        guess: function from a number of tokens to the cost that is expected of them, in any unit.
    """

    def __init__(self, guess: Callable[[int], float]) -> None:
        self._guess = guess
        self._measured: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._steps = 0

    def record(self, tokens: int, seconds: float) -> None:
        """Record a step that ran beside no prompt."""
        self._steps += 1
        self._measured.setdefault(tokens, deque(maxlen=KEPT)).append(seconds)
        self._last[tokens] = self._steps
        for old in [one for one, step in self._last.items() if step <= self._steps - LATEST]:
            del self._last[old], self._measured[old]

    def age(self, tokens: int) -> int:
        """Return the number of steps since one of so many tokens was measured."""
        return self._steps - self._last.get(tokens, 0)

    def cost(self, tokens: int) -> float:
        """Return the cost of a step of so many tokens: seconds, or the guess's unit while nothing is measured.

        Between two measured numbers it is on a line; beyond them the guess says how it goes on.
        """
        if not self._measured:
            return self._guess(tokens)
        below = max((one for one in self._measured if one <= tokens), default=None)
        above = min((one for one in self._measured if one >= tokens), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None, "something is measured"
            return self._median(nearest) * self._guess(tokens) / self._guess(nearest)
        if below == above:
            return self._median(below)
        low, high = self._median(below), self._median(above)
        return low + (high - low) * (tokens - below) / (above - below)

    def _median(self, tokens: int) -> float:
        return median(self._measured[tokens])
