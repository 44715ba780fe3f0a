"""What moves a model's weights while it runs: files, threads, slots, and the policy that the runner asks.

plan -> groups that stream -> slots, bound once -> jobs that fill them -> policy
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.checkpoint.streamed_file import StreamedFile
from graphcore.engine.device_stream import DeviceLink, stream_to_device
from graphcore.engine.expert_stream import Below, ExpertStream, open_experts
from graphcore.engine.group_jobs import THREADS, filler_for, jobs_of
from graphcore.engine.movement import Movement
from graphcore.nn.decoder import Decoder
from graphcore.streaming.cuda_lanes import CudaLanes
from graphcore.streaming.cuda_registrar import CudaRegistrar
from graphcore.streaming.embedding_rows import FileRows, HostRows
from graphcore.streaming.filler import Filler
from graphcore.streaming.host_store import HostStore
from graphcore.streaming.jobs import Job
from graphcore.streaming.link import measure_copies, measure_jobs, without_pieces
from graphcore.streaming.pinning import Pins
from graphcore.streaming.policy import Policy, Resident
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.timeline import Timeline
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.matching import EMBEDDING, HEAD
from graphcore.weights.plan import Plan
from graphcore.weights.slots import Slot, bind


@dataclass
class WeightStream:
    """Everything that is open while weights move.

    Attributes:
        policy: what programs run under.
        jobs: that fill each group's slot; of a device the host slots, if there are any.
        host_nbytes: of weights that wait in RAM.
        expert_hit_rate: share of the routed experts that were there already; None without a cache of experts.
        experts: that do not stay; None where the model has none, or all stay.
        link: to a device with memory of its own; None where the device is RAM.
        copies: to that device, of each group: where from and where to.
        note: what did not go as one might expect; empty if nothing did.
    """

    policy: Policy
    timeline: Timeline
    filler: Filler | None = None
    files: dict[Path, ByteSource] = field(default_factory=dict)
    jobs: dict[int, list[Job]] = field(default_factory=dict)
    host_nbytes: int = 0
    experts: ExpertStream | None = None
    link: DeviceLink | None = None
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    note: str = ""

    @property
    def expert_hit_rate(self) -> float | None:
        """Share of the routed experts that were there already; None without a cache of experts."""
        return None if self.experts is None else self.experts.cache.hit_rate

    def raw_link(self, most_nbytes: int) -> float | None:
        """Return the bytes/s at which the same bytes come when nothing else runs; None: nothing moves.

        By the same threads, or by copies to a device that nothing is computed on; where groups come by both, by the
        slower way. What has been read ahead is forgotten first.
        """
        if self.filler is None and not self.copies:
            return None
        self.policy.reset()
        rates = []
        if self.link is not None and self.copies:
            rates.append(measure_copies(self.link.lanes, self.copies, most_nbytes).bytes_per_second)
        if self.filler is not None:
            jobs = without_pieces([job for each in self.jobs.values() for job in each])
            threads = measure_jobs(jobs, self.files, THREADS, most_nbytes).bytes_per_second
            # Of a store that could be locked in part, only what could not be goes through threads.
            rates.append(threads * len(self.copies) / len(self.jobs) if self.copies else threads)
        return min(rates)

    def close(self) -> None:
        """End the threads and copies, unlock memory and close the files, whatever of that fails."""
        with ExitStack() as closing:  # backwards
            for source in self.files.values():
                closing.callback(source.close)
            if self.link is not None:
                closing.callback(self.link.close)
            for filler in (self.filler, None if self.experts is None else self.experts.cache.filler):
                if filler is not None:
                    closing.callback(filler.close)


def open_files(loader: Loader, weights: Sequence[str], direct: bool) -> dict[Path, ByteSource]:
    """Return the files that hold weights, open.

    Raises:
        CheckpointError: a file is not what it was, or cannot be read.
    """
    checkpoint = loader.checkpoint
    paths = {span.file for name in weights for span in checkpoint.spans(loader.sources[name].name)}
    with ExitStack() as opened:  # closes them again if one cannot be opened
        files: dict[Path, ByteSource] = {}
        for path in sorted(paths):
            files[path] = opened.enter_context(StreamedFile.open(path, checkpoint.files[path], direct))
        opened.pop_all()
    return files


def bind_slots(groups: Sequence[Group], plan: Plan, device: torch.device) -> list[dict[str, Tensor]]:
    """Allocate the slots and bind each group's modules to its own, once.

    Returns:
        For each group the views of its slot, by place in order, and under "" the slot's bytes.
    """
    memory = Slot.allocate(plan.slots_nbytes, device)
    memory.raw.zero_()  # so that all of it is there from the start, and what grows later is not the slots
    bound = []
    for number, group in enumerate(groups):
        assert group.layout.nbytes <= plan.slot_nbytes, (
            f"{group.label} does not fit in a slot of {plan.slot_nbytes} bytes"
        )
        start = number % plan.num_slots * plan.slot_nbytes
        slot = Slot(memory.raw[start : start + group.layout.nbytes])
        views = slot.views(group.layout)
        for place in group.places:
            bind(place.module, place.leaf, views[place.name])
        bound.append({"": slot.raw, **views})
    return bound


def way_to(device: torch.device, pinned: bool) -> Callable[[], DeviceLink] | None:
    """Return what makes the way to a device, or None if the device is RAM.

    Args:
        pinned: lock the memory that copies start from.
    """
    if device.type == "cpu":
        return None
    return lambda: DeviceLink(CudaLanes(device), Pins(CudaRegistrar(device)) if pinned else None)


def open_stream(
    loader: Loader,
    decoder: Decoder,
    movement: Movement,
    store: HostStore | None,
    direct: bool,
    device: torch.device,
    link_to: Callable[[], DeviceLink] | None = None,
) -> WeightStream:
    """Return what moves the weights, its slots bound; nothing has been read yet.

    Args:
        store: where they wait in RAM; None reads the checkpoint's files.
        direct: read past the page cache.
        link_to: makes the way to the device, if it has memory of its own.

    Raises:
        CheckpointError: a file is not what it was, or cannot be read.
    """
    files = open_files(loader, sorted(movement.moved), direct) if store is None else {}
    with ExitStack() as undo:  # whatever is open, if the rest fails
        for source in files.values():
            undo.callback(source.close)
        if movement.is_gathered:
            decoder.embed_tokens.gather = _rows(loader, decoder, store, files, device)
        stream = stream_groups(loader, movement.groups, movement.plan, store, files, device, link_to)
        undo.callback(stream.close)
        if movement.plan.experts is not None:
            if stream.link is None and link_to is not None:
                stream.link = link_to()
            below, groups = Below(loader, decoder, store, files), movement.group_of_layer
            stream.experts = open_experts(below, movement.plan.experts, groups, stream.timeline, device, stream.link)
            stream.note = "; ".join(note for note in (stream.note, stream.experts.note) if note)
        undo.pop_all()
    return stream


def stream_groups(
    loader: Loader,
    groups: Sequence[Group],
    plan: Plan,
    store: HostStore | None,
    files: dict[Path, ByteSource],
    device: torch.device,
    link_to: Callable[[], DeviceLink] | None = None,
) -> WeightStream:
    """Return what moves groups through slots, which are bound here; nothing has been read yet.

    Args:
        store: where the groups wait in RAM; None reads the files.
        files: open; they are closed with the stream.
        link_to: as for `open_stream`.
    """
    timeline, host_nbytes = Timeline(), 0 if store is None else store.nbytes
    if not groups:
        return WeightStream(Resident(), timeline, None, files, host_nbytes=host_nbytes)
    bound = dict(zip((group.index for group in groups), bind_slots(groups, plan, device), strict=True))
    held = None if store is None else store.groups
    if link_to is None:
        jobs = {group.index: jobs_of(loader, group, Slot(bound[group.index][""]), held, files) for group in groups}
        filler = filler_for(jobs, files, timeline)
        policy = Streamed(jobs, plan.num_slots, plan.mode == "async", filler, timeline)
        return WeightStream(policy, timeline, filler, files, jobs, host_nbytes)
    link, slots = link_to(), {index: views[""] for index, views in bound.items()}
    with ExitStack() as undo:
        undo.callback(link.close)  # some memory may be locked already
        stream = stream_to_device(loader, groups, plan, slots, held, files, link, timeline)
        undo.pop_all()
    copies = [(source, slots[index][: source.nbytes]) for index, source in stream.sources.items()]
    return WeightStream(
        stream.policy, timeline, stream.filler, files, stream.jobs, host_nbytes, None, link, copies, stream.note
    )


def _rows(
    loader: Loader, decoder: Decoder, store: HostStore | None, files: dict[Path, ByteSource], device: torch.device
) -> FileRows | HostRows:
    """Return what fetches the embedding's rows."""
    embedding = decoder.embed_tokens
    if store is not None:
        table = store.tables[HEAD if loader.is_tied and HEAD in store.tables else EMBEDDING]
        return HostRows(table, embedding.packing, device)
    dtype = torch.float32 if embedding.packing is not None else embedding.weight.dtype
    return FileRows(loader, EMBEDDING, files, decoder.spec.dim, dtype, device)
