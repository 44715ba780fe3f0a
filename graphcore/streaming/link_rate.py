"""Measurement of the rate at which threads or copies move bytes into slots when nothing else runs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.streaming.device.queues import Queues
from graphcore.streaming.fill_jobs import FillJob
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline

PROBE_NBYTES = 256 * 10**6  # upper limit of the bytes that a measurement moves


@dataclass(frozen=True)
class LinkRate:
    """A measured rate.

    Attributes:
        nbytes: number of bytes that were moved to measure it.
        processors: number of processors that were busy meanwhile, on average; 0 if a device copied by itself.
    """

    bytes_per_second: float
    nbytes: int
    processors: float = 0.0


def measure_jobs(
    jobs: Sequence[FillJob], files: Mapping[Path, ByteSource], num_threads: int, most_nbytes: int = PROBE_NBYTES
) -> LinkRate:
    """Return the rate at which threads run jobs; only the first jobs are run, up to `most_nbytes`.

    Raises:
        CheckpointError: a file changed, or cannot be read.
    """
    chosen: list[FillJob] = []
    for job in jobs:
        if chosen and sum(one.nbytes for one in chosen) + job.nbytes > most_nbytes:
            break
        chosen.append(job)
    room = max(job.room for job in chosen)
    filler = ThreadFiller(files, num_threads, room, 0, Timeline())
    try:
        began, worked = time.perf_counter(), time.process_time()
        filler.wait(filler.begin(0, chosen, None))
        seconds, processor_seconds = time.perf_counter() - began, time.process_time() - worked
    finally:
        filler.close()
    nbytes = sum(job.nbytes for job in chosen)
    return LinkRate(nbytes / seconds, nbytes, processor_seconds / seconds)


@torch.inference_mode()
def measure_copies(
    queues: Queues, copies: Sequence[tuple[Tensor, Tensor]], most_nbytes: int = PROBE_NBYTES
) -> LinkRate:
    """Return the rate at which a device copies from RAM; only the first copies are made, up to `most_nbytes`.

    Args:
        copies: pairs of a source in RAM and a target on the device, [nbytes] uint8.
    """
    queues.mark("compute", is_timed=False).hold("copy")  # compute work may still read the targets
    nbytes = 0
    began = queues.mark("copy")
    for source, target in copies:
        if nbytes and nbytes + source.nbytes > most_nbytes:
            break
        queues.copy(source, target)
        nbytes += source.nbytes
    ended = queues.mark("copy")
    ended.wait()
    return LinkRate(nbytes / (ended.seconds - began.seconds), nbytes)


def without_conversions(jobs: Sequence[FillJob]) -> list[FillJob]:
    """Return the jobs without their conversions: bytes from files are only read. Copies in RAM stay as they are."""
    return [replace(job, conversions=()) if job.reads else job for job in jobs]
