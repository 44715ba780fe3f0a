"""How long a draft model goes on drafting.

    no draft     1 token                              for  check(1)
    depth k      1 + p1 + p1 p2 + ... + p1 .. pk      for  k x draft + check(1 + k)

Another draft step is taken while some depth beyond the present one promises more tokens for the time. The draft tokens
so far have known classes, so p1 p2 ... follows from their acceptance; tokens to come count with the share of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chain:
    """The draft of one request that may go on.

    Attributes:
        chance: probability that all its tokens so far are accepted.
        share: expected acceptance rate of its next tokens.
        left: most further tokens.
    """

    chance: float
    share: float
    left: int

    def gain(self, tokens: int) -> float:
        """Return the expected number of accepted tokens among so many further ones."""
        return self.chance * sum(self.share**at for at in range(1, 1 + min(tokens, self.left)))


def worth_drafting(
    chains: Sequence[Chain],
    gained: float,
    seconds: float,
    check: Sequence[float],
    draft: Callable[[int], float],
    least_gain: float,
) -> int:
    """Return how many chains, the first ones, are worth another draft step; 0 if drafting is to stop.

    Args:
        chains: drafts that may go on, the likeliest first.
        gained: expected tokens of the step as it is.
        seconds: time that drafting has taken so far.
        check: time of the step as it is, and with 1, 2, ... further tokens.
        draft: function from a number of chains to the time of a draft step.
        least_gain: smallest ratio of tokens for the time that a further step must promise.
    """
    best, best_rate = 0, least_gain * gained / (seconds + check[0])
    for count in range(1, 1 + len(chains)):
        step, some = draft(count), chains[:count]
        for depth in range(1, 1 + (len(check) - 1) // count):
            gain = gained + sum(chain.gain(depth) for chain in some)
            rate = gain / (seconds + depth * step + check[depth * count])
            if rate > best_rate:
                best, best_rate = count, rate
    return best
