"""How often draft tokens were accepted, as it is learned while drafts are checked.

A draft token is accepted if it is the token that is chosen without drafts. A drafter knows something about each token
that says how likely that is: prompt lookup, how many tokens before it agree; a draft model, how probable it finds the
token. The shares are counted by classes of that number.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

GUESS_WEIGHT = 4.0  # draft tokens that a guess counts for
KEPT = 0.97  # weight of older draft tokens at each new one of their class
KEPT_OF_ALL = 0.99  # the same for all classes together


@dataclass(frozen=True)
class Classes:
    """Classes of draft tokens, by a number that their drafter knows.

    Attributes:
        least: least number of each class, ascending; smaller numbers are in the first class, too.
        first_guess: expected share of accepted tokens of each class before anything is known.
    """

    least: Sequence[float]
    first_guess: Sequence[float]

    def of(self, number: float) -> int:
        """Return the class of a number."""
        return max(0, bisect_right(self.least, number) - 1)


@dataclass
class Acceptance:
    """Acceptance rates of draft tokens.

    Args:
        classes: classes of the draft tokens.
        guess: shares to begin with, such as those of other sequences; None for those of the classes.

    Attributes:
        drafted, accepted: draft tokens that were checked, and those accepted, by their place in the draft.
    """

    classes: Classes
    guess: "Acceptance | None" = None
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    _seen: list[float] = field(default_factory=list)
    _right: list[float] = field(default_factory=list)
    _all_seen: float = 0.0
    _all_right: float = 0.0

    def __post_init__(self) -> None:
        self._seen = [0.0] * len(self.classes.least)
        self._right = [0.0] * len(self.classes.least)

    def share(self, kind: int) -> float:
        """Return the expected acceptance rate of a draft token of a class, given that those before it are accepted."""
        guess = self.classes.first_guess[kind] if self.guess is None else self.guess.share(kind)
        return (self._right[kind] + guess * GUESS_WEIGHT) / (self._seen[kind] + GUESS_WEIGHT)

    @property
    def share_of_all(self) -> float:
        """The expected acceptance rate of a draft token whose class is not known yet."""
        first = self.classes.first_guess
        guess = sum(first) / len(first) if self.guess is None else self.guess.share_of_all
        return (self._all_right + guess * GUESS_WEIGHT) / (self._all_seen + GUESS_WEIGHT)

    def record(self, kinds: Sequence[int], accepted: int) -> None:
        """Record a checked draft: its first `accepted` tokens were accepted; those after the first wrong one are void.

        Args:
            kinds: classes of the tokens that were checked.
        """
        self.drafted.extend([0] * (len(kinds) - len(self.drafted)))
        self.accepted.extend([0] * (len(kinds) - len(self.accepted)))
        for at in range(len(kinds)):
            self.drafted[at] += 1
            self.accepted[at] += at < accepted
        for at, kind in enumerate(kinds[: accepted + 1]):
            self._seen[kind] = self._seen[kind] * KEPT + 1.0
            self._right[kind] = self._right[kind] * KEPT + (at < accepted)
            self._all_seen = self._all_seen * KEPT_OF_ALL + 1.0
            self._all_right = self._all_right * KEPT_OF_ALL + (at < accepted)
        if self.guess is not None:
            self.guess.record(kinds, accepted)
