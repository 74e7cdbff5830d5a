"""Files for the textfile collector of Prometheus' node_exporter: written whole or not at all."""

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from blobstore.local.files import flush
from engine.metrics.exposition import expose, parse
from engine.metrics.model import PREFIX, Sample
from engine.metrics.run_names import RUN
from engine.metrics.samples import METRICS, Samples

# A file of ours is small; what is larger is somebody else's.
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_KEPT: Final = f"{PREFIX}run_last_success_timestamp_seconds"
# The collector runs as another user, and has to read it; runs of other users have to open the lock.
_MODE: Final = 0o644
# A run holds the lock for one small file, so that 5 s are enough for a hundred of them.
LOCK_ATTEMPTS_MAX: Final = 100
_LOCK_RETRY_S: Final = 0.05


def write_textfile(path: Path, samples: Iterable[Sample]) -> None:
    """Write some samples, in place of what the file has.

    Raises:
        OSError: As the file system says, or another run does not let go of the file; the file is what it was.
    """
    with _locked(path):
        _replace(path, expose(samples))


def add_run(path: Path, run: Samples) -> str:
    """Write what a run tells into a file that other runs write to, too.

    Counters go on from what the file has for the same verb and job, and gauges take the place of theirs, but for the
    time of the last success where this run had none. What other verbs and jobs told stays.

    Returns:
        Why what the file had before was given up; empty if it was not.

    Raises:
        OSError: As the file system says, or another run does not let go of the file; the file is what it was.
    """
    with _locked(path):
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
            # Whatever umask the run has: cron and systemd often say 077.
            os.fchmod(file.fileno(), _MODE)
            file.write(data)
            file.flush()
            flush(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One at a time among the runs that write to a file.

    Raises:
        TimeoutError: Another holds the lock, and does not let go of it.
        OSError: As the file system says, or what stands there is a pipe or a device.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
    # A file of its own, which stays: the file itself is another one after each run, and anybody locks a directory.
    lock = path.with_name(f".{path.name}.lock")
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(lock, flags, _MODE)
    try:
        with contextlib.suppress(PermissionError):  # it is another user's, who has seen to that
            os.fchmod(descriptor, _MODE)
        _take(descriptor, lock)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, lock: Path) -> None:
    for _ in range(LOCK_ATTEMPTS_MAX):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            threading.Event().wait(_LOCK_RETRY_S)
        else:
            return
    raise TimeoutError(errno.ETIMEDOUT, "another process holds this lock, and does not let go of it", str(lock))
