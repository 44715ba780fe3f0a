"""Conversions of a checkpoint's bytes into weights, for both resident and streamed weights.

    RowConversion      some rows of a stored tensor, copied, cast, unpacked or repacked row by row   megabytes at a time
    PackingConversion  some dense rows, packed in the format that `quant` sets                       megabytes at a time
    TensorConversion   a whole stored tensor, if a fold or its encoding needs all of it at once

A conversion lists the spans of bytes that it needs and converts them into part of a weight. The caller reads the bytes
and provides the memory. Conversions of one weight are independent and may be written in any order.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.folds import PickRows
from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import FileSpan, read_span
from graphcore.kernels.packing import GROUP_ROWS, Packing
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.quant import FORMATS
from graphcore.quant.registry import has_tensor_scale
from graphcore.weights.loader import Loader

# The most stored bytes of a RowConversion: large enough for a disk's full speed, and small enough for the buffers of
# all threads together to take less than a twentieth of a budget of 300 MB. Plans of less memory have smaller ones
# (`planning.tier`).
CONVERSION_NBYTES = 5 << 19


class Conversion(Protocol):
    """The interface of a conversion: from some stored bytes to part of a weight."""

    @property
    def spans(self) -> tuple[FileSpan, ...]:
        """Spans of the stored bytes that the conversion needs."""

    @property
    def weight(self) -> str:
        """Name of the weight, for messages."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weight that the conversion writes; the spans may have more or fewer."""

    @property
    def plain_place(self) -> Tensor | None:
        """Memory that the only span's bytes may be read into unchanged, uint8; None if they must be converted."""

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Convert the spans' bytes and write the result into the weight's memory.

        Args:
            parts: bytes of each span, uint8 at any alignment.
            threads: number of threads that packing may use; None for torch's number.

        Raises:
            CheckpointError: the bytes are not valid weights.
        """


@dataclass(frozen=True)
class RowConversion:
    """The conversion of rows begin .. end - 1 of a weight whose rows are stored contiguously and independently.

    Attributes:
        info: description of the stored tensor.
        packing: packing of the weight; None if it is dense.
        out: memory of the whole weight: [O, I] compute dtype, or [nbytes] uint8 if it is packed.
        nbytes: bytes of these rows in `out`.
    """

    weight: str
    spans: tuple[FileSpan, ...]
    info: TensorInfo
    packing: Packing | None
    out: Tensor
    begin: int
    end: int
    nbytes: int

    @property
    def plain_place(self) -> Tensor | None:
        """Memory of the rows, uint8, if they are as stored: the file's blocks, or dense in its dtype; else None."""
        if isinstance(self.packing, StoredPacking):
            return self.out[self.packing.offset(self.begin) : self.packing.offset(self.end)]
        is_plain = self.packing is None and DENSE_DTYPES.get(self.info.encoding) == self.out.dtype
        return self.out[self.begin : self.end].view(-1).view(torch.uint8) if is_plain else None

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Write the rows into the weight's memory."""
        (raw,) = parts
        place = self.plain_place
        if place is not None:
            copy_bytes(raw, place)
            return
        shape = (self.end - self.begin, *self.info.shape[1:])
        if self.packing is not None:
            self.packing.pack_rows(raw.view(shape[0], -1), self.begin, self.out, threads=threads)
            return
        rows = self.out[self.begin : self.end]
        if self.info.encoding in DENSE_DTYPES:
            dtype = DENSE_DTYPES[self.info.encoding]
            aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
            rows.copy_(aligned.view(dtype).view(shape))
        else:
            rows.copy_(FORMATS[self.info.encoding].dequantize(raw, shape, rows.dtype))


@dataclass(frozen=True)
class PackingConversion:
    """The conversion of dense rows begin .. end - 1 of a weight that is packed at load.

    Attributes:
        info: description of the stored tensor.
        out: memory of the whole weight, [nbytes] uint8.
        nbytes: bytes of these rows in `out`.
    """

    weight: str
    spans: tuple[FileSpan, ...]
    loader: Loader
    info: TensorInfo
    packing: Packing
    out: Tensor
    begin: int
    end: int
    nbytes: int

    @property
    def plain_place(self) -> None:
        """Always None: the rows have to be packed."""

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Pack the rows into the weight's memory."""
        (raw,) = parts
        dtype = DENSE_DTYPES[self.info.encoding]
        aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
        rows = aligned.view(dtype).view(self.end - self.begin, self.info.shape[1])
        self.loader.pack_rows(self.weight, rows, self.packing, self.begin, self.out, threads)


@dataclass(frozen=True)
class TensorConversion:
    """The conversion of a whole stored tensor into a whole weight."""

    weight: str
    spans: tuple[FileSpan, ...]
    loader: Loader
    packing: Packing | None
    out: Tensor

    @property
    def nbytes(self) -> int:
        """Size of the weight in bytes."""
        return self.out.nbytes

    @property
    def plain_place(self) -> None:
        """Always None: the tensor may have to be folded."""

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Write the weight into its memory; `threads` has no effect."""
        stored = self.loader.checkpoint.assemble(self.loader.sources[self.weight].name, parts)
        if self.packing is None:
            self.out.copy_(self.loader.dense_of(self.weight, stored, self.out.dtype))
        else:
            self.loader.pack_into(self.weight, stored, self.packing, self.out)


def conversions_of(
    loader: Loader,
    weight: str,
    packing: Packing | None,
    out: Tensor,
    rows: range | None = None,
    most_nbytes: int = CONVERSION_NBYTES,
) -> list[Conversion]:
    """Return the conversions that fill a weight.

    Args:
        weight: name of the weight in the decoder.
        packing: packing of the weight; None if it is dense.
        out: memory of the weight, or of some of its rows.
        rows: range of the weight's rows that `out` holds; None for all.
        most_nbytes: most stored bytes of a conversion of several groups of rows.
    """
    source = loader.sources[weight]
    info = loader.checkpoint.tensors[source.name]
    is_packed_here = packing is not None and info.encoding in DENSE_DTYPES and packing.can_split
    first = first_row(loader, source, info, None if is_packed_here else packing)
    if first is None:
        is_whole = rows is None or len(rows) == info.shape[0]
        assert is_whole, f"{weight} has no rows of its own in the file"
        return [TensorConversion(weight, loader.checkpoint.spans(source.name), loader, packing, out)]
    (span,) = loader.checkpoint.spans(source.name)
    row_nbytes = span.nbytes // info.shape[0]
    count = len(rows) if rows is not None else _num_rows(source, info)
    first += rows.start if rows is not None else 0
    step = max(GROUP_ROWS, most_nbytes // row_nbytes // GROUP_ROWS * GROUP_ROWS)
    conversions: list[Conversion] = []
    for begin in range(0, count, step):
        end = min(begin + step, count)
        spans = (FileSpan(span.file, span.offset + (first + begin) * row_nbytes, (end - begin) * row_nbytes),)
        nbytes = out.nbytes * end // count - out.nbytes * begin // count
        if is_packed_here and packing is not None:
            conversions.append(PackingConversion(weight, spans, loader, info, packing, out, begin, end, nbytes))
        else:
            conversions.append(RowConversion(weight, spans, info, packing, out, begin, end, nbytes))
    return conversions


def fill_weight(loader: Loader, weight: str, packing: Packing | None, out: Tensor, rows: range | None = None) -> None:
    """Read a weight from the checkpoint's files on this thread and write it into its memory.

    Args:
        weight, packing, out, rows: arguments as for `conversions_of`.

    Raises:
        CheckpointError: a file changed, or its bytes are not valid weights.
    """
    files = loader.checkpoint.files
    for conversion in conversions_of(loader, weight, packing, out, rows):
        conversion.write([read_span(span, files[span.file], weight) for span in conversion.spans], None)


def first_row(loader: Loader, source: TensorSource, info: TensorInfo, packing: Packing | None) -> int | None:
    """Return the index of the stored row that is the weight's first row; None if it cannot be converted row by row."""
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


def row_span(loader: Loader, weight: str, row: int) -> FileSpan:
    """Return the span of the stored bytes of one row, for a weight that can be converted row by row."""
    source = loader.sources[weight]
    info = loader.checkpoint.tensors[source.name]
    first = first_row(loader, source, info, None)
    assert first is not None, f"{weight} has no rows of its own in the file"
    (span,) = loader.checkpoint.spans(source.name)
    row_nbytes = span.nbytes // info.shape[0]
    return FileSpan(span.file, span.offset + (first + row) * row_nbytes, row_nbytes)


def _num_rows(source: TensorSource, info: TensorInfo) -> int:
    match source.folds:
        case (PickRows(start=start, stop=stop),):
            return min(stop, info.shape[0]) - start
    return info.shape[0]


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy the bytes of a contiguous CPU tensor to another of the same size, on this thread only.

    Torch would split the copy among threads, so that each reading thread would start its own thread pool.
    """
    assert source.nbytes == target.nbytes, f"{source.nbytes} bytes into {target.nbytes}"
    assert source.is_contiguous() and target.is_contiguous(), "bytes are copied in one run"  # noqa: PT018
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
