"""Find every checkpoint below a prefix, and what each is, by one listing and a few of its logs (design 0005, W1 to W4).

Nothing is written, and no query notices: each may go on meanwhile.
"""

import os
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from blobstore.base import BlobStore, is_component
from blobstore.checkpoint_files import FileStatus
from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import AccessDeniedError
from blobstore.opening import StoreSettings
from engine.errors import NotFoundError
from engine.runtime import NO_PROGRESS, Progress, Runtime
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.query import StreamingCheckpoint, provider_of
from engine.state.settings import HDFS_PROVIDER, ROCKSDB_PROVIDER
from index.spark.checkpoint import COMMITS, OFFSETS, STATE
from index.spark.query_logs import parse_batch_name
from index.spark.requests import DAYS_PER_MONTH, GB, Prices, log_times, measure_requests
from index.spark.waste import WasteReason, find_waste
from tidemark.errors import TidemarkError

_PRICES: Final = Prices()
_AT_ONCE: Final = 8
# A shorter time between two commits says nothing of a month.
_WINDOW_MS_MIN: Final = 60_000
_MS: Final = 1_000_000
_PROVIDERS: Final = {ROCKSDB_PROVIDER: "RocksDB", HDFS_PROVIDER: "HDFS-backed"}


class SurveyedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the listing and the logs of one checkpoint say."""

    # From the place that was asked for; "." for that itself.
    path: str
    # Empty where `metadata` cannot be read.
    query_id: str = ""
    # The newest committed batch; -1 before the first. With its age by the blob store's clock; -1 where that is unknown.
    batch: int = -1
    age_ms: int = -1
    # `RocksDB`, `HDFS-backed`, or the class of another one; empty where the offsets of the batch cannot be read.
    provider: str = ""
    # 2 with unique ids, else 1; 0 where the commit cannot be read.
    format_version: int = 0
    files: int = 0
    size_bytes: int = 0
    # Of these, in `state/`.
    state_bytes: int = 0
    # What certainly nobody needs, by reason; there may be more.
    waste_bytes: Mapping[WasteReason, int] = {}
    # By the list prices of `Prices`; None where the listing does not say how often the query writes.
    requests_usd_per_month: float | None = None
    stored_usd_per_month: float = 0.0
    # What an operator should look at.
    findings: tuple[str, ...] = ()


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Every checkpoint below a place, by path."""

    location: str
    checkpoints: tuple[SurveyedCheckpoint, ...]
    # All that was listed, also outside of checkpoints.
    files: int
    size_bytes: int


async def survey_checkpoints(
    location: str | Path | BlobStore, *, store_settings: StoreSettings | None = None, progress: Progress = NO_PROGRESS
) -> Survey:
    """Survey all checkpoints at a place and below it.

    A directory of this machine that may not be listed is a finding of the checkpoint that it is in; of one that is in
    none, nothing else is known, and it is shown as a checkpoint.

    Costs one LIST for each 1,000 files, and four GETs for each checkpoint, five where there is waste. About 300 bytes
    of memory for each file.

    Raises:
        NotFoundError: There is nothing at this place.
        StoreError: The blob store did not answer the listing. What then fails for one checkpoint is a finding of it.
    """
    now_ms = Runtime().local_now_ms()
    async with opened_checkpoint(location, store_settings) as root:
        files, closed = await _list_all(root)
        if not files and not closed:
            hint = "name a directory, or s3://bucket/prefix, below which there are checkpoints"
            raise NotFoundError("there is nothing here", operation="survey", subject=root.location, hint=hint)
        found = group_checkpoints(files)
        progress.total(files=len(found), bytes_=0)

        closed_in: dict[str | None, list[str]] = {}
        for of in closed:
            closed_in.setdefault(_find_root(of, found), []).append(of)

        async def one(path: str) -> SurveyedCheckpoint:
            surveyed = await _survey(root.child(path) if path else root, path or ".", found[path], now_ms)
            progress.add(files=1)
            notes = [f"{of.removeprefix(f'{path}/')} {closed[of]}" for of in closed_in.get(path, ())]
            return msgspec.structs.replace(surveyed, findings=(*surveyed.findings, *notes))

        surveyed = await map_bounded(one, sorted(found), in_flight_max=_AT_ONCE)
        surveyed += [SurveyedCheckpoint(path=of, findings=(closed[of],)) for of in closed_in.get(None, ())]
        surveyed.sort(key=lambda each: each.path)
    return Survey(
        location=root.location,
        checkpoints=tuple(surveyed),
        files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
    )


def group_checkpoints(files: Sequence[FileStatus]) -> dict[str, list[FileStatus]]:
    """Return the files of each checkpoint by its path, each file with its path in it (W1).

    A checkpoint is a directory with a batch in `offsets/` or `commits/`. One inside of another has its own files.
    """
    roots = {root for file in files if (root := _root_of(file.path)) is not None}
    grouped: dict[str, list[FileStatus]] = {}
    for file in files:
        root = _find_root(file.path, roots)
        if root is not None:
            path = file.path.removeprefix(f"{root}/" if root else "")
            grouped.setdefault(root, []).append(msgspec.structs.replace(file, path=path))
    return grouped


async def _list_all(root: CheckpointDir) -> tuple[Sequence[FileStatus], Mapping[str, str]]:
    """List all files; and what of a directory of this machine cannot be listed, with the reason."""
    try:
        return await root.walk(), {}
    except AccessDeniedError:
        if root.local_root is None:
            raise
        files, closed = await run_blocking(_list_allowed, root.local_root)
        if "." in closed:
            raise
        return files, closed


def _list_allowed(root: Path) -> tuple[list[FileStatus], dict[str, str]]:
    files, errors = list[FileStatus](), list[OSError]()
    for directory, below, names in os.walk(root, onerror=errors.append):
        below[:] = filter(is_component, below)
        for name in filter(is_component, names):
            try:
                found = os.lstat(f"{directory}/{name}")
            except OSError as error:
                errors.append(error)
                continue
            if stat.S_ISREG(found.st_mode):
                path, at_ns = os.path.relpath(f"{directory}/{name}", root), max(found.st_mtime_ns, found.st_ctime_ns)
                of = FileStatus(path=path, is_directory=False, size_bytes=found.st_size, modified_at_ms=at_ns // _MS)
                files.append(of)
    # What is gone by now was not there.
    left = [error for error in errors if not isinstance(error, FileNotFoundError)]
    return files, {os.path.relpath(error.filename, root): f"cannot be listed: {error.strerror}" for error in left}


def _root_of(path: str) -> str | None:
    parts = path.split("/")
    is_log = len(parts) > 1 and parts[-2] in {OFFSETS, COMMITS} and parse_batch_name(parts[-1]) is not None
    return "/".join(parts[:-2]) if is_log else None


def _above(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[:length]) for length in reversed(range(len(parts))))


def _find_root(path: str, roots: Container[str]) -> str | None:
    return next((above for above in _above(path) if above in roots), None)


async def _survey(root: CheckpointDir, path: str, files: Sequence[FileStatus], now_ms: int) -> SurveyedCheckpoint:
    committed, planned = log_times(files, COMMITS), log_times(files, OFFSETS)
    batch = max(committed, default=-1)
    checkpoint, findings = StreamingCheckpoint(root), list[str]()
    size_bytes = sum(file.size_bytes for file in files)
    surveyed = SurveyedCheckpoint(
        path=path,
        batch=batch,
        age_ms=max(0, now_ms - committed[batch]) if committed else -1,
        files=len(files),
        size_bytes=size_bytes,
        state_bytes=sum(file.size_bytes for file in files if file.path.startswith(f"{STATE}/")),
        stored_usd_per_month=size_bytes / GB * _PRICES.usd_per_gb_month,
    )
    if not committed:
        findings.append("no batch is committed")
    elif max(planned, default=-1) > batch:
        findings.append(f"batch {max(planned)} is planned and not committed")
    with _noting(findings):
        try:
            surveyed = msgspec.structs.replace(surveyed, query_id=await checkpoint.query_id())
        except NotFoundError:
            findings.append("metadata is missing: Spark starts no query here, or gives it a new id")
    if committed:
        with _noting(findings):
            surveyed = await _with_logs(surveyed, checkpoint, files, min(committed))
    if root.local_root is not None:
        links = await run_blocking(_links_in, root.local_root)
        findings += [f"{link} is a symbolic link: what it leads to is not counted" for link in links]
    return msgspec.structs.replace(surveyed, findings=tuple(findings))


def _links_in(root: Path) -> list[Path]:
    """List the links where a checkpoint has directories, down to those of partitions: no listing follows them."""
    found = [path for pattern in ("*", f"{STATE}/*", f"{STATE}/*/*") for path in sorted(root.glob(pattern))]
    return [path.relative_to(root) for path in found if path.is_symlink()]


@contextmanager
def _noting(findings: list[str]) -> Iterator[None]:
    """Note what a block raises of one checkpoint: it ends no survey (W1)."""
    try:
        yield
    except TidemarkError as error:
        findings.append(str(error))


async def _with_logs(
    surveyed: SurveyedCheckpoint, checkpoint: StreamingCheckpoint, files: Sequence[FileStatus], oldest: int
) -> SurveyedCheckpoint:
    """Add what the logs of the newest committed batch say, and how often the query commits since the oldest one."""
    batch = surveyed.batch
    read = {number: await checkpoint.offsets.get(number) for number in {oldest, batch}}
    commit, offsets = await checkpoint.commits.get(batch), read[batch]
    logged = {number: entry.timestamp_ms for number, entry in read.items() if entry is not None and entry.timestamp_ms}
    rate, requests_usd = measure_requests(files, logged_at_ms=logged), None
    if rate is not None and rate.window_ms >= _WINDOW_MS_MIN:
        requests_usd = rate.requests_usd_per_day(_PRICES) * DAYS_PER_MONTH
    found = find_waste(files, batch, commit) if commit is not None else ()
    if found and await checkpoint.commits.get(batch + 1) is not None:
        found = ()  # the query went on while it was listed, and this may be of a later batch
    waste = dict[WasteReason, int]()
    for each in found:
        waste[each.reason] = waste.get(each.reason, 0) + each.size_bytes
    return msgspec.structs.replace(
        surveyed,
        provider="" if offsets is None else _PROVIDERS.get(provider_of(offsets), provider_of(offsets)),
        format_version=0 if commit is None else 1 if commit.unique_ids is None else 2,
        waste_bytes=waste,
        requests_usd_per_month=requests_usd,
    )
