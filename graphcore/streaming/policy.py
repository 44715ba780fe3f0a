"""The interface of streaming policies, which decide when bytes move, and the policy under which nothing moves.

    programs  --acquire, release-->  policy  --begin, wait, release, cancel-->  filler  --bytes-->  slots

The planner decides which groups stay on the device (`StreamingSettings.keeps`). `Streamed` (streamed.py) moves the
others, described by a `Ring`: the groups in the order of use, the slots that they go through, and the slots' filler.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from graphcore.progress import Progress
from graphcore.streaming.filler import Filler, SlotFillT
from graphcore.streaming.timeline import Watch

Work = TypeVar("Work")


@dataclass(frozen=True)
class Ring(Generic[Work, SlotFillT]):
    """The groups that move, and what a policy needs to move them.

    Attributes:
        work: work that fills a group's slot, by group, in the order of use. Groups that are absent do not move.
        num_slots: number of slots; the group at position i has slot i modulo this.
        reads_ahead: True if the slots of later groups are filled while one computes (`streaming.mode=async`); else
            each is filled when it is acquired.
        filler: filler of the slots.
        watch: clock that times stalls and compute.
    """

    work: Mapping[int, Work]
    num_slots: int
    reads_ahead: bool
    filler: Filler[Work, SlotFillT]
    watch: Watch


@dataclass(frozen=True)
class SlotUse:
    """The state of a slot at one moment.

    Attributes:
        group: number of the group whose bytes it holds or gets; None if it is free.
        state: "free"; "reading", its bytes arrive; "ready", they are there; "computing", a step reads them.
    """

    group: int | None
    state: Literal["free", "reading", "ready", "computing"]


@dataclass(frozen=True)
class Activity:
    """A snapshot of a policy: the state of each slot, and the group that computes.

    Attributes:
        slots: state of each slot; empty if nothing moves through slots.
        computing: number of the group that computes, a resident one too; None between passes, or if nothing moves.
    """

    slots: Sequence[SlotUse] = ()
    computing: int | None = None


class Policy(ABC):
    """A strategy that decides when a layer group's bytes are moved to the device and when their slot is refilled."""

    @abstractmethod
    def acquire(self, group: int) -> None:
        """Ensure that all work enqueued after this call finds the group's bytes on the device."""

    @abstractmethod
    def release(self, group: int) -> None:
        """Allow the group's slot to be refilled after the work enqueued so far, which is the last to read it."""

    def skip(self, groups: Collection[int]) -> None:  # noqa: B027  # only policies that read ahead use it
        """Leave groups out of all later passes. A policy that does not read ahead can ignore this."""

    def reset(self) -> None:  # noqa: B027  # only policies that read ahead use it
        """Discard groups that were read ahead; no bytes move any more when this returns."""

    def drafting(self) -> AbstractContextManager[object]:
        """Return a context in which a draft model runs between two passes; a timeline of movement shows it."""
        return nullcontext()

    def activity(self) -> Activity:
        """Return a snapshot of the slots and of the group that computes. Thread-safe."""
        return Activity()


class Resident(Policy):
    """A policy under which nothing moves: every group is resident on the device."""

    def acquire(self, group: int) -> None:
        """Do nothing: the bytes are on the device."""

    def release(self, group: int) -> None:
        """Do nothing: the bytes stay."""


class Watched(Policy):
    """A policy that reports each acquire and passes all calls to another policy.

    Args:
        policy: policy that moves the bytes.
        on_progress: callback, called with stage, group, done and total before each wait.
        stage: "prefill" or "generate".
        done, total: numbers of tokens when the pass begins.
    """

    def __init__(self, policy: Policy, on_progress: Progress, stage: str, done: int, total: int) -> None:
        self._policy = policy
        self._on_progress = on_progress
        self._pass = stage, done, total

    def acquire(self, group: int) -> None:
        """Report the group, then acquire it."""
        stage, done, total = self._pass
        self._on_progress(stage, group, done, total)
        self._policy.acquire(group)

    def release(self, group: int) -> None:
        """Release the group's slot."""
        self._policy.release(group)

    def skip(self, groups: Collection[int]) -> None:
        """Leave groups out of all later passes."""
        self._policy.skip(groups)

    def reset(self) -> None:
        """Discard groups that were read ahead."""
        self._policy.reset()

    def drafting(self) -> AbstractContextManager[object]:
        """Return the context of the wrapped policy."""
        return self._policy.drafting()

    def activity(self) -> Activity:
        """Return the snapshot of the wrapped policy."""
        return self._policy.activity()


def watched(policy: Policy, on_progress: Progress, stage: str, done: int, total: int) -> Policy:
    """Return a policy that reports each group of one pass; `Resident` is returned unchanged, as it moves nothing."""
    return policy if isinstance(policy, Resident) else Watched(policy, on_progress, stage, done, total)
