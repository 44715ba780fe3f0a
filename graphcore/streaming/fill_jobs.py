"""Jobs of the threads that fill slots: a few long reads into a buffer, then conversions from the buffer to weights.

file     ... |##conversion##|##conversion##| ...      adjacent conversions share one read
read        [--------------------------------]        widened to multiples of 4096 bytes
buffer      [--------------------------------]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.errors import CheckpointError
from graphcore.weights.conversion import CONVERSION_NBYTES, Conversion, conversions_of, copy_bytes
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.slots import Slot

ALIGNMENT = 4096  # bytes; direct reads, which bypass the page cache, need it
GAP = 64 << 10  # bytes; spans with a smaller gap between them share one read, which includes the gap
ROOM = 8 * ALIGNMENT  # bytes of a buffer beyond its jobs' weights, because reads are widened to aligned ones
BUFFER_NBYTES = CONVERSION_NBYTES + ROOM  # bytes of a buffer for jobs of the largest size


@dataclass(frozen=True)
class Read:
    """An aligned run of a file's bytes, and its offset `at` in the buffer."""

    file: Path
    offset: int
    nbytes: int
    at: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the run."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class FillJob:
    """A unit of work for a thread: reads into its buffer, and the conversions of the bytes read.

    Attributes:
        conversions: conversions, each with the offset of each of its spans in the buffer.
        nbytes: bytes of weights that the job writes into slots; a file may hold them in fewer bytes, or in more.
        room: bytes of buffer that the reads need.
        straight: spans that are read directly into the slot once it is free, each with its destination in the slot.
    """

    reads: tuple[Read, ...]
    conversions: tuple[tuple[Conversion, tuple[int, ...]], ...]
    nbytes: int
    room: int
    straight: tuple[tuple[FileSpan, Tensor], ...] = ()


@dataclass(frozen=True)
class ByteCopy:
    """A conversion that copies bytes from RAM into a slot.

    Attributes:
        source, out: [nbytes] uint8.
    """

    weight: str
    source: Tensor
    out: Tensor
    spans: tuple[FileSpan, ...] = ()
    plain_place: None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that are copied."""
        return self.out.nbytes

    def write(self, _parts: Sequence[Tensor], _threads: int | None) -> None:
        """Copy the bytes."""
        copy_bytes(self.source, self.out)


def file_jobs(
    conversions: Sequence[Conversion], is_cached: bool = False, most_nbytes: int = CONVERSION_NBYTES
) -> list[FillJob]:
    """Return the jobs that carry out conversions from files, in the order of the files' bytes.

    Args:
        is_cached: True if files are read through the page cache. Weights that need no conversion are then read
            directly into the slot, which saves a copy.
        most_nbytes: most bytes of a file that conversions share a read for.
    """
    if is_cached:
        plain = [(conversion, place) for conversion in conversions if (place := conversion.plain_place) is not None]
        rest = [conversion for conversion in conversions if conversion.plain_place is None]
        straight = [FillJob((), (), place.nbytes, 0, ((conversion.spans[0], place),)) for conversion, place in plain]
        return sorted(straight, key=lambda job: job.straight[0][0]) + file_jobs(rest, most_nbytes=most_nbytes)
    single = sorted(
        (conversion for conversion in conversions if len(conversion.spans) == 1),
        key=lambda conversion: conversion.spans[0],
    )
    jobs: list[FillJob] = []
    together: list[Conversion] = []
    for conversion in single:
        if together and not _joins(together, conversion.spans[0], most_nbytes):
            jobs.append(_job(together))
            together = []
        together.append(conversion)
    if together:
        jobs.append(_job(together))
    return jobs + [_job([conversion]) for conversion in conversions if len(conversion.spans) != 1]


def copy_jobs(weight: str, source: Tensor, out: Tensor) -> list[FillJob]:
    """Return the jobs that copy bytes from RAM to a slot, a few megabytes each."""
    cuts = range(0, source.nbytes, CONVERSION_NBYTES)
    parts = [(source[at : at + CONVERSION_NBYTES], out[at : at + CONVERSION_NBYTES]) for at in cuts]
    return [FillJob((), ((ByteCopy(weight, part, place), ()),), part.nbytes, 0) for part, place in parts]


def read_job(job: FillJob, files: Mapping[Path, ByteSource], buffer: Tensor) -> None:
    """Carry out a job's reads into the buffer.

    Raises:
        CheckpointError: a file cannot be read, or a read returns too few bytes.
    """
    for read in job.reads:
        _read_into(files[read.file], buffer[read.at : read.at + read.nbytes], read.offset)


def read_straight(job: FillJob, files: Mapping[Path, ByteSource]) -> None:
    """Read the bytes that need no buffer directly into the slot.

    Raises:
        CheckpointError: as for `read_job`.
    """
    for span, place in job.straight:
        _read_into(files[span.file], place, span.offset)


def _read_into(source: ByteSource, space: Tensor, offset: int) -> None:
    count = source.read_into(space, offset, space.nbytes)
    expected = min(space.nbytes, source.size - offset)
    if count < expected:
        raise CheckpointError(
            f"{source.path}: {count} of {expected} bytes came from byte {offset} on; check the disk, or fetch the file "
            "again"
        )


def _joins(together: Sequence[Conversion], span: FileSpan, most_nbytes: int) -> bool:
    """Return whether a span can join the read of preceding conversions, which are in the order of their bytes."""
    first, last = together[0].spans[0], together[-1].spans[0]
    return span.file == last.file and span.offset - last.end <= GAP and span.end - first.offset <= most_nbytes


def _job(conversions: Sequence[Conversion]) -> FillJob:
    """Return a job for several conversions with one read, or for one conversion with a read for each span."""
    spans = [span for conversion in conversions for span in conversion.spans]
    covers = [_cover(spans)] if len(conversions) > 1 else [_cover([span]) for span in spans]
    reads: list[Read] = []
    room = 0
    for cover in covers:
        reads.append(Read(cover.file, cover.offset, cover.nbytes, room))
        room += cover.nbytes
    placed = tuple((conversion, tuple(_place(span, reads) for span in conversion.spans)) for conversion in conversions)
    return FillJob(tuple(reads), placed, sum(conversion.nbytes for conversion in conversions), room)


def _cover(spans: Sequence[FileSpan]) -> FileSpan:
    """Return the smallest aligned run around spans of one file."""
    begin = min(span.offset for span in spans) // ALIGNMENT * ALIGNMENT
    end = -(-max(span.end for span in spans) // ALIGNMENT) * ALIGNMENT
    return FileSpan(spans[0].file, begin, end - begin)


def _place(span: FileSpan, reads: Sequence[Read]) -> int:
    """Return the offset in the buffer of a span's first byte."""
    read = next(read for read in reads if read.file == span.file and read.offset <= span.offset <= span.end <= read.end)
    return read.at + span.offset - read.offset


def jobs_of(
    loader: Loader,
    group: Group,
    slot: Slot,
    held: Mapping[int, Tensor] | None,
    files: Mapping[Path, ByteSource],
    most_nbytes: int = CONVERSION_NBYTES,
) -> list[FillJob]:
    """Return the jobs that fill a group's slot in RAM.

    Args:
        held: the groups' bytes in RAM, by group; None if they are read from files.
        most_nbytes: most bytes of a job that reads rows from files (`OtherMemory.job_nbytes`).
    """
    if held is not None:
        source = held[group.index]
        return copy_jobs(group.label, source, slot.raw[: source.nbytes])
    views = slot.views(group.layout)
    conversions = [
        conversion
        for weight in group.weights
        for conversion in conversions_of(
            loader, weight.name, weight.packing, views[weight.name], weight.rows, most_nbytes
        )
    ]
    return file_jobs(conversions, not any(source.is_direct for source in files.values()), most_nbytes)
