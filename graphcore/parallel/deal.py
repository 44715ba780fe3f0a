"""The deal of a model's layers to ranks.

    layers            0   1   2   3   4   5   6   7
    in turn           0   1   0   1   0   1   0   1     while weights stream: all disks read at once for one sequence
    contiguous        0   0   0   0   1   1   1   1     if all weights stay in memory: fewer hand-overs

The residual stream goes from the embedding, on rank 0, through the layers to the head, which is on rank 0, too. Where
the next layer is another rank's it is handed over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigError

ENDS = 0  # the rank that has embedding and head


@dataclass(frozen=True)
class Share:
    """One rank's share of the layers.

    Attributes:
        rank: the rank.
        owners: rank of each layer of the model.
    """

    rank: int
    owners: tuple[int, ...]

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


def deal(num_layers: int, world_size: int, together: int, is_contiguous: bool) -> tuple[int, ...]:
    """Return the rank of each layer.

    Args:
        together: layers that move together, and stay on one rank.
        is_contiguous: True for one run of layers for each rank; False to deal them in turn.

    Raises:
        ConfigError: there are fewer groups of layers than ranks.
    """
    groups = -(-num_layers // together)
    if groups < world_size:
        raise ConfigError(
            f"parallel=ring: {groups} groups of layers cannot be dealt to {world_size} ranks; start {groups} ranks at "
            "most, or set a smaller streaming.layer_group_size"
        )
    of_group = [group * world_size // groups if is_contiguous else group % world_size for group in range(groups)]
    return tuple(of_group[layer // together] for layer in range(num_layers))


def described(owners: Sequence[int]) -> str:
    """Return the deal in a few words for a note."""
    counts = [owners.count(rank) for rank in range(max(owners) + 1)]
    changes = sum(one != other for one, other in zip((ENDS, *owners), (*owners, ENDS), strict=True))
    return f"{len(counts)} ranks have {', '.join(map(str, counts))} layers, and a pass has {changes} hand-overs"
