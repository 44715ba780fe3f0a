"""Prefix-aware choice of a replica: the one that has the request's prefix cached, unless it is busy."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CHOSEN_SECONDS = 1.0  # for which a replica is counted as chosen, if the request is not taken meanwhile
MOST_KEYS = 200_000  # prefixes that are remembered, about 20 MB


@dataclass(frozen=True)
class RoutingHint:
    """Routing information of a call: the first argument of every method of a replica.

    Attributes:
        keys: prefix hashes of the request, shortest prefix first (prefix_keys.py).
        excluded: ids of replicas that are only taken if there is no other.
        is_pinned: True if the call goes to the replica that has the prefix even if that is busy.
    """

    keys: Sequence[bytes] = ()
    excluded: frozenset[str] = frozenset()
    is_pinned: bool = False


@dataclass
class PrefixTable:
    """Which replica last computed a prefix, and how many requests are in flight on each.

    Attributes:
        slack: requests that a replica may have more than the least busy one before it counts as busy.
        clock: function that returns seconds.
    """

    slack: int
    clock: Callable[[], float] = time.monotonic
    _holders: OrderedDict[bytes, str] = field(default_factory=OrderedDict)
    _running: Counter[str] = field(default_factory=Counter)
    _chosen: dict[str, tuple[str, float]] = field(default_factory=dict)
    _routed: Counter[str] = field(default_factory=Counter)

    def order(self, hint: RoutingHint, replicas: Sequence[str], request: str = "") -> list[str]:
        """Return replica ids, best first: the one with the longest matching prefix, then by load.

        Args:
            request: id of the request, which counts for the first replica until it is sent; "" for none.
        """
        found = self._order(hint, replicas)
        if request:
            self._chosen[request] = found[0], self.clock()
        return found

    def _order(self, hint: RoutingHint, replicas: Sequence[str]) -> list[str]:
        loads = self._loads(replicas)
        by_load = sorted(replicas, key=lambda one: (one in hint.excluded, loads[one], self._routed[one], one))
        known = (self._holders.get(key) for key in reversed(hint.keys))
        holder = next((one for one in known if one in replicas and one not in hint.excluded), None)
        if holder is None or not (hint.is_pinned or loads[holder] <= min(loads.values()) + self.slack):
            return by_load
        return [holder, *(one for one in by_load if one != holder)]

    def _loads(self, replicas: Sequence[str]) -> dict[str, int]:
        """Return the load of each replica: requests in flight, and those chosen for it but not sent yet."""
        oldest = self.clock() - CHOSEN_SECONDS
        self._chosen = {request: one for request, one in self._chosen.items() if one[1] > oldest}
        waiting = Counter(replica for replica, _ in self._chosen.values())
        return {one: self._running[one] + waiting[one] for one in replicas}

    def note_sent(self, replica: str) -> None:
        """Count a request that was sent to a replica, which may still reject it."""
        self._running[replica] += 1

    def note_taken(self, hint: RoutingHint, replica: str, request: str = "") -> None:
        """Record that a replica has accepted a request, and will have its prefixes cached."""
        self._chosen.pop(request, None)
        self._routed[replica] += 1
        for key in hint.keys:
            self._holders[key] = replica
            self._holders.move_to_end(key)
        while len(self._holders) > MOST_KEYS:
            self._holders.popitem(last=False)

    def note_end(self, replica: str) -> None:
        """Stop counting a request that was sent, whether it succeeded, failed or was rejected."""
        self._running[replica] = max(0, self._running[replica] - 1)
