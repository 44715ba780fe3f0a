"""The deal of a model's layers to ranks.

    layers            0   1   2   3   4   5   6   7
    in turn           0   1   1   0   1   1   0   1     while weights stream: all disks read at once for one sequence
    contiguous        0   0   0   1   1   1   1   1     if all weights stay in memory: fewer hand-overs

How many layers a rank has follows from its memory, its disk and what it reads besides, which on rank 0 is the head: so
many that all ranks read as long in a pass, and if nothing streams, that all compute as long. The settings may say it
instead (`parallel.split`).

The residual stream goes from the embedding, on rank 0, through the layers to the head, which is on rank 0, too. Where
the next layer is another rank's it is handed over.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from graphcore.config.settings import Keeps
from graphcore.errors import ConfigError
from graphcore.parallel.assignment import Assignment

ENDS = 0  # the rank that has embedding and head
SAME_RATE = 0.85  # share of the fastest rank's rate from which on a rank counts as equally fast
LEAST_RATE = 1.0  # bytes per second; a measured rate may be 0


@dataclass(frozen=True)
class Offer:
    """What a rank brings to the deal.

    Attributes:
        room_nbytes: bytes for weights, caches and a draft model's copies.
        streaming_nbytes: bytes of them that slots and buffers take if weights stream.
        least_nbytes: the same with one slot, with which a rank runs if there is no room for more.
        disk: bytes per second at which weights that do not stay arrive; None if unknown.
        memory: bytes per second at which memory is read; None if unknown.
        layers: layers whose weights are in its files; None for all.
    """

    room_nbytes: int
    streaming_nbytes: int = 0
    least_nbytes: int = 0
    disk: float | None = None
    memory: float | None = None
    layers: Sequence[int] | None = None

    def may_have(self, layers: Sequence[int]) -> bool:
        """Return whether the rank's files hold these layers."""
        return self.layers is None or set(layers) <= set(self.layers)

    def without_room(self, needs: "Needs", keeps: Keeps) -> tuple[float, float]:
        """Return the bytes that have no room, whatever streams, and the bytes of weights that stream for a token."""
        if keeps == "all" or (keeps == "most" and needs.held_nbytes <= self.room_nbytes):
            return max(0.0, needs.held_nbytes - self.room_nbytes), 0.0
        weights, least = needs.held_nbytes - needs.kept_nbytes, needs.kept_nbytes + needs.draft_nbytes
        more = self.room_nbytes - self.streaming_nbytes - least  # for weights that are kept in place of their copies
        kept = weights - needs.draft_nbytes
        away = 1.0 if keeps == "nothing" or more <= 0 else max(0.0, 1 - more / kept)
        return max(0.0, least + self.least_nbytes - self.room_nbytes), away * needs.read_nbytes


@dataclass(frozen=True)
class Needs:
    """What layers, or the ends, need.

    Attributes:
        held_nbytes: bytes that stay in memory if nothing streams: weights and caches.
        read_nbytes: bytes of weights that one token reads.
        kept_nbytes: bytes of them that stay in memory if all weights stream.
        draft_nbytes: bytes of a draft model's copies, which stay beside if all weights stream.
    """

    held_nbytes: float
    read_nbytes: float
    kept_nbytes: float = 0
    draft_nbytes: float = 0

    def times(self, count: float) -> "Needs":
        """Return what so many times as much needs."""
        return Needs(*(count * nbytes for nbytes in vars(self).values()))

    def plus(self, other: "Needs") -> "Needs":
        """Return the sum of both needs, in bytes."""
        return Needs(*(one + more for one, more in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Share:
    """One rank's share of the layers.

    Attributes:
        rank: the rank.
        owners: rank of each layer of the model.
        offers: what each rank has brought to the deal.
    """

    rank: int
    owners: tuple[int, ...]
    offers: tuple[Offer, ...] = ()

    @property
    def has_ends(self) -> bool:
        """Whether the rank has embedding and head."""
        return self.rank == ENDS

    @property
    def text(self) -> str:
        """The share in a few words, such as "0-3,8 of rank 1 of 2"."""
        return f"{_runs_text(self.layers)} of rank {self.rank} of {max(self.owners) + 1}"

    @property
    def runs(self) -> list[range]:
        """The rank's layers, as ranges of neighbours."""
        return _runs_of(self.layers)

    @property
    def layers(self) -> frozenset[int]:
        """The rank's layers."""
        return frozenset(layer for layer, owner in enumerate(self.owners) if owner == self.rank)

    def source(self, layer: int) -> int | None:
        """Return the rank that hands over the residual stream before a layer of this rank; None if it has it."""
        before = self.owners[layer - 1] if layer else ENDS
        return None if before == self.rank else before

    def target(self, layer: int) -> int | None:
        """Return the rank that gets the residual stream after a layer of this rank; None if it stays."""
        after = self.owners[layer + 1] if layer + 1 < len(self.owners) else ENDS
        return None if after == self.rank else after

    @property
    def last_owner(self) -> int:
        """The rank of the last layer."""
        return self.owners[-1]


def holders_of(cache_layers: Sequence[int], together: int, offers: Sequence[Offer]) -> list[list[int]]:
    """Return for each group of layers the ranks whose files hold it; the first group is always rank 0's.

    A rank has the files of a group if it has those of all layers that are on its rank then (`with_lenders`).

    Args:
        cache_layers: layer whose cache each layer uses, its own or an earlier one's.
        together: layers that move together, and stay on one rank.

    Raises:
        ConfigError: no rank has the files of a group, or there are too few groups for one on each rank.
    """
    found = []
    for first in range(0, len(cache_layers), together):
        layers = range(first, min(len(cache_layers), first + together))
        ranks = range(len(offers)) if first else (ENDS,)  # what follows the embedding is where the embedding is
        lenders = {*layers} & {*cache_layers} or {cache_layers[layer] for layer in layers}
        needed = [layer for layer, lender in enumerate(cache_layers) if lender in lenders]
        found.append([rank for rank in ranks if offers[rank].may_have(needed)])
        if not found[-1]:
            who, where = ("no rank", "one of the machines") if first else ("rank 0", "its machine")
            raise ConfigError(
                f"parallel=ring: {who} has the files of {_in_words(layers)}; put the files that hold them on {where}"
            )
    if len(found) < len(offers):
        fewer = f"start {len(found)} ranks at most" if len(found) > 1 else "leave parallel=ring out"
        size = f"{len(found)} layers" if together == 1 else f"{len(found)} groups of {together} layers"
        smaller = ", or set a smaller streaming.layer_group_size" if together > 1 else ""
        raise ConfigError(f"parallel=ring: {size} cannot be dealt to {len(offers)} ranks; {fewer}{smaller}")
    _check_each_gets_one(found, together, len(offers))
    return found


def _check_each_gets_one(holders: Sequence[Sequence[int]], together: int, num_ranks: int) -> None:
    dealt = Assignment(holders)
    for rank in range(num_ranks):
        if dealt.give(rank):
            continue
        ranks, groups = dealt.rivals(rank)
        found = [layer for group in groups for layer in range(group * together, (group + 1) * together)]
        unit = "layer" if together == 1 else f"whole group of {together} layers (streaming.layer_group_size)"
        reason = f"its files hold no {unit} but the first, which rank 0 has"
        if found:
            reason = f"the files of ranks {', '.join(map(str, ranks))} hold only layers {_runs_text(found)} for them"
        raise ConfigError(
            f"parallel=ring: rank {rank} gets no layer, because {reason}; give it the files of more layers, or start "
            "fewer ranks"
        )


def deal(
    num_layers: int, together: int, holders: Sequence[Sequence[int]], counts: Sequence[int], is_contiguous: bool
) -> tuple[int, ...]:
    """Return the rank of each layer.

    Args:
        together: layers that move together, and stay on one rank.
        holders: ranks that may have each group of layers (`holders_of`).
        counts: groups of layers of each rank (`fair_counts`, `split_counts`).
        is_contiguous: True for one run of layers for each rank, as far as files allow; False to deal them in turn.
    """
    dealt = Assignment(holders)
    for rank, count in enumerate(counts):
        for _ in range(count):
            is_given = dealt.give(rank)
            assert is_given, "fair_counts and split_counts return what can be dealt"
    owners: list[int] = []
    had, before = [0] * len(counts), ENDS
    for group in range(len(holders)):
        done = (group + 1) / len(holders)
        order = sorted(range(len(counts)), key=lambda rank: had[rank] - counts[rank] * done)
        if is_contiguous:
            order = [before, *range(len(counts))]
        before = next(rank for rank in order if dealt.fix(group, rank))
        had[before] += 1
        owners += [before] * min(together, num_layers - len(owners))
    return tuple(owners)


def counts_with_lenders(counts: Sequence[int], cache_layers: Sequence[int], together: int) -> list[int]:
    """Return how many groups of neighbouring layers each rank gets, with all that lend or use caches on the last one.

    Args:
        counts: groups of layers of each rank, if every layer had its own cache; the others keep their proportions.
        cache_layers, together: the same as for `holders_of`.
    """
    lenders = [lender for layer, lender in enumerate(cache_layers) if lender != layer]
    left = min(lenders, default=len(cache_layers)) // together
    lent, weight = sum(counts) - left, sum(counts[:-1])
    if counts[-1] >= lent or left < len(counts) - 1:
        return [*counts]
    found: list[int] = []
    for rank, count in enumerate(counts[:-1], start=2):
        found.append(min(max(1, round(left * count / weight)), left - (len(counts) - rank)))
        left, weight = left - found[-1], weight - count
    return [*found, lent]


def with_lenders(owners: Sequence[int], cache_layers: Sequence[int]) -> tuple[int, ...]:
    """Return the rank of each layer, where a layer that reads another's cache is on the rank of that one.

    Args:
        owners: rank of each layer, if every layer had its own cache.
        cache_layers: the same as for `holders_of`.

    Raises:
        ConfigError: a rank is left without layers.
    """
    found = tuple(owners[layer] for layer in cache_layers)
    lenders = sorted({lender for layer, lender in enumerate(cache_layers) if lender != layer})
    for rank in range(max(owners) + 1):
        if rank not in found:
            raise ConfigError(
                f"parallel=ring: rank {rank} gets no layer, because others use the keys and values of layers "
                f"{', '.join(map(str, lenders))} and are on their ranks; set another parallel.split, or start fewer "
                "ranks"
            )
    return found


def fair_counts(
    holders: Sequence[Sequence[int]], offers: Sequence[Offer], layer: Needs, ends: Needs, keeps: Keeps = "most"
) -> list[int]:
    """Return how many groups of layers each rank gets, at least one, so that all ranks need as long.

    Args:
        holders: ranks that may have each group of layers (`holders_of`).
        layer: needs of one group of layers.
        ends: needs of embedding and head, which rank 0 has.
        keeps: weights that stay in memory.
    """
    disks, memories = leveled([one.disk for one in offers]), leveled([one.memory for one in offers])

    def seconds(rank: int, count: int) -> tuple[float, float, float]:
        needs = ends.plus(layer.times(count)) if rank == ENDS else layer.times(count)
        lacks, reads = offers[rank].without_room(needs, keeps)
        return lacks, reads / disks[rank], 0.0 if reads else needs.read_nbytes / memories[rank]

    return _counts(holders, len(offers), seconds)


def split_counts(holders: Sequence[Sequence[int]], split: Sequence[float]) -> list[int]:
    """Return how many groups of layers each rank gets, at least one, in the proportions of a split.

    Args:
        holders: ranks that may have each group of layers (`holders_of`).
    """
    return _counts(holders, len(split), lambda rank, count: (-split[rank] / count,))


def _counts(
    holders: Sequence[Sequence[int]], num_ranks: int, cost: Callable[[int, int], tuple[float, ...]]
) -> list[int]:
    """Return counts of groups, which go one by one to the rank that then has the least cost, of those that can.

    Args:
        cost: function from a rank and its number of groups.
    """
    dealt, able = Assignment(holders), [*range(num_ranks)]
    for rank in able:
        is_given = dealt.give(rank)
        assert is_given, "holders_of has checked that each rank gets a group"
    counts = [1] * num_ranks
    while sum(counts) < len(holders):
        rank = min(able, key=lambda rank: cost(rank, counts[rank] + 1))
        if dealt.give(rank):
            counts[rank] += 1
        else:
            able.remove(rank)  # nor can it later: exchanges take no group from a rank without giving it another
    return counts


def leveled(rates: Sequence[float | None]) -> list[float]:
    """Return rates, of which those that are nearly the fastest are that, because measurements vary; 1 if unknown."""
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return [1.0] * len(rates)
    return [max(LEAST_RATE, max(known) if rate >= SAME_RATE * max(known) else rate) for rate in known]


def _runs_of(layers: Collection[int]) -> list[range]:
    found: list[range] = []
    for layer in sorted(layers):
        if found and found[-1].stop == layer:
            found[-1] = range(found[-1].start, layer + 1)
        else:
            found.append(range(layer, layer + 1))
    return found


def _runs_text(layers: Collection[int]) -> str:
    return ",".join(str(run.start) if len(run) == 1 else f"{run.start}-{run[-1]}" for run in _runs_of(layers))


def _in_words(layers: range) -> str:
    return f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start} to {layers.stop - 1}"


def described(owners: Sequence[int]) -> str:
    """Return the deal in a few words for a note."""
    counts = [owners.count(rank) for rank in range(max(owners) + 1)]
    layers, handed = ", ".join(map(str, counts)), num_hand_overs(owners)
    return f"{len(counts)} ranks have {layers} layers, and a pass has {handed} hand-overs"


def num_hand_overs(owners: Sequence[int]) -> int:
    """Return how often the residual stream goes from one rank to another in a pass."""
    return sum(one != other for one, other in zip((ENDS, *owners), (*owners, ENDS), strict=True))
