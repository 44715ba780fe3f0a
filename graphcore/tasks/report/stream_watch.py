"""Measurements of a streamed run: what moved in an interval, the rate of the bare link, and peak memory.

They are reported in two forms: lines for people, and a record for result.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from graphcore.config.byte_sizes import in_words, parse_nbytes, rate_in_words
from graphcore.engine.engine import Engine
from graphcore.engine.what_if import BudgetPlan, plan_record
from graphcore.streaming.report import Measured, StreamingReport, TierMemory, report_streaming
from graphcore.tasks.measuring.process_memory import PeakMemory, resident_nbytes
from graphcore.tasks.report.chrome_trace import write_trace
from graphcore.tasks.task import Context, Record

RAW_PASSES = 2  # timed passes of the bare link; the faster one counts
MOVED = (
    "link_gb_per_second",
    "wall_gb_per_second",
    "raw_link_gb_per_second",
    "link_share",
    "bytes_per_token",
    "overlap",
    "copy_seconds",
    "hidden_by_drafts_seconds",
    "draft_seconds",
    "stall_seconds",
    "stall_seconds_per_group",
    "device_peak_bytes",
    "device_budget_bytes",
    "host_peak_bytes",
    "host_budget_bytes",
    "expert_hit_rate",
    "expert_link_bytes",
)


@dataclass(frozen=True)
class Interval:
    """A time interval with a number of passes over the weights.

    Attributes:
        begin, end: seconds of time.perf_counter.
        num_passes: number of decode steps or prefill chunks.
    """

    begin: float
    end: float
    num_passes: int


@dataclass
class StreamWatch:
    """A record of memory from a baseline after compiling; it reports what moved in intervals.

    Attributes:
        engine: the streaming engine.
        peak: peak of memory since the baseline.
        shared_nbytes: resident shared memory at the baseline, in bytes; not used on a GPU.
    """

    engine: Engine
    peak: PeakMemory
    shared_nbytes: int

    @classmethod
    def begin(cls, engine: Engine) -> "StreamWatch":
        """Return a watch whose baseline is now."""
        device = engine.runner.device
        return cls(engine, PeakMemory(device), resident_nbytes("RssShmem") if device.type == "cpu" else 0)

    def device(self) -> TierMemory:
        """Return the peak memory of the device; on a GPU the drop of its free memory since before loading.

        On the CPU it is the planned memory plus the growth since the baseline: weights, slots and caches count whole,
        even if they had not been written to at the baseline. Read buffers are planned, too, and lie in shared memory
        (`host_pages.py`) that is first written to when a group is read; that growth is not counted twice.
        """
        plan, free_memory = self.engine.plan, self.engine.loaded.free_memory
        if free_memory is not None:
            free_memory.look()
            return TierMemory(free_memory.drop, plan.budget)
        shared = resident_nbytes("RssShmem") - self.shared_nbytes
        growth = max(0, self.peak.nbytes() - max(0, shared))
        return TierMemory(plan.total_nbytes - plan.other.workspace_nbytes + growth, plan.budget)

    def host(self) -> TierMemory:
        """Return the memory of weights that are kept in RAM."""
        budget = parse_nbytes("host_memory_budget", self.engine.settings.streaming.host_memory_budget)
        return TierMemory(self.engine.loaded.weight_stream.host_nbytes, budget)

    def raw_link(self) -> float | None:
        """Return the bytes/s of the bare link: the same threads copy the same bytes, and nothing is computed."""
        most = self.engine.plan.groups.streamed_nbytes
        rates = [self.engine.loaded.weight_stream.raw_link(most) for _ in range(RAW_PASSES)]
        return max((rate for rate in rates if rate is not None), default=None)

    def report(self, interval: Interval, raw_link: float | None, device: TierMemory) -> StreamingReport | None:
        """Return the report of an interval; None where nothing is streamed."""
        plan = self.engine.plan
        if not plan.is_streaming:
            return None
        num_groups = plan.groups.num_layer_groups + 1 + max(1, len(plan.groups.head_slices))
        measured = Measured(
            interval.begin, interval.end, interval.num_passes, num_groups, raw_link, device, self.host()
        )
        return report_streaming(self.engine.loaded.weight_stream.timeline.since(interval.begin), measured)


def streaming_of(
    watch: StreamWatch, intervals: Mapping[str, Interval], device: TierMemory
) -> dict[str, StreamingReport | None]:
    """Return the report of each phase; the bare link is measured now."""
    raw = watch.raw_link() if watch.engine.plan.is_streaming else None
    return {phase: watch.report(interval, raw, device) for phase, interval in intervals.items()}


def streaming_results(engine: Engine, reports: Mapping[str, StreamingReport | None]) -> Record:
    """Return `streaming` of result.json: the record of decode steps, with that of prefill chunks under `prefill`."""
    policy, stream = engine.settings.streaming.policy, engine.loaded.weight_stream
    experts = stream.expert_hit_rate, stream.expert_link_nbytes
    prefill = streaming_record(policy, reports["prefill"], *experts)
    return {**streaming_record(policy, reports["decode"], *experts), "prefill": prefill}


def show_streaming(
    context: Context, engine: Engine, reports: Mapping[str, StreamingReport | None], intervals: Mapping[str, Interval]
) -> None:
    """Print the report of each phase, and write the trace if it was asked for."""
    policy = engine.settings.streaming.policy
    for phase, report in reports.items():
        if report is not None:
            for line in streaming_lines(policy, report, engine.loaded.weight_stream.expert_hit_rate):
                context.console.line(f"{phase}: {line}")
    if engine.settings.trace:
        begin, end = min(one.begin for one in intervals.values()), max(one.end for one in intervals.values())
        links = [report.raw_link for report in reports.values() if report is not None]
        write_streaming_trace(context, engine, begin, end, next(iter(links), None))


def write_streaming_trace(
    context: Context, engine: Engine, begin: float, end: float, link: float | None = None
) -> None:
    """Write the events between two times of time.perf_counter as a Chrome trace, a picture and a page.

    Args:
        link: bytes/s of the bare link; None if not measured.
    """
    assert context.output_dir is not None, "the settings refuse trace=true with outputs=false"
    plan, groups = engine.plan, engine.plan.groups
    title = (
        f"{engine.config.model_type}, {engine.config.num_hidden_layers} layers, streaming={plan.policy}, "
        f"{len(groups.streamed)} groups through {groups.num_slots} slot{'' if groups.num_slots == 1 else 's'} of "
        f"{in_words(groups.slot_nbytes)}"
    )
    events = [event for event in engine.loaded.weight_stream.timeline.since(begin) if event.begin < end]
    record = plan_record(engine, BudgetPlan(plan, engine.loaded.tier), link)
    write_trace(context.output_dir, events, title, record, context.console)


def streaming_record(
    policy: str,
    report: StreamingReport | None,
    expert_hit_rate: float | None = None,
    expert_link_nbytes: int | None = None,
) -> Record:
    """Return a report as a record of result.json.

    Args:
        policy: policy "off", "on" or "auto".
        report: report of the measured steps; None where nothing is streamed, and then all but the policy is null.
        expert_hit_rate: share of the routed experts that were on the device already; None without an expert cache.
        expert_link_nbytes: bytes of experts that kernels have read over the link; None without slots that they fill.
    """
    if report is None:
        return {"policy": policy, **dict.fromkeys(MOVED)}
    return {
        "policy": policy,
        "link_gb_per_second": _gb(report.busy_link),
        "wall_gb_per_second": _gb(report.wall_link),
        "raw_link_gb_per_second": _gb(report.raw_link),
        "link_share": report.busy_link_share,
        "bytes_per_token": report.nbytes_per_pass,
        "overlap": report.overlap,
        "copy_seconds": report.copy_seconds,
        "hidden_by_drafts_seconds": report.hidden_by_drafts_seconds,
        "draft_seconds": report.draft_seconds,
        "stall_seconds": report.stall_seconds,
        "stall_seconds_per_group": list(report.stall_seconds_per_group),
        "device_peak_bytes": report.device.peak_nbytes,
        "device_budget_bytes": report.device.budget_nbytes,
        "host_peak_bytes": report.host.peak_nbytes,
        "host_budget_bytes": report.host.budget_nbytes,
        "expert_hit_rate": expert_hit_rate,
        "expert_link_bytes": expert_link_nbytes,
    }


def streaming_lines(policy: str, report: StreamingReport, expert_hit_rate: float | None = None) -> list[str]:
    """Return a report as three lines: link, stalls and memory; figures that are not known are left out."""
    lines = [f"streaming={policy}: {_link_words(report)}", _wait_words(report)]
    memory = [_memory_words("device", report.device), _memory_words("host", report.host)]
    hits = "" if expert_hit_rate is None else f"{expert_hit_rate:.0%} of routed experts were on the device already"
    known = [words for words in (*memory, hits) if words]
    return [*lines, "; ".join(known)] if known else lines


def _link_words(report: StreamingReport) -> str:
    if report.busy_link is None or report.wall_link is None or report.nbytes_per_pass is None:
        return "nothing moved"
    words = f"{in_words(report.nbytes_per_pass)} per step, {rate_in_words(report.busy_link)} while copying"
    share = report.busy_link_share
    if share is not None and report.raw_link is not None and share <= 1:  # above, others slowed the raw link's trial
        words += f" ({share:.0%} of the raw link's {rate_in_words(report.raw_link)})"
    return f"{words}, {rate_in_words(report.wall_link)} over all the time"


def _wait_words(report: StreamingReport) -> str:
    hidden = (
        "" if report.overlap is None else f"{report.overlap:.0%} of {report.copy_seconds:.2f} s of copying hidden; "
    )
    drafts = f"{report.hidden_by_drafts_seconds:.2f} s of it behind {report.draft_seconds:.2f} s of drafting; "
    hidden += drafts if report.draft_seconds else ""
    words = f"{hidden}waited {report.stall_seconds:.2f} s of {report.seconds:.2f} s"
    if not report.stall_seconds:
        return words
    worst = max(range(len(report.stall_seconds_per_group)), key=report.stall_seconds_per_group.__getitem__)
    return f"{words}, longest for group {worst} ({report.stall_seconds_per_group[worst]:.2f} s)"


def _memory_words(tier: str, memory: TierMemory) -> str:
    if memory.peak_nbytes is None:
        return ""
    words = f"{tier} peak {in_words(memory.peak_nbytes)}"
    if memory.budget_nbytes is None:
        return words
    return f"{words} of {in_words(memory.budget_nbytes)} allowed"


def _gb(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9
