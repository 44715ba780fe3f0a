"""Upper bounds of the memory that loading takes besides the weights.

A weight is converted from the bytes read for it, with intermediate copies. Weights are made one after another
(weights/resident_weights.py, streaming/host_store.py), so the largest counts.
"""

from collections.abc import Iterator
from math import prod

import torch

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.kernels.packing import GROUP_ROWS, Packing
from graphcore.nn.decoder import Decoder
from graphcore.planning.workspace import FLOAT32_NBYTES
from graphcore.weights.conversion import CONVERSION_NBYTES, first_row
from graphcore.weights.layout import layout_of
from graphcore.weights.loader import PACKED_WEIGHTS, Loader
from graphcore.weights.packed_weights import packing_of

# Bytes for each weight that is being packed: in float32, packed, unpacked again, and the temporaries of a search for
# scales.
PACKING_NBYTES = 8 * FLOAT32_NBYTES


def loading_nbytes(loader: Loader, decoder: Decoder, is_on_cpu: bool) -> int:
    """Return the peak bytes of RAM for loading, besides the weights' own memory.

    Args:
        is_on_cpu: True if the device is the CPU, where weights are made in place; else a whole group is made in RAM and
            then copied.
    """
    largest = max((making_nbytes(loader, *weight) for weight in _weights(loader, decoder)), default=0)
    if is_on_cpu:
        return largest
    return largest + max(layout_of(group.named_buffers()).nbytes for _, group in decoder.groups())


def making_nbytes(loader: Loader, weight: str, packing: Packing | None, dtype: torch.dtype) -> int:
    """Return the peak bytes for making one weight, besides the weight's own memory.

    Args:
        packing: packing of the weight; None if it is dense.
        dtype: dtype of the weight's memory.
    """
    source = loader.sources[weight]
    info = loader.checkpoint.tensors[source.name]
    is_dense = info.encoding in DENSE_DTYPES
    is_packed_here = packing is not None and (is_dense or packing.format != info.encoding)
    packs = packing_nbytes(prod(info.shape)) if is_packed_here else 0
    can_split = packing is None or packing.can_split
    if can_split and first_row(loader, source, info, None if is_packed_here and is_dense else packing) is not None:
        rows = min(info.shape[0], max(GROUP_ROWS, CONVERSION_NBYTES * info.shape[0] // info.nbytes))
        stored = rows * info.nbytes // info.shape[0]
        return 2 * stored + packs + (0 if is_dense else 2 * rows * info.shape[1] * FLOAT32_NBYTES)
    num_weights = prod(info.shape)
    spans = loader.checkpoint.spans(source.name)
    read = info.nbytes * (1 if len(spans) < 2 and is_dense else 2)  # the parts, and the tensor made of them
    itemsize = DENSE_DTYPES[info.encoding].itemsize if is_dense else max(dtype.itemsize, FLOAT32_NBYTES)
    stays_packed = packing is not None and not is_packed_here
    copied = info.nbytes if stays_packed else num_weights * itemsize
    folded = copied if source.folds or not is_dense else 0
    is_cast = packing is None and (not is_dense or DENSE_DTYPES[info.encoding] != dtype)
    return read + folded + packs + (num_weights * dtype.itemsize if is_cast else 0)


def packing_nbytes(num_weights: int) -> int:
    """Return the bytes for packing a dense matrix, some rows at a time, besides the dense and the packed matrix."""
    return PACKING_NBYTES * min(num_weights, PACKED_WEIGHTS)


def _weights(loader: Loader, decoder: Decoder) -> Iterator[tuple[str, Packing | None, torch.dtype]]:
    """Yield name, packing and dtype of every weight that has a source."""
    for prefix, group in decoder.groups():
        for name, tensor in group.named_buffers():
            if prefix + name in loader.sources:
                yield prefix + name, packing_of(group, name), tensor.dtype
