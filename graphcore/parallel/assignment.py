"""An assignment of groups of layers to the ranks whose files hold them: a bipartite matching with augmenting paths.

    give(2)     group 5: rank 1 -> rank 2     group 7: nobody -> rank 1     if no group of rank 2's files is nobody's
    fix(5, 0)   group 5: rank 2 -> rank 0     group 6: rank 0 -> rank 2     all ranks have as many groups as before

So a rank gets another group whenever some assignment allows it, however the groups before it were given.
"""

from collections import deque
from collections.abc import Sequence

NOBODY = -1


class Assignment:
    """Which rank has each group. All groups are nobody's at first.

    Args:
        holders: ranks that may have each group.
    """

    def __init__(self, holders: Sequence[Sequence[int]]) -> None:
        self._holders = [frozenset(ranks) for ranks in holders]
        self._owners = [NOBODY] * len(holders)
        self._num_fixed = 0

    def give(self, rank: int) -> bool:
        """Give a rank one group more, and all others as many as they have; return False if no assignment has that."""
        return self._move(NOBODY, rank)

    def fix(self, group: int, rank: int) -> bool:
        """Give the next group to a rank for good, and all ranks as many as they have; False if no assignment has that.

        Args:
            group: the next one after those that were fixed.
        """
        assert group == self._num_fixed, "groups are fixed in their order"
        owner = self._owners[group]
        if rank not in self._holders[group]:
            return False
        self._owners[group], self._num_fixed = rank, group + 1
        if owner == rank or self._move(rank, owner):
            return True
        self._owners[group], self._num_fixed = owner, group
        return False

    def rivals(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the ranks between which a rank's lack of groups can be moved, and all groups that these may have."""
        ranks = sorted(self._paths(rank))
        return ranks, [group for group, holders in enumerate(self._holders) if holders & {*ranks}]

    def _move(self, source: int, target: int) -> bool:
        """Take a group from the source and give the target one more, which may be another; return whether it works."""
        paths = self._paths(target)
        if source not in paths:
            return False
        while source != target:
            group, taker = paths[source]
            self._owners[group] = taker
            source = taker
        return True

    def _paths(self, target: int) -> dict[int, tuple[int, int]]:
        """Return the owners from which a group can be taken for a target: of each, the group and who takes it."""
        found = {target: (NOBODY, target)}
        queue = deque([target])
        while queue:
            taker = queue.popleft()
            for group in range(self._num_fixed, len(self._owners)):
                owner = self._owners[group]
                if owner not in found and taker in self._holders[group]:
                    found[owner] = group, taker
                    if owner != NOBODY:
                        queue.append(owner)
        return found
