"""The jobs that fill groups' slots from the checkpoint's files, and the threads that do them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.streaming.filler import Filler
from graphcore.streaming.jobs import BUFFER_NBYTES, Job, copy_jobs, file_jobs
from graphcore.streaming.timeline import Lane, Timeline
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.pieces import pieces_of
from graphcore.weights.slots import Slot

THREADS = 4  # that read: as many reads in flight; a disk here gives its most with two to four


def jobs_of(
    loader: Loader, group: Group, slot: Slot, held: Mapping[int, Tensor] | None, files: Mapping[Path, ByteSource]
) -> list[Job]:
    """Return the jobs that fill a group's slot in RAM.

    Args:
        held: the groups' bytes in RAM; None reads the files.
    """
    if held is not None:
        source = held[group.index]
        return copy_jobs(group.label, source, slot.raw[: source.nbytes])
    views = slot.views(group.layout)
    pieces = [
        piece
        for place in group.places
        for piece in pieces_of(loader, place.name, place.packing, views[place.name], place.rows)
    ]
    return file_jobs(pieces, is_cached=not any(source.is_direct for source in files.values()))


def filler_for(
    jobs: Mapping[int, Sequence[Job]], files: Mapping[Path, ByteSource], timeline: Timeline, lane: Lane = "copy"
) -> Filler:
    """Return threads with buffers that the jobs fit in; `lane` as for `Filler`."""
    room = max((job.room for each in jobs.values() for job in each), default=0)
    large = room if room > BUFFER_NBYTES else 0
    return Filler(files, THREADS, BUFFER_NBYTES if room else 0, large, timeline, lane)
