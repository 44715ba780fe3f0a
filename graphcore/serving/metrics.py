"""Metrics for Prometheus: graphcore's own names, and those of vLLM or llama.cpp beside them if asked for."""

from collections import deque
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphcore.serving.served_model import ServedModel

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
        self.register(_Readiness(served))
        self._aliases = ALIASES[aliases] if aliases else {}

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=SECONDS, registry=self._registry)

    def register(self, collector: Collector) -> None:
        """Add metrics that are read when they are asked for."""
        self._registry.register(collector)

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


class _Readiness(Collector):
    """The metric of whether the server accepts requests."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        ready = float(self._served.is_healthy)
        yield GaugeMetricFamily("graphcore_ready", "1 if requests are taken", value=ready)
