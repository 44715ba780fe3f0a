"""Measurements of how fast this machine moves and reads weights, within a second or two, for predictions.

A probe moves at most 256 MB of the weights that will stream into memory laid out as a slot, and reads as much memory at
the speed of matrix products. To a GPU it copies as many bytes from locked memory, timed by the device. Weights that
stream from files to a GPU take both ways, and the slower one counts. For offloaded keys and values a file is written
where theirs lie, and read as memory.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from graphcore.host_pages import private_pages
from graphcore.kernels.backend import Backend
from graphcore.kernels.bandwidth import measure_read_bandwidth
from graphcore.kernels.packing import Packing
from graphcore.memory_limit import affordable_nbytes
from graphcore.nn.moe import ExpertLinear
from graphcore.planning.machine import PRODUCT_SHARE, Machine, Speeds
from graphcore.planning.prediction import Rates
from graphcore.processors import usable_processors
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.experts.reading import expert_conversions
from graphcore.streaming.fill_jobs import ByteCopy, FillJob, file_jobs
from graphcore.streaming.link_rate import PROBE_NBYTES, LinkRate, measure_copies, measure_jobs
from graphcore.streaming.moving_weights import MovingWeights, open_files
from graphcore.streaming.thread_filler import THREADS
from graphcore.weights.conversion import CONVERSION_NBYTES, conversions_of
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan, Tier
from graphcore.weights.slots import Slot

COPIES = 3
FILE_PROBE_NBYTES = 64 << 20
LinkTo = Callable[[], DeviceLink] | None


def moves_weights(plan: Plan) -> bool:
    """Return whether a decode step waits for weights."""
    return bool(plan.groups.streamed) or (plan.experts is not None and not plan.experts.is_all)


def measure_rates(
    loader: Loader,
    moving: MovingWeights,
    tier: Tier,
    machine: Machine,
    given: Speeds,
    backend: Backend,
    link_to: LinkTo = None,
    folder: Path | None = None,
) -> Rates | None:
    """Return the rates that a plan's decode steps depend on; measure those that are not given.

    Args:
        moving: weights that move under the plan.
        machine: description of this machine.
        given: speeds that are already known.
        backend: kernels, whose own reader reads memory at the speed of products if they have one.
        link_to: function that opens the link to a device with its own memory (`link_opener`); None for the CPU.
        folder: folder of offloaded keys and values; None where the plan has none.

    Returns:
        The rates; None if too little memory is free to measure them, or no file can be written in the folder.

    Raises:
        CheckpointError: a file changed, or cannot be read.
    """
    read = given.bandwidth or measure_reading(machine.device, backend)
    if read is None:
        return None
    offload: float | None = math.inf
    if moving.plan.offloaded_kv is not None:
        assert folder is not None, "offloaded keys and values have a folder"
        offload = given.disk or measure_file_pages(folder)
    if offload is None:
        return None
    per_stored = 1.0 if given.disk is None else moved_bytes_per_stored_byte(loader, moving, tier)
    moves = moves_weights(moving.plan)
    if moves and given.arrival(machine, tier.kind, per_stored) is None:
        link, busy = _link(loader, moving, tier, machine.device, link_to)
        return Rates(link, PRODUCT_SHARE * read, busy, offload)
    rates = replace(given, bandwidth=read).rates(machine, tier.kind, moves, per_stored)
    return None if rates is None else replace(rates, offload=offload)


def measure_file_pages(folder: Path) -> float | None:
    """Return the bytes/s of reading a mapped file that is not in the page cache; None if no file can be made.

    Args:
        folder: folder for the file, which has no name.
    """
    block = bytes(range(256)) * (1 << 12)  # a megabyte that no file system leaves out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(max(1, affordable_nbytes(FILE_PROBE_NBYTES) // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())  # only what is on the disk can be dropped from the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            path, nbytes = f"/proc/self/fd/{file.fileno()}", file.tell()
            pages = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8).view(torch.int64)
    except OSError:
        return None
    began = time.perf_counter()
    pages.sum()
    return nbytes / (time.perf_counter() - began)


def measure_reading(device: torch.device, backend: Backend) -> float | None:
    """Return the bytes/s at which a device's memory is read; None if too little is free to measure it.

    Args:
        backend: as for `measure_rates`.
    """
    found = measure_read_bandwidth(device, backend, PROBE_NBYTES, repeats=3)
    return None if found is None else found.best


def moved_bytes_per_stored_byte(loader: Loader, moving: MovingWeights, tier: Tier) -> float:
    """Return how many bytes move into slots for a byte of the files; 1 where weights wait in RAM as they move.

    On a CPU it is above 1 for IQ files, whose grids are looked up on the way. It is below 1 for weights that are packed
    there.
    """
    if tier.kind == "host":
        return 1.0
    weights = [(one.name, one.packing, one.tensor) for group in moving.groups for one in group.on_link.weights]
    for layer in _expert_matrices(moving.experts):
        weights += [(name, packing, one) for name, (packing, one) in layer.items()]
    moved, stored = 0, 0.0
    for name, packing, one in weights:
        info = loader.checkpoint.tensors[loader.sources[name].name]
        count = one.numel() if packing is None else packing.rows * packing.columns
        moved, stored = moved + one.nbytes, stored + count * info.nbytes / math.prod(info.shape)
    return moved / stored if stored else 1.0


def _expert_matrices(experts: Mapping[str, ExpertLinear]) -> Iterator[dict[str, tuple[Packing | None, Tensor]]]:
    """Yield packing and shape of an expert's matrices, by the weights' names, for each layer; on the meta device."""
    for _, layer in groupby(experts.items(), key=lambda item: item[0].rpartition(".experts.")[0]):
        yield {
            name: (linear.packing, torch.empty(linear.weight.shape[1:], dtype=linear.weight.dtype, device="meta"))
            for name, linear in layer
        }


def _link(
    loader: Loader, moving: MovingWeights, tier: Tier, device: torch.device, link_to: LinkTo
) -> tuple[float, float]:
    """Return the bytes/s at which groups arrive in their slots when nothing else runs, and `Rates.link_busy`."""
    if link_to is None:
        found = _to_ram(loader, moving, tier)
        return found.bytes_per_second, min(1.0, found.processors / usable_processors())
    copied = device_link(link_to(), device)
    return copied if tier.kind == "host" else min(copied, _to_ram(loader, moving, tier).bytes_per_second), 0.0


@torch.inference_mode()
def device_link(link: DeviceLink, device: torch.device) -> float:
    """Return the bytes/s at which a device copies from RAM: the best of a few copies. Close the link.

    The memory is locked if the link has `pins`.
    """
    source = private_pages(affordable_nbytes(PROBE_NBYTES))
    source.zero_()  # pages are allocated when they are first written
    target = torch.empty_like(source, device=device)
    try:
        if link.pins is not None:
            link.pins.add([source])  # if that fails, the copies go through the driver's buffer
        rates = [measure_copies(link.queues, [(source, target)]).bytes_per_second for _ in range(COPIES)]
    finally:
        link.close()
    return max(rates)


def _to_ram(loader: Loader, moving: MovingWeights, tier: Tier) -> LinkRate:
    """Return the rate at which threads move groups, or experts if no group streams, into slots in RAM."""
    if tier.kind == "host":
        copies = scratch_copies(affordable_nbytes(PROBE_NBYTES) // 2) * 2
        return _fastest(lambda: measure_jobs(copies, {}, THREADS), COPIES)
    files = open_files(loader, sorted(moving.names), tier.is_direct)
    try:
        with torch.inference_mode():
            most = affordable_nbytes(PROBE_NBYTES)
            slots = moving.plan.groups.num_slots
            jobs = scratch_jobs(loader, moving.groups, slots, not tier.is_direct, most, moving.plan.other.job_nbytes)
            jobs = jobs or scratch_experts(loader, moving.experts, most)
            # From the page cache the first time has costs that a stream has only once.
            return _fastest(lambda: measure_jobs(jobs, files, THREADS), 1 if tier.is_direct else COPIES)
    finally:
        for source in files.values():
            source.close()


def _fastest(measure: Callable[[], LinkRate], times: int) -> LinkRate:
    return max((measure() for _ in range(times)), key=lambda found: found.bytes_per_second)


def scratch_jobs(
    loader: Loader,
    groups: Sequence[Group],
    num_slots: int,
    is_cached: bool,
    most_nbytes: int = PROBE_NBYTES,
    job_nbytes: int = CONVERSION_NBYTES,
) -> list[FillJob]:
    """Return jobs that fill so many scratch slots in RAM with the weights of the first groups, in turn.

    As many as the stream has: a processor's cache may hold a part of them.
    """
    jobs: list[FillJob] = []
    groups = [one.on_link for one in groups]
    slots: list[Slot] = []
    for index, group in enumerate(groups):
        if sum(job.nbytes for job in jobs) >= most_nbytes:
            break
        if index < num_slots:
            slots.append(Slot.allocate(max(one.layout.nbytes for one in groups), torch.device("cpu")))
            slots[-1].raw.zero_()  # allocates the pages before the measurement, as for a real slot
        views = slots[index % num_slots].views(group.layout)
        for weight in group.weights:
            conversions = conversions_of(
                loader, weight.name, weight.packing, views[weight.name], weight.rows, job_nbytes
            )
            jobs += file_jobs(conversions, is_cached, job_nbytes)
    return jobs


def scratch_experts(loader: Loader, experts: Mapping[str, ExpertLinear], most_nbytes: int) -> list[FillJob]:
    """Return jobs that fill scratch memory with the first expert of some layers, as they would fill slots."""
    jobs: list[FillJob] = []
    for layer in _expert_matrices(experts):
        if sum(job.nbytes for job in jobs) >= most_nbytes:
            break
        matrices = {name: (packing, torch.zeros_like(one, device="cpu")) for name, (packing, one) in layer.items()}
        jobs += file_jobs(expert_conversions(loader, 0, matrices))
    return jobs


def scratch_copies(nbytes: int) -> list[FillJob]:
    """Return jobs that copy a number of bytes from RAM to RAM."""
    source, out = (
        torch.ones(nbytes, dtype=torch.uint8, device="cpu"),
        torch.ones(nbytes, dtype=torch.uint8, device="cpu"),
    )
    return [FillJob((), ((ByteCopy("probe", source, out), ()),), nbytes, 0)]
