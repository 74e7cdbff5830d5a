"""Backing up one directory, or a part of it: what changed since a base is uploaded, and an index is written.

First it is found out what the base has, what is on the disk, and what to upload (`gather_facts`); nothing is sent until
then. Nothing is visible until a commit names the index; everything uploaded carries a TTL until then (design 0002, C5).
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.concurrency import run_blocking
from engine.backup.source import BackupSource, WholeDirectory
from engine.backup.upload import Uploader, UploadSession
from engine.clock import Runtime
from engine.errors import DamagedError, UsageError
from engine.local.cache import DigestCache
from engine.local.identify import identify, identify_ssts
from engine.local.scan import all_files, file_system_now_ns
from engine.local.transfer import SourceDir
from engine.progress import NO_PROGRESS, Progress
from engine.records.indexes import IndexCache, StoredSnapshot, read_stored_snapshot, write_index
from engine.records.missing import find_missing, key_of
from engine.settings import TransferSettings
from index.display import DisplayMixin, format_files, format_seconds
from index.errors import FormatError
from index.plan.backup import BackupLimits, BackupPlan, build_snapshot, plan_backup
from index.snapshot.contents import blob_keys
from index.snapshot.dir_diff import DirDiff, LocalDir, diff_dir
from index.snapshot.invariants import check_snapshot_index
from index.snapshot.model import (
    BlobKey,
    DirIndex,
    FilePath,
    IndexReference,
    LineageItem,
    Scope,
    SnapshotIndex,
    SnapshotMetadata,
    SstIdentity,
    UniqueId,
)
from index.snapshot.records import RepositoryRecord, StoreReference
from index.spark.names import parse_state_name
from index.text import human_bytes, printable

# An index carries this many of its ancestors. Whoever needs more reads the oldest of them.
LINEAGE_KEPT_MAX: Final = 100


class BackupStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup did. Retained files count as such even where their pack was packed again."""

    files_total: int
    bytes_total: int
    files_added: int
    bytes_added: int
    files_retained: int
    bytes_retained: int
    files_removed: int
    bytes_removed: int
    files_repacked: int
    bytes_repacked: int
    files_inline: int
    # Packs are among the blobs.
    packs: int
    blobs: int
    bytes_uploaded: int
    index_bytes: int
    # Requests that it took if no answer was lost on the way.
    requests: int
    seconds: float
    # Retained files that were sent again because bytes of them were missing in the store (design 0006, M1). They count
    # as packed again too, unless the base's index was missing: then all files are added anew, and all count here.
    files_healed: int = 0
    bytes_healed: int = 0
    sub_dirs_added: int = 0
    sub_dirs_retained: int = 0
    sub_dirs_removed: int = 0
    # Of `seconds`, what it took to look at the directory and to find out what has changed.
    diff_seconds: float = 0.0


class BackupResult(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a commit needs to know of a backup; it can be sent to the process that commits."""

    scope: Scope
    # Without a number: the commit gives it one.
    reference: StoreReference
    # The index that it was diffed against; a commit on another parent refuses the result (design 0002, C2).
    base: IndexReference | None
    # When the store created the oldest upload: the lease begins there (C5).
    oldest_birth_ms: int
    # Everything that carries a TTL: blobs, then the index.
    new_keys: tuple[BlobKey, ...]
    stats: BackupStats
    # What the base needs, is missing, and is not needed any more: the commit does not stumble over it.
    missing_keys: tuple[str, ...] = ()

    @override
    def figures(self) -> dict[str, str]:
        """What was backed up, and what of it was new."""
        reference, stats = self.reference, self.stats
        told = {
            "of": printable(str(self.scope)),
            "store": printable(f"{reference.task}/{reference.store}"),
            "version": f"{reference.version:,}",
            "files": format_files(stats.files_total, stats.bytes_total),
            "added": format_files(stats.files_added, stats.bytes_added),
            "retained": format_files(stats.files_retained, stats.bytes_retained),
            "uploaded": human_bytes(stats.bytes_uploaded),
            "removed": format_files(stats.files_removed, stats.bytes_removed),
            "packed again": format_files(stats.files_repacked, stats.bytes_repacked) if stats.files_repacked else "",
            "healed": format_files(stats.files_healed, stats.bytes_healed) if stats.files_healed else "",
            "unique id": printable(reference.unique_id),
            "requests": f"{stats.requests:,}",
            "time": format_seconds(stats.seconds),
        }
        return {name: text for name, text in told.items() if text}


async def backup_source(
    store: BlobStore,
    *,
    scope: Scope,
    task: str,
    store_name: str,
    source: BackupSource,
    version: int,
    unique_id: UniqueId | None,
    base: StoreReference | None,
    repository: RepositoryRecord,
    settings: TransferSettings,
    runtime: Runtime,
    cache: DigestCache,
    progress: Progress = NO_PROGRESS,
    indexes: IndexCache | None = None,
    lineage: Sequence[LineageItem] | Callable[[], Sequence[LineageItem]] | None = None,
    missing: frozenset[str] = frozenset(),
    check_retained: bool = False,
) -> BackupResult:
    """Upload what a source has and its base has not, and write the index of all of it.

    Requests: one GET for the base's index (none if `indexes` has it, one more per delta that it is told by), one PUT
    per pack and blob, one PUT for the index; with `check_retained` a STAT for each blob retained, and for each index
    that would have been read if this process did not have it.

    Args:
        store: Where to.
        scope: The job or task that will commit it.
        task: Whose state it is.
        store_name: Which of the task's stores.
        source: What is backed up.
        version: The caller's version of this state; greater than the last of the lineage.
        unique_id: A label of this attempt at the version, for people and for Spark; a random one if not given.
        base: The snapshot to diff against; None uploads everything.
        repository: Tells the TTL of uploads.
        settings: Limits and sizes.
        runtime: Clock and randomness.
        cache: Hashes of local files that are known already (I1).
        progress: Told what there is to do and what is done.
        indexes: Indexes that this process knows already.
        lineage: What this version grew from, oldest first: Spark's lineage of a state store's version. If not given,
            the base and what that grew from; of a state store's directory, nothing (design 0001, M13). A function is
            asked once the source was looked at.
        missing: Blobs and indexes known to be missing: what has bytes in them is uploaded again (design 0006, M1).
        check_retained: Whether to look for such blobs.

    Returns:
        What to commit.

    Raises:
        UnsafeSourceError: The source is in use, changed meanwhile, or has entries that cannot be kept (I3).
        UsageError: Version, lineage, task or store name cannot be written down.
        DamagedError: The base's index is missing or altered, and `missing` does not say so.
        StoreError: As the store says. What was uploaded until then expires.
        EngineError, FormatError: As the source says.
    """
    begun_s = runtime.monotonic_s()
    session = runtime.session()
    unique_id = unique_id or runtime.unique_id()
    facts = await gather_facts(
        store,
        source=source,
        base=base,
        settings=settings,
        cache=cache,
        indexes=indexes,
        missing=missing,
        check_retained=check_retained,
    )
    looked_s = runtime.monotonic_s()
    metadata = SnapshotMetadata(
        job=scope.job,
        task=task,
        store=store_name,
        version=version,
        unique_id=unique_id,
        base=LineageItem(base.version, base.unique_id) if base is not None else None,
        lineage=_lineage(facts) if lineage is None else tuple(lineage() if callable(lineage) else lineage),
        created_at_ms=runtime.local_now_ms(),
    )
    _check_metadata(metadata, session)
    with SourceDir(source.directory) as opened:
        uploader = Uploader(
            store,
            UploadSession(scope=scope, task=task, store_name=store_name, session=session, ttl_ms=repository.ttl_ms),
            opened,
            settings=settings,
            ssts=facts.compared.ssts,
            cache=cache,
            looked_at_ns=facts.compared.looked_at_ns,
            progress=progress,
        )
        uploaded = await uploader.upload(facts.plan)
    await source.check_held_still()
    index = await run_blocking(
        build_snapshot,
        facts.plan,
        metadata=metadata,
        session=session,
        uploaded=uploaded.files,
        packs=uploaded.packs,
    )
    snapshot, created = await write_index(store, index, scope=scope, ttl_ms=repository.ttl_ms, base=facts.base)
    if indexes is not None:
        indexes.keep(snapshot)
    reference = snapshot.chain[0]
    births_ms = [created.created_at_ms]
    if uploaded.oldest_birth_ms is not None:
        births_ms.append(uploaded.oldest_birth_ms)
    changes = facts.plan.changes
    return BackupResult(
        scope=scope,
        reference=StoreReference(
            task=task,
            store=store_name,
            version=version,
            unique_id=unique_id,
            index=reference,
            number=0,
            files_count=changes.files_added + changes.files_retained,
            size_bytes=changes.bytes_added + changes.bytes_retained,
        ),
        base=base.index if base is not None else None,
        oldest_birth_ms=min(births_ms),
        new_keys=(*uploaded.keys, reference.key),
        stats=_stats(facts, reference.size_bytes, runtime.monotonic_s() - begun_s, diff_seconds=looked_s - begun_s),
        missing_keys=tuple(sorted(facts.missing)),
    )


async def plan_backup_dir(
    store: BlobStore,
    *,
    directory: Path,
    base: StoreReference | None,
    settings: TransferSettings,
    cache: DigestCache,
    missing: frozenset[str] = frozenset(),
    check_retained: bool = False,
) -> BackupPlan:
    """What `backup_source` would do with a directory; nothing is written. Errors likewise."""
    facts = await gather_facts(
        store,
        source=WholeDirectory(directory),
        base=base,
        settings=settings,
        cache=cache,
        indexes=None,
        missing=missing,
        check_retained=check_retained,
    )
    return facts.plan


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was gathered before anything was sent."""

    # As scanned; identity facts stand in the plan.
    scanned: LocalDir
    base: StoredSnapshot | None
    # GETs that the base took.
    requests: int
    compared: "_Compared"
    # What of the base is missing; with its index, everything.
    missing: frozenset[str]

    @property
    def plan(self) -> BackupPlan:
        """What is going to be done."""
        return self.compared.plan


class _Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A source beside its base."""

    local: LocalDir
    previous: SnapshotIndex | None
    diff: DirDiff
    limits: BackupLimits
    plan: BackupPlan
    ssts: dict[FilePath, SstIdentity]
    # By the clock of the source's file system, after the scan.
    looked_at_ns: int

    def without(self, missing: Collection[str]) -> "_Compared":
        """The same where so much of the base is missing; the files need not be looked at again."""
        plan = plan_backup(self.local, self.previous, self.diff, self.limits, missing)
        return msgspec.structs.replace(self, plan=plan)


async def gather_facts(
    store: BlobStore,
    *,
    source: BackupSource,
    base: StoreReference | None,
    settings: TransferSettings,
    cache: DigestCache,
    indexes: IndexCache | None,
    missing: frozenset[str],
    check_retained: bool,
) -> Facts:
    """Look at everything; arguments and errors as `engine.backup.backup.backup_source`."""
    found = _Base() if base is None else await _find_base(store, base, indexes, missing, check_retained=check_retained)
    previous = found.snapshot.index if found.snapshot is not None else None
    requests = found.requests

    async def compare(scanned: LocalDir) -> _Compared:
        stop = threading.Event()
        try:
            compared = await asyncio.to_thread(
                _compare,
                source.directory,
                scanned,
                previous,
                settings=settings,
                cache=cache,
                stop=stop,
            )
        finally:
            # The thread of a cancelled backup stops at its next megabyte, and holds nothing that anybody waits for.
            stop.set()
        return compared.without(missing) if missing else compared

    scanned = await source.look(previous)
    compared = await compare(scanned)
    if check_retained:
        retained = compared.plan.blobs_retained
        requests += len(retained)
        missing |= await find_missing(store, retained)
        compared = compared.without(missing)
    anew = await source.prepare(tuple(compared.plan.files))
    if anew is not None:
        scanned = anew
        compared = await compare(scanned)
    of_base = blob_keys(previous) if missing and previous is not None else frozenset[BlobKey]()
    return Facts(
        scanned=scanned,
        base=found.snapshot,
        requests=requests,
        compared=compared,
        missing=found.missing | (missing & of_base),
    )


class _Base(msgspec.Struct, frozen=True, kw_only=True):
    """What is there of the snapshot that a backup is diffed against."""

    # None: it has none, or cannot be read.
    snapshot: StoredSnapshot | None = None
    requests: int = 0
    # Its index, and what that is a delta on, where they are missing.
    missing: frozenset[str] = frozenset()


async def _find_base(
    store: BlobStore,
    base: StoreReference,
    indexes: IndexCache | None,
    missing: frozenset[str],
    *,
    check_retained: bool,
) -> _Base:
    """Read the base's index; one that is known to be missing is no error, and everything is uploaded anew (M1)."""
    known = indexes.find(base.index) if indexes is not None else None
    requests = 0
    if known is not None and check_retained:
        requests = len(known.chain)
        missing |= await find_missing(store, {index.key: index.size_bytes for index in known.chain})
    if known is not None and not missing.isdisjoint(index.key for index in known.chain):
        # Read once more: an index that is not there must not become the base of another, whoever remembers it.
        known = None
    try:
        snapshot = known or await read_stored_snapshot(store, base.index)
    except DamagedError as error:
        key = key_of(error)
        if key not in missing:
            raise
        return _Base(requests=requests + 1, missing=frozenset({key, base.index.key}))
    if snapshot.index.metadata.unique_id != base.unique_id:
        raise DamagedError(
            f"is of {snapshot.index.metadata.unique_id}, not of {base.unique_id}",
            operation="backup",
            subject=base.index.key,
        )
    return _Base(snapshot=snapshot, requests=requests + (len(snapshot.chain) if known is None else 0))


def _compare(
    directory: Path,
    scanned: LocalDir,
    previous: SnapshotIndex | None,
    *,
    settings: TransferSettings,
    cache: DigestCache,
    stop: threading.Event,
) -> _Compared:
    """Everything that has to be read of the directory before it is known what to upload, in one hop to a thread."""
    remote = previous.dir if previous is not None else DirIndex("")
    looked_at_ns = file_system_now_ns(directory, scanned)
    local = identify(directory, scanned, remote, cache, looked_at_ns=looked_at_ns, stop=stop)
    limits = BackupLimits(
        blob_bytes_max=settings.blob_bytes_max,
        pack_file_bytes_max=settings.pack_file_bytes_max,
        pack_bytes_max=settings.pack_bytes_max,
        inline_file_bytes_max=settings.inline_file_bytes_max,
        inline_bytes_max=settings.inline_bytes_max,
    )
    diff = diff_dir(local, remote)
    plan = plan_backup(local, previous, diff, limits)
    cache.trim(all_files(scanned))
    # Small files are read as a whole when they are sent, and tell then.
    added = [(item.file.path, item.file.file) for item in plan.blobs if item.file.expected is None]
    ssts = identify_ssts(directory, added, cache, looked_at_ns=looked_at_ns, stop=stop)
    return _Compared(
        local=local, previous=previous, diff=diff, limits=limits, plan=plan, ssts=ssts, looked_at_ns=looked_at_ns
    )


def _lineage(facts: Facts) -> tuple[LineageItem, ...]:
    """What this version grew from, as far as we can tell.

    Of a state store's directory we cannot: what was backed up before may be of an attempt that lost, or of a version
    that the query was taken back from, and whoever resolves the state by it would replay a changelog on another state
    than its own (design 0004, R2).
    """
    if facts.base is None or any(parse_state_name(file.name) is not None for file in facts.scanned.files):
        return ()
    metadata = facts.base.index.metadata
    return (*metadata.lineage, LineageItem(metadata.version, metadata.unique_id))[-LINEAGE_KEPT_MAX:]


def _check_metadata(metadata: SnapshotMetadata, session: str) -> None:
    """Refuse before the first upload what could not be written down after the last one."""
    try:
        check_snapshot_index(SnapshotIndex(metadata=metadata, session=session, dir=DirIndex("")))
    except FormatError as error:
        raise UsageError(
            f"cannot be written down: {error}",
            operation="backup",
            subject=f"{metadata.job}/{metadata.task}/{metadata.store} version {metadata.version}",
            hint="versions grow along a lineage; names are not empty and not too long",
        ) from error


def _stats(facts: Facts, index_bytes: int, seconds: float, *, diff_seconds: float) -> BackupStats:
    plan, changes = facts.plan, facts.plan.changes
    base_is_gone = facts.base is None and bool(facts.missing)
    return BackupStats(
        files_total=changes.files_added + changes.files_retained,
        bytes_total=changes.bytes_added + changes.bytes_retained,
        files_added=changes.files_added,
        bytes_added=changes.bytes_added,
        files_retained=changes.files_retained,
        bytes_retained=changes.bytes_retained,
        files_removed=changes.files_removed,
        bytes_removed=changes.bytes_removed,
        files_repacked=plan.files_repacked,
        bytes_repacked=plan.bytes_repacked,
        files_inline=len(plan.inline),
        packs=len(plan.packs),
        blobs=plan.uploads_count,
        bytes_uploaded=plan.upload_bytes,
        index_bytes=index_bytes,
        requests=facts.requests + plan.uploads_count + 1,
        seconds=seconds,
        files_healed=changes.files_added if base_is_gone else plan.files_healed,
        bytes_healed=changes.bytes_added if base_is_gone else plan.bytes_healed,
        sub_dirs_added=changes.sub_dirs_added,
        sub_dirs_retained=changes.sub_dirs_retained,
        sub_dirs_removed=changes.sub_dirs_removed,
        diff_seconds=diff_seconds,
    )
