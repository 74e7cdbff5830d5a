"""The restore drill: restore a whole commit, to a directory that is removed again or to nowhere, and time it.

What it measures is a line of JSON in its history (design 0009, H1 to H4), and makes a forecast (F1 to F5).
"""

import fcntl
import itertools
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, ClassVar, Final, TypeAlias, Unpack

import msgspec

from blobstore import installed_release
from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import ByteBudget, run_all, run_blocking
from engine.errors import DamagedError, NotFoundError, TargetError
from engine.local.digests import ContentHasher, HashingSink
from engine.records.find import Choice, naming_complete
from engine.records.repository import OpenRepository
from engine.repository.repository import Repository
from engine.restore.download import fetch_right
from engine.restore.restore import read_index_of, restore_store, target_below
from engine.restore.staging import find_lack_of_space, remove_tree, target_errors
from engine.restore.write import PackReader
from engine.rocksdb.store import StoreReader, spark_settings
from engine.runtime import NO_PROGRESS, AddedProgress, Progress, Runtime
from engine.settings import STORES_AT_ONCE, share_among
from engine.text import table
from index.display import DisplayMixin, count, format_seconds, human_bytes, human_duration
from index.errors import FormatError, UnknownFormatError
from index.plan.commits import Commit
from index.plan.restore import FetchedRun, RestoredFile, plan_restore
from index.snapshot.model import FileBlob, Scope, StoreReference, as_scope

SCHEMA: Final = 1
HISTORY_NAME: Final = "restore-drills.jsonl"
EARLIER_NAME: Final = "rehearsals.jsonl"
LINE_BYTES_MAX: Final = 64 * 1024
# Of an error, so that a line of the history keeps within its cap.
MESSAGE_LENGTH_MAX: Final = 1000

_HINT: Final = "look at this line: it is kept as it is, and left out of the report"

# A finite number of seconds: JSON has no other infinities than those that overflow.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

SCRATCH_PREFIX: Final = "tidemark-restore-drill-"
_OPERATION: Final = "bench restore"
_METADATA: Final = RequestMetadata(payload_path="restore drill")
# An operator that reads any operands a store may hold; nothing is read but what an opening reads.
_OPENING: Final = spark_settings(merge_delimiter=b",")

# A range of a pack, or a blob of a file.
_Job: TypeAlias = FetchedRun | tuple[RestoredFile, FileBlob]


class DrillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a restore drill."""

    # A directory that exists. A fresh one is made in it, with enough space, and removed at the end, also after an
    # error. None: everything is read and hashed, and nothing is written or opened.
    scratch: Path | None
    # Leave the fresh directory. RocksDB was open in it: it is not byte for byte what was backed up.
    keep: bool = False
    # This number of stores share the requests and the memory of `repository.settings`, as on an executor.
    stores_at_once: int = STORES_AT_ONCE
    # Noted in the result.
    slo_ms: int | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Count what a restore moved."""

    # GETs of indexes and blobs, and their bytes as asked for.
    requests_count: Count
    bytes_fetched: Count
    # RocksDB databases that were opened.
    opened_count: Count


class RestoreDrill(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="done"):
    """Describe a restore drill that succeeded. Phases are in seconds of wall time, without the removal of the files."""

    json_properties: ClassVar = {name: name for name in ("total_s", "slo_met")}

    # By this machine's clock: for people.
    began_at_ms: Count
    release: str
    repository_id: str
    job: str
    # None: the job commits as a whole.
    task: str | None
    commit_number: Count
    version: Count
    # False: no pin could be written.
    pinned: bool
    # False: everything was read and hashed, and nothing written.
    to_disk: bool
    # The directory, if it is still there: it was kept, or could not be removed.
    kept_at: str = ""
    stores_at_once: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    stores_count: Count
    files_count: Count
    size_bytes: Count
    largest_store_bytes: Count
    # Finding and pinning the commit; restoring all its stores; opening those that are RocksDB.
    find_s: Amount
    restore_s: Amount
    open_s: Amount
    measured: Measured
    slo_ms: Count | None = None

    @property
    def total_s(self) -> float:
        """From the search for the commit to the opened databases."""
        return self.find_s + self.restore_s + self.open_s

    @property
    def is_slow(self) -> bool:
        """Whether it took longer than `slo_ms`."""
        return self.slo_ms is not None and self.total_s * 1000 > self.slo_ms

    @property
    def slo_met(self) -> bool | None:
        """Whether it was quick enough; None: nobody said how quick."""
        return not self.is_slow if self.slo_ms is not None else None


class FailedDrill(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failed"):
    """Describe a restore drill that an error ended: the state could not have been restored then."""

    began_at_ms: Count
    release: str
    repository_id: str
    job: str
    task: str | None
    # The class of the error, and its message.
    error: str
    message: str


Entry = RestoreDrill | FailedDrill


async def run_restore_drill(
    repository: Repository,
    scope: str | Scope,
    options: DrillOptions,
    *,
    runtime: Runtime | None = None,
    progress: Progress = NO_PROGRESS,
    **choice: Unpack[Choice],
) -> RestoreDrill:
    """Restore all stores of a commit to a scratch directory or to nowhere, open those of RocksDB, and time it.

    Requests: as a restore of each store. `choice` says which commit of the scope, as for `Repository.find`.

    Raises:
        NotFoundError: No commit fits.
        TargetError: The scratch directory does not exist, cannot be used, or has too little space.
        DamagedError: Something is missing or altered, or a RocksDB does not open. If the fresh directory could not be
            removed, a note names it.
        StoreError: As the blob store says.
    """
    scope, runtime = as_scope(scope), runtime or Runtime()
    began_at_ms, began_s = runtime.local_now_ms(), runtime.monotonic_s()
    find = repository.find_pinned(scope, purpose="restore drill", **choice)
    async with naming_complete(repository.store, lambda: repository.commits(scope)), find as (commit, lease):
        find_s = runtime.monotonic_s() - began_s
        stores = commit.record.stores
        at_once, settings = share_among(repository.settings, max(1, min(options.stores_at_once, len(stores))))
        async with _scratch_directory(options, commit, runtime) as directory:
            opened = repository.opened.without_digests(settings)
            drill = _Drill(repository=opened, directory=directory, progress=AddedProgress(progress))
            progress.total(files=sum(s.files_count for s in stores), bytes_=sum(s.size_bytes for s in stores))
            with repository.missing_blobs.recording():
                began_s = runtime.monotonic_s()
                await run_all(drill.restore, stores, in_flight_max=at_once)
                restore_s = runtime.monotonic_s() - began_s
                databases = await run_blocking(_rocksdb_dirs, directory) if directory is not None else []
                began_s = runtime.monotonic_s()
                await run_all(lambda path: run_blocking(_open_and_close, path), databases, in_flight_max=at_once)
                open_s = runtime.monotonic_s() - began_s if databases else 0.0
    return RestoreDrill(
        began_at_ms=began_at_ms,
        release=installed_release(),
        repository_id=repository.record.id,
        job=scope.job,
        task=scope.task,
        commit_number=commit.pointer.number,
        version=commit.record.version,
        pinned=lease.pinned,
        to_disk=directory is not None,
        kept_at=str(directory) if directory is not None and await run_blocking(directory.exists) else "",
        stores_at_once=at_once,
        stores_count=len(stores),
        files_count=sum(store.files_count for store in stores),
        size_bytes=sum(store.size_bytes for store in stores),
        largest_store_bytes=max((store.size_bytes for store in stores), default=0),
        find_s=find_s,
        restore_s=restore_s,
        open_s=open_s,
        measured=Measured(
            requests_count=drill.requests, bytes_fetched=drill.bytes_fetched, opened_count=len(databases)
        ),
        slo_ms=options.slo_ms,
    )


class _Drill(msgspec.Struct, kw_only=True):
    repository: OpenRepository
    # None: to nowhere.
    directory: Path | None
    progress: Progress
    # GETs of indexes and of blobs, and the bytes of these.
    requests: int = 0
    bytes_fetched: int = 0

    async def restore(self, reference: StoreReference) -> None:
        if self.directory is None:
            await self._restore_to_nowhere(reference)
            return
        target = target_below(self.directory, reference)
        result = await restore_store(self.repository, reference, target, progress=self.progress)
        self.requests += result.requests
        self.bytes_fetched += result.bytes_fetched

    async def _restore_to_nowhere(self, reference: StoreReference) -> None:
        """Read and hash all that a restore to an empty directory would fetch, by the same plan (design 0009, R4)."""
        store, settings = self.repository.store.tagged(_METADATA), self.repository.settings
        index, requests = await read_index_of(self.repository.store, reference)
        self.requests += requests
        plan = plan_restore(index, {}, range_bytes=settings.range_bytes, owners_count=False)
        budget = ByteBudget(settings.memory_bytes_max)

        async def fetch(job: _Job) -> None:
            ranged = job if isinstance(job, FetchedRun) else job[1]

            async def is_right(*, fresh: bool) -> bool:
                self.requests += 1
                self.bytes_fetched += ranged.size_bytes
                return await _is_right(store, job, fresh=fresh)

            async with budget.hold(2 * settings.chunk_bytes):
                await fetch_right(is_right, lambda why: DamagedError(why, operation=_OPERATION, subject=ranged.key))
            if isinstance(job, FetchedRun):
                self.progress.add(files=len(job.files), bytes_=sum(file.size_bytes for file in job.files))
            else:
                self.progress.add(bytes_=ranged.size_bytes)

        blobs = ((file, blob) for file in plan.streams for blob in file.entry.blobs)
        jobs: Iterator[_Job] = itertools.chain(plan.runs, blobs)
        await run_all(fetch, jobs, in_flight_max=settings.in_flight_max)
        in_index = (*plan.empty, *plan.inline)
        self.progress.add(files=len(in_index) + len(plan.streams), bytes_=sum(file.size_bytes for file in in_index))


async def _is_right(store: BlobStore, job: _Job, *, fresh: bool) -> bool:
    if isinstance(job, FetchedRun):
        files = PackReader(job, job.files)
        await store.read_into(job.key, files, start=job.start, size_bytes=job.size_bytes, fresh=fresh)
        return not files.wrong
    file, blob = job
    hasher = ContentHasher()
    sink, start = HashingSink(hasher), blob.blob_offset_bytes
    await store.read_into(blob.key, sink, start=start, size_bytes=blob.size_bytes, fresh=fresh)
    # The hash of a file's only blob is the file's.
    return hasher.blake3 == (blob.blake3 or file.entry.blake3)


def _rocksdb_dirs(directory: Path) -> list[Path]:
    return [
        Path(path)
        for path, _, names in os.walk(directory)
        if any(name.startswith("MANIFEST-") for name in names)
        and any(name == "CURRENT" or name.endswith(".sst") for name in names)
    ]


def _open_and_close(directory: Path) -> None:
    try:
        with StoreReader.open(directory, _OPENING):
            pass
    except NotFoundError as error:
        message = "has a MANIFEST and SSTs, and no CURRENT: RocksDB does not open it"
        hint = "it was backed up so: back up the whole directory, or a rocksdb_checkpoint of it"
        raise DamagedError(message, operation=_OPERATION, subject=str(directory), hint=hint) from error


# ---------------------------------------------------------------------- the fresh directory (design 0009, R2)


@asynccontextmanager
async def _scratch_directory(options: DrillOptions, commit: Commit, runtime: Runtime) -> AsyncIterator[Path | None]:
    """Make a directory with space for a commit, and remove it at the end unless all went well and it is kept."""
    if options.scratch is None:
        yield None
        return
    directory = await run_blocking(options.scratch.absolute) / f"{SCRATCH_PREFIX}{runtime.session()}"
    try:
        with target_errors(directory):
            await run_blocking(_make_with_space, directory, commit)
        yield directory
    except BaseException as error:
        if reason := await run_blocking(remove_scratch, directory):
            error.add_note(f"could not be removed: {directory}: {reason}")
        raise
    if not options.keep:
        await run_blocking(remove_scratch, directory)


def _make_with_space(directory: Path, commit: Commit) -> None:
    # Never made: where a disk is not mounted, what is measured would be the disk of the root.
    if not directory.parent.is_dir():
        hint = "see that its disk is mounted, or make it; or choose another one with --to"
        raise TargetError("there is no such directory", operation=_OPERATION, subject=str(directory.parent), hint=hint)
    directory.mkdir(mode=0o700)
    stores = commit.record.stores
    size_bytes, files_count = sum(s.size_bytes for s in stores), sum(s.files_count for s in stores)
    if lack := find_lack_of_space(directory, size_bytes, files_count):
        hint = "choose another disk with --to, or run the drill with --to-nowhere"
        raise TargetError(f"too little space: {lack}", operation=_OPERATION, subject=str(directory.parent), hint=hint)


def remove_scratch(directory: Path) -> str:
    """Remove as much of a directory as possible; return why the rest stays, empty if all is gone."""
    remove_tree(directory, ignore_errors=True)
    try:
        # Once more, of what is left: now the first error is reported.
        remove_tree(directory)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


# ---------------------------------------------------------------------- the history (H1 to H4)


class DrillHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the lines of a history in their order, and the errors of those that cannot be read."""

    entries: tuple[Entry, ...] = ()
    broken: tuple[FormatError, ...] = ()


class _Head(msgspec.Struct):
    schema: int = 0


_DECODER: Final[msgspec.json.Decoder[Entry]] = msgspec.json.Decoder(Entry)


def history_path(directory: Path) -> Path:
    """Return the file of the history in a directory; one that was begun under the earlier name keeps it."""
    earlier = directory / EARLIER_NAME
    return earlier if earlier.exists() else directory / HISTORY_NAME


def append(path: Path, entry: Entry) -> None:
    """Add a line durably; no other line changes.

    One write under a lock, so that two drills at a time do not mix; behind half a line, which a crash has left, a new
    one is begun.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode({"schema": SCHEMA, **msgspec.to_builtins(entry)}) + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(descriptor)


def read_history(path: Path) -> DrillHistory:
    """Read all lines; those that cannot be read are reported, and stay. An absent file has no lines."""
    entries: list[Entry] = []
    broken: list[FormatError] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return DrillHistory()
    with file:
        number = 0
        while line := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            try:
                entries.append(decode_line(line, f"{path}, line {number}"))
            except FormatError as error:
                broken.append(error)
            while line and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES_MAX)  # the rest of one that is too long
    return DrillHistory(entries=tuple(entries), broken=tuple(broken))


def decode_line(line: bytes, subject: str) -> Entry:
    """Decode one line of a history.

    Raises:
        UnknownFormatError: A newer tidemark wrote it.
        FormatError: It is not a restore drill.
    """
    if len(line) > LINE_BYTES_MAX:
        raise FormatError("exceeds 64 KiB", subject=subject, hint=_HINT)
    try:
        schema = msgspec.json.decode(line, type=_Head).schema
        if schema > SCHEMA:
            raise UnknownFormatError(f"is of schema {schema}", subject=subject, hint="read it with a newer tidemark")
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"is not a restore drill: {error}", subject=subject, hint=_HINT) from None


# ---------------------------------------------------------------------- the forecast (F1 to F5), and the result as text

SIZES: Final = (1, 2, 10)
EXECUTORS: Final = (1, 4, 16)


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast; both times are in seconds."""

    # Multiple of the bytes, files and requests of the drill, in the same stores.
    size: int
    executors: int
    # Each executor gets from the store what this machine got.
    best_s: float
    # All executors together get no more bytes per second from it than this machine got.
    worst_s: float


def forecast(
    drill: RestoreDrill, *, sizes: Sequence[int] = SIZES, executors: Sequence[int] = EXECUTORS
) -> tuple[Forecast, ...]:
    """Forecast restores of the same state, at multiples of its size and over several machines with a disk of their own.

    Returns:
        For each size, each number of executors. For 1 and 1 it is the measurement.
    """
    # A store is restored by one executor: none has less to do than the largest.
    largest = min(1.0, drill.largest_store_bytes / max(1, drill.size_bytes))

    def at(size: int, number: int) -> Forecast:
        share = size * max(1 / number, largest)
        opened_s = drill.find_s + share * drill.open_s
        best_s, worst_s = opened_s + share * drill.restore_s, opened_s + size * drill.restore_s
        return Forecast(size=size, executors=number, best_s=best_s, worst_s=worst_s)

    return tuple(at(size, number) for size in sizes for number in executors)


def format_slo(drill: RestoreDrill) -> str:
    """Return whether the drill met its SLO; empty if it had none."""
    if drill.slo_ms is None:
        return ""
    return f"SLO {human_duration(drill.slo_ms)}: {'MISSED' if drill.is_slow else 'met'}"


def summary_line(drill: RestoreDrill) -> str:
    """Format the drill as one line, for a log."""
    restored = f"restored {human_bytes(drill.size_bytes)} in {format_seconds(drill.total_s)}"
    return "; ".join(line for line in (restored, _headline(drill), format_slo(drill)) if line)


def summary_lines(drill: RestoreDrill) -> list[str]:
    """Format the drill with its phases and the forecast."""
    measured = drill.measured
    phases = [("find the commit", drill.find_s), ("restore", drill.restore_s)]
    if measured.opened_count:
        phases.append((f"open RocksDB ({measured.opened_count:,})", drill.open_s))
    phases.append(("total", drill.total_s))
    rows = [
        (
            f"{size}x, {human_bytes(size * drill.size_bytes)}",
            *(_format_range(found) for found in forecast(drill, sizes=(size,))),
        )
        for size in SIZES
    ]
    slo = format_slo(drill)
    return [
        _headline(drill),
        f"fetched {human_bytes(measured.bytes_fetched)} in {count(measured.requests_count, 'request')}",
        "",
        *table(("phase", "time"), [(name, format_seconds(s)) for name, s in phases], right=("time",)),
        *([slo] if slo else []),
        "",
        *table(("forecast", *(count(number, "executor") for number in EXECUTORS)), rows),
        "From a blob store that gives each executor what it gave this machine, to one that gives that to all together.",
    ]


def _headline(drill: RestoreDrill) -> str:
    what = f"{count(drill.stores_count, 'store')}, {human_bytes(drill.size_bytes)}"
    where = "to disk" if drill.to_disk else "to nowhere: read and hashed, nothing written or opened"
    files = count(drill.files_count, "file")
    return f"commit {drill.commit_number}, version {drill.version}: {what} in {files}, {where}"


def _format_range(found: Forecast) -> str:
    best, worst = format_seconds(found.best_s), format_seconds(found.worst_s)
    return best if best == worst else f"{best} to {worst}"
