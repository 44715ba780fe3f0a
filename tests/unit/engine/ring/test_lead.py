"""Rank 0's batching leaves the process group whenever a call fails on it, as the other ranks then wait for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.ring.lead import LeadBatching, LeadSampler
from graphcore.engine.ring.shared_requests import LedRequests
from graphcore.parallel.process_group import ProcessGroup
from graphcore.progress import ignore_progress
from graphcore.streaming.scheduler import never


class Ranks:
    """A process group that notes what it is told, and whether this rank has left it."""

    waited = 0.0

    def __init__(self) -> None:
        self.told: list[str] = []
        self.has_left = False

    def tell(self, message: dict[str, Any]) -> None:
        """Note a call."""
        self.told.append(message["call"])

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Note that the block has raised."""
        try:
            yield
        except BaseException:
            self.has_left = True
            raise


class FailingBatching:
    """A scheduler whose calls fail."""

    snapshots = None
    running = ()

    def fail(self, *_arguments: Any) -> Any:
        """Raise."""
        raise MemoryError

    admit = resume = run = lend_cache = fail


class LendingBatching(FailingBatching):
    """A scheduler that lends its caches, and fails when it gets them back."""

    def lend_cache(self) -> Any:
        """Return the function that gives them back."""
        return self.fail


class NoSampler:
    """A sampler without requests."""

    def take_forced_before(self, _requests: Any) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("batching", "call"),
    [
        (FailingBatching, lambda lead: lead.admit([])),
        (FailingBatching, lambda lead: lead.resume([], 3)),
        (FailingBatching, lambda lead: lead.run(ignore_progress, never)),
        (FailingBatching, lambda lead: lead.lend_cache()),
        (LendingBatching, lambda lead: lead.lend_cache()()),
    ],
    ids=["admit", "resume", "run", "lend_cache", "give_back_cache"],
)
def test_a_call_that_fails_on_rank_0_leaves_the_group(
    batching: type[FailingBatching], call: Callable[[LeadBatching], object]
) -> None:
    ranks = Ranks()
    inner, group = cast("ContinuousBatching", batching()), cast("ProcessGroup", ranks)
    lead = LeadBatching(inner, cast("LeadSampler", NoSampler()), group, LedRequests(), 4)
    with pytest.raises(MemoryError):
        call(lead)
    assert ranks.told
    assert ranks.has_left
