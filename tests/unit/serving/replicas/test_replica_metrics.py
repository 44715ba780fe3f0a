"""The metrics of several replicas as one page."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from graphcore.serving.replicas.replica_metrics import merged_metrics


def page(requests: int, has_gauge: bool = True) -> str:
    registry = CollectorRegistry()
    Counter("requests", "answered", ("path",), registry=registry).labels('/a "b"\n').inc(requests)
    Histogram("seconds", "how long", buckets=(1.0, 2.0), registry=registry).observe(requests)
    if has_gauge:
        Gauge("ready", "or not", registry=registry).set(requests)
    return generate_latest(registry).decode()


def test_each_sample_has_its_replica_and_each_metric_is_there_once() -> None:
    text = merged_metrics({"r1": page(1), "r2": page(3, has_gauge=False)}).decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert families["requests"].type == "counter"
    samples = {
        (one.name, one.labels["replica"], one.labels.get("path"), one.labels.get("le")): one.value
        for family in families.values()
        for one in family.samples
    }
    assert samples["requests_total", "r1", '/a "b"\n', None] == 1
    assert samples["requests_total", "r2", '/a "b"\n', None] == 3
    assert samples["seconds_bucket", "r1", None, "1.0"] == 1
    assert samples["seconds_bucket", "r2", None, "2.0"] == 0
    assert samples["seconds_count", "r2", None, None] == 1
    assert samples["ready", "r1", None, None] == 1
    assert ("ready", "r2", None, None) not in samples
    assert text.count("# TYPE seconds histogram") == 1


def test_no_replica_has_no_metrics() -> None:
    assert merged_metrics({}) == b""
