"""The one way from a checkpoint's bytes to a weight's place, for weights that stay and for weights that move.

    RowsPiece     some rows of a stored tensor, copied, cast, unpacked or repacked row by row   megabytes at a time
    DenseRowsPiece   some dense rows, packed as quant= says                                     megabytes at a time
    TensorPiece   a whole stored tensor, where a fold or its form needs all of it at once

Who reads the bytes, how many at a time and into what memory is the reader's business; a piece only says which bytes it
wants and what it makes of them. Pieces of one weight are independent of each other and may be written in any order.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.folds import PickRows
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.encodings import has_tensor_scale
from graphcore.kernels.packing import GROUP_ROWS
from graphcore.quant import FORMATS
from graphcore.quant.packing import Packing
from graphcore.weights.loader import Loader

# Most stored bytes of a RowsPiece: large enough for a disk's full speed; the buffers of all threads together are then
# less than a twentieth of a budget of 300 MB.
PIECE_NBYTES = 5 << 19


class Piece(Protocol):
    """Part of a weight."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The bytes that it is made of."""

    @property
    def weight(self) -> str:
        """The weight's name, for messages."""

    @property
    def plain_place(self) -> Tensor | None:
        """Where the bytes of the only span may be put as they are, uint8; None if something is made of them."""

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Make the rows of the weight from the bytes of each span, uint8 at any address, and put them in their place.

        Args:
            threads: that packing may take; None is as many as torch has.

        Raises:
            CheckpointError: the bytes are no such weight.
        """


@dataclass(frozen=True)
class RowsPiece:
    """Rows begin .. end - 1 of a weight whose stored rows lie one after another, each by itself.

    Attributes:
        info: of the stored tensor.
        packing: of the weight; None is dense.
        out: where the whole weight goes: [O, I] compute dtype, or [nbytes] uint8 if it is packed.
    """

    weight: str
    spans: tuple[Span, ...]
    info: TensorInfo
    packing: Packing | None
    out: Tensor
    begin: int
    end: int

    @property
    def plain_place(self) -> Tensor | None:
        """The rows' bytes, where they are dense and of the stored dtype."""
        is_plain = self.packing is None and DENSE_DTYPES.get(self.info.encoding) == self.out.dtype
        return self.out[self.begin : self.end].view(-1).view(torch.uint8) if is_plain else None

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Put the rows in their place."""
        (raw,) = parts
        shape = (self.end - self.begin, *self.info.shape[1:])
        if self.packing is not None:
            self.packing.pack_rows(raw.view(shape[0], -1), self.begin, self.out, threads=threads)
            return
        rows = self.out[self.begin : self.end]
        if self.info.encoding in DENSE_DTYPES:
            dtype = DENSE_DTYPES[self.info.encoding]
            if dtype == rows.dtype:
                copy_bytes(raw, rows)
                return
            aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
            rows.copy_(aligned.view(dtype).view(shape))
        else:
            rows.copy_(FORMATS[self.info.encoding].dequantize(raw, shape, rows.dtype))


@dataclass(frozen=True)
class DenseRowsPiece:
    """Dense rows begin .. end - 1 of a weight that is packed at load.

    Attributes:
        info: of the stored tensor.
        out: [nbytes] uint8, where the whole weight goes.
    """

    weight: str
    spans: tuple[Span, ...]
    loader: Loader
    info: TensorInfo
    packing: Packing
    out: Tensor
    begin: int
    end: int

    @property
    def plain_place(self) -> None:
        """Nowhere: the rows have to be packed."""

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Pack the rows to their place."""
        (raw,) = parts
        dtype = DENSE_DTYPES[self.info.encoding]
        aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
        rows = aligned.view(dtype).view(self.end - self.begin, self.info.shape[1])
        self.loader.pack_rows(self.weight, rows, self.packing, self.begin, self.out, threads)


@dataclass(frozen=True)
class TensorPiece:
    """A whole weight, by way of its whole stored tensor."""

    weight: str
    spans: tuple[Span, ...]
    loader: Loader
    packing: Packing | None
    out: Tensor

    @property
    def plain_place(self) -> None:
        """Nowhere: the tensor may have to be folded."""

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Put the weight in its place; `threads` has no effect."""
        stored = self.loader.checkpoint.assemble(self.loader.sources[self.weight].name, parts)
        if self.packing is None:
            self.out.copy_(self.loader.dense_of(self.weight, stored, self.out.dtype))
        else:
            self.loader.pack_into(self.weight, stored, self.packing, self.out)


def pieces_of(
    loader: Loader, weight: str, packing: Packing | None, out: Tensor, rows: range | None = None
) -> list[Piece]:
    """Return the pieces that fill a weight.

    Args:
        weight: its name in the decoder.
        packing: None is dense.
        out: its place, or that of some of its rows.
        rows: of the weight that `out` is for; None is all.
    """
    source = loader.sources[weight]
    info = loader.checkpoint.tensors[source.name]
    is_packed_here = packing is not None and info.encoding in DENSE_DTYPES and packing.can_split
    first = first_row(loader, source, info, None if is_packed_here else packing)
    if first is None:
        is_whole = rows is None or len(rows) == info.shape[0]
        assert is_whole, f"{weight} has no rows of its own in the file"
        return [TensorPiece(weight, loader.checkpoint.spans(source.name), loader, packing, out)]
    (span,) = loader.checkpoint.spans(source.name)
    row_nbytes = span.nbytes // info.shape[0]
    count = len(rows) if rows is not None else _num_rows(source, info)
    first += rows.start if rows is not None else 0
    step = max(GROUP_ROWS, PIECE_NBYTES // row_nbytes // GROUP_ROWS * GROUP_ROWS)
    pieces: list[Piece] = []
    for begin in range(0, count, step):
        end = min(begin + step, count)
        spans = (Span(span.file, span.offset + (first + begin) * row_nbytes, (end - begin) * row_nbytes),)
        if is_packed_here and packing is not None:
            pieces.append(DenseRowsPiece(weight, spans, loader, info, packing, out, begin, end))
        else:
            pieces.append(RowsPiece(weight, spans, info, packing, out, begin, end))
    return pieces


def first_row(loader: Loader, source: TensorSource, info: TensorInfo, packing: Packing | None) -> int | None:
    """Return the stored row that is the weight's first, or None if the weight is not made row by row."""
    spans = loader.checkpoint.spans(source.name)
    is_plain = info.file is not None and len(spans) == 1 and spans[0].nbytes == info.nbytes and len(info.shape) == 2
    if not is_plain or not info.nbytes or has_tensor_scale(info.encoding):
        return None
    is_known = info.encoding in FORMATS or DENSE_DTYPES[info.encoding].is_floating_point
    if not is_known or (packing is not None and packing.format != info.encoding):
        return None
    match source.folds:
        case ():
            return 0
        case (PickRows(start=start, step=1, axis=0),):
            return start
    return None


def row_span(loader: Loader, weight: str, row: int) -> Span:
    """Return where the stored bytes of a weight's row are; the weight is made row by row."""
    source = loader.sources[weight]
    info = loader.checkpoint.tensors[source.name]
    first = first_row(loader, source, info, None)
    assert first is not None, f"{weight} has no rows of its own in the file"
    (span,) = loader.checkpoint.spans(source.name)
    row_nbytes = span.nbytes // info.shape[0]
    return Span(span.file, span.offset + (first + row) * row_nbytes, row_nbytes)


def _num_rows(source: TensorSource, info: TensorInfo) -> int:
    match source.folds:
        case (PickRows(start=start, stop=stop),):
            return min(stop, info.shape[0]) - start
    return info.shape[0]


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy the bytes of one contiguous CPU tensor over those of another of the same size, on this thread alone.

    torch would share the copy out to threads, of which every reading thread would then have its own team.
    """
    assert source.nbytes == target.nbytes, f"{source.nbytes} bytes into {target.nbytes}"
    assert source.is_contiguous() and target.is_contiguous(), "bytes are copied in one run"  # noqa: PT018
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
