"""What moves groups to a device with memory of its own.

store, locked                          one copy per group, straight from where it lies
store, too large to lock               threads -> two locked host slots -> one copy per group
files                                  threads -> two locked host slots -> one copy per group
store, pinned_memory=false             one copy per group, by way of the driver's own memory
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.engine.group_jobs import filler_for, jobs_of
from graphcore.streaming.device_copy import DeviceCopy
from graphcore.streaming.device_watch import DeviceWatch
from graphcore.streaming.filler import Filler
from graphcore.streaming.jobs import Job
from graphcore.streaming.lanes import Lanes
from graphcore.streaming.pinning import Pins
from graphcore.streaming.policy import Policy
from graphcore.streaming.staging import Held, LoadT, Staged, Store
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.timeline import Timeline
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan, in_words
from graphcore.weights.slots import Slot

HOST_SLOTS = 2  # one is filled while the other is copied from


@dataclass(frozen=True)
class DeviceLink:
    """The way to a device.

    Attributes:
        pins: locks memory; None where that is not wanted.
    """

    lanes: Lanes
    pins: Pins | None

    def close(self) -> None:
        """Wait for what is under way, and unlock memory."""
        self.lanes.mark("copy").wait()
        if self.pins is not None:
            self.pins.close()


@dataclass(frozen=True)
class DeviceStream:
    """What moves groups.

    Attributes:
        filler: of host slots; None where nothing is staged.
        jobs: that fill each group's host slot.
        note: what is worth saying about it; empty if nothing is.
    """

    policy: Policy
    filler: Filler | None = None
    jobs: dict[int, list[Job]] = field(default_factory=dict)
    note: str = ""


def host_ring_nbytes(plan: Plan) -> int:
    """Return the bytes of RAM that staged groups go through."""
    return HOST_SLOTS * plan.slot_nbytes


def stream_to_device(
    loader: Loader,
    groups: Sequence[Group],
    plan: Plan,
    slots: Mapping[int, Tensor],
    held: Mapping[int, Tensor] | None,
    files: Mapping[Path, ByteSource],
    link: DeviceLink,
    timeline: Timeline,
) -> DeviceStream:
    """Return what moves groups into their slots on a device; nothing has been read yet.

    Args:
        slots: [nbytes] uint8 on the device, of each group.
        held: the groups' bytes in RAM; None reads the files.
    """
    if held is not None and link.pins is None:
        return DeviceStream(_policy(Held(held), slots, plan, link, timeline, 0))
    obstacle = link.pins.add(held.values()) if held is not None and link.pins is not None else ""
    if held is not None and not obstacle:
        return DeviceStream(_policy(Held(held), slots, plan, link, timeline, 0))
    ring = Slot.allocate(host_ring_nbytes(plan), torch.device("cpu")).raw
    ring_obstacle = link.pins.add([ring]) if link.pins is not None else ""
    host = {group.index: _host_slot(ring, number, plan, group) for number, group in enumerate(groups)}
    jobs = {group.index: jobs_of(loader, group, host[group.index], held, files) for group in groups}
    filler = filler_for(jobs, files, timeline)
    raw = {index: slot.raw for index, slot in host.items()}
    store = Staged(jobs, raw, HOST_SLOTS, filler)
    policy = _policy(store, slots, plan, link, timeline, filler.num_threads)
    return DeviceStream(policy, filler, jobs, _note(obstacle, ring_obstacle, held, ring))


def _policy(
    store: Store[LoadT], slots: Mapping[int, Tensor], plan: Plan, link: DeviceLink, timeline: Timeline, threads: int
) -> Policy:
    copier = DeviceCopy(link.lanes, store, timeline, threads)
    watch = DeviceWatch(link.lanes, timeline)
    return Streamed(slots, plan.num_slots, plan.mode == "async", copier, watch)


def _host_slot(ring: Tensor, number: int, plan: Plan, group: Group) -> Slot:
    start = number % HOST_SLOTS * plan.slot_nbytes
    return Slot(ring[start : start + group.layout.nbytes])


def _note(obstacle: str, ring_obstacle: str, held: Mapping[int, Tensor] | None, ring: Tensor) -> str:
    """Return what did not get locked, and what that means."""
    if ring_obstacle:
        return f"streaming.pinned_memory: no RAM could be locked ({ring_obstacle}), so copies to the device are slower"
    if obstacle and held is not None:
        wanted = sum(raw.nbytes for raw in held.values())
        return (
            f"streaming.pinned_memory: {in_words(wanted)} of RAM could not be locked ({obstacle}), so weights go "
            f"through {in_words(ring.nbytes)} that could"
        )
    return ""
