"""One rank's share of a model's layers, and where the residual stream is handed over.

The stream goes from the embedding, on rank 0, through the layers to the head, which is on rank 0, too. Where the next
layer is another rank's it is handed over.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from graphcore.parallel.capacity import RankCapacity

ENDS = 0  # the rank that has embedding and head


@dataclass(frozen=True)
class Share:
    """One rank's share of the layers.

    Attributes:
        rank: the rank.
        owners: rank of each layer of the model.
        capacities: capacity of each rank, from which the shares follow.
    """

    rank: int
    owners: tuple[int, ...]
    capacities: tuple[RankCapacity, ...] = ()

    @property
    def has_ends(self) -> bool:
        """Whether the rank has embedding and head."""
        return self.rank == ENDS

    @property
    def text(self) -> str:
        """The share in a few words, such as "0-3,8 of rank 1 of 2"."""
        return f"{layers_text(self.layers)} of rank {self.rank} of {max(self.owners) + 1}"

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


def described(owners: Sequence[int]) -> str:
    """Return the shares of all ranks in a few words for a note. Args: owners: rank of each layer."""
    counts = [owners.count(rank) for rank in range(max(owners) + 1)]
    layers, handed = ", ".join(map(str, counts)), num_hand_overs(owners)
    return f"{len(counts)} ranks have {layers} layers, and a pass has {handed} hand-overs"


def num_hand_overs(owners: Sequence[int]) -> int:
    """Return how often the residual stream goes from one rank to another in a pass."""
    return sum(one != other for one, other in zip((ENDS, *owners), (*owners, ENDS), strict=True))


def handed_pairs(owners: Sequence[int]) -> frozenset[tuple[int, int]]:
    """Return the pairs of ranks, the sender first, between which the stream of layers with these owners goes."""
    steps = zip((ENDS, *owners), (*owners, ENDS), strict=True)
    return frozenset((source, target) for source, target in steps if source != target)


def layers_text(layers: Collection[int]) -> str:
    """Return layers in a few words, such as "0-3,8"."""
    return ",".join(str(run.start) if len(run) == 1 else f"{run.start}-{run[-1]}" for run in _runs_of(layers))


def _runs_of(layers: Collection[int]) -> list[range]:
    found: list[range] = []
    for layer in sorted(layers):
        if found and found[-1].stop == layer:
            found[-1] = range(found[-1].start, layer + 1)
        else:
            found.append(range(layer, layer + 1))
    return found
