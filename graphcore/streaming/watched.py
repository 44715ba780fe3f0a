"""A policy under which somebody is told which group is needed."""

from collections.abc import Collection

from graphcore.progress import Progress
from graphcore.streaming.policy import Policy, Resident


class Watched:
    """Another policy, each acquire of which is reported before it waits.

    Args:
        policy: what really moves bytes.
        on_progress: called with stage, the group, done and total.
        stage: "prefill" or "generate".
        done, total: tokens, when the pass begins.
    """

    def __init__(self, policy: Policy, on_progress: Progress, stage: str, done: int, total: int) -> None:
        self._policy = policy
        self._on_progress = on_progress
        self._pass = stage, done, total

    def acquire(self, group: int) -> None:
        """Report the group, then make its bytes be there."""
        stage, done, total = self._pass
        self._on_progress(stage, group, done, total)
        self._policy.acquire(group)

    def release(self, group: int) -> None:
        """Let the group's slot go."""
        self._policy.release(group)

    def skip(self, groups: Collection[int]) -> None:
        """Leave groups out from now on."""
        self._policy.skip(groups)

    def reset(self) -> None:
        """Forget what was moved ahead of its use."""
        self._policy.reset()


def watched(policy: Policy, on_progress: Progress, stage: str, done: int, total: int) -> Policy:
    """Return a policy that reports each group of the pass that begins now; one that moves nothing is left as it is."""
    return policy if isinstance(policy, Resident) else Watched(policy, on_progress, stage, done, total)
