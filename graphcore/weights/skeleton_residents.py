"""From a checkpoint to a transformers skeleton whose resident weights are in place: one allocation, filled, bound."""

from collections.abc import Collection

import torch

from graphcore.arch.transformers_fallback import Skeleton
from graphcore.errors import ResidencyError
from graphcore.progress import Progress
from graphcore.weights.layout import layout_of
from graphcore.weights.loader import Loader
from graphcore.weights.pieces import pieces_of
from graphcore.weights.residents import CPU, fill_from_files
from graphcore.weights.skeleton_groups import SkeletonWeights
from graphcore.weights.slots import Slot, bind


def load_resident_skeleton(
    sorted_weights: SkeletonWeights, device: torch.device, on_progress: Progress, moved: Collection[str]
) -> int:
    """Give every weight that does not move a place for good, fill it and bind the skeleton to it, once.

    Args:
        on_progress: called with "load", the weight's index, bytes done and in all.
        moved: names of weights that have no place of their own; they stay on the meta device.

    Returns:
        The bytes of all places.

    Raises:
        CheckpointError: a file changed, or holds values that are no weights.
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
    """Write a weight into its place; pieces are made by this machine's processor, so elsewhere it is copied once."""
    made = view if view.device.type == "cpu" else torch.empty_like(view, device=CPU)
    for piece in pieces_of(loader, name, None, made):
        fill_from_files(loader, piece)
    if made is not view:
        view.copy_(made)


def check_bound(skeleton: Skeleton, moved: Collection[str]) -> None:
    """Return if every weight that stays, and every buffer, has bytes.

    Raises:
        ResidencyError: one has not; it would give numbers that mean nothing.
    """
    model = skeleton.model
    everything = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in everything if tensor.is_meta and name not in moved]
    if empty:
        raise ResidencyError(f"weights {empty} of {type(model).__name__} were left without bytes; load the model again")
