"""Which weights of a transformers skeleton move together, and how those that stay get their places.

    group       0                     1 .. G                            G + 1
    holds       nothing that moves    the matrices of its layers        the head's matrix, unless it is the embedding's

Vectors, and what stands outside layers and head (embeddings, final norm), stay on the device whatever moves.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from graphcore.arch.transformers_fallback import Skeleton
from graphcore.errors import ResidencyError
from graphcore.weights.groups import Group, Place, split_layers
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.loader import Loader
from graphcore.weights.pieces import pieces_of
from graphcore.weights.residents import fill_from_files
from graphcore.weights.slots import Slot, bind

Progress = Callable[[str, int, int], None]


def skeleton_groups(skeleton: Skeleton, loader: Loader, layer_group_size: int) -> list[Group]:
    """Return every group that can move, in order of use; a head that is the embedding's tensor is in none."""
    shared, weights = shared_weights(skeleton, loader), skeleton.weights()
    matrices = [name for name, tensor in weights.items() if tensor.dim() > 1 and name not in shared]
    groups = []
    for index, layers in enumerate(split_layers(skeleton.num_layers, layer_group_size), start=1):
        prefixes = tuple(f"{skeleton.layers}.{layer}." for layer in layers)
        label = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        groups.append(Group(index, label, [_place(skeleton, name) for name in matrices if name.startswith(prefixes)]))
    head = [_place(skeleton, name) for name in matrices if name.startswith(f"{skeleton.head}.")]
    return [*groups, Group(len(groups) + 1, "head", head)]


def _place(skeleton: Skeleton, name: str) -> Place:
    owner, _, leaf = name.rpartition(".")
    return Place(name, skeleton.model.get_submodule(owner), leaf, None)


def shared_weights(skeleton: Skeleton, loader: Loader) -> dict[str, str]:
    """Return the weights without bytes of their own, each with the one outside the layers whose bytes it reads."""
    first: dict[str, str] = {}
    shared = {}
    weights = skeleton.weights()
    for name in sorted(weights, key=lambda name: name.startswith(f"{skeleton.head}.")):
        partner = first.setdefault(loader.sources[name].name, name)
        if partner != name and not partner.startswith(f"{skeleton.layers}."):
            shared[name] = partner
    return shared


def resident_skeleton_layout(skeleton: Skeleton, loader: Loader, moved: Collection[str]) -> Layout:
    """Return where each weight that stays stands in its one allocation."""
    left_out = {*moved, *shared_weights(skeleton, loader)}
    return layout_of((name, tensor) for name, tensor in skeleton.weights().items() if name not in left_out)


def load_resident_skeleton(
    skeleton: Skeleton,
    loader: Loader,
    device: torch.device,
    on_progress: Progress,
    moved: Collection[str] = (),
) -> Slot:
    """Give every weight that does not move a place for good, fill it and bind the skeleton to it, once.

    Args:
        on_progress: called with "load", weights done and weights in all.
        moved: names of weights that have no place of their own; they stay on the meta device.

    Returns:
        The allocation that holds them all.

    Raises:
        CheckpointError: a file changed under us.
    """
    layout = resident_skeleton_layout(skeleton, loader, moved)
    slot = Slot.allocate(layout.nbytes, device)
    for index, (name, view) in enumerate(slot.views(layout).items(), start=1):
        for piece in pieces_of(loader, name, None, view):
            fill_from_files(loader, piece)
        bind(skeleton.model, name, view)
        on_progress("load", index, len(layout.places))
    weights = skeleton.weights()
    for name, partner in shared_weights(skeleton, loader).items():
        bind(skeleton.model, name, weights[partner].detach())
    for name, buffer in list(skeleton.model.named_buffers()):
        if not buffer.is_meta:
            bind(skeleton.model, name, buffer.to(device))
    return slot


def check_bound(model: nn.Module) -> None:
    """Return if every weight and buffer has bytes.

    Raises:
        ResidencyError: one has not; it would give numbers that mean nothing.
    """
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise ResidencyError(f"weights {empty} of {type(model).__name__} were left without bytes; load the model again")


def bind_group(group: Group, slot: Slot) -> None:
    """Make the group's weights be views of a slot."""
    views = slot.views(group.layout)
    for place in group.places:
        bind(place.module, place.leaf, views[place.name])


def moved_names(groups: Sequence[Group]) -> set[str]:
    """Return the names of the groups' weights."""
    return {place.name for group in groups for place in group.places}
