"""Interfaces: `Batching` schedules requests into forward passes, `DecodeLoop` runs decode steps and samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from graphcore.engine.request import Request
from graphcore.engine.speculation.speculation import Reserve, Speculation
from graphcore.graph.program import Program
from graphcore.progress import Progress


class Batching(ABC):
    """Schedules requests into forward passes, one pass at a time."""

    @property
    @abstractmethod
    def running(self) -> Sequence[Request]:
        """Requests that were admitted and have not left, in order of admission; some may be swapped out."""

    @abstractmethod
    def admit(self, waiting: Sequence[Request]) -> int:
        """Admit waiting requests in order, as far as there is room; return how many."""

    @abstractmethod
    def resume(self, requests: Sequence[Request], cached: int) -> None:
        """Start running requests whose first `cached` tokens are already in rows 0, 1, ... of the KV cache.

        For measurements, while no other request runs. A row keeps its pages if its request is swapped out at the end.
        """

    @abstractmethod
    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run one pass, and append the next token to each request whose known tokens have all run.

        Args:
            is_stopped: function that is called between layer groups; True aborts the pass.
        """

    @abstractmethod
    def leave(self) -> None:
        """Free the rows and pages of finished requests."""

    def page_counts(self, _request: Request) -> tuple[int, int]:
        """Return the number of a request's KV-cache pages, and how many it shares with other requests. Thread-safe.

        Both are 0 where there are no pages.
        """
        return 0, 0

    @property
    def speculation(self) -> Speculation | None:
        """What is learned of draft tokens; None without speculation."""
        return None

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End all running requests with an error; the content of the caches is invalid."""

    @abstractmethod
    def give_up(self) -> None:
        """End all running requests after an aborted pass; the caches hold a part of its tokens."""

    @abstractmethod
    def lend_cache(self) -> Callable[[], None]:
        """Lend the KV cache to other calls until the returned function is called."""


class NoBatching(Batching):
    """The batching of a closed engine, which has no requests and no caches."""

    running: Sequence[Request] = ()

    def admit(self, waiting: Sequence[Request]) -> int:
        """Admit none."""
        return 0

    def resume(self, requests: Sequence[Request], cached: int) -> None:
        """Do nothing."""

    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        """Do nothing."""

    def give_up(self) -> None:
        """Do nothing."""

    def lend_cache(self) -> Callable[[], None]:
        """Return a function that does nothing."""
        return lambda: None


class DecodeLoop(ABC):
    """A loop of decode steps; requests join and leave between any two steps."""

    most_together = 1  # most consecutive tokens of one request in a step
    speculation: Speculation | None = None  # source of draft tokens

    @abstractmethod
    def take_forced(self, requests: Sequence[Request]) -> None:
        """Append the tokens that masks of running requests force, as far as they are known before a pass."""

    def drafts(
        self, tokens: Mapping[Request, Sequence[int]], spare: int, reserve: Reserve, *, is_alone: bool
    ) -> Mapping[Request, Sequence[int]]:
        """Return draft tokens that the next step may check behind the known ones; most loops have none.

        Args:
            tokens: the argument of `start`, without drafts.
            spare: further tokens that the step has room for.
            reserve: function that gives a request the pages of draft tokens.
            is_alone: True if no chunk of a prompt runs in the pass, so that its time is the step's.
        """
        return {}

    @abstractmethod
    def start(self, tokens: Mapping[Request, Sequence[int]]) -> tuple[list[Program], Mapping[Request, int]]:
        """Return the programs of the next step, and its requests, each with the number of its tokens that are sure.

        Args:
            tokens: all running requests that run no chunk of a prompt, each with its next tokens: none if the next is
                not known on the host, and at most `most_together`. Draft tokens may follow the known ones.
        """

    @abstractmethod
    def finish(self, ended: Sequence[tuple[Request, Tensor]]) -> bool:
        """Sample tokens after the programs of `start` have run; return whether any request got one.

        Args:
            ended: requests whose last prompt chunk has run, with the logits after it, [1, V] float32.
        """

    @abstractmethod
    def drain(self, request: Request) -> None:
        """Read the steps that run a request, and leave it out of further ones until it is passed to `start` again."""

    @abstractmethod
    def may_leave(self, request: Request) -> bool:
        """Return whether an ended request may leave: its steps were read, or no other request may reuse its cache."""

    @abstractmethod
    def leave(self, request: Request) -> list[int]:
        """Remove a request that has ended, and return those of its tokens that the caches hold."""

    @abstractmethod
    def drop(self) -> None:
        """Discard the steps that have not been finished, after a pass that failed or was aborted."""


def done_of(requests: Sequence[Request]) -> tuple[int, int]:
    """Return the number of new tokens and the limit of the request with the largest limit."""
    longest = max(requests, key=lambda request: request.max_new_tokens)
    return len(longest.token_ids), longest.max_new_tokens
