"""Setup of weight streaming: files, threads, slots, and the policy.

weights that move -> store in RAM or open files -> bind slots once -> filler of the slots -> policy
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.host_pages import shared_pages
from graphcore.nn.decoder import Decoder
from graphcore.streaming.device.copies import DeviceFiller
from graphcore.streaming.device.queues import CudaQueues
from graphcore.streaming.device.stream import DeviceLink, host_ring_nbytes, stream_to_device
from graphcore.streaming.device.timing import DeviceWatch
from graphcore.streaming.embedding_rows import FileRows, HostRows, RowTable
from graphcore.streaming.experts.stream import ExpertStream, LowerTier, open_experts
from graphcore.streaming.fill_jobs import FillJob, jobs_of
from graphcore.streaming.filler import Filler
from graphcore.streaming.host_store import HostStore, fill_store
from graphcore.streaming.link_rate import PROBE_NBYTES, measure_copies, measure_jobs, without_conversions
from graphcore.streaming.movement import MovementTotals
from graphcore.streaming.moving_weights import MovingWeights, bind_slots, open_files
from graphcore.streaming.pinned_memory import CudaRegistrar, Pins
from graphcore.streaming.policy import Policy, Resident, Ring
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.thread_filler import THREADS, ThreadFiller, filler_for
from graphcore.streaming.timeline import Timeline
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Tier
from graphcore.weights.slots import Slot


@dataclass(frozen=True)
class WeightStream:
    """All resources that are open while weights move.

    Attributes:
        policy: policy that programs run under.
        moving: weights that move, and the layers that move together.
        filler: filler of the groups' slots; None if no group moves.
        files: open files, by path.
        jobs: jobs that fill a group's slot, or its host slot on the way to a device, by group.
        host_nbytes: bytes of weights that are kept in RAM and stream from there.
        experts: stream of experts; None if the model has none, or all of them stay on the device.
        link: connection to a device with its own memory; None for the CPU, or if nothing moves.
        copies: source and target of each group's copy to that device.
        note: message for the user; empty if there is none.
    """

    policy: Policy
    timeline: Timeline
    moving: MovingWeights
    filler: ThreadFiller | DeviceFiller | None = None
    files: Mapping[Path, ByteSource] = field(default_factory=dict)
    jobs: Mapping[int, Sequence[FillJob]] = field(default_factory=dict)
    host_nbytes: int = 0
    experts: ExpertStream | None = None
    link: DeviceLink | None = None
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    note: str = ""

    @property
    def expert_hit_rate(self) -> float | None:
        """Share of the requested experts that were in a slot; None without a cache of experts."""
        return None if self.experts is None else self.experts.hit_rate

    @property
    def expert_link_nbytes(self) -> int | None:
        """Bytes of experts that kernels have read over the link; None without slots that they fill."""
        device_cache = None if self.experts is None else self.experts.device_cache
        return None if device_cache is None else device_cache.link_nbytes

    @cached_property
    def totals(self) -> MovementTotals:
        """Cumulative counters of weight streaming."""
        return MovementTotals(self.timeline)

    def raw_link(self, most_nbytes: int = PROBE_NBYTES) -> float | None:
        """Return the bytes/s at which the groups' bytes arrive when nothing else runs; None if no group moves.

        The same threads, or copies to an idle device, move the bytes; if the groups need both, the slower one counts.
        Groups that were read ahead are discarded first.

        Args:
            most_nbytes: upper limit of the bytes that are moved to measure.
        """
        if not self.jobs and not self.copies:
            return None
        self.policy.reset()
        rates = []
        if self.link is not None and self.copies:
            rates.append(measure_copies(self.link.queues, self.copies, most_nbytes).bytes_per_second)
        if self.jobs:
            jobs = without_conversions([job for each in self.jobs.values() for job in each])
            threads = measure_jobs(jobs, self.files, THREADS, most_nbytes).bytes_per_second
            # If a store is locked in part, only the groups that are not locked go through threads.
            rates.append(threads * len(self.copies) / len(self.jobs) if self.copies else threads)
        return min(rates)

    def check_usable(self) -> None:
        """Check that weights can still be read: the files are there, unchanged and readable, and no thread has died.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: a thread has died.
        """
        for filler in (self.filler, None if self.experts is None else self.experts.cache.filler):
            if isinstance(filler, ThreadFiller):
                filler.check_alive()
        for source in self.files.values():
            source.check_unchanged()
            source.read_into(shared_pages(source.alignment), 0, source.alignment)

    def without_weights(self) -> "WeightStream":
        """Return the record of a closed stream, which refers to no weights and no slots."""
        return WeightStream(
            Resident(), self.timeline, MovingWeights(self.moving.plan), host_nbytes=self.host_nbytes, note=self.note
        )

    def end_waits(self) -> None:
        """Let waits for a disk that gives no answer end soon, with a StreamingError: the engine is being closed."""
        for filler in self._fillers:
            filler.end_waits()

    def close(self) -> None:
        """Stop the threads and copies, unlock memory and close the files, even if one of these fails."""
        with ExitStack() as closing:  # runs in reverse order
            closing.callback(self._close_files)
            if self.link is not None:
                closing.callback(self.link.close)
            for filler in self._fillers:
                closing.callback(filler.close)

    def _close_files(self) -> None:
        """Close the files, unless a thread hangs in a read, which could go on in another file of the same number."""
        if any(filler.is_reading for filler in self._fillers):
            return
        with ExitStack() as closing:
            for source in self.files.values():
                closing.callback(source.close)

    @property
    def _fillers(self) -> list[Filler[Any, Any]]:
        """The fillers of groups and of experts, as far as there are any."""
        both = (self.filler, None if self.experts is None else self.experts.cache.filler)
        return [filler for filler in both if filler is not None]


def link_opener(device: torch.device, pinned: bool) -> Callable[[], DeviceLink] | None:
    """Return a function that opens the link to a device with its own memory; None for the CPU.

    Args:
        pinned: True if the memory that copies start from is to be locked.
    """
    if device.type == "cpu":
        return None
    return lambda: DeviceLink(CudaQueues(device), Pins(CudaRegistrar(device)) if pinned else None)


def stream_weights(
    loader: Loader,
    moving: MovingWeights,
    tier: Tier,
    device: torch.device,
    pinned: bool,
    decoder: Decoder | None = None,
) -> WeightStream:
    """Bind slots and lookups for the weights that move, and return the stream that moves them.

    Weights that stream from RAM are read into RAM now; weights that stream from files are not read yet.

    Args:
        tier: tier that the weights stream from.
        pinned: True if the memory that copies to a GPU start from is to be locked.
        decoder: decoder that owns the experts; needed only if experts move.

    Raises:
        CheckpointError: bytes are wrong, or a file changed or cannot be read.
    """
    store, link_to = None, link_opener(device, pinned)
    if tier.kind == "host" and moving.plan.is_streaming:
        groups = moving.groups if link_to is None else [group.on_link for group in moving.groups]
        store = fill_store(loader, groups, {**moving.sliced, **moving.tables, **moving.experts})
    files = open_files(loader, sorted(moving.names), tier.is_direct) if store is None else {}
    for name, table in moving.tables.items():
        table.fetch_rows(_rows(loader, name, table, store, files, device, moving.plan.other.job_nbytes))
    return open_stream(loader, moving, store, files, device, link_to, decoder)


def open_stream(
    loader: Loader,
    moving: MovingWeights,
    store: HostStore | None,
    files: Mapping[Path, ByteSource],
    device: torch.device,
    link_to: Callable[[], DeviceLink] | None,
    decoder: Decoder | None = None,
) -> WeightStream:
    """Bind the slots of groups and experts, and return the stream that moves them. Nothing is read yet.

    Args:
        store: store of the weights in RAM; None if they are read from files.
        files: open files, by path; closed with the stream, or if it cannot be opened.
        link_to: function that opens the link to a device with its own memory; None for the CPU.
        decoder: decoder that owns the experts; needed only if experts move.
    """
    plan, timeline = moving.plan, Timeline()
    with ExitStack() as undo:  # closes what is open if a later step fails
        for source in files.values():
            undo.callback(source.close)
        link = link_to() if link_to is not None and (moving.groups or plan.experts is not None) else None
        if link is not None:
            undo.callback(link.close)  # some memory may already be locked
        stream = _open_groups(loader, moving, store, files, device, link, timeline)
        if stream.filler is not None:
            undo.callback(stream.filler.close)
        if plan.experts is not None:
            assert decoder is not None, "experts are a decoder's"
            below = LowerTier(loader, decoder, store, files)
            experts = open_experts(below, plan.experts, moving.group_of_layer, timeline, device, link)
            note = "; ".join(note for note in (stream.note, experts.note) if note)
            stream = replace(stream, experts=experts, note=note)
        undo.pop_all()
    return stream


def _open_groups(
    loader: Loader,
    moving: MovingWeights,
    store: HostStore | None,
    files: Mapping[Path, ByteSource],
    device: torch.device,
    link: DeviceLink | None,
    timeline: Timeline,
) -> WeightStream:
    """Return a stream that moves groups but no experts; arguments as for `open_stream`."""
    groups, plan, host_nbytes = moving.groups, moving.plan, 0 if store is None else store.nbytes
    if not groups:
        return WeightStream(Resident(), timeline, moving, files=files, host_nbytes=host_nbytes, link=link)
    slots = bind_slots(groups, plan, device)
    held, reads_ahead = None if store is None else store.groups, plan.mode == "async"
    if link is None:
        most = plan.other.job_nbytes
        into = {group.index: Slot(slots.memory[group.index]) for group in groups}
        jobs = {group.index: jobs_of(loader, group, into[group.index], held, files, most) for group in groups}
        threads = filler_for(jobs, files, timeline, most_nbytes=most)
        ring = Ring(jobs, plan.groups.num_slots, reads_ahead, threads, timeline)
        return WeightStream(Streamed(ring), timeline, moving, threads, files, jobs, host_nbytes)
    found = stream_to_device(loader, groups, slots, held, files, host_ring_nbytes(plan), link, timeline)
    device_ring = Ring(found.work, plan.groups.num_slots, reads_ahead, found.filler, DeviceWatch(link.queues, timeline))
    return WeightStream(
        Streamed(device_ring),
        timeline,
        moving,
        found.filler,
        files,
        found.jobs,
        host_nbytes,
        link=link,
        copies=[(source, slots.memory[index][: source.nbytes]) for index, source in found.sources.items()],
        note=found.note,
    )


def _rows(
    loader: Loader,
    name: str,
    table: RowTable,
    store: HostStore | None,
    files: Mapping[Path, ByteSource],
    device: torch.device,
    most_nbytes: int,
) -> FileRows | HostRows:
    """Return the lookup that fetches the rows of a table from the store or the files, so many bytes in a read."""
    if store is not None:
        return HostRows(store.tables[name], table.packing, device)
    dtype = torch.float32 if table.packing is not None else table.weight.dtype
    return FileRows(loader, name, files, table.width, dtype, device, most_nbytes)
