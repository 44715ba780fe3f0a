"""Which groups stay on the device and which stream: every arrangement that a policy may choose from.

stays  #   streams  .        12 layer groups, 4 of them stream
# . # # . # # . # # . #      evenly, so that each copy has as much compute to hide behind as the next
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphcore.weights.weight_sizes import WeightSizes


@dataclass(frozen=True)
class Arrangement:
    """One of them.

    Attributes:
        layer_groups: indices of the layer groups that stream, from 0.
        is_head_streamed: whether the head's slices do.
        is_embedding_gathered: whether the table is elsewhere, and rows are fetched; so it is where a tied head streams.
    """

    layer_groups: tuple[int, ...]
    is_head_streamed: bool
    is_embedding_gathered: bool

    def unit_nbytes(self, sizes: WeightSizes) -> list[int]:
        """Return the bytes of what goes through slots, in order of use."""
        slices = sizes.head_slices if self.is_head_streamed else ()
        return [*(sizes.groups[index] for index in self.layer_groups), *slices]

    def resident_nbytes(self, sizes: WeightSizes) -> int:
        """Return the bytes of table, layer groups and head that stay, experts and vectors left out."""
        layers = sum(sizes.groups) - sum(sizes.groups[index] for index in self.layer_groups)
        table = 0 if self.is_embedding_gathered else sizes.embedding
        return layers + table + (0 if self.is_head_streamed or sizes.is_tied else sizes.head)

    def streamed(self, sizes: WeightSizes) -> tuple[int, ...]:
        """Return the numbers of the groups that stream: the embedding is 0, the head's slices come last."""
        first_slice = len(sizes.groups) + 1
        slices = range(first_slice, first_slice + len(sizes.head_slices)) if self.is_head_streamed else ()
        return (*(index + 1 for index in self.layer_groups), *slices)


def arrangements(policy: str, sizes: WeightSizes) -> Iterator[Arrangement]:
    """Yield what the policy may choose from; under "auto" those with the same streams have the gathered table first."""
    num_groups = len(sizes.groups)
    if policy == "off":
        yield Arrangement((), is_head_streamed=False, is_embedding_gathered=False)
        return
    if policy == "on":
        yield Arrangement(tuple(range(num_groups)), is_head_streamed=True, is_embedding_gathered=True)
        return
    for layer_groups in _choices(sizes.groups):
        for is_head_streamed in (False, True):
            if not sizes.is_tied:
                yield Arrangement(layer_groups, is_head_streamed, is_embedding_gathered=True)
                yield Arrangement(layer_groups, is_head_streamed, is_embedding_gathered=False)
            else:
                yield Arrangement(layer_groups, is_head_streamed, is_embedding_gathered=is_head_streamed)


def _choices(groups: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the layer groups that could stream: any number, spread; and so turned that a smaller last one stays."""
    for count in range(len(groups) + 1):
        layer_groups = spread(count, len(groups))
        yield layer_groups
        if groups[-1] < groups[0] and len(groups) - 1 in layer_groups and count < len(groups):
            stays = next(index for index in range(len(groups)) if index not in layer_groups)
            yield tuple(sorted((index - stays - 1) % len(groups) for index in layer_groups))


def spread(count: int, of: int) -> tuple[int, ...]:
    """Return `count` indices below `of`; their gaps, from the last to the first too, differ by one at most."""
    return tuple((2 * index + 1) * of // (2 * count) for index in range(count))
