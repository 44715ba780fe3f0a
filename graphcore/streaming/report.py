"""What streaming came to in a measured interval: numbers from events, and nothing else.

    |---------------------- seconds -----------------------|
    copy     ==========  ===========    ====================    copy_seconds: while anything was copied, or read
    stall           ~~~                     ~~~~~~              stall_seconds: while the caller waited
    compute  #######   #################### #         ######    compute_seconds: while a step ran
    hidden   =======     ===========    ====      ==========    copied while the caller did not wait

    overlap = hidden / copy

Lanes are sets of time: two workers that copy at once count once. What is read into a host slot is on its way as what is
copied from there to a device is, and its bytes count when they arrive. An event that began before the interval or ended
after it counts by the part inside, and so do its bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphcore.streaming.intervals import Interval, minus, total, union
from graphcore.streaming.timeline import Event


@dataclass(frozen=True)
class TierMemory:
    """Bytes of one tier.

    Attributes:
        peak_nbytes: the most that was in use; None where it was not measured.
        budget_nbytes: what it was to stay under; None without a limit.
    """

    peak_nbytes: int | None = None
    budget_nbytes: int | None = None


@dataclass(frozen=True)
class Measured:
    """What was measured, apart from the events.

    Attributes:
        begin, end: the interval, seconds of time.perf_counter.
        num_passes: passes over the weights in it: decode steps (tokens of one sequence), or prefill chunks.
        num_groups: groups are numbered 0 to num_groups - 1.
        raw_link: bytes/s of the same link without the engine; None if it was not measured.
        device, host: memory against budgets.
    """

    begin: float
    end: float
    num_passes: int
    num_groups: int
    raw_link: float | None = None
    device: TierMemory = TierMemory()
    host: TierMemory = TierMemory()


@dataclass(frozen=True)
class StreamingReport:
    """What streaming came to.

    Rates, shares and averages are None where they would divide by nothing.

    Attributes:
        seconds: of the measured interval.
        num_passes: decode steps or prefill chunks in it.
        nbytes: moved in it.
        copy_seconds: while at least one copy was under way (the link was busy).
        hidden_seconds: of these, while the caller did not wait: what compute, or anything else, hid.
        compute_seconds: while a step ran.
        stall_seconds: while the caller waited for any group.
        stall_seconds_per_group: while it waited for each group; index is the group.
        raw_link: bytes/s of the link without the engine.
        device, host: memory against budgets.
    """

    seconds: float
    num_passes: int
    nbytes: int
    copy_seconds: float
    hidden_seconds: float
    compute_seconds: float
    stall_seconds: float
    stall_seconds_per_group: tuple[float, ...]
    raw_link: float | None
    device: TierMemory
    host: TierMemory

    @property
    def nbytes_per_pass(self) -> float | None:
        """Bytes moved for each decode step or prefill chunk."""
        return _ratio(self.nbytes, self.num_passes)

    @property
    def busy_link(self) -> float | None:
        """Bytes/s while the link was busy: bytes over `copy_seconds`."""
        return _ratio(self.nbytes, self.copy_seconds)

    @property
    def wall_link(self) -> float | None:
        """Bytes/s of the whole interval, pauses of the link included: bytes over `seconds`."""
        return _ratio(self.nbytes, self.seconds)

    @property
    def busy_link_share(self) -> float | None:
        """Of the raw link, what `busy_link` is."""
        return None if self.busy_link is None else _ratio(self.busy_link, self.raw_link)

    @property
    def wall_link_share(self) -> float | None:
        """Of the raw link, what `wall_link` is."""
        return None if self.wall_link is None else _ratio(self.wall_link, self.raw_link)

    @property
    def overlap(self) -> float | None:
        """Share of the copy time during which nobody waited."""
        return _ratio(self.hidden_seconds, self.copy_seconds)


def report_streaming(events: Sequence[Event], measured: Measured) -> StreamingReport:
    """Return what the events came to inside the measured interval.

    Args:
        events: in any order; those outside the interval do not count.
        measured: everything else.
    """
    begin, end = measured.begin, measured.end
    assert begin <= end, f"the interval ends at {end}, before it begins at {begin}"
    copies = [event for event in events if event.lane == "copy"]
    stalls = [event for event in events if event.lane == "stall"]
    moving = (event for event in events if event.lane in ("copy", "read"))
    busy, waiting = _times(moving, begin, end), _times(stalls, begin, end)
    waits: list[list[Event]] = [[] for _ in range(measured.num_groups)]
    for stall in stalls:
        assert 0 <= stall.group < measured.num_groups, f"group {stall.group} of {measured.num_groups} was waited for"
        waits[stall.group].append(stall)
    return StreamingReport(
        seconds=end - begin,
        num_passes=measured.num_passes,
        nbytes=round(sum(_nbytes_inside(copy, begin, end) for copy in copies)),
        copy_seconds=total(busy),
        hidden_seconds=total(minus(busy, waiting)),
        compute_seconds=total(_times((event for event in events if event.lane == "compute"), begin, end)),
        stall_seconds=total(waiting),
        stall_seconds_per_group=tuple(total(_times(group, begin, end)) for group in waits),
        raw_link=measured.raw_link,
        device=measured.device,
        host=measured.host,
    )


def _times(events: Iterable[Event], begin: float, end: float) -> list[Interval]:
    """Return when any of the events was under way, inside the interval."""
    return union((max(event.begin, begin), min(event.end, end)) for event in events)


def _nbytes_inside(copy: Event, begin: float, end: float) -> float:
    """Return the bytes of a copy in proportion to its time inside; one that took no time counts whole or not at all."""
    if copy.end <= copy.begin:
        return copy.nbytes if begin <= copy.begin < end else 0
    inside = min(copy.end, end) - max(copy.begin, begin)
    return copy.nbytes * max(inside, 0.0) / (copy.end - copy.begin)


def _ratio(amount: float, of: float | None) -> float | None:
    return amount / of if of else None
