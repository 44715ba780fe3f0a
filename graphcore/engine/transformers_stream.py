"""What moves a transformers model's weights while it runs: the same files, threads and slots as for any other model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.engine.planning import Tier
from graphcore.engine.weight_stream import WeightStream, open_files, stream_groups, way_to
from graphcore.streaming.embedding_rows import FileRows, HostRows
from graphcore.streaming.host_store import HostStore
from graphcore.streaming.pages import private_pages
from graphcore.weights.groups import Group
from graphcore.weights.pieces import pieces_of
from graphcore.weights.plan import Plan
from graphcore.weights.residents import CPU, fill_from_files
from graphcore.weights.skeleton_groups import SkeletonWeights
from graphcore.weights.slots import Slot


def moving_groups(weights: SkeletonWeights, plan: Plan) -> list[Group]:
    """Return the groups that the plan has move through slots."""
    return [group for group in weights.groups() if group.index in plan.streamed]


def moved_names(weights: SkeletonWeights, plan: Plan) -> set[str]:
    """Return the names of the weights that have no place of their own."""
    names = {place.name for group in moving_groups(weights, plan) for place in group.places}
    is_gathered = weights.table is not None and not plan.is_embedding_resident
    return names | ({weights.skeleton.table_weight} if is_gathered else set())


def open_transformers_stream(
    weights: SkeletonWeights, plan: Plan, tier: Tier, device: torch.device, pinned: bool = True
) -> WeightStream:
    """Return what moves the weights, its slots bound; of weights that wait in RAM all have been read, else none.

    Args:
        pinned: lock the memory that copies to a GPU start from.

    Raises:
        CheckpointError: a file is not what it was, or cannot be read.
    """
    groups, moved = moving_groups(weights, plan), moved_names(weights, plan)
    store = fill_store(weights, groups) if tier.kind == "host" and plan.is_streaming else None
    files = open_files(weights.loader, sorted(moved), tier.is_direct) if store is None else {}
    name = weights.skeleton.table_weight
    if weights.table is not None and name in moved:
        table = weights.table
        weight = table.weight
        rows = FileRows(weights.loader, name, files, table.embedding_dim, weight.dtype, device)
        table.gather = rows if store is None else HostRows(whole(weights, name), None, device)
    return stream_groups(weights.loader, groups, plan, store, files, device, way_to(device, pinned))


def fill_store(weights: SkeletonWeights, groups: Sequence[Group]) -> HostStore:
    """Return the groups' bytes in RAM, read from the checkpoint once."""
    held = {}
    for group in groups:
        slot = Slot(private_pages(group.layout.nbytes))
        views = slot.views(group.layout)
        for place in group.places:
            for piece in pieces_of(weights.loader, place.name, None, views[place.name], place.rows):
                fill_from_files(weights.loader, piece)
        held[group.index] = slot.raw
    return HostStore(held, {})


def whole(weights: SkeletonWeights, name: str) -> Tensor:
    """Return a weight in RAM, read from the checkpoint."""
    table = torch.empty_like(weights.weights[name], device=CPU)
    for piece in pieces_of(weights.loader, name, None, table):
        fill_from_files(weights.loader, piece)
    return table
