"""The places of a skeleton's weights while it runs: in one allocation, filled and bound, or moved by a weight stream.

The stream is the same as for graphcore's own models, with the same files, threads and slots.
"""

from collections.abc import Collection

import torch

from graphcore.engine.fallback.skeleton import Skeleton
from graphcore.engine.fallback.weight_groups import SkeletonWeights
from graphcore.errors import ResidencyError
from graphcore.progress import Progress
from graphcore.streaming.embedding_rows import FileRows, HostRows
from graphcore.streaming.host_store import HostStore, read_group, read_table
from graphcore.streaming.moving_weights import MovingWeights, open_files
from graphcore.streaming.weight_stream import WeightStream, link_opener, open_stream
from graphcore.weights.conversion import fill_weight
from graphcore.weights.groups import Group
from graphcore.weights.layout import layout_of
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan, Tier
from graphcore.weights.resident_weights import CPU
from graphcore.weights.slots import Slot, bind


def load_resident_skeleton(
    sorted_weights: SkeletonWeights, device: torch.device, on_progress: Progress, moved: Collection[str]
) -> int:
    """Allocate, fill and bind every weight that does not move.

    Args:
        on_progress: callback with "load", the weight's index, bytes done and total.
        moved: names of weights that have no place of their own; they stay on the meta device.

    Returns:
        The bytes that were allocated.

    Raises:
        CheckpointError: a file has changed, or holds values that are no weights.
        ResidencyError: a weight was left without bytes.
    """
    skeleton, weights = sorted_weights.skeleton, sorted_weights.weights
    left_out = {*moved, *sorted_weights.shared}
    layout = layout_of((name, weight) for name, weight in weights.items() if name not in left_out)
    slot = Slot.allocate(layout.nbytes, device)
    done, total = 0, sum(weight.nbytes for name, weight in weights.items() if name not in left_out)
    for index, (name, view) in enumerate(slot.views(layout).items()):
        fill(sorted_weights.loader, name, view)
        bind(skeleton.model, name, view)
        done += view.nbytes
        on_progress("load", index, done, total)
    bound = skeleton.weights()
    for name, partner in sorted_weights.shared.items():
        if name not in moved:
            bind(skeleton.model, name, bound[partner].detach())
    for name, buffer in list(skeleton.model.named_buffers()):
        if name not in weights:
            bind(skeleton.model, name, buffer.to(device))
    if skeleton.sliced_head is not None:
        skeleton.sliced_head.bind_slices()
    check_bound(skeleton, moved)
    return slot.raw.nbytes


def fill(loader: Loader, name: str, view: torch.Tensor) -> None:
    """Write a weight into its place; the CPU makes it, so a place on another device is filled by a copy."""
    made = view if view.device.type == "cpu" else torch.empty_like(view, device=CPU)
    fill_weight(loader, name, None, made)
    if made is not view:
        view.copy_(made)


def check_bound(skeleton: Skeleton, moved: Collection[str]) -> None:
    """Check that every weight that stays, and every buffer, has bytes.

    Raises:
        ResidencyError: a weight or a buffer has none.
    """
    model = skeleton.model
    everything = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in everything if tensor.is_meta and name not in moved]
    if empty:
        raise ResidencyError(f"weights {empty} of {type(model).__name__} were left without bytes; load the model again")


def moving_groups(weights: SkeletonWeights, plan: Plan) -> list[Group]:
    """Return the groups that move through slots in the plan."""
    return [group for group in weights.groups() if group.index in plan.groups.streamed]


def moved_names(weights: SkeletonWeights, plan: Plan) -> set[str]:
    """Return the names of the weights that have no place of their own."""
    names = {weight.name for group in moving_groups(weights, plan) for weight in group.weights}
    is_gathered = weights.table is not None and not plan.groups.is_embedding_resident
    return names | ({weights.skeleton.table_weight} if is_gathered else set())


def open_transformers_stream(
    weights: SkeletonWeights, plan: Plan, tier: Tier, device: torch.device, pinned: bool = True
) -> WeightStream:
    """Return the stream of the weights, with its slots bound; weights that are kept in RAM have been read.

    Args:
        pinned: True locks the memory that copies to a GPU start from.

    Raises:
        CheckpointError: a file has changed or cannot be read.
    """
    groups, moved = moving_groups(weights, plan), moved_names(weights, plan)
    store = None
    if tier.kind == "host" and plan.is_streaming:
        store = HostStore({group.index: read_group(weights.loader, group) for group in groups}, {})
    files = open_files(weights.loader, sorted(moved), tier.is_direct) if store is None else {}
    name = weights.skeleton.table_weight
    if weights.table is not None and name in moved:
        table = weights.table
        weight = table.weight
        rows = FileRows(weights.loader, name, files, table.embedding_dim, weight.dtype, device)
        table.gather = rows if store is None else HostRows(read_table(weights.loader, name, None, weight), None, device)
    return open_stream(weights.loader, MovingWeights(plan, groups), store, files, device, link_opener(device, pinned))
