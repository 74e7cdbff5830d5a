"""What one run of a verb did, for `--metrics-file`: noted while it runs, written down at its end however it ends."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from blobstore.wrappers.meter import Meter
from engine.clock import Runtime
from engine.progress import Progress, SummedProgress


class _Counted:
    """Progress, counted."""

    def __init__(self) -> None:
        self.files = self.bytes = self.files_total = self.bytes_total = 0

    def total(self, *, files: int, bytes_: int) -> None:
        """What there is to do."""
        self.files_total, self.bytes_total = files, bytes_

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """So much more is done."""
        self.files += files
        self.bytes += bytes_


class _Both:
    """Progress that two hear of."""

    def __init__(self, first: Progress, second: Progress) -> None:
        self._both = (first, second)

    def total(self, *, files: int, bytes_: int) -> None:
        """What there is to do."""
        for one in self._both:
            one.total(files=files, bytes_=bytes_)

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """So much more is done."""
        for one in self._both:
            one.add(files=files, bytes_=bytes_)


class RunRecord:
    """Notes what a run does.

    Attributes:
        meter: Requests to the store of the repository.
        view: What was shown last.
        seconds: How long parts of it took, by their names.
        progress: Files and bytes, planned and done.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.began_s = runtime.monotonic_s()
        self.meter = Meter()
        self.view: msgspec.Struct | None = None
        self.seconds: dict[str, float] = {}
        self._forget_progress()

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long the block takes, also where it fails."""
        began_s = self._runtime.monotonic_s()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + self._runtime.monotonic_s() - began_s

    def heard(self, progress: Progress) -> Progress:
        """A progress that is counted, too."""
        return _Both(self._sums.part(), progress)

    def write(
        self,
        path: Path,
        *,
        verb: str,
        job: str,
        code: int,
        error: BaseException | None,
        warn: Callable[[str], None],
    ) -> None:
        """Write the figures of the run, and begin to note anew.

        What cannot be written is a warning, and changes nothing of the result.
        """
        try:
            given_up = self._add_to(path, verb=verb, job=job, code=code, error=error)
        except Exception as failure:  # noqa: BLE001  (the work is done, and has its own result)
            said = str(failure) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
            warn(f"there are no figures of this run: {said}")
        else:
            if given_up:
                warn(f"{path}: what it had is given up, {given_up}")
        finally:
            self._begin_again()

    def _add_to(self, path: Path, *, verb: str, job: str, code: int, error: BaseException | None) -> str:
        # With prometheus_client, and what all verbs show: for those who asked for it.
        from engine.cli.run_figures import figures_of  # noqa: PLC0415
        from engine.metrics.textfile import add_run  # noqa: PLC0415

        samples = figures_of(
            self,
            verb=verb,
            job=job,
            code=code,
            error=error,
            ended_at_ms=self._runtime.local_now_ms(),
            seconds=self._runtime.monotonic_s() - self.began_s,
        )
        return add_run(path, samples)

    def _begin_again(self) -> None:
        self.began_s = self._runtime.monotonic_s()
        self.meter.reset()
        self.view = None
        self.seconds = {}
        self._forget_progress()

    def _forget_progress(self) -> None:
        self.progress = _Counted()
        self._sums = SummedProgress(self.progress)
