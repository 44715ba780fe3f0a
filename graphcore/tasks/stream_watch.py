"""Watching a streamed run: what moved in an interval, how fast the bare link is, and what memory it took."""

from collections.abc import Mapping
from dataclasses import dataclass

from graphcore.config.byte_sizes import in_words, parse_nbytes
from graphcore.engine.engine import Engine
from graphcore.streaming.report import Measured, StreamingReport, TierMemory, report_streaming
from graphcore.tasks.measure import PeakMemory, resident_nbytes
from graphcore.tasks.streaming_record import streaming_lines, streaming_record
from graphcore.tasks.task import Context, Record
from graphcore.tasks.trace import write_trace

RAW_PASSES = 2  # of the bare link; the faster one counts


@dataclass(frozen=True)
class Interval:
    """Some passes over the weights.

    Attributes:
        begin, end: seconds of time.perf_counter.
        num_passes: decode steps or prefill chunks.
    """

    begin: float
    end: float
    num_passes: int


@dataclass
class StreamWatch:
    """Memory from the time it was made, after everything was compiled; reports at the end.

    Attributes:
        engine: that streams.
        peak: of the growth since.
        shared_nbytes: resident shared memory at the baseline; of no interest on a GPU.
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
        """Return the most that the device held: on a GPU what of its free memory is gone since before the load.

        On the CPU what is planned and was there before, and what has grown since: weights, slots and caches count
        whole, whether they had been written to at the baseline or not. Read buffers, which are planned, lie in shared
        memory (`streaming/pages.py`) that is first written to when a group is read: that growth is not counted twice.
        """
        plan, free_memory = self.engine.plan, self.engine.free_memory
        if free_memory is not None:
            free_memory.look()
            return TierMemory(free_memory.drop, plan.budget)
        shared = resident_nbytes("RssShmem") - self.shared_nbytes
        growth = max(0, self.peak.nbytes() - max(0, shared))
        return TierMemory(plan.total_nbytes - plan.workspace_nbytes + growth, plan.budget)

    def host(self) -> TierMemory:
        """Return what waits in RAM."""
        budget = parse_nbytes("host_memory_budget", self.engine.settings.streaming.host_memory_budget)
        return TierMemory(self.engine.weight_stream.host_nbytes, budget)

    def raw_link(self) -> float | None:
        """Return the bytes/s of the bare link: the same bytes by the same threads, nothing made of them."""
        most = self.engine.plan.streamed_nbytes
        rates = [self.engine.weight_stream.raw_link(most) for _ in range(RAW_PASSES)]
        return max((rate for rate in rates if rate is not None), default=None)

    def report(self, interval: Interval, raw_link: float | None, device: TierMemory) -> StreamingReport | None:
        """Return what moved in an interval; None where nothing moves."""
        plan = self.engine.plan
        if not plan.is_streaming:
            return None
        num_groups = plan.num_layer_groups + 1 + max(1, len(plan.head_slices))
        measured = Measured(
            interval.begin, interval.end, interval.num_passes, num_groups, raw_link, device, self.host()
        )
        return report_streaming(self.engine.weight_stream.timeline.since(interval.begin), measured)


def streaming_of(
    watch: StreamWatch, intervals: Mapping[str, Interval], device: TierMemory
) -> dict[str, StreamingReport | None]:
    """Return the report of each phase; the bare link is measured now."""
    raw = watch.raw_link() if watch.engine.plan.is_streaming else None
    return {phase: watch.report(interval, raw, device) for phase, interval in intervals.items()}


def streaming_results(engine: Engine, reports: Mapping[str, StreamingReport | None]) -> Record:
    """Return `streaming` of result.json: of decode steps, and under `prefill` of prefill chunks."""
    policy, rate = engine.settings.streaming.policy, engine.weight_stream.expert_hit_rate
    prefill = streaming_record(policy, reports["prefill"], rate)
    return {**streaming_record(policy, reports["decode"], rate), "prefill": prefill}


def show_streaming(
    context: Context, engine: Engine, reports: Mapping[str, StreamingReport | None], intervals: Mapping[str, Interval]
) -> None:
    """Print what moved in each phase, and write the trace if it was asked for."""
    policy = engine.settings.streaming.policy
    for phase, report in reports.items():
        if report is not None:
            for line in streaming_lines(policy, report, engine.weight_stream.expert_hit_rate):
                context.console.line(f"{phase}: {line}")
    if engine.settings.trace:
        begin, end = min(one.begin for one in intervals.values()), max(one.end for one in intervals.values())
        trace(context, engine, begin, end)


def trace(context: Context, engine: Engine, begin: float, end: float) -> None:
    """Write what moved between two times of time.perf_counter as a Chrome trace and a picture."""
    assert context.output_dir is not None, "the settings refuse trace=true with outputs=false"
    plan = engine.plan
    title = (
        f"{engine.config.model_type}, {engine.config.num_hidden_layers} layers, streaming={plan.policy}, "
        f"{len(plan.streamed)} groups through {plan.num_slots} slots of {in_words(plan.slot_nbytes)}"
    )
    events = [event for event in engine.weight_stream.timeline.since(begin) if event.begin < end]
    write_trace(context.output_dir, events, title, context.console)
