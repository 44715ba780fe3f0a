"""The layers that have to be on one rank, and the ranks whose files hold them.

layers         0   1   2   3   4   5        layer 4 uses the keys and values of layer 2, layer 5 those of layer 3
units, by 1    0   1   2 4     3 5          each layer with those that use its keys and values
units, by 2    0 1     2 3 4 5              the same for each group of layers that stream together
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigError
from graphcore.parallel.assignment import Assignment
from graphcore.parallel.capacity import RankCapacity
from graphcore.parallel.share import ENDS, layers_text


@dataclass(frozen=True)
class LayerUnit:
    """Layers that are on one rank.

    Attributes:
        layers: the layers, in order.
        ranks: ranks whose files hold all of them; rank 0 for the first unit, which follows the embedding.
        lends: True if some of them use keys and values of others.
    """

    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    lends: bool = False


def units_of(cache_layers: Sequence[int], group_size: int, capacities: Sequence[RankCapacity]) -> list[LayerUnit]:
    """Return the units of a model, in the order of their first layers; each rank can have one at least.

    Args:
        cache_layers: layer whose keys and values each layer uses, its own or an earlier one's.
        group_size: number of layers that stream together.

    Raises:
        ConfigError: no rank has the files of a unit, or there are too few units for one on each rank.
    """
    found = []
    for first in range(0, len(cache_layers), group_size):
        group = range(first, min(len(cache_layers), first + group_size))
        owned = {layer for layer in group if cache_layers[layer] == layer}
        layers = tuple(layer for layer, lender in enumerate(cache_layers) if lender in owned)
        if layers:
            able = (rank for rank, capacity in enumerate(capacities) if capacity.has_files_of(layers))
            ranks = tuple(rank for rank in able if first or rank == ENDS)
            found.append(LayerUnit(layers, ranks, lends=any(cache_layers[layer] != layer for layer in layers)))
    _check_files(found)
    _check_number(found, len(cache_layers), group_size, len(capacities))
    _check_each_gets_one(found, group_size, len(capacities))
    return found


def contiguous_units(units: Sequence[LayerUnit]) -> list[LayerUnit] | None:
    """Return units of neighbours only: all from the first that lends on are one; None if there is none, or no such one.

    No rank may have the files of all of them.
    """
    first = next((at for at, unit in enumerate(units) if unit.lends), None)
    if first is None:
        return None
    layers = tuple(sorted(layer for unit in units[first:] for layer in unit.layers))
    ranks = frozenset(units[first].ranks).intersection(*(unit.ranks for unit in units[first:]))
    return [*units[:first], LayerUnit(layers, tuple(sorted(ranks)), lends=True)] if ranks else None


def _check_files(units: Sequence[LayerUnit]) -> None:
    for at, unit in enumerate(units):
        if not unit.ranks:
            who, where = ("no rank", "one of the machines") if at else ("rank 0", "its machine")
            layers = f"layer{'s' if len(unit.layers) > 1 else ''} {layers_text(unit.layers)}"
            reason = ", of which some use keys and values of others" if unit.lends else ""
            raise ConfigError(
                f"parallel=ring: {who} has the files of {layers}{reason}; put the files that hold them on {where}"
            )


def _check_number(units: Sequence[LayerUnit], num_layers: int, group_size: int, num_ranks: int) -> None:
    if len(units) >= num_ranks:
        return
    fewer = f"start {len(units)} ranks at most" if len(units) > 1 else "leave parallel=ring out"
    size = f"{len(units)} layers" if group_size == 1 else f"{len(units)} groups of {group_size} layers"
    if any(unit.lends for unit in units):
        size = f"{num_layers} layers, of which some use keys and values of others and {len(units)} can be apart,"
    smaller = ", or set a smaller streaming.layer_group_size" if group_size > 1 else ""
    raise ConfigError(f"parallel=ring: {size} cannot be split among {num_ranks} ranks; {fewer}{smaller}")


def _check_each_gets_one(units: Sequence[LayerUnit], group_size: int, num_ranks: int) -> None:
    assignment = Assignment([unit.ranks for unit in units])
    for rank in range(num_ranks):
        if assignment.give(rank):
            continue
        ranks, found = assignment.rivals(rank)
        layers = [layer for at in found for layer in units[at].layers]
        kind = "layer" if group_size == 1 else f"whole group of {group_size} layers (streaming.layer_group_size)"
        users = ", with those that use its keys and values," if any(unit.lends for unit in units) else ""
        reason = f"its files hold no {kind}{users} but the first, which rank 0 has"
        if found:
            reason = f"the files of ranks {', '.join(map(str, ranks))} hold only layers {layers_text(layers)} for them"
        raise ConfigError(
            f"parallel=ring: rank {rank} gets no layer, because {reason}; give it the files of more layers, or start "
            "fewer ranks"
        )
