"""How a run of a verb ends: its exit code, one per reaction of the caller, and its figures for `--metrics-file`."""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import click

from blobstore.errors import InvalidRequestError
from blobstore.wrappers.forwarding import Meter
from engine.cli.notify import Hook, send
from engine.cli.output import TEXT, say
from engine.errors import CommitUnknownError
from engine.runtime import CountedProgress, Progress, Runtime, SummedProgress

if TYPE_CHECKING:
    from engine.metrics.names import Samples


class ExitCode(IntEnum):
    """The exit codes of `tidemark`, sorted by what the caller does next; `meaning` is what help says of one."""

    meaning: str

    def __new__(cls, code: int, meaning: str = "") -> Self:
        self = int.__new__(cls, code)
        self._value_, self.meaning = code, meaning
        return self

    OK = 0, "done"
    UNEXPECTED = 1, "unexpected: a fault of tidemark or of this machine; --debug shows where"
    USAGE = 2, "the command line, a setting or a file named in it is wrong"
    PARTIAL = 3, "done in part: some keys or stores failed, a TTL is left to remove, an audit record is missing"
    DAMAGED = 4, "stored data is missing or altered"
    UNAVAILABLE = 5, "the blob store is unavailable or full, or the outcome of a commit unknown: try again"
    CONFLICT = 6, "conflict: another writer was first, or the backup is too old; back up again"
    NOT_FOUND = 7, "no such bucket, repository, job, commit, store, key or name"
    DENIED = 8, "access denied"
    UNSAFE = 9, "refused as unsafe: this directory, target, blob store, deletion or newer format"
    TOO_MUCH = 10, "a collection would delete, or a backup shrink a state by, more than it may: look, and allow it"
    SLOW = 11, "a restore drill took longer than its --slo"
    INTERRUPTED = 130, "interrupted (143: terminated; 129: the terminal hung up)"
    HUNG_UP = 129
    TERMINATED = 143


# What `tidemark --help` and docs/how-to/troubleshoot.md say of them.
MEANINGS: Final = {code: code.meaning for code in ExitCode if code.meaning}

# Every public class of error by the name that `--json` shows, so that a new one is a decision and not an accident; a
# test walks the trees. Errors of engine.spark are not among them: verbs load it only when they are asked to, and its
# errors have the code of the class above them.
_NAMES: Final = {
    ExitCode.UNEXPECTED: "TidemarkError StoreError InvalidRequestError EngineError",
    # Names and files that people give are checked before, as usage; a name that is wrong later was in the store. A
    # plan is where people put it, and is only ever read because they name it.
    ExitCode.USAGE: "ShadowedError UsageError NotLoadedError SamzaFormatError PlanFileError UnsupportedRecordError",
    ExitCode.DAMAGED: "BlobCorruptError DamagedError CommitDamagedError IncompleteError MisplacedKeyError "
    "ManifestError SnapshotRepairError FormatError CorruptIndexError IndexInvariantError UnsafeNameError BatchLogError "
    "DamagedChangelogError FileChecksumError LineageError RowChecksumError StateMetadataError",
    # Of a full store nothing is wrong with the data or the command; once there is space, the same command works. The
    # changelog of a snapshot that was not uploaded exists, and the next commit makes another snapshot.
    ExitCode.UNAVAILABLE: "StoreUnavailableError StoreFullError CheckpointUnknownError CommitUnknownError "
    "QueryMovedOnError SnapshotUploadError",
    ExitCode.CONFLICT: "CheckpointFileExistsError ConflictError CommitLostError FencedError StaleResultError "
    "LeaseExpiredError PromotedError ClosedCheckpointError",
    # A version that never was looks the same as one that was deleted.
    ExitCode.NOT_FOUND: "BlobNotFoundError BlobDeletedError StoreMissingError NotFoundError CollectedError "
    "VersionMissingError",
    ExitCode.DENIED: "AccessDeniedError",
    ExitCode.UNSAFE: "CapabilityMissingError SourceChangedError UnsafeSourceError TargetError TargetBusyError "
    "PartitionKeyError ProviderError StoreMergeError UnsafeStoreError UnknownFormatError ShortListingError",
    ExitCode.TOO_MUCH: "TooMuchToDeleteError ShrunkError",
}
CODES: Final = {name: code for code, names in _NAMES.items() for name in names.split()}

# The signals to end that this process has got.
SIGNALS: Final[list[int]] = []
# By the signal, which `app` notes.
_SIGNALLED: Final = {(signal.SIGTERM,): ExitCode.TERMINATED, (signal.SIGHUP,): ExitCode.HUNG_UP}
# What a store does before its first request can only go wrong by its settings.
_FIRST_STEPS: Final = frozenset({"open", "connect", "sign"})


def is_wrong_setting(error: BaseException) -> bool:
    """Return whether the settings or the environment do not lead to a store: tidemark is not at fault."""
    return isinstance(error, InvalidRequestError) and error.operation in _FIRST_STEPS


def innermost(error: BaseException) -> BaseException:
    """Return the first plain error inside groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def public_class(error: BaseException) -> str:
    """Name the public class of an error: a private subclass is nothing that a program could know."""
    return next(kind.__name__ for kind in type(innermost(error)).__mro__ if not kind.__name__.startswith("_"))


def choose_exit_code(error: BaseException) -> ExitCode:
    """Return the code of an error: that of its class, or of the nearest class above that has one."""
    if is_wrong_setting(error):
        return ExitCode.USAGE
    for kind in type(error).__mro__:
        # Others may have a class of the same name.
        if kind.__name__ in CODES and kind.__module__.startswith(_OURS):
            return CODES[kind.__name__]
    if isinstance(error, PermissionError):
        return ExitCode.DENIED
    if isinstance(error, KeyboardInterrupt):
        return _SIGNALLED.get(error.args[:1], ExitCode.INTERRUPTED)
    return ExitCode.UNEXPECTED


_OURS: Final = ("blobstore.", "engine.", "index.", "tidemark.")


class RunRecord:
    """Notes what a run does: requests to the store (`meter`), and the `seconds` that parts of it took."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.meter = Meter()
        self.begin()

    def begin(self) -> None:
        """Forget everything: another run begins."""
        self._began_s = self._runtime.monotonic_s()
        self.meter.reset()
        self.seconds: dict[str, float] = {}
        # Whether there was nothing to commit; None where it came to no such decision.
        self.commit_skipped: bool | None = None
        self._results: list[tuple[object, Mapping[str, str]]] = []
        # Of metrics that no result has.
        self.values: dict[str, float] = {}
        self._progress = CountedProgress()
        self._sums = SummedProgress(self._progress)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long the block takes, also where it fails."""
        began_s = self._runtime.monotonic_s()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + self._runtime.monotonic_s() - began_s

    def counted(self, progress: Progress) -> Progress:
        """Return a progress that is counted, too."""
        return _Both(self._sums.part(), progress)

    def note(self, result: object, **labels: str) -> None:
        """Note a result for `engine.metrics.results`, with the labels that it does not know."""
        self._results.append((result, labels))

    def write(
        self, path: Path, run: Mapping[str, str], code: int, error: BaseException | None, warn: Callable[[str], None]
    ) -> None:
        """Write the samples of the run to a file, to which other runs write, too, and begin to note the next one.

        `run` is as `run_of` says it. If nothing can be written, that is a warning and changes nothing of the result.
        """
        try:
            # With prometheus_client, for those who asked for it.
            from engine.metrics.exposition import add_run  # noqa: PLC0415

            if given_up := add_run(path, self._samples(run, code, error)):
                warn(f"{path}: what it had is given up, {given_up}")
        except Exception as failure:  # noqa: BLE001  (the work is done, and has its own result)
            reason = str(failure) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
            warn(f"there are no figures of this run: {reason}")
        finally:
            self.begin()

    def _samples(self, run: Mapping[str, str], code: int, error: BaseException | None) -> "Samples":
        from engine.metrics.names import Samples  # noqa: PLC0415
        from engine.metrics.results import add_result  # noqa: PLC0415

        samples = Samples(**run)
        meter, done = self.meter, self._progress
        ended_at_s = self._runtime.local_now_ms() / 1000
        samples.add("runs_total", 1, code=str(int(code)))
        values: dict[str, float] = {
            "run_exit_code": code,
            "run_end_timestamp_seconds": ended_at_s,
            "run_seconds": self._runtime.monotonic_s() - self._began_s,
            "store_retries_total": meter.retries,
            "store_sent_bytes_total": meter.bytes_out,
            "store_received_bytes_total": meter.bytes_in,
            "run_files_planned": done.files_total,
            "run_planned_bytes": done.bytes_total,
            "run_files_done": done.files,
            "run_done_bytes": done.bytes,
            "run_files_remaining": max(0, done.files_total - done.files),
            "run_remaining_bytes": max(0, done.bytes_total - done.bytes),
        }
        if error is not None:
            # The text of an error may repeat what nobody is to read in a metric.
            samples.add("run_errors_total", 1, error=public_class(error))
        if code == ExitCode.OK:
            values["run_last_success_timestamp_seconds"] = ended_at_s
        if "open" in self.seconds:
            values["run_open_seconds"] = self.seconds["open"]
        if self.commit_skipped is not None or "commit" in self.seconds:
            values["commit_calls_total"] = 1
            values["commits_skipped_total"] = bool(self.commit_skipped)
            values["commit_exceptions_total"] = error is not None
            values["commits_timed_out_total"] = isinstance(error, CommitUnknownError)
        if "commit" in self.seconds:
            values["commit_seconds"] = self.seconds["commit"]
            values["commit_cleanup_seconds"] = meter.seconds["remove_ttl"]
        for operation, number in meter.requests.items():
            samples.add("store_requests_total", number, operation=operation)
            samples.add("store_request_errors_total", meter.errors[operation], operation=operation)
            samples.add("store_request_seconds_total", meter.seconds[operation], operation=operation)
        for name, value in (values | self.values).items():
            samples.add(name, value)
        for result, labels in self._results:
            add_result(samples, result, **labels)
        return samples


class _Both:
    def __init__(self, first: Progress, second: Progress) -> None:
        self._both = (first, second)

    def total(self, *, files: int, bytes_: int) -> None:
        for one in self._both:
            one.total(files=files, bytes_=bytes_)

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        for one in self._both:
            one.add(files=files, bytes_=bytes_)


def run_of(words: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Return what metrics call a run, and its job: an upload that nobody can see yet is not a backup to rely on."""
    verb = f"{words} --no-commit" if values.get("no_commit") else words
    return {"verb": verb, "job_name": str(values.get("job") or "")}


def readable_values(command: click.Command, parent: click.Context | None, args: Sequence[str]) -> Mapping[str, Any]:
    """Return the values that can be read of a refused command line: flags, environment and settings file."""
    obj: dict[str, Any] | None = None if parent is not None else {}
    ctx = click.Context(command, parent=parent, info_name=command.name, obj=obj, resilient_parsing=True)
    ctx.ignore_unknown_options = ctx.allow_extra_args = True
    with ctx.scope(cleanup=False):
        click.Command.parse_args(command, ctx, list(args))
    return ctx.params


def write_refused(words: str, values: Mapping[str, Any], error: BaseException) -> None:
    """Record a command line that was refused before its verb began: also a run that did not end well."""
    if values.get("dry_run"):
        return
    run, path, hook = run_of(words, values), values.get("metrics_file"), values.get("on_failure")
    warn = functools.partial(say, "warning", words, log_format=values.get("log_format") or TEXT)
    if path is not None:
        RunRecord(Runtime()).write(Path(path), run, ExitCode.USAGE, error, warn)
    if isinstance(hook, Hook):
        # It knows the codes of here.
        from engine.cli.errors import describe_run  # noqa: PLC0415

        send(hook, describe_run(run, ExitCode.USAGE, error, ""), warn)
