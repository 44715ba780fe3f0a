"""Movement of groups to a device with its own memory. The path depends on where the groups are stored.

store in RAM, locked                   one copy per group, straight from the store
store in RAM, locked in part           the locked groups as above, the others as from files
files                                  threads -> two locked host slots -> one copy per group
store in RAM, pinned_memory=false      one copy per group, through the driver's own buffer

Groups with matrices that have fewer bytes on the link are copied into one buffer, and from there expanded into slots.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.config.byte_sizes import in_words
from graphcore.host_pages import shared_pages
from graphcore.streaming.device.copies import DeviceFiller, Expansion, HostSlots, Transfer, tensors_like
from graphcore.streaming.device.queues import Queues
from graphcore.streaming.fill_jobs import FillJob, jobs_of
from graphcore.streaming.moving_weights import BoundSlots
from graphcore.streaming.pinned_memory import Locked, Pins
from graphcore.streaming.thread_filler import filler_for
from graphcore.streaming.timeline import Timeline
from graphcore.weights.groups import Group
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan
from graphcore.weights.slots import Slot

HOST_SLOTS = 2  # one is filled while the other is copied from


@dataclass(frozen=True)
class DeviceLink:
    """The connection to a device with its own memory: its queues, and the memory that is locked for copies.

    Attributes:
        pins: locked memory; None if memory must not be locked.
    """

    queues: Queues
    pins: Pins | None

    def close(self) -> None:
        """Wait for all work that may read locked memory, then unlock it."""
        with suppress(RuntimeError):  # the device has failed: no work is running on it
            self.queues.mark("copy", is_timed=False).wait()
            self.queues.mark("compute", is_timed=False).wait()
        if self.pins is not None:
            self.pins.close()


@dataclass(frozen=True)
class DeviceGroups:
    """The transfers that bring groups to a device, and their filler.

    Attributes:
        work: transfer that brings a group into its slot, by group.
        filler: filler that runs the transfers.
        sources: [nbytes] uint8, memory that a group's copy starts from, by group; the first of a group's host slots.
        jobs: jobs that fill a host slot, by group; only groups that go through host slots.
        note: message for the user; empty if there is none.
    """

    work: Mapping[int, Transfer]
    filler: DeviceFiller
    sources: Mapping[int, Tensor]
    jobs: Mapping[int, Sequence[FillJob]] = field(default_factory=dict)
    note: str = ""


def host_ring_nbytes(plan: Plan) -> int:
    """Return the bytes of RAM that all host slots for groups take."""
    return HOST_SLOTS * plan.groups.host_slot_nbytes


def stream_to_device(
    loader: Loader,
    groups: Sequence[Group],
    slots: BoundSlots,
    held: Mapping[int, Tensor] | None,
    files: Mapping[Path, ByteSource],
    ring_nbytes: int,
    link: DeviceLink,
    timeline: Timeline,
) -> DeviceGroups:
    """Return the transfers that bring groups into their slots on a device, and their filler. Nothing is read yet.

    Args:
        held: the groups' bytes in RAM, as they cross the link, by group; None if they are read from files.
        ring_nbytes: bytes of all host slots, from `host_ring_nbytes`.
    """
    work = {group.index: _arrival(group, slots) for group in groups}
    if held is not None and link.pins is None:
        return _all_held(held, work, link, timeline)
    ring = shared_pages(ring_nbytes)
    locked = _lock(link.pins, held, ring)
    if held is not None and len(locked.keys) == len(held):
        return _all_held(held, work, link, timeline)
    staged = [group for group in groups if group.index not in locked.keys]
    each = ring_nbytes // HOST_SLOTS
    host = [[ring[number * each : (number + 1) * each]] for number in range(HOST_SLOTS)]
    reads = {group.index: GroupReads(loader, group.on_link, held, files) for group in staged}
    views = {
        group.index: tensors_like(work[group.index].targets, host[number % HOST_SLOTS])
        for number, group in enumerate(staged)
    }
    jobs = {index: reads[index](views[index]) for index in reads}
    filler = DeviceFiller(link.queues, timeline, HostSlots(filler_for(jobs, files, timeline, "read"), host))
    ready = {} if held is None else {index: raw for index, raw in held.items() if index in locked.keys}
    work = {
        index: replace(one, jobs=reads[index]) if index in reads else _from_ram(one, ready[index])
        for index, one in work.items()
    }
    sources = {**ready, **{index: raw for index, (raw,) in views.items()}}
    return DeviceGroups(work, filler, sources, jobs, _note(held or {}, locked, ring))


def _arrival(group: Group, slots: BoundSlots) -> Transfer:
    """Return the device's part of the transfer of a group, without where its bytes come from."""
    slot = slots.memory[group.index]
    if not group.is_expanded:
        return Transfer([slot])
    arrived = slots.arrival[: group.on_link.layout.nbytes]
    return Transfer([arrived], expansion=Expansion(group.expansion(Slot(arrived), Slot(slot)), slot))


def _from_ram(arrival: Transfer, source: Tensor) -> Transfer:
    """Return the transfer of a group from its bytes in RAM; those of a head's slice may be fewer than its slot's."""
    (target,) = arrival.targets
    return replace(arrival, targets=[target[: source.nbytes]], sources=[source])


def _all_held(
    held: Mapping[int, Tensor], arrivals: Mapping[int, Transfer], link: DeviceLink, timeline: Timeline
) -> DeviceGroups:
    """Return transfers that copy each group directly from its bytes in RAM."""
    work = {index: _from_ram(one, held[index]) for index, one in arrivals.items()}
    return DeviceGroups(work, DeviceFiller(link.queues, timeline), held)


@dataclass
class GroupReads:
    """A factory of the jobs that read one group; caches the jobs of each host slot.

    Attributes:
        held: the groups' bytes in RAM, by group; None if they are read from files.
    """

    loader: Loader
    group: Group
    held: Mapping[int, Tensor] | None
    files: Mapping[Path, ByteSource]
    _made: dict[int, list[FillJob]] = field(default_factory=dict)

    def __call__(self, slot: Sequence[Tensor]) -> list[FillJob]:
        """Return the jobs that read the group into a host slot, [nbytes] uint8."""
        (raw,) = slot
        address = raw.data_ptr()
        if address not in self._made:
            self._made[address] = jobs_of(self.loader, self.group, Slot(raw), self.held, self.files)
        return self._made[address]


def _lock(pins: Pins | None, held: Mapping[int, Tensor] | None, ring: Tensor) -> Locked[int]:
    """Lock the memory that copies start from: the held groups, the ring of host slots, or both."""
    if pins is None:
        return Locked(frozenset(), False, "")
    if held is not None:
        return pins.add_most(held, ring)
    obstacle = pins.add([ring])
    return Locked(frozenset(), not obstacle, obstacle)


def _note(held: Mapping[int, Tensor], locked: Locked[int], ring: Tensor) -> str:
    """Return a note on memory that could not be locked; empty if all of it could."""
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
