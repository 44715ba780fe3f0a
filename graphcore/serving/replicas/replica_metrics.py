"""The metrics of several replicas as one page for Prometheus: each sample has a label `replica`."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Return metrics in Prometheus's text format.

    Args:
        texts: what GET /metrics of each replica has answered, by the replica's id.
    """
    return generate_latest(_Merged(texts))


class _Merged(CollectorRegistry):
    """Metrics parsed from several pages and merged by name, as Prometheus's text format requires."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        super().__init__()
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with the samples of all replicas."""
        merged: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for metric in text_string_to_metric_families(text):
                found = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                labelled = [one._replace(labels={**one.labels, "replica": replica}) for one in metric.samples]
                found.samples.extend(labelled)
        yield from merged.values()
