"""What moves groups to a device with memory of its own.

store, locked                          one copy per group, straight from where it lies
store, locked in part                  what is locked so, and the rest as files are
files                                  threads -> two locked host slots -> one copy per group
store, pinned_memory=false             one copy per group, by way of the driver's own memory
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.config.byte_sizes import in_words
from graphcore.engine.group_jobs import filler_for, jobs_of
from graphcore.streaming.device_copy import DeviceCopy
from graphcore.streaming.device_watch import DeviceWatch
from graphcore.streaming.filler import Filler
from graphcore.streaming.jobs import Job
from graphcore.streaming.lanes import Lanes
from graphcore.streaming.pages import shared_pages
from graphcore.streaming.pinning import Locked, Pins
from graphcore.streaming.policy import Policy
from graphcore.streaming.staging import Held, LoadT, Partly, Staged, Store
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.timeline import Timeline
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan
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
        """Wait for what copies or reads locked memory, and unlock it."""
        with suppress(RuntimeError):  # of a device that has failed: nothing is under way there any more
            self.lanes.mark("copy", is_timed=False).wait()
            self.lanes.mark("compute", is_timed=False).wait()
        if self.pins is not None:
            self.pins.close()


@dataclass(frozen=True)
class DeviceStream:
    """What moves groups.

    Attributes:
        sources: [nbytes] uint8, where each group's copy starts from.
        filler: of host slots; None where nothing is staged.
        jobs: that fill the host slots of the groups that are staged.
        note: what is worth saying about it; empty if nothing is.
    """

    policy: Policy
    sources: Mapping[int, Tensor]
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
        return DeviceStream(_policy(Held(held), slots, plan, link, timeline), held)
    ring = shared_pages(host_ring_nbytes(plan))
    locked = _lock(link.pins, held, ring)
    if held is not None and len(locked.keys) == len(held):
        return DeviceStream(_policy(Held(held), slots, plan, link, timeline), held)
    staged = [group for group in groups if group.index not in locked.keys]
    host = {group.index: _host_slot(ring, number, plan, group) for number, group in enumerate(staged)}
    jobs = {group.index: jobs_of(loader, group, host[group.index], held, files) for group in staged}
    filler = filler_for(jobs, files, timeline, "read")
    ready = {} if held is None else {index: raw for index, raw in held.items() if index in locked.keys}
    raw = {index: slot.raw for index, slot in host.items()}
    policy = _policy(Partly(Held(ready), Staged(jobs, raw, HOST_SLOTS, filler)), slots, plan, link, timeline)
    return DeviceStream(policy, {**ready, **raw}, filler, jobs, _note(held or {}, locked, ring))


def _lock(pins: Pins | None, held: Mapping[int, Tensor] | None, ring: Tensor) -> Locked[int]:
    """Lock what copies will start from."""
    if pins is None:
        return Locked(frozenset(), False, "")
    if held is not None:
        return pins.add_most(held, ring)
    obstacle = pins.add([ring])
    return Locked(frozenset(), not obstacle, obstacle)


def _policy(
    store: Store[LoadT], slots: Mapping[int, Tensor], plan: Plan, link: DeviceLink, timeline: Timeline
) -> Policy:
    copier = DeviceCopy(link.lanes, store, timeline)
    return Streamed(slots, plan.num_slots, plan.mode == "async", copier, DeviceWatch(link.lanes, timeline))


def _host_slot(ring: Tensor, number: int, plan: Plan, group: Group) -> Slot:
    start = number % HOST_SLOTS * plan.slot_nbytes
    return Slot(ring[start : start + group.layout.nbytes])


def _note(held: Mapping[int, Tensor], locked: Locked[int], ring: Tensor) -> str:
    """Return how much could be locked, and what becomes of the rest; nothing if all of it could."""
    if not locked.obstacle:
        return ""
    if not locked.is_ring:
        return (
            f"streaming.pinned_memory: no RAM could be locked ({locked.obstacle}), so copies to the device are slower"
        )
    wanted = sum(raw.nbytes for raw in held.values())
    found = sum(held[index].nbytes for index in locked.keys)
    return (
        f"streaming.pinned_memory: {in_words(found)} of {in_words(wanted)} of RAM could be locked ({locked.obstacle}); "
        f"the other weights go through {in_words(ring.nbytes)} of locked RAM, which is slower"
    )
