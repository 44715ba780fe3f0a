"""The interface of drafters, which guess the next tokens of one sequence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Draft(NamedTuple):
    """A guess at the next tokens of a sequence.

    Attributes:
        token_ids: draft tokens, in order; none if there is nothing to guess from.
        kinds: class of each token, by which its acceptance is learned (`Classes`).
    """

    token_ids: Sequence[int] = ()
    kinds: Sequence[int] = ()


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
