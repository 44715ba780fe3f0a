"""Interfaces: `Batching` schedules requests into forward passes, `DecodeLoop` runs decode steps and samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from graphcore.engine.request import Request
from graphcore.graph.program import Program
from graphcore.progress import Progress


class Batching(ABC):
    """Schedules requests into forward passes, one pass at a time."""

    @property
    @abstractmethod
    def running(self) -> Sequence[Request]:
        """Requests that were admitted and have not left, in that order; some may be swapped out."""

    @abstractmethod
    def admit(self, waiting: Sequence[Request]) -> int:
        """Admit the first requests that wait, and return how many there was room for."""

    @abstractmethod
    def resume(self, requests: Sequence[Request], cached: int) -> None:
        """Run requests from now on whose first `cached` tokens are in rows 0, 1, ... of the KV cache already.

        For measurements, while no other request runs. A row keeps its pages if its request is swapped out at the end.
        """

    @abstractmethod
    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run one pass, and give each request that is due one its next token.

        Args:
            is_stopped: function that is asked between layer groups whether the pass is to be given up.
        """

    @abstractmethod
    def leave(self) -> None:
        """Free the rows and pages of finished requests."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End all running requests with an error; the caches hold nothing that can be used."""

    @abstractmethod
    def give_up(self) -> None:
        """End all running requests after a pass was given up; the caches hold a part of its tokens."""

    @abstractmethod
    def lend_cache(self) -> Callable[[], None]:
        """Lend the KV cache to other calls until the function that is returned is called."""


class DecodeLoop(ABC):
    """A way to run decode steps of requests that join and leave between any two of them."""

    @abstractmethod
    def start(self, requests: Sequence[Request]) -> tuple[list[Program], Sequence[Request]]:
        """Return the programs of the next step, and the requests that get a token into the caches by them.

        Args:
            requests: all running requests of whose prompts at most one token is left.
        """

    @abstractmethod
    def finish(self, ended: Sequence[tuple[Request, Tensor]]) -> bool:
        """Choose tokens after the programs of `start` have run; return whether any request was given one.

        Args:
            ended: requests whose prompts have ended with a chunk, with the logits after it, [1, V] float32.
        """

    @abstractmethod
    def settle(self, request: Request) -> None:
        """Leave a request out of steps until `start` is given it again, and make known what the caches hold of it."""

    @abstractmethod
    def may_leave(self, request: Request) -> bool:
        """Return whether it is known what the caches hold of a request that has ended, if that matters."""

    @abstractmethod
    def leave(self, request: Request) -> list[int]:
        """Forget a request that has ended, and return the tokens that the caches hold of it."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the steps that have not been finished, after a pass that failed or was given up."""


def done_of(requests: Sequence[Request]) -> tuple[int, int]:
    """Return the new tokens of the request that has most to do, and how many it may have."""
    longest = max(requests, key=lambda request: request.max_new_tokens)
    return len(longest.token_ids), longest.max_new_tokens
