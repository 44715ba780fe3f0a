"""The report on streaming in a measured interval, computed from events.

    |---------------------- seconds -----------------------|
    copy     ==========  ===========    ====================    copy_seconds: while anything was copied, or read
    stall           ~~~                     ~~~~~~              stall_seconds: while the caller waited
    compute  #######   #################### #         ######    compute_seconds: while a step ran
    draft           #                                           draft_seconds: while a draft model ran
    hidden   =======     ===========    ====      ==========    copied while the caller did not wait

    overlap = hidden / copy

Times in a lane are merged: two workers that copy at the same time count once. Reads into a host slot count as copy
time, but their bytes count only when they are copied to the device. An event that is partly outside the interval counts
in proportion to the part inside, and so do its bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphcore.streaming.timeline import Event, Interval, minus, shared_part, total, union


@dataclass(frozen=True)
class TierMemory:
    """Memory use of one tier against its budget.

    Attributes:
        peak_nbytes: the most bytes in use at any time; None if not measured.
        budget_nbytes: upper limit in bytes; None if there is none.
    """

    peak_nbytes: int | None = None
    budget_nbytes: int | None = None


@dataclass(frozen=True)
class Measured:
    """Measurements other than the events.

    Attributes:
        begin, end: bounds of the interval, in seconds of time.perf_counter.
        num_passes: passes over the weights in the interval: decode steps, or prefill chunks.
        num_groups: number of groups; they are numbered 0 to num_groups - 1.
        raw_link: bytes/s of the same link when nothing else runs; None if not measured.
        device, host: memory use of the two tiers.
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
    """Times, bytes and rates of streaming in a measured interval.

    Rates, shares and averages are None if they would divide by zero.

    Attributes:
        seconds: length of the interval.
        num_passes: decode steps or prefill chunks in the interval.
        nbytes: bytes moved in the interval.
        copy_seconds: time in which at least one copy or read was running (the link was busy).
        hidden_seconds: part of `copy_seconds` in which the caller did not wait.
        hidden_by_drafts_seconds: part of `hidden_seconds` in which a draft model ran.
        draft_seconds: time in which a draft model ran.
        compute_seconds: time in which a step ran.
        stall_seconds: time in which the caller waited for any group.
        stall_seconds_per_group: time in which the caller waited for a group, by group.
        raw_link: bytes/s of the link when nothing else runs; None if not measured.
        device, host: memory use of the two tiers.
    """

    seconds: float
    num_passes: int
    nbytes: int
    copy_seconds: float
    hidden_seconds: float
    hidden_by_drafts_seconds: float
    draft_seconds: float
    compute_seconds: float
    stall_seconds: float
    stall_seconds_per_group: tuple[float, ...]
    raw_link: float | None
    device: TierMemory
    host: TierMemory

    @property
    def nbytes_per_pass(self) -> float | None:
        """Bytes moved per decode step or prefill chunk."""
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
        """Ratio of `busy_link` to `raw_link`."""
        return None if self.busy_link is None else _ratio(self.busy_link, self.raw_link)

    @property
    def overlap(self) -> float | None:
        """Share of the copy time in which the caller did not wait."""
        return _ratio(self.hidden_seconds, self.copy_seconds)


def report_streaming(events: Sequence[Event], measured: Measured) -> StreamingReport:
    """Return the report on the events inside a measured interval.

    Args:
        events: events in any order; those outside the interval do not count.
        measured: interval, passes, link and memory.
    """
    begin, end = measured.begin, measured.end
    assert begin <= end, f"the interval ends at {end}, before it begins at {begin}"
    copies = [event for event in events if event.lane == "copy"]
    stalls = [event for event in events if event.lane == "stall"]
    moving = (event for event in events if event.lane in ("copy", "read"))
    busy, waiting = _times(moving, begin, end), _times(stalls, begin, end)
    hidden, drafting = minus(busy, waiting), _times((one for one in events if one.lane == "draft"), begin, end)
    waits: list[list[Event]] = [[] for _ in range(measured.num_groups)]
    for stall in stalls:
        assert 0 <= stall.group < measured.num_groups, f"group {stall.group} of {measured.num_groups} was waited for"
        waits[stall.group].append(stall)
    return StreamingReport(
        seconds=end - begin,
        num_passes=measured.num_passes,
        nbytes=round(sum(_nbytes_inside(copy, begin, end) for copy in copies)),
        copy_seconds=total(busy),
        hidden_seconds=total(hidden),
        hidden_by_drafts_seconds=total(shared_part(hidden, drafting)),
        draft_seconds=total(drafting),
        compute_seconds=total(_times((event for event in events if event.lane == "compute"), begin, end)),
        stall_seconds=total(waiting),
        stall_seconds_per_group=tuple(total(_times(group, begin, end)) for group in waits),
        raw_link=measured.raw_link,
        device=measured.device,
        host=measured.host,
    )


def _times(events: Iterable[Event], begin: float, end: float) -> list[Interval]:
    """Return the times inside the interval at which any of the events was running."""
    return union((max(event.begin, begin), min(event.end, end)) for event in events)


def _nbytes_inside(copy: Event, begin: float, end: float) -> float:
    """Return a copy's bytes in proportion to its time inside. A copy of zero length counts as a whole or not at all."""
    if copy.end <= copy.begin:
        return copy.nbytes if begin <= copy.begin < end else 0
    inside = min(copy.end, end) - max(copy.begin, begin)
    return copy.nbytes * max(inside, 0.0) / (copy.end - copy.begin)


def _ratio(amount: float, of: float | None) -> float | None:
    return amount / of if of else None
