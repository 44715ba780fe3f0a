"""The layout of a layer group: the place of each weight in the group's buffer.

    [ q_proj.weight | pad | k_proj.weight | pad | ... ]      every offset is a multiple of 256 bytes

An alignment of 256 bytes suits wide loads and copy engines. A misaligned weight can even change the bits of a float32
product, because the library then uses a different code path.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Place:
    """The place of one weight in its group's buffer: byte offset, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the weight in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The places of a group's weights, by name, and the size of the buffer in bytes."""

    places: Mapping[str, Place]
    nbytes: int


def aligned(nbytes: int) -> int:
    """Return a size rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
    """Return the layout of named tensors, in their order. They may be meta tensors."""
    places: dict[str, Place] = {}
    offset = 0
    for name, tensor in tensors:
        place = Place(offset, tuple(tensor.shape), tensor.dtype)
        places[name] = place
        offset += aligned(place.nbytes)
    return Layout(MappingProxyType(places), offset)
