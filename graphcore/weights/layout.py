"""Where each weight of a layer group stands in the group's buffer.

    [ q_proj.weight | pad | k_proj.weight | pad | ... ]      every offset a multiple of 256 bytes

256 is the alignment that wide loads and copy engines like; a misaligned weight can even change the bits of a float32
product, because the library then takes another path.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

ALIGNMENT = 256


@dataclass(frozen=True)
class Place:
    """One weight's place in its group's buffer; offset in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Weight name to place, and the buffer's size in bytes."""

    places: Mapping[str, Place]
    nbytes: int


def aligned(nbytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
    """Return the layout of the named tensors, in their order; meta tensors will do."""
    places: dict[str, Place] = {}
    offset = 0
    for name, tensor in tensors:
        place = Place(offset, tuple(tensor.shape), tensor.dtype)
        places[name] = place
        offset += aligned(place.nbytes)
    return Layout(MappingProxyType(places), offset)
