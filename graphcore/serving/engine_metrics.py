"""Metrics of the engine, for Prometheus: what it does at present, and what it has moved."""

import threading
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphcore.engine.engine import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.speculation.speculation import SpeculationTimes
from graphcore.errors import ConfigError
from graphcore.serving.served_model import ServedModel
from graphcore.streaming.movement import Movement


class EngineCollector(Collector):
    """What the engine does at present, and what it has moved."""

    def __init__(self, served: ServedModel) -> None:
        self._served, self._lock = served, threading.Lock()
        self._before = Movement()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        engine = self._served.loaded_engine
        if engine is None:
            return
        try:
            statuses, stats = engine.status(), engine.stats
        except ConfigError:  # it is closed
            return
        yield gauge(
            "graphcore_pass_seconds", "seconds since the running pass began; 0 if none runs", engine.pass_seconds
        )
        running = [one for one in statuses if one.is_running]
        yield gauge("graphcore_requests_running", "requests that have a row of the KV cache", len(running))
        yield gauge("graphcore_requests_waiting", "requests in the queue", len(statuses) - len(running))
        pages = sum(one.pages for one in running)
        yield gauge("graphcore_kv_cache_pages", "pages of the KV cache that requests hold", pages)
        yield gauge("graphcore_kv_cache_usage", "share of the KV cache's pages that are in use", usage_of(engine))
        for name, value in stats.items():
            if isinstance(value, int | float):
                yield gauge(f"graphcore_{name}", f"Engine.stats[{name!r}]", value)
        totals = engine.totals
        yield counter("graphcore_draft_tokens", "draft tokens that steps have checked", totals.draft_tokens)
        yield counter("graphcore_accepted_tokens", "draft tokens that were accepted", totals.accepted_tokens)
        times = SpeculationTimes() if engine.batching.speculation is None else engine.batching.speculation.times
        yield counter("graphcore_draft_steps", "steps of a draft model", times.draft_steps)
        yield counter("graphcore_draft_seconds", "seconds of drafting", times.draft_seconds)
        yield counter("graphcore_check_steps", "decode steps with draft tokens, beside no prompt", times.check_steps)
        yield counter("graphcore_check_seconds", "seconds of these steps", times.check_seconds)
        budget = engine.plan.budget
        if budget is not None:
            yield gauge("graphcore_memory_budget_bytes", "bytes that the plan may use", budget)
        yield from self._streaming(engine)

    def _streaming(self, engine: Engine) -> Sequence[Metric]:
        """Return cumulative counters of weight streaming, and its rates since the last scrape."""
        with self._lock:
            now, before = engine.loaded.weight_stream.totals.now(), self._before
            self._before = now
        if now.nbytes < before.nbytes:  # the engine was rebuilt
            before = Movement()
        copying = now.copy_seconds - before.copy_seconds
        rate = (now.nbytes - before.nbytes) / copying / 1e9 if copying else 0.0
        overlap = (now.hidden_seconds - before.hidden_seconds) / copying if copying else 0.0
        return [
            counter("graphcore_streamed_bytes", "bytes of weights that were moved", now.nbytes),
            counter("graphcore_streaming_seconds", "seconds in which weights moved", now.copy_seconds),
            counter("graphcore_stall_seconds", "seconds in which steps waited for weights", now.stall_seconds),
            gauge("graphcore_link_gigabytes_per_second", "rate of weights since the last scrape", rate),
            gauge("graphcore_streaming_overlap", "share of that time in which no step waited", overlap),
        ]


def usage_of(engine: Engine) -> float:
    """Return the share of the KV cache's pages that requests or the prefix cache hold."""
    runner = engine.loaded.runner  # unlike `engine.runner` also after a failure
    tables = runner.pages.tables if isinstance(runner, ProgramRunner) else []
    pages = sum(table.num_pages for table in tables)
    return 1 - sum(table.num_free for table in tables) / pages if pages else 0.0


def gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    """Return a metric that goes up and down."""
    return GaugeMetricFamily(name, meaning, value=float(value))


def counter(name: str, meaning: str, value: float) -> CounterMetricFamily:
    """Return a metric that only grows."""
    return CounterMetricFamily(name, meaning, value=float(value))
