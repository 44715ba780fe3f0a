"""How fast streamed weights can come, measured by moving some of them and doing nothing else.

raw     bytes from the tier below into buffers, as fast as the same threads get them
filled  the same bytes all the way: folded, cast or packed, and in their slot
copied  bytes from RAM to a device, by its copy lane, timed by the device
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.streaming.filler import Filler
from graphcore.streaming.jobs import CopyPiece, Job, file_jobs
from graphcore.streaming.lanes import Lanes
from graphcore.streaming.timeline import Timeline
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.pieces import pieces_of
from graphcore.weights.slots import Slot

PROBE_NBYTES = 256 * 10**6  # most that a probe moves


@dataclass(frozen=True)
class LinkRate:
    """Bytes per second, and of how many bytes."""

    bytes_per_second: float
    nbytes: int


def measure_jobs(
    jobs: Sequence[Job], files: Mapping[Path, ByteSource], num_threads: int, most_nbytes: int = PROBE_NBYTES
) -> LinkRate:
    """Return how fast threads do jobs, of which as many are done as move that many bytes.

    Raises:
        CheckpointError: a file changed, or cannot be read.
    """
    chosen: list[Job] = []
    for job in jobs:
        if chosen and sum(one.nbytes for one in chosen) + job.nbytes > most_nbytes:
            break
        chosen.append(job)
    room = max(job.room for job in chosen)
    filler = Filler(files, num_threads, room, 0, Timeline())
    try:
        began = time.perf_counter()
        filler.wait(filler.begin(0, chosen, None))
        seconds = time.perf_counter() - began
    finally:
        filler.close()
    nbytes = sum(job.nbytes for job in chosen)
    return LinkRate(nbytes / seconds, nbytes)


@torch.inference_mode()
def measure_copies(lanes: Lanes, copies: Sequence[tuple[Tensor, Tensor]], most_nbytes: int = PROBE_NBYTES) -> LinkRate:
    """Return how fast a device copies, of which as many copies are made as move that many bytes.

    Args:
        copies: source in RAM and target on the device, uint8 of one size each.
    """
    lanes.mark("compute", is_timed=False).hold("copy")  # what computes may still read the targets
    nbytes = 0
    began = lanes.mark("copy")
    for source, target in copies:
        if nbytes and nbytes + source.nbytes > most_nbytes:
            break
        lanes.copy(source, target)
        nbytes += source.nbytes
    ended = lanes.mark("copy")
    ended.wait()
    return LinkRate(nbytes / (ended.seconds - began.seconds), nbytes)


def without_pieces(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs without what is made of their bytes: bytes in memory are copied, those of files only read."""
    return [replace(job, pieces=()) if job.reads else job for job in jobs]


def scratch_jobs(
    loader: Loader, groups: Sequence[Group], is_cached: bool, most_nbytes: int = PROBE_NBYTES
) -> list[Job]:
    """Return jobs that fill memory that nobody reads with the first groups' weights, as a slot would be filled."""
    jobs: list[Job] = []
    for group in groups:
        if sum(job.nbytes for job in jobs) >= most_nbytes:
            break
        slot = Slot.allocate(group.layout.nbytes, torch.device("cpu"))
        slot.raw.zero_()  # a slot's memory is there before it is filled
        views = slot.views(group.layout)
        for place in group.places:
            pieces = pieces_of(loader, place.name, place.packing, views[place.name], place.rows)
            jobs += file_jobs(pieces, is_cached)
    return jobs


def scratch_copies(nbytes: int) -> list[Job]:
    """Return jobs that copy that many bytes of RAM to other RAM."""
    source, out = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    return [Job((), ((CopyPiece("probe", source, out), ()),), nbytes, 0)]
