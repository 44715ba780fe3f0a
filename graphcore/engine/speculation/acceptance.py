"""How often draft tokens were accepted, as it is learned while drafts are checked.

A draft token is accepted if it is the token that is chosen without drafts. Whether it is depends mostly on how many
tokens before it agree with the place where it was found, so that is what the shares are counted by.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

LEAST_MATCHED = (1, 2, 3, 4, 6, 9, 14, 20)  # tokens; the first number of each class
FIRST_GUESS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.92)  # share of each class before anything is known
GUESS_WEIGHT = 4.0  # draft tokens that a guess counts for
KEPT = 0.97  # weight of older draft tokens at each new one of their class


def class_of(matched: int) -> int:
    """Return the class of a draft token after so many that agree."""
    return max(0, bisect_right(LEAST_MATCHED, matched) - 1)


@dataclass
class Acceptance:
    """Acceptance rates of draft tokens.

    Args:
        guess: shares to begin with, such as those of other sequences; None for general ones.

    Attributes:
        drafted, accepted: draft tokens that were checked, and those accepted, by their place in the draft.
    """

    guess: "Acceptance | None" = None
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    _seen: list[float] = field(default_factory=lambda: [0.0] * len(LEAST_MATCHED))
    _right: list[float] = field(default_factory=lambda: [0.0] * len(LEAST_MATCHED))

    def share(self, matched: int) -> float:
        """Return the expected acceptance rate of a draft token that follows `matched` matching tokens."""
        at = class_of(matched)
        guess = FIRST_GUESS[at] if self.guess is None else self.guess.share(matched)
        return (self._right[at] + guess * GUESS_WEIGHT) / (self._seen[at] + GUESS_WEIGHT)

    def record(self, matched: int, drafted: int, accepted: int) -> None:
        """Record a checked draft: its first `accepted` tokens were accepted; those after the first wrong one are void.

        Args:
            matched: the draft's own number.
        """
        self.drafted.extend([0] * (drafted - len(self.drafted)))
        self.accepted.extend([0] * (drafted - len(self.accepted)))
        for at in range(drafted):
            self.drafted[at] += 1
            self.accepted[at] += at < accepted
        for at in range(min(drafted, accepted + 1)):
            kind = class_of(matched + at)
            self._seen[kind] = self._seen[kind] * KEPT + 1.0
            self._right[kind] = self._right[kind] * KEPT + (at < accepted)
        if self.guess is not None:
            self.guess.record(matched, drafted, accepted)
