"""What making weights takes besides their places, in bytes: what is read for one, and its copies on their way.

Weights are made one after another (`residents`, `host_store`), by the pieces of `pieces.py`; so the largest counts.
"""

from collections.abc import Iterator
from math import prod

import torch

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.kernels.packing import GROUP_ROWS
from graphcore.nn.decoder import Decoder
from graphcore.quant.packing import Packing
from graphcore.weights.layout import layout_of
from graphcore.weights.loader import PACKED_WEIGHTS, Loader
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.pieces import PIECE_NBYTES, first_row

FLOAT32_NBYTES = 4
# For each weight of those that are packed together: in float32, packed and unpacked again, and what a search for scales
# holds of a slice.
PACKING_NBYTES = 8 * FLOAT32_NBYTES


def loading_nbytes(loader: Loader, decoder: Decoder, is_on_cpu: bool) -> int:
    """Return the bytes of RAM that loading takes at once, besides the places of weights in it.

    Args:
        is_on_cpu: weights are made where they stay; else a group is made in RAM and copied as one.
    """
    largest = max((making_nbytes(loader, *weight) for weight in _weights(loader, decoder)), default=0)
    if is_on_cpu:
        return largest
    return largest + max(layout_of(group.named_buffers()).nbytes for _, group in decoder.groups())


def making_nbytes(loader: Loader, weight: str, packing: Packing | None, dtype: torch.dtype) -> int:
    """Return the bytes that making one weight takes at once, besides its place.

    Args:
        packing: None is dense.
        dtype: of its place.
    """
    source = loader.sources[weight]
    info = loader.checkpoint.tensors[source.name]
    is_dense = info.encoding in DENSE_DTYPES
    is_packed_here = packing is not None and is_dense
    packs = packing_nbytes(prod(info.shape)) if is_packed_here else 0
    can_split = packing is None or packing.can_split
    if can_split and first_row(loader, source, info, None if is_packed_here else packing) is not None:
        rows = min(info.shape[0], max(GROUP_ROWS, PIECE_NBYTES * info.shape[0] // info.nbytes))
        stored = rows * info.nbytes // info.shape[0]
        return 2 * stored + packs + (0 if is_dense else 2 * rows * info.shape[1] * FLOAT32_NBYTES)
    num_weights = prod(info.shape)
    spans = loader.checkpoint.spans(source.name)
    read = info.nbytes * (1 if len(spans) < 2 and is_dense else 2)  # parts, and what is assembled of them
    itemsize = DENSE_DTYPES[info.encoding].itemsize if is_dense else max(dtype.itemsize, FLOAT32_NBYTES)
    stays_packed = packing is not None and not is_packed_here
    copied = info.nbytes if stays_packed else num_weights * itemsize
    folded = copied if source.folds or not is_dense else 0
    is_cast = packing is None and (not is_dense or DENSE_DTYPES[info.encoding] != dtype)
    return read + folded + packs + (num_weights * dtype.itemsize if is_cast else 0)


def packing_nbytes(num_weights: int) -> int:
    """Return the bytes that packing a dense matrix takes, some rows at a time, besides the dense one and the packed."""
    return PACKING_NBYTES * min(num_weights, PACKED_WEIGHTS)


def _weights(loader: Loader, decoder: Decoder) -> Iterator[tuple[str, Packing | None, torch.dtype]]:
    """Yield name, packing and dtype of every weight that has a source."""
    for prefix, group in decoder.groups():
        for name, tensor in group.named_buffers():
            if prefix + name in loader.sources:
                yield prefix + name, packing_of(group, name), tensor.dtype
