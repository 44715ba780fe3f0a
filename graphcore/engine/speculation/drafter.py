"""The interface of drafters, which guess the next tokens of one sequence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Draft(NamedTuple):
    """A guess at the next tokens of a sequence.

    Attributes:
        token_ids: draft tokens, in order; none if there is nothing to guess from.
        matched: tokens that agree with the place the guess was found at. Acceptance is learned by this number.
    """

    token_ids: Sequence[int] = ()
    matched: int = 0


class Drafter(ABC):
    """The drafter of one sequence.

    Attributes:
        num_tokens: tokens of the sequence that it has.
    """

    num_tokens: int

    @abstractmethod
    def propose(self, most: int) -> Draft:
        """Return a draft of at most `most` tokens after the tokens so far."""

    @abstractmethod
    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the sequence now has, whether they were drafted or not."""
