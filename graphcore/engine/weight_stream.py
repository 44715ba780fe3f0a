"""What moves a model's weights while it runs: files, threads, slots, and the policy that the runner asks.

plan -> groups that stream -> slots, bound once -> jobs that fill them -> policy
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.checkpoint.streamed_file import StreamedFile
from graphcore.engine.device_stream import DeviceLink, stream_to_device
from graphcore.engine.group_jobs import filler_for, jobs_from_files
from graphcore.nn.decoder import Decoder, Head
from graphcore.streaming.cuda_lanes import CudaLanes
from graphcore.streaming.embedding_rows import FileRows, HostRows
from graphcore.streaming.filler import Filler
from graphcore.streaming.host_store import HostStore
from graphcore.streaming.jobs import copy_jobs
from graphcore.streaming.pinning import CudaRegistrar, Pins
from graphcore.streaming.policy import Policy, Resident
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.timeline import Timeline
from graphcore.weights.groups import Group, movable_groups
from graphcore.weights.loader import Loader
from graphcore.weights.matching import EMBEDDING, HEAD
from graphcore.weights.plan import Plan
from graphcore.weights.slots import Slot, bind


@dataclass(frozen=True)
class Movement:
    """What of a decoder moves, decided before anything is allocated.

    Attributes:
        groups: that stream through slots.
        heads: the head in its parts, if they stream.
        is_gathered: the embedding's rows are fetched one by one.
    """

    plan: Plan
    groups: Sequence[Group] = ()
    heads: Sequence[Head] = ()

    @property
    def is_gathered(self) -> bool:
        """Whether the embedding's table is not on the device."""
        return not self.plan.is_embedding_resident

    @property
    def moved(self) -> frozenset[str]:
        """Names of the weights that have no place of their own."""
        names = {place.name for group in self.groups for place in group.places}
        return frozenset(names | ({EMBEDDING} if self.is_gathered else set()))


def movement_of(decoder: Decoder, plan: Plan, layer_groups: Sequence[range]) -> Movement:
    """Return what the plan has move; the decoder is on the meta device."""
    parts = [decoder.head.part(rows) for rows in decoder.head_rows()]
    groups = [group for group in movable_groups(decoder, layer_groups, parts) if group.index in plan.streamed]
    return Movement(plan, groups, () if plan.is_head_resident else parts)


@dataclass
class WeightStream:
    """Everything that is open while weights move; `policy` is what programs run under.

    Attributes:
        link: to a device with memory of its own; None where the device is RAM.
        note: what did not go as one might expect; empty if nothing did.
    """

    policy: Policy
    timeline: Timeline
    filler: Filler | None = None
    files: dict[Path, ByteSource] = field(default_factory=dict)
    link: DeviceLink | None = None
    note: str = ""

    def close(self) -> None:
        """End the threads and copies, and close the files."""
        if self.filler is not None:
            self.filler.close()
        if self.link is not None:
            self.link.close()
        for source in self.files.values():
            source.close()


def open_files(loader: Loader, weights: Sequence[str], direct: bool) -> dict[Path, ByteSource]:
    """Return the files that hold weights, open.

    Raises:
        CheckpointError: a file is not what it was, or cannot be read.
    """
    checkpoint = loader.checkpoint
    paths = {span.file for name in weights for span in checkpoint.spans(loader.sources[name].name)}
    return {path: StreamedFile.open(path, checkpoint.files[path], direct) for path in sorted(paths)}


def bind_slots(groups: Sequence[Group], plan: Plan, device: torch.device) -> list[dict[str, Tensor]]:
    """Allocate the slots and bind each group's modules to its own, once.

    Returns:
        For each group the views of its slot, by place in order, and under "" the slot's bytes.
    """
    memory = Slot.allocate(plan.slots_nbytes, device)
    bound = []
    for number, group in enumerate(groups):
        start = number % plan.num_slots * plan.slot_nbytes
        slot = Slot(memory.raw[start : start + group.layout.nbytes])
        views = slot.views(group.layout)
        for place in group.places:
            bind(place.module, place.leaf, views[place.name])
        bound.append({"": slot.raw, **views})
    return bound


def cuda_link(device: torch.device, pinned: bool) -> DeviceLink:
    """Return the way to a GPU.

    Args:
        pinned: lock the memory that copies start from.
    """
    return DeviceLink(CudaLanes(device), Pins(CudaRegistrar(device)) if pinned else None)


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
        link_to: makes the way to the device, if it has memory of its own and anything goes there.

    Raises:
        CheckpointError: a file is not what it was, or cannot be read.
    """
    files = open_files(loader, sorted(movement.moved), direct) if store is None else {}
    if movement.is_gathered:
        decoder.embed_tokens.gather = _rows(loader, decoder, store, files, device)
    return stream_groups(loader, movement.groups, movement.plan, store, files, device, link_to)


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
    timeline = Timeline()
    if not groups:
        return WeightStream(Resident(), timeline, None, files)
    bound = dict(zip((group.index for group in groups), bind_slots(groups, plan, device), strict=True))
    held = None if store is None else store.groups
    if link_to is None:
        return _stream_in_ram(loader, groups, plan, bound, held, files, timeline)
    link, slots = link_to(), {index: views[""] for index, views in bound.items()}
    stream = stream_to_device(loader, groups, plan, slots, held, files, link, timeline)
    return WeightStream(stream.policy, timeline, stream.filler, files, link, stream.note)


def _stream_in_ram(
    loader: Loader,
    groups: Sequence[Group],
    plan: Plan,
    bound: Mapping[int, Mapping[str, Tensor]],
    held: Mapping[int, Tensor] | None,
    files: dict[Path, ByteSource],
    timeline: Timeline,
) -> WeightStream:
    """Return what moves groups where the device is RAM: threads write into the slots themselves."""
    jobs = {
        group.index: jobs_from_files(loader, group, bound[group.index])
        if held is None
        else copy_jobs(group.label, held[group.index], bound[group.index][""][: held[group.index].nbytes])
        for group in groups
    }
    filler = filler_for(jobs, files, timeline)
    policy = Streamed(jobs, plan.num_slots, plan.mode == "async", filler, timeline)
    return WeightStream(policy, timeline, filler, files)


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
