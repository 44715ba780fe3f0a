"""Slots: preallocated memory for weights, the views of its tensors, and the binding of modules to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from graphcore.host_pages import private_pages
from graphcore.weights.layout import ALIGNMENT, Layout


@dataclass(frozen=True)
class Slot:
    """An aligned run of bytes on a device.

    Attributes:
        raw: [nbytes] uint8, with its first byte at a multiple of ALIGNMENT.
    """

    raw: Tensor

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> "Slot":
        """Allocate a slot of `nbytes` bytes; its contents are undefined."""
        if device.type == "cpu":
            return cls(private_pages(nbytes))
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % ALIGNMENT
        return cls(memory[start : start + nbytes])

    def split(self, layouts: Sequence[Layout]) -> list["Slot"]:
        """Split this slot into consecutive slots, one for each layout."""
        ends = list(accumulate(layout.nbytes for layout in layouts))
        return [Slot(self.raw[end - layout.nbytes : end]) for end, layout in zip(ends, layouts, strict=True)]

    def views(self, layout: Layout) -> dict[str, Tensor]:
        """Return the layout's tensors as views of the slot."""
        return {
            name: self.raw[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)
            for name, place in layout.places.items()
        }


def bind(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the buffer or parameter `name`, such as "mlp.up_proj.weight", of a module."""
    owner, _, leaf = name.rpartition(".")
    target = module.get_submodule(owner)
    if leaf in target._parameters:  # in a transformers model
        target._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        return
    assert leaf in target._buffers, f"{type(target).__name__} has no weight {leaf}"
    setattr(target, leaf, tensor)
