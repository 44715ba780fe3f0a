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

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigError

ENDS = 0  # the rank that has embedding and head
SAME_RATE = 0.85  # share of the fastest rank's rate from which on a rank counts as equally fast


@dataclass(frozen=True)
class Offer:
    """What a rank brings to the deal.

    Attributes:
        room_nbytes: bytes for weights and caches that stay in memory; 0 if all weights stream.
        disk: bytes per second at which weights that do not stay arrive; None if unknown.
        memory: bytes per second at which products read memory; None if unknown.
        layers: layers whose weights are in its files; None for all.
    """

    room_nbytes: int
    disk: float | None = None
    memory: float | None = None
    layers: Sequence[int] | None = None

    def may_have(self, layers: Sequence[int]) -> bool:
        """Return whether the rank's files hold these layers."""
        return self.layers is None or set(layers) <= set(self.layers)

    def streamed_nbytes(self, needs: "Needs") -> float:
        """Return the bytes of weights that stream for a token, if the rank has to keep these."""
        away = max(0.0, 1 - self.room_nbytes / needs.held_nbytes) if needs.held_nbytes else 0.0
        return away * needs.read_nbytes


@dataclass(frozen=True)
class Needs:
    """What layers, or the ends, need.

    Attributes:
        held_nbytes: bytes that stay in memory if nothing streams: weights and caches.
        read_nbytes: bytes of weights that one token reads.
    """

    held_nbytes: float
    read_nbytes: float

    def with_layers(self, layer: "Needs", count: int) -> "Needs":
        """Return what these need with so many layers."""
        return Needs(self.held_nbytes + count * layer.held_nbytes, self.read_nbytes + count * layer.read_nbytes)


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
        runs = [str(run.start) if len(run) == 1 else f"{run.start}-{run[-1]}" for run in self.runs]
        return f"{','.join(runs)} of rank {self.rank} of {max(self.owners) + 1}"

    @property
    def runs(self) -> list[range]:
        """The rank's layers, as ranges of neighbours."""
        found: list[range] = []
        for layer in sorted(self.layers):
            if found and found[-1].stop == layer:
                found[-1] = range(found[-1].start, layer + 1)
            else:
                found.append(range(layer, layer + 1))
        return found

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


def deal(
    num_layers: int,
    together: int,
    counts: Sequence[int],
    is_contiguous: bool,
    offers: Sequence[Offer] = (),
) -> tuple[int, ...]:
    """Return the rank of each layer.

    Args:
        together: layers that move together, and stay on one rank.
        counts: groups of so many layers that each rank is to have (`fair_counts`, `split_counts`).
        is_contiguous: True for one run of layers for each rank; False to deal them in turn.
        offers: what the ranks bring; a rank gets no layer that its files lack. Empty if all files hold all.

    Raises:
        ConfigError: no rank has the files of a layer, or a rank has those of none.
    """
    owners: list[int] = []
    groups, had = sum(counts), [0] * len(counts)
    for group in range(groups):
        layers = range(group * together, min(num_layers, (group + 1) * together))
        ranks = range(len(counts)) if group else (ENDS,)  # what follows the embedding is where the embedding is
        able = [rank for rank in ranks if not offers or offers[rank].may_have(layers)]
        if not able:
            who, where = ("no rank", "one of the machines") if group else ("rank 0", "its machine")
            raise ConfigError(
                f"parallel=ring: {who} has the files of {_in_words(layers)}; put the files that hold them on {where}"
            )
        due = [counts[rank] * (1 if is_contiguous else (group + 1) / groups) - had[rank] for rank in range(len(counts))]
        owed = [rank for rank in able if due[rank] > 0]
        rank = owed[0] if is_contiguous and owed else max(able, key=lambda one: due[one])
        had[rank] += 1
        owners += [rank] * len(layers)
    if 0 in had:
        raise ConfigError(
            f"parallel=ring: rank {had.index(0)} gets no layer, because its files hold none that another rank has not "
            "got already; give it the files of more layers, or start fewer ranks"
        )
    return tuple(owners)


def counts_with_lenders(counts: Sequence[int], cache_layers: Sequence[int], together: int) -> list[int]:
    """Return how many groups of neighbouring layers each rank gets, with all that lend or use caches on the last one.

    Args:
        counts: groups of layers of each rank, if every layer had its own cache; the others keep their proportions.
        cache_layers, together: the same as for `with_lenders` and `deal`.
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


def with_lenders(owners: Sequence[int], cache_layers: Sequence[int], offers: Sequence[Offer] = ()) -> tuple[int, ...]:
    """Return the rank of each layer, where a layer that reads another's cache is on the rank of that one.

    Args:
        owners: rank of each layer, if every layer had its own cache.
        cache_layers: layer whose cache each layer uses, its own or an earlier one's.
        offers: the same as for `deal`.

    Raises:
        ConfigError: a rank is left without layers, or has not the files of those that it gets.
    """
    found = tuple(owners[layer] for layer in cache_layers)
    lenders = sorted({lender for layer, lender in enumerate(cache_layers) if lender != layer})
    for rank in range(max(owners) + 1):
        layers = [layer for layer, owner in enumerate(found) if owner == rank]
        if not layers or (offers and not offers[rank].may_have(layers)):
            raise ConfigError(
                f"parallel=ring: rank {rank} {'lacks files of its layers' if layers else 'gets no layer'}, because "
                f"others use the keys and values of layers {', '.join(map(str, lenders))} and are on their ranks; set "
                "another parallel.split, or start fewer ranks"
            )
    return found


def fair_counts(num_groups: int, offers: Sequence[Offer], layer: Needs, ends: Needs) -> list[int]:
    """Return how many groups of layers each rank gets, at least one, so that all ranks need as long.

    Args:
        layer: needs of one group of layers.
        ends: needs of embedding and head, which rank 0 has.

    Raises:
        ConfigError: there are fewer groups of layers than ranks.
    """
    _check_enough(num_groups, len(offers))
    disks, memories = leveled([one.disk for one in offers]), leveled([one.memory for one in offers])
    besides = [ends if rank == ENDS else Needs(0, 0) for rank in range(len(offers))]
    counts = [1] * len(offers)

    def seconds_with_another(rank: int) -> tuple[float, float]:
        needs = besides[rank].with_layers(layer, counts[rank] + 1)
        reads = offers[rank].streamed_nbytes(needs) / disks[rank]
        return reads, 0.0 if reads else needs.read_nbytes / memories[rank]

    for _ in range(num_groups - len(offers)):
        counts[min(range(len(offers)), key=seconds_with_another)] += 1
    return counts


def split_counts(num_groups: int, split: Sequence[float]) -> list[int]:
    """Return how many groups of layers each rank gets, at least one, in the proportions of a split.

    Raises:
        ConfigError: there are fewer groups of layers than ranks.
    """
    _check_enough(num_groups, len(split))
    counts = [1] * len(split)
    for _ in range(num_groups - len(split)):
        counts[max(range(len(split)), key=lambda rank: split[rank] / (counts[rank] + 1))] += 1
    return counts


def leveled(rates: Sequence[float | None]) -> list[float]:
    """Return rates, of which those that are nearly the fastest are that, because measurements vary; 1 if unknown."""
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return [1.0] * len(rates)
    return [max(known) if rate >= SAME_RATE * max(known) else rate for rate in known]


def _check_enough(num_groups: int, ranks: int) -> None:
    if num_groups < ranks:
        raise ConfigError(
            f"parallel=ring: {num_groups} groups of layers cannot be dealt to {ranks} ranks; start {num_groups} ranks "
            "at most, or set a smaller streaming.layer_group_size"
        )


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
