"""All metrics by name, and values on their way to Prometheus."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from engine.metrics.model import PREFIX, Metric, Sample
from engine.metrics.repository_names import REPOSITORY_METRICS
from engine.metrics.run_names import RUN_METRICS
from engine.metrics.state_names import STATE_METRICS

METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric for metric in (*RUN_METRICS, *REPOSITORY_METRICS, *STATE_METRICS)
}


class Samples:
    """Values, each of a metric that exists and with the labels that it has.

    Args:
        labels: Labels that every value has, where its metric has them.
    """

    def __init__(self, **labels: str) -> None:
        self._common = labels
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Note a value, in place of an earlier one with the same labels.

        Args:
            name: Of the metric, without `tidemark_`.
            labels: Those that not every value has; one that is not given is empty.

        Raises:
            KeyError: There is no such metric, or it has no such label.
        """
        metric = METRICS[f"{PREFIX}{name}"]
        if unknown := labels.keys() - set(metric.labels):
            raise KeyError(f"{metric.name} has no label {min(unknown)}")
        told = {**self._common, **labels}
        self._values[metric.name, tuple(_writable(told.get(label, "")) for label in metric.labels)] = float(value)

    def update(self, samples: Iterable[Sample]) -> None:
        """Note values that are samples already."""
        for sample in samples:
            self._values[sample.name, sample.labels] = sample.value

    def __iter__(self) -> Iterator[Sample]:
        """All of them, in the order of the table of metrics."""
        places = {name: place for place, name in enumerate(METRICS)}
        for name, labels in sorted(self._values, key=lambda key: (places[key[0]], key[1])):
            yield Sample(name, labels, self._values[name, labels])


def _writable(text: str) -> str:
    """A text that UTF-8 has: bytes of the command line that are none of it are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def labels_of(sample: Sample) -> Mapping[str, str]:
    """The labels of a sample by name."""
    return dict(zip(METRICS[sample.name].labels, sample.labels, strict=True))
