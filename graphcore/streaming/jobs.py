"""What a thread does in one go: a few long reads into its buffer, and the pieces of weights that are made of them.

file     ... |###piece###|###piece###| ...          pieces that touch are read together
read        [--------------------------]            widened to multiples of 4096 bytes
buffer      [--------------------------]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.checkpoint.span import Span
from graphcore.errors import CheckpointError
from graphcore.weights.pieces import PIECE_NBYTES, Piece, copy_bytes

ALIGNMENT = 4096  # of reads past the page cache
GAP = 64 << 10  # bytes nobody wants, that are read along rather than starting another read
BUFFER_NBYTES = PIECE_NBYTES + GAP  # for a job of rows, widened to aligned bytes


@dataclass(frozen=True)
class Read:
    """An aligned run of a file's bytes, and where in the buffer it goes."""

    file: Path
    offset: int
    nbytes: int
    at: int

    @property
    def end(self) -> int:
        """The byte of the file after the last one."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Job:
    """Reads, and what is made of them.

    Attributes:
        pieces: each with the place of each of its spans in the buffer.
        nbytes: of weights that it moves.
        room: bytes of buffer that the reads take.
        straight: bytes that are read straight to their place in the slot, once it is free.
    """

    reads: tuple[Read, ...]
    pieces: tuple[tuple[Piece, tuple[int, ...]], ...]
    nbytes: int
    room: int
    straight: tuple[tuple[Span, Tensor], ...] = ()


@dataclass(frozen=True)
class CopyPiece:
    """Bytes that lie in memory already, on their way to a slot.

    Attributes:
        source, out: uint8 of one size.
    """

    weight: str
    source: Tensor
    out: Tensor
    spans: tuple[Span, ...] = ()
    plain_place: None = None

    def write(self, _parts: Sequence[Tensor], _threads: int | None) -> None:
        """Copy the bytes."""
        copy_bytes(self.source, self.out)


def file_jobs(pieces: Sequence[Piece], is_cached: bool = False) -> list[Job]:
    """Return the jobs that make pieces out of files, in the order of the files' bytes.

    Args:
        is_cached: the files' pages are in RAM: what needs no buffer is read straight to its place, with one copy less.
    """
    if is_cached:
        plain = [(piece, place) for piece in pieces if (place := piece.plain_place) is not None]
        rest = [piece for piece in pieces if piece.plain_place is None]
        straight = [Job((), (), place.nbytes, 0, ((piece.spans[0], place),)) for piece, place in plain]
        return sorted(straight, key=lambda job: job.straight[0][0]) + file_jobs(rest)
    single = sorted((piece for piece in pieces if len(piece.spans) == 1), key=lambda piece: piece.spans[0])
    jobs: list[Job] = []
    together: list[Piece] = []
    for piece in single:
        if together and not _joins(together, piece.spans[0]):
            jobs.append(_job(together))
            together = []
        together.append(piece)
    if together:
        jobs.append(_job(together))
    return jobs + [_job([piece]) for piece in pieces if len(piece.spans) != 1]


def copy_jobs(weight: str, source: Tensor, out: Tensor) -> list[Job]:
    """Return the jobs that copy a group's bytes from memory to its slot, a few megabytes each."""
    cuts = range(0, source.nbytes, PIECE_NBYTES)
    parts = [(source[at : at + PIECE_NBYTES], out[at : at + PIECE_NBYTES]) for at in cuts]
    return [Job((), ((CopyPiece(weight, part, place), ()),), part.nbytes, 0) for part, place in parts]


def read_job(job: Job, files: Mapping[Path, ByteSource], buffer: Tensor) -> None:
    """Read a job's bytes into their places in the buffer.

    Raises:
        CheckpointError: a file cannot be read, or gives fewer bytes than it has.
    """
    for read in job.reads:
        _read_into(files[read.file], buffer[read.at : read.at + read.nbytes], read.offset)


def read_straight(job: Job, files: Mapping[Path, ByteSource]) -> None:
    """Read a job's bytes that need no buffer into the slot.

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


def _joins(together: Sequence[Piece], span: Span) -> bool:
    """Return whether a span is read along with pieces in the order of their bytes."""
    first, last = together[0].spans[0], together[-1].spans[0]
    return span.file == last.file and span.offset - last.end <= GAP and span.end - first.offset <= PIECE_NBYTES


def _job(pieces: Sequence[Piece]) -> Job:
    """Return the job of pieces that one read covers, or of one piece with a read for each of its spans."""
    spans = [span for piece in pieces for span in piece.spans]
    covers = [_cover(spans)] if len(pieces) > 1 else [_cover([span]) for span in spans]
    reads: list[Read] = []
    room = 0
    for cover in covers:
        reads.append(Read(cover.file, cover.offset, cover.nbytes, room))
        room += cover.nbytes
    placed = tuple((piece, tuple(_place(span, reads) for span in piece.spans)) for piece in pieces)
    return Job(tuple(reads), placed, sum(span.nbytes for span in spans), room)


def _cover(spans: Sequence[Span]) -> Span:
    """Return the smallest aligned run around spans of one file."""
    begin = min(span.offset for span in spans) // ALIGNMENT * ALIGNMENT
    end = -(-max(span.end for span in spans) // ALIGNMENT) * ALIGNMENT
    return Span(spans[0].file, begin, end - begin)


def _place(span: Span, reads: Sequence[Read]) -> int:
    """Return where in the buffer a span's first byte comes to lie."""
    read = next(read for read in reads if read.file == span.file and read.offset <= span.offset <= span.end <= read.end)
    return read.at + span.offset - read.offset
