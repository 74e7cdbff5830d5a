"""Files for the textfile collector of Prometheus' node_exporter: written whole or not at all."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from blobstore.local_files import flush
from engine.metrics.exposition import expose, parse
from engine.metrics.model import PREFIX, Sample
from engine.metrics.run_names import RUN
from engine.metrics.samples import METRICS, Samples

# A file of ours is small; what is larger is somebody else's.
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_KEPT: Final = f"{PREFIX}run_last_success_timestamp_seconds"
# The collector runs as another user, and has to read it.
_MODE: Final = 0o644


def write_textfile(path: Path, samples: Iterable[Sample]) -> None:
    """Write some samples, in place of what the file has.

    Raises:
        OSError: As the file system says; the file is what it was.
    """
    _replace(path, expose(samples))


def add_run(path: Path, run: Samples) -> str:
    """Write what a run tells into a file that other runs write to, too.

    Counters go on from what the file has for the same verb and job, and gauges take the place of theirs, but for the
    time of the last success where this run had none. What other verbs and jobs told stays.

    Returns:
        Why what the file had before was given up; empty if it was not.

    Raises:
        OSError: As the file system says; the file is what it was.
    """
    with _locked(path.parent):
        before, given_up = _read(path)
        merged = Samples()
        merged.update(_merge(before, tuple(run)))
        _replace(path, expose(merged))
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
    """What a file has, and why that cannot be read."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return (), "it is larger than a file of tidemark"
        # As it stands: a carriage return is a part of a label, and no end of a line.
        with path.open(encoding="utf-8", newline="") as file:
            return parse(file.read()), ""
    except FileNotFoundError:
        return (), ""
    except ValueError as error:
        return (), str(error)


def _replace(path: Path, data: bytes) -> None:
    # Hidden, and without the ending that the collector looks for.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            flush(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One at a time among the runs that write to files of a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
