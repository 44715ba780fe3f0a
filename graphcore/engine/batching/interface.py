"""The interfaces of batching: which sequences a pass runs, and how a pass's decode steps run and choose tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from graphcore.engine.request import TokenSequence
from graphcore.graph.program import Program
from graphcore.progress import Progress


class Batching(ABC):
    """A way to run sequences together, pass by pass."""

    @property
    @abstractmethod
    def running(self) -> Sequence[TokenSequence]:
        """Sequences that were admitted and have not left, in that order; some may be put aside."""

    @abstractmethod
    def admit(self, waiting: Sequence[TokenSequence]) -> int:
        """Give places to the first sequences that wait, and return how many got one."""

    @abstractmethod
    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run one pass, and give each sequence that is due one its next token.

        Args:
            is_stopped: function that is asked between layer groups whether the pass is to be given up.
        """

    @abstractmethod
    def leave(self) -> None:
        """Take back the places of sequences that have ended."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End all running sequences with an error; the caches hold nothing that can be used."""

    @abstractmethod
    def give_up(self) -> None:
        """End all running sequences after a pass was given up; the caches hold a part of its tokens."""

    @abstractmethod
    def put_aside(self) -> Callable[[], None]:
        """Copy what the running sequences need out of the caches; the function that is returned puts it back."""


class DecodeLoop(ABC):
    """A way to run decode steps of sequences that join and leave between any two of them."""

    @abstractmethod
    def start(self, sequences: Sequence[TokenSequence]) -> tuple[list[Program], Sequence[TokenSequence]]:
        """Return the programs of the next step, and the sequences that get a token into the caches by them.

        Args:
            sequences: all running sequences of whose prompts at most one token is left.
        """

    @abstractmethod
    def finish(self, ended: Sequence[tuple[TokenSequence, Tensor]]) -> bool:
        """Choose tokens after the programs of `start` have run; return whether any sequence was given one.

        Args:
            ended: sequences whose prompts have ended with a chunk, with the logits after it, [1, V] float32.
        """

    @abstractmethod
    def settle(self, sequence: TokenSequence) -> None:
        """Leave a sequence out of steps until `start` is given it again, and make known what the caches hold of it."""

    @abstractmethod
    def may_leave(self, sequence: TokenSequence) -> bool:
        """Return whether it is known what the caches hold of a sequence that has ended, if that matters."""

    @abstractmethod
    def leave(self, sequence: TokenSequence) -> list[int]:
        """Forget a sequence that has ended, and return the tokens that the caches hold of it."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the steps that have not been finished, after a pass that failed or was given up."""


def done_of(sequences: Sequence[TokenSequence]) -> tuple[int, int]:
    """Return the new tokens of the sequence that has most to do, and how many it may have."""
    longest = max(sequences, key=lambda sequence: sequence.request.max_new_tokens)
    return len(longest.request.token_ids), longest.request.max_new_tokens
