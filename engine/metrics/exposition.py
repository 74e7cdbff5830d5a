"""The text that Prometheus reads, both ways: the one door to prometheus_client."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from engine.metrics.model import Sample
from engine.metrics.samples import METRICS

_TOTAL = "_total"


class _Told(Collector):
    """Samples, looked at anew each time that somebody asks."""

    def __init__(self, look: Callable[[], Iterable[Sample]]) -> None:
        self._look = look

    @override
    def collect(self) -> Iterator[Metric]:
        for name, samples in groupby(self._look(), key=lambda sample: sample.name):
            metric = METRICS[name]
            family: CounterMetricFamily | GaugeMetricFamily
            if metric.kind == "counter":
                family = CounterMetricFamily(
                    name.removesuffix(_TOTAL), metric.documentation, labels=list(metric.labels)
                )
            else:
                family = GaugeMetricFamily(name, metric.documentation, labels=list(metric.labels))
            for sample in samples:
                family.add_metric(list(sample.labels), sample.value)
            yield family

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: else the registry would look once to find the names."""
        return iter(())


def expose(samples: Iterable[Sample]) -> bytes:
    """The text of some samples, which come in the order of `Samples`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(lambda: samples))
    return generate_latest(registry)


def parse(text: str) -> tuple[Sample, ...]:
    """The samples of a text, those of unknown metrics or with other labels left out.

    Raises:
        ValueError: It is no such text.
    """
    try:
        return tuple(_parse(text))
    except Exception as error:
        # The parser of prometheus_client ends with whatever comes of it, and often says nothing.
        raise ValueError(f"it is no text for Prometheus: {str(error) or type(error).__name__}") from error


def _parse(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metric = METRICS.get(sample.name)
            if metric is not None and sample.labels.keys() == set(metric.labels):
                values = tuple(sample.labels[label] for label in metric.labels)
                yield Sample(sample.name, values, float(sample.value))


def serve(look: Callable[[], Iterable[Sample]], *, host: str, port: int) -> WSGIServer:
    """Serve `/metrics` by a thread, with some samples, looked at anew for each request.

    Args:
        look: Makes the samples; called in a thread for each request.
        host: Address to listen on.
        port: 0: any that is free.

    Returns:
        The server, for `close`.

    Raises:
        OSError: The address cannot be listened on.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(look))
    return start_http_server(port, host, registry)[0]


def close(server: WSGIServer) -> None:
    """Answer nobody any more."""
    server.shutdown()
    server.server_close()
