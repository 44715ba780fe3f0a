"""A driver that locks memory up to a quota, and counts."""

from dataclasses import dataclass, field


@dataclass
class Driver:
    """Locks runs of memory up to a quota.

    Attributes:
        quota: bytes of all runs together.
        most: that were locked at once.
    """

    quota: int
    locked: dict[int, int] = field(default_factory=dict)
    most: int = 0

    def register(self, address: int, nbytes: int) -> str:
        if sum(self.locked.values()) + nbytes > self.quota:
            return "out of memory"
        self.locked[address] = nbytes
        self.most = max(self.most, sum(self.locked.values()))
        return ""

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def device_address(self, address: int) -> int | None:
        return address
