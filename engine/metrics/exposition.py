"""The text that Prometheus reads: made, parsed, served, and written to files for node_exporter's textfile collector.

The sole importer of prometheus_client. Files are written whole or not at all.
"""

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from blobstore.local.files import check_regular, write_whole
from engine.local.scan import opened
from engine.metrics.names import METRICS, PREFIX, RUN, Sample, Samples


class _Samples(Collector):
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples

    @override
    def collect(self) -> Iterator[Metric]:
        for name, samples in groupby(self._samples, key=lambda sample: sample.name):
            metric = METRICS[name]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name.removesuffix("_total"), metric.documentation, labels=list(metric.labels))
            for sample in samples:
                family.add_metric(list(sample.labels), sample.value)
            yield family


def expose(samples: Iterable[Sample]) -> bytes:
    """Format samples, which come in the order of `Samples`."""
    return generate_latest(_registry(samples))


def _registry(samples: Iterable[Sample]) -> CollectorRegistry:
    # It would collect once to find the names.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Samples(samples))
    return registry


def parse(text: str) -> tuple[Sample, ...]:
    """Parse a text, or raise ValueError; samples of unknown metrics or with other labels are left out."""
    try:
        return tuple(
            Sample(sample.name, tuple(sample.labels[label] for label in metric.labels), float(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if (metric := METRICS.get(sample.name)) is not None and sample.labels.keys() == set(metric.labels)
        )
    except Exception as error:
        # The parser of prometheus_client ends with whatever comes of it, and often says nothing.
        raise ValueError(f"not a text for Prometheus: {str(error) or type(error).__name__}") from error


def serve(samples: Iterable[Sample], *, host: str, port: int) -> WSGIServer:
    """Serve `/metrics` by a thread; OSError: the address cannot be listened on.

    The samples are gone through by a thread for each request; port 0 is any that is free.
    """
    return start_http_server(port, host, _registry(samples))[0]


class LastReading:
    """The last reading of a repository; `repository_up` is 0 before the first one, and after one that failed."""

    def __init__(self) -> None:
        self._samples = Samples()
        self._samples.add("repository_up", 0)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def refresh(self, read: Callable[[], Samples]) -> None:
        """Read once; what a failing `read` raises leaves all else as it was."""
        try:
            self._samples = read()
        except Exception:
            self._samples.add("repository_up", 0)
            raise


# A file of ours is small; what is larger is not.
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_KEPT: Final = f"{PREFIX}run_last_success_timestamp_seconds"
# The collector runs as another user, and has to read it; runs of other users have to open the lock. It is set whatever
# umask the run has: cron and systemd often say 077.
_MODE: Final = 0o644
# A run holds the lock for one small file, so that 5 s are enough for a hundred of them.
LOCK_ATTEMPTS_MAX: Final = 100
_LOCK_RETRY_S: Final = 0.05


def write_textfile(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples in place of what the file has; raises as `add_run`."""
    with _locked(path):
        write_whole(path, expose(samples), mode=_MODE, is_durable=True)


def add_run(path: Path, run: Samples) -> str:
    """Add the samples of a run to a file that other runs write to, too.

    Counters go on from what the file has for the same verb and job, and gauges replace theirs, but for the time of the
    last success where this run had none. The samples of other verbs and jobs stay.

    Returns:
        Why what the file had before was given up; empty if it was not.

    Raises:
        OSError: As the file system says, or another run keeps the file locked; the file is what it was.
    """
    with _locked(path):
        before, given_up = _read(path)
        merged = Samples()
        merged.update(_merge(before, tuple(run)))
        write_whole(path, expose(merged), mode=_MODE, is_durable=True)
    return given_up


def _merge(before: tuple[Sample, ...], run: tuple[Sample, ...]) -> Iterator[Sample]:
    runs = {sample.labels[: len(RUN)] for sample in run}
    for sample in before:
        is_own = METRICS[sample.name].labels[: len(RUN)] == RUN and sample.labels[: len(RUN)] in runs
        if not is_own or METRICS[sample.name].kind == "counter" or sample.name == _KEPT:
            yield sample
    counted = {(s.name, s.labels): s.value for s in before if METRICS[s.name].kind == "counter"}
    for sample in run:
        yield Sample(sample.name, sample.labels, sample.value + counted.get((sample.name, sample.labels), 0.0))


def _read(path: Path) -> tuple[tuple[Sample, ...], str]:
    """Return the samples of a file, and why it cannot be read."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return (), "it is larger than a file of tidemark"
        # As it is: a carriage return is a part of a label, and no end of a line.
        with path.open(encoding="utf-8", newline="") as file:
            return parse(file.read()), ""
    except FileNotFoundError:
        return (), ""
    except ValueError as error:
        return (), str(error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep out other runs that write to the file; OSError: another keeps the lock, or it is a pipe or a device."""
    check_regular(path)
    # A file of its own, which stays: the file itself is another one after each run, and anybody locks a directory.
    lock = path.with_name(f".{path.name}.lock")
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with opened(lock, flags, _MODE) as descriptor:
        with contextlib.suppress(PermissionError):  # it is another user's, who has seen to that
            os.fchmod(descriptor, _MODE)
        for _ in range(LOCK_ATTEMPTS_MAX):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                threading.Event().wait(_LOCK_RETRY_S)
        else:
            raise TimeoutError(errno.ETIMEDOUT, "another process keeps this lock", str(lock))
        yield
