"""Which replica a request goes to: the one that has computed its beginning, unless that is busy."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_KEYS = 200_000  # beginnings that are remembered, about 20 MB


@dataclass(frozen=True)
class RoutingHint:
    """Where a call may go: the first argument of every method of a replica.

    Attributes:
        keys: keys of the request's beginnings, shortest first (prefix_keys.py).
        excluded: ids of replicas that are only taken if there is no other.
        is_pinned: True if the call goes to the replica with its beginning even if that is busy.
    """

    keys: Sequence[bytes] = ()
    excluded: frozenset[str] = frozenset()
    is_pinned: bool = False


@dataclass
class PrefixTable:
    """Which replica had a beginning last, and how many requests run on each.

    Attributes:
        slack: requests that a replica may have more than the least busy one before it counts as busy.
    """

    slack: int
    _holders: OrderedDict[bytes, str] = field(default_factory=OrderedDict)
    _running: Counter[str] = field(default_factory=Counter)
    _routed: Counter[str] = field(default_factory=Counter)

    def order(self, hint: RoutingHint, replicas: Sequence[str]) -> list[str]:
        """Return the ids of replicas, best first: the holder of the longest beginning, and then the least busy."""
        by_load = sorted(replicas, key=lambda one: (one in hint.excluded, self._running[one], self._routed[one], one))
        known = (self._holders.get(key) for key in reversed(hint.keys))
        holder = next((one for one in known if one in replicas and one not in hint.excluded), None)
        if holder is None or not (hint.is_pinned or self._has_room(holder, replicas)):
            return by_load
        return [holder, *(one for one in by_load if one != holder)]

    def _has_room(self, holder: str, replicas: Sequence[str]) -> bool:
        return self._running[holder] <= min(self._running[one] for one in replicas) + self.slack

    def note_start(self, hint: RoutingHint, replica: str) -> None:
        """Note that a replica has a request, and from now on its beginnings."""
        self._running[replica] += 1
        self._routed[replica] += 1
        for key in hint.keys:
            self._holders[key] = replica
            self._holders.move_to_end(key)
        while len(self._holders) > MOST_KEYS:
            self._holders.popitem(last=False)

    def note_end(self, replica: str) -> None:
        """Note that a request has ended, however it did."""
        self._running[replica] -= 1
