"""The interface of a streaming policy, and the one that never moves anything."""

from collections.abc import Collection
from typing import Protocol


class Policy(Protocol):
    """Decides when a layer group's bytes come to the device and when their slot may be filled again."""

    def acquire(self, group: int) -> None:
        """Make the group's bytes be there before anything that is enqueued after this call."""

    def release(self, group: int) -> None:
        """Say that what was enqueued so far is the last to read the group's slot."""

    def skip(self, groups: Collection[int]) -> None:
        """Say which groups the passes from now on leave out."""

    def reset(self) -> None:
        """Forget what was moved ahead of its use; nothing moves any more when this returns."""


class Resident:
    """Every group has a slot of its own that was filled at load."""

    def acquire(self, group: int) -> None:
        """The bytes are there."""

    def release(self, group: int) -> None:
        """The bytes stay."""

    def skip(self, groups: Collection[int]) -> None:
        """Nothing moves."""

    def reset(self) -> None:
        """Nothing moves."""
