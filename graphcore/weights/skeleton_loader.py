"""From a checkpoint's bytes to a bound transformers skeleton: every layer group in a slot, bound once.

    group 0        what is outside the layers: embeddings, final norm
    1 .. G         layer groups
    G + 1          the head; nothing, where it is the embedding's tensor

A weight that has no stored tensor of its own, because the model ties it to one of group 0, is a view of that one's
bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from graphcore.arch.transformers_fallback import Skeleton, replace_parameter
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.errors import ResidencyError
from graphcore.weights.layout import Layout, layout_of
from graphcore.weights.slots import Slot, bind

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SkeletonLoader:
    """Fills layer groups' slots from a checkpoint.

    Attributes:
        sources: stored tensor of each of the skeleton's weights.
        groups: names of each group's weights.
        errors: of weights packed at load; there never are any.
    """

    skeleton: Skeleton
    checkpoint: Checkpoint
    sources: Mapping[str, str]
    groups: Sequence[Sequence[str]]
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the checkpoint has of the weights; what two weights share counts once."""
        return sum(self.checkpoint.tensors[name].nbytes for name in set(self.sources.values()))

    def shared(self) -> dict[str, str]:
        """Return the weights that have no bytes of their own, each with the weight of group 0 whose bytes they are."""
        outside = {self.sources[name]: name for name in self.groups[0]}
        later = [name for names in self.groups[1:] for name in names]
        return {name: outside[self.sources[name]] for name in later if self.sources[name] in outside}

    def layouts(self) -> list[Layout]:
        """Return where each group's weights stand in its slot."""
        weights, shared = self.skeleton.weights(), self.shared()
        return [layout_of((name, weights[name]) for name in names if name not in shared) for names in self.groups]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a weight on the CPU, cast.

        Raises:
            CheckpointError: the file changed under us.
        """
        return self.checkpoint.read(self.sources[name]).to(dtype)

    def fill(self, layout: Layout, slot: Slot) -> None:
        """Write a group's weights into a slot."""
        for name, view in slot.views(layout).items():
            view.copy_(self.read(name, view.dtype))

    def load(self, device: torch.device, on_progress: Progress) -> list[Slot]:
        """Give every group a slot, fill it and bind the skeleton's weights to it, once; return the slots.

        Args:
            on_progress: called with "load", groups done and groups in all.

        Raises:
            CheckpointError: the file changed under us.
            ResidencyError: a weight was left without bytes.
        """
        layouts = self.layouts()
        slots = Slot.allocate(sum(layout.nbytes for layout in layouts), device).split(layouts)
        for index, (layout, slot) in enumerate(zip(layouts, slots, strict=True)):
            self.fill(layout, slot)
            bind_views(self.skeleton.model, slot.views(layout))
            on_progress("load", index + 1, len(layouts))
        for name, partner in self.shared().items():
            bind_views(self.skeleton.model, {name: self.skeleton.weights()[partner].detach()})
        move_buffers(self.skeleton.model, device)
        check_bound(self.skeleton)
        return slots


def bind_views(model: nn.Module, views: Mapping[str, Tensor]) -> None:
    """Make the model's parameters and buffers of these names be these tensors."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, view in views.items():
        if name in parameters:
            replace_parameter(model, name, view)
        else:
            bind(model, name, view)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring the buffers that no checkpoint holds to the device."""
    for name, buffer in list(model.named_buffers()):
        bind(model, name, buffer.to(device))


def check_bound(skeleton: Skeleton) -> None:
    """Return if every weight and buffer has bytes.

    Raises:
        ResidencyError: one has not; it would give numbers that mean nothing.
    """
    model = skeleton.model
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise ResidencyError(f"weights {empty} of {type(model).__name__} were left without bytes; load the model again")
