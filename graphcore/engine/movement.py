"""What of a decoder moves while it runs, as the plan has it: nothing is allocated or opened yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.nn.decoder import Decoder, Head
from graphcore.weights.expert_pools import expert_linears
from graphcore.weights.groups import Group, movable_groups
from graphcore.weights.matching import EMBEDDING
from graphcore.weights.plan import Plan


@dataclass(frozen=True)
class Movement:
    """What of a decoder moves, decided before anything is allocated.

    Attributes:
        groups: that stream through slots.
        heads: the head in its parts, if they stream.
        is_gathered: the embedding's rows are fetched one by one.
        expert_weights: names of matrices that are fetched expert by expert.
        layer_groups: layers of each layer group.
    """

    plan: Plan
    groups: Sequence[Group] = ()
    heads: Sequence[Head] = ()
    expert_weights: Sequence[str] = ()
    layer_groups: Sequence[range] = ()

    @property
    def is_gathered(self) -> bool:
        """Whether the embedding's table is not on the device."""
        return not self.plan.is_embedding_resident

    @property
    def group_of_layer(self) -> dict[int, int]:
        """The number of each layer's group."""
        return {layer: number for number, layers in enumerate(self.layer_groups, start=1) for layer in layers}

    @property
    def moved(self) -> frozenset[str]:
        """Names of the weights that have no place of their own."""
        names = {place.name for group in self.groups for place in group.places}
        return frozenset({*names, *self.expert_weights} | ({EMBEDDING} if self.is_gathered else set()))


def movement_of(decoder: Decoder, plan: Plan, layer_groups: Sequence[range]) -> Movement:
    """Return what the plan has move; the decoder is on the meta device."""
    parts = [decoder.head.part(rows) for rows in decoder.head_rows()]
    groups = [group for group in movable_groups(decoder, layer_groups, parts) if group.index in plan.streamed]
    experts = () if plan.experts is None else tuple(expert_linears(decoder, plan.experts.num_layers))
    return Movement(plan, groups, () if plan.is_head_resident else parts, experts, layer_groups)
