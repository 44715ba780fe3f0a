"""The partition of a model's layers among ranks.

    layers            0   1   2   3   4   5   6   7
    interleaved       0   1   1   0   1   1   0   1     while weights stream: all disks read at once for one sequence
    contiguous        0   0   0   1   1   1   1   1     if all weights stay in memory: fewer hand-overs

How many layers a rank has follows from its memory, its disk and what it reads besides, which on rank 0 is the head: so
many that all ranks read as long in a pass, and if nothing streams, that all compute as long. The settings may say it
instead (`parallel.split`).

Units that are alike go one by one to the rank that then has the least load, which is optimal. Units that lend keys and
values are larger, and few: a model has one for each kind of attention. So every way to place them is tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from graphcore.config.settings import Keeps
from graphcore.errors import ConfigError
from graphcore.parallel.assignment import Assignment
from graphcore.parallel.capacity import RankCapacity, Requirement, leveled
from graphcore.parallel.layer_units import LayerUnit, contiguous_units
from graphcore.parallel.share import ENDS

Load = tuple[float, ...]
"""The load of a rank, compared lexicographically."""
LoadOf = Callable[[int, int, Sequence[LayerUnit]], Load]
"""A function to a rank's load, from the rank, its number of units that do not lend, and its units that lend."""


@dataclass(frozen=True)
class _Partition:
    """Numbers of units for each rank.

    Attributes:
        holders: ranks that may have each unit; one for a unit that lends.
        counts: number of units of each rank.
        loads: loads of all ranks, the largest first.
    """

    units: Sequence[LayerUnit]
    holders: Sequence[Sequence[int]]
    counts: Sequence[int]
    loads: tuple[Load, ...]

    def owners(self, *, is_contiguous: bool) -> tuple[int, ...]:
        """Return the rank of each layer.

        Args:
            is_contiguous: True for one run of layers for each rank, as far as files and lent keys and values allow;
                False to interleave them.
        """
        assignment, ranks = Assignment(self.holders), range(len(self.counts))
        for rank in ranks:
            for _ in range(self.counts[rank]):
                is_given = assignment.give(rank)
                assert is_given, "the search returns counts that can be assigned"
        last = self.holders[-1][0] if self.units[-1].lends else None
        in_runs = sorted(ranks, key=lambda rank: rank == last)  # the last unit's rank ends with it
        owners, had, before = dict[int, int](), [0] * len(ranks), ENDS
        for at, unit in enumerate(self.units):
            done = (at + 1) / len(self.units)
            by_need = sorted(ranks, key=lambda rank: had[rank] - self.counts[rank] * done)
            before = next(
                rank for rank in ([before, *in_runs] if is_contiguous else by_need) if assignment.fix(at, rank)
            )
            had[before] += 1
            owners.update(dict.fromkeys(unit.layers, before))
        return tuple(owners[layer] for layer in range(len(owners)))


def partition_by_capacity(
    units: Sequence[LayerUnit],
    capacities: Sequence[RankCapacity],
    layers: Sequence[Requirement],
    ends: Requirement,
    keeps: Keeps,
    *,
    is_contiguous: bool,
) -> tuple[int, ...]:
    """Return the rank of each layer, so that all ranks need as long.

    Args:
        units: units of the model, for these capacities (`units_of`).
        layers: requirement of each layer.
        ends: requirement of embedding and head, which rank 0 has.
        keeps: weights that stay in memory.
        is_contiguous: True for runs of neighbours, also if some lend keys and values, unless the memory of ranks would
            then be too small, or another partition would stream less.
    """

    def best(units: Sequence[LayerUnit]) -> _Partition | None:
        return min(
            _partitions(units, len(capacities), _capacity_load(units, capacities, layers, ends, keeps)),
            key=lambda partition: partition.loads,
            default=None,
        )

    found = best(units)
    assert found is not None, "units_of has checked that each rank gets a unit"
    neighbours = contiguous_units(units) if is_contiguous else None
    in_runs = None if neighbours is None else best(neighbours)
    if in_runs is not None and in_runs.loads[0][:2] <= found.loads[0][:2]:
        found = in_runs
    return found.owners(is_contiguous=is_contiguous)


def partition_by_split(
    units: Sequence[LayerUnit], split: Sequence[float], group_size: int, *, is_contiguous: bool
) -> tuple[int, ...]:
    """Return the rank of each layer, in the proportions of a split, rounded to groups of layers, at least one for each.

    Args:
        units, is_contiguous: the same as for `partition_by_capacity`.
        group_size: number of layers that stream together.

    Raises:
        ConfigError: files, or lent keys and values, do not allow it; the message has the nearest split that is allowed.
    """
    num_layers, ranks = sum(len(unit.layers) for unit in units), range(len(split))

    def groups(count: int, lending: Sequence[LayerUnit]) -> float:
        return count + sum(len(unit.layers) for unit in lending) / group_size

    def load(rank: int, count: int, lending: Sequence[LayerUnit]) -> Load:
        return (groups(count, lending) / split[rank],)

    everywhere = [(ENDS,), *[tuple(ranks)] * (-(-num_layers // group_size) - 1)]
    wanted = _counts(everywhere, [()] * len(split), load)
    assert wanted is not None, "there are more groups than units, and more units than ranks"
    exact = [num_layers / group_size * part / sum(split) for part in split]

    def distance(owners: Sequence[int], rank: int, groups: Sequence[float]) -> float:
        return abs(owners.count(rank) / group_size - groups[rank])

    neighbours = contiguous_units(units) if is_contiguous else None
    each = [units] if neighbours is None else [neighbours, units]
    possible = [partition for units in each for partition in _partitions(units, len(split), load)]
    all_owners = [partition.owners(is_contiguous=is_contiguous) for partition in possible]
    kept = [
        one for one in all_owners if all(min(distance(one, at, exact), distance(one, at, wanted)) < 1 for at in ranks)
    ]
    if kept:
        return min(kept, key=lambda owners: max(distance(owners, rank, exact) for rank in ranks))
    owners = min(possible, key=lambda partition: partition.loads).owners(is_contiguous=is_contiguous)
    lent = "layers stay with those whose keys and values they use" if any(unit.lends for unit in units) else ""
    absent = "ranks lack the files of some layers" if any(len(unit.ranks) < len(split) for unit in units[1:]) else ""
    raise ConfigError(
        f"parallel.split={[*split]} cannot be kept, because {' and '.join(filter(None, (lent, absent)))}; the nearest "
        f"that can be is parallel.split=[{','.join(str(owners.count(rank)) for rank in ranks)}]"
    )


def _capacity_load(
    units: Sequence[LayerUnit],
    capacities: Sequence[RankCapacity],
    layers: Sequence[Requirement],
    ends: Requirement,
    keeps: Keeps,
) -> LoadOf:
    """Return the load of a rank: bytes without room, seconds of reading, and if there are none, of computing."""
    disks, memories = leveled([one.disk for one in capacities]), leveled([one.memory for one in capacities])
    alike = [unit for unit in units if not unit.lends]
    each = Requirement.sum(layers[layer] for unit in alike for layer in unit.layers).times(1 / max(1, len(alike)))

    def load(rank: int, count: int, lending: Sequence[LayerUnit]) -> Load:
        lent = (layers[layer] for unit in lending for layer in unit.layers)
        needed = Requirement.sum([each.times(count), *lent, *([ends] if rank == ENDS else [])])
        lacks, reads = capacities[rank].without_room(needed, keeps)
        return lacks, reads / disks[rank], 0.0 if reads else needed.read_nbytes / memories[rank]

    return load


def _partitions(units: Sequence[LayerUnit], num_ranks: int, load: LoadOf) -> list[_Partition]:
    """Return, for every way to place units that lend, the partition whose largest load is least; no rank is idle."""
    lending, found = [at for at, unit in enumerate(units) if unit.lends], list[_Partition]()
    for ranks in product(*(reversed(units[at].ranks) for at in lending)):  # of equal ones, on the last rank
        placed = dict(zip(lending, ranks, strict=True))
        holders = [(placed[at],) if at in placed else unit.ranks for at, unit in enumerate(units)]
        lent = [[units[at] for at in lending if placed[at] == rank] for rank in range(num_ranks)]
        counts = _counts(holders, lent, load)
        if counts is not None:
            each = zip(range(num_ranks), counts, lent, strict=True)
            loads = sorted((load(rank, count - len(own), own) for rank, count, own in each), reverse=True)
            found.append(_Partition(units, holders, counts, tuple(loads)))
    return found


def _counts(
    holders: Sequence[Sequence[int]], lent: Sequence[Sequence[LayerUnit]], load: LoadOf
) -> Sequence[int] | None:
    """Return the number of units of each rank, at least one; None if there are not so many.

    Units go one by one to the rank that then has the least load, of those that can have one more.

    Args:
        holders: ranks that may have each unit.
        lent: units that lend, of each rank.
    """
    assignment, able = Assignment(holders), [*range(len(lent))]
    counts = [max(1, len(own)) for own in lent]
    if not all(assignment.give(rank) for rank in able for _ in range(counts[rank])):
        return None
    while sum(counts) < len(holders):
        rank = min(able, key=lambda rank: load(rank, counts[rank] + 1 - len(lent[rank]), lent[rank]))
        if assignment.give(rank):
            counts[rank] += 1
        else:
            able.remove(rank)  # nor can it later: exchanges take no unit from a rank without giving it another
    return counts
