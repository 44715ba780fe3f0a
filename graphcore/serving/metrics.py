"""Metrics for Prometheus: graphcore's own names, and those of vLLM or llama.cpp beside them if asked for."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphcore.engine.engine import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.speculation.speculation import SpeculationTimes
from graphcore.errors import ConfigError
from graphcore.serving.served_model import ServedModel
from graphcore.streaming.movement import Movement

RECENT = 100  # answers whose times to the first piece are kept
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
ALIASES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "graphcore_requests_running": "vllm:num_requests_running",
        "graphcore_requests_waiting": "vllm:num_requests_waiting",
        "graphcore_kv_cache_usage": "vllm:kv_cache_usage_perc",
        "graphcore_prompt_tokens": "vllm:prompt_tokens",
        "graphcore_generation_tokens": "vllm:generation_tokens",
        "graphcore_draft_tokens": "vllm:spec_decode_num_draft_tokens",
        "graphcore_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
        "graphcore_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "graphcore_request_seconds": "vllm:e2e_request_latency_seconds",
    },
    "llamacpp": {
        "graphcore_requests_running": "llamacpp:requests_processing",
        "graphcore_requests_waiting": "llamacpp:requests_deferred",
        "graphcore_prompt_tokens": "llamacpp:prompt_tokens",
        "graphcore_generation_tokens": "llamacpp:tokens_predicted",
    },
}
"""Other servers' names of the same numbers, by the value of task.metric_aliases; without counters' "_total"."""


class ServingMetrics:
    """The counters of a server; those of the engine are read when they are asked for.

    Args:
        served: the model.
        aliases: key of ALIASES; None for graphcore's names alone.

    Attributes:
        requests: counter of answered requests.
        recent_first_seconds: times to the first piece of the newest answers.
    """

    def __init__(self, served: ServedModel, aliases: str | None = None) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "graphcore_requests", "answered requests", ("endpoint", "status"), registry=self._registry
        )
        self._prompt = Counter("graphcore_prompt_tokens", "tokens of prompts", registry=self._registry)
        self._cached = Counter(
            "graphcore_cached_tokens", "tokens of prompts that the KV cache held already", registry=self._registry
        )
        self._new = Counter("graphcore_generation_tokens", "tokens of answers", registry=self._registry)
        self._in_thoughts = Counter(
            "graphcore_calls_in_thoughts",
            "calls of tools that were read from thoughts which the answer did not close",
            registry=self._registry,
        )
        self._first = self._histogram(
            "graphcore_time_to_first_token_seconds", "seconds to the first piece of an answer"
        )
        self.recent_first_seconds: deque[float] = deque(maxlen=RECENT)
        self._whole = self._histogram("graphcore_request_seconds", "seconds of a whole answer")
        self._registry.register(_EngineCollector(served))
        self._aliases = ALIASES[aliases] if aliases else {}

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=SECONDS, registry=self._registry)

    def note_tokens(self, prompt: int, cached: int, new: int) -> None:
        """Count the tokens of an answer."""
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._new.inc(new)

    def note_calls_in_thoughts(self, count: int) -> None:
        """Count calls that were read from thoughts which the answer did not close."""
        self._in_thoughts.inc(count)

    def note_first(self, seconds: float) -> None:
        """Count the time to the first piece of an answer."""
        self._first.observe(seconds)
        self.recent_first_seconds.append(seconds)

    def note_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.requests.labels(endpoint, str(status)).inc()
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(_Renamed(self._registry, self._aliases) if self._aliases else self._registry)


class _Renamed(CollectorRegistry):
    """All metrics, and the renamed copies of some.

    Args:
        inner: registry of the metrics.
        names: other name by name.
    """

    def __init__(self, inner: CollectorRegistry, names: Mapping[str, str]) -> None:
        super().__init__()
        self._inner, self._names = inner, names

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, and its copy."""
        for metric in self._inner.collect():
            yield metric
            other = self._names.get(metric.name)
            if other is not None:
                copied = Metric(other, metric.documentation, metric.type)
                copied.samples = [
                    sample._replace(name=sample.name.replace(metric.name, other, 1)) for sample in metric.samples
                ]
                yield copied


class _EngineCollector(Collector):
    """What the engine does at present, and what it has moved."""

    def __init__(self, served: ServedModel) -> None:
        self._served, self._lock = served, threading.Lock()
        self._before = Movement()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield gauge("graphcore_ready", "1 if requests are taken", self._served.is_healthy)
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
