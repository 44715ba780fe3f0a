"""Rank 0's batching: each call of the queue is told to the other ranks before it runs here.

    queue  --admit, run, leave, ...-->  LeadBatching  -->  ContinuousBatching       on rank 0
                                             |
                                        JSON messages  -->  follow.py               on all other ranks

With each message goes what has happened to the requests: tokens that rank 0 has sampled, and ends. So the schedulers of
all ranks make the same choices, and pages, prefixes and snapshots need no messages.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.batching.interface import Batching
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.request import Request
from graphcore.engine.ring.rank_times import PassClock
from graphcore.engine.ring.saved_parts import CacheParts
from graphcore.engine.ring.shared_requests import LedRequests
from graphcore.engine.sampler import SequenceSampler
from graphcore.engine.speculation.speculation import Speculation
from graphcore.parallel.process_group import ProcessGroup
from graphcore.progress import Progress
from graphcore.streaming.scheduler import never


class LeadSampler(SequenceSampler):
    """Rank 0's sampler, which tells the other ranks the tokens."""

    def __init__(self, runner: ModelRunner, ranks: ProcessGroup, requests: LedRequests) -> None:
        super().__init__(runner)
        self._ranks, self._requests = ranks, requests

    def take_forced(self, requests: Sequence[Request]) -> None:
        """Do nothing inside a pass: a mask may be ready on rank 0 at any time. `take_forced_before` is for that."""

    def take_forced_before(self, requests: Sequence[Request]) -> None:
        """Append the tokens that masks force, before the other ranks are told of the pass."""
        super().take_forced(requests)

    def share(self) -> None:
        """Tell the other ranks what was sampled since the last message."""
        self._ranks.tell(self._requests.changes())


class LeadBatching(Batching):
    """The batching of rank 0.

    Args:
        batching: scheduler of this rank, like those of the others.
        sampler: sampler of its decode loop.
        most_admitted: most requests that can be admitted at once.

    Attributes:
        clock: times of all ranks.
        caches: parts of saved caches on this rank.
    """

    def __init__(
        self,
        batching: ContinuousBatching,
        sampler: LeadSampler,
        ranks: ProcessGroup,
        requests: LedRequests,
        most_admitted: int,
    ) -> None:
        self._batching, self._sampler, self._ranks, self._requests = batching, sampler, ranks, requests
        self._most_admitted, self.clock = most_admitted, PassClock(ranks)
        self.caches = CacheParts(ranks, batching.snapshots)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that were admitted and have not left, in order of admission; some may be swapped out."""
        return self._batching.running

    def admit(self, waiting: Sequence[Request]) -> int:
        """Admit waiting requests in order, as far as there is room; return how many."""
        first = waiting[: self._most_admitted]
        self._tell("admit", first)
        with self._ranks.leaving_on_error():
            return self._batching.admit(first)

    def resume(self, requests: Sequence[Request], cached: int) -> None:
        """Start running requests whose first `cached` tokens are already in rows 0, 1, ... of the KV cache."""
        self._tell("resume", requests, cached=cached)
        with self._ranks.leaving_on_error():
            self._batching.resume(requests, cached)

    def run(self, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Run one pass. No rank can be told to abort it, so it runs to its end."""
        self._sampler.take_forced_before(self.running)
        exchanges = self.clock.is_due
        self._tell("run", exchanges=exchanges)
        with self._ranks.leaving_on_error(), self.clock.measured(exchanges=exchanges):
            self._batching.run(on_progress, never)

    def leave(self) -> None:
        """Free the rows and pages of finished requests."""
        ended = [request for request in self.running if request.has_ended]
        if ended:
            self._tell("leave", rowless=self._requests.numbers(one for one in ended if one.cache_row is None))
            with self._ranks.leaving_on_error():
                self._batching.leave()
        self._requests.forget(self.running)

    def page_counts(self, request: Request) -> tuple[int, int]:
        """Return the number of a request's KV-cache pages, and how many it shares with other requests."""
        return self._batching.page_counts(request)

    def idle_seconds(self) -> float:
        """Return the seconds since the last message."""
        return time.monotonic() - self._ranks.told

    def beat(self) -> None:
        """Check that all other ranks are there.

        Raises:
            ParallelError: one is not.
        """
        with self._ranks.leaving_on_error():
            self._ranks.beat()

    @property
    def speculation(self) -> Speculation | None:
        """What is learned of draft tokens; None without speculation."""
        return self._batching.speculation

    def fail(self, error: BaseException) -> None:
        """End all running requests with an error; the other ranks are told nothing, as no pass follows."""
        self._batching.fail(error)

    def give_up(self) -> None:
        """End all running requests."""
        self._batching.give_up()

    def lend_cache(self) -> Callable[[], None]:
        """Lend the KV cache of all ranks to other calls until the returned function is called."""
        self._tell("lend_cache")
        with self._ranks.leaving_on_error():
            give_back = self._batching.lend_cache()

        def give_all_back() -> None:
            try:
                self._tell("give_back_cache")
            finally:
                with self._ranks.leaving_on_error():
                    give_back()

        return give_all_back

    def _tell(self, call: str, requests: Sequence[Request] = (), **more: Any) -> None:
        """Tell the other ranks of a call, with its requests and what has happened since the last message."""
        described = self._requests.describe(requests)
        changes, numbers = self._requests.changes(), self._requests.numbers(requests)
        self._ranks.tell({"call": call, "new": described, "changes": changes, "requests": numbers, **more})
