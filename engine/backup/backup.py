"""Back up one directory, or a part of it: upload what changed since a base, and write an index.

`gather_facts` finds out what the base has, what is on the disk, and what to upload; nothing is sent until then. Nothing
is visible until a commit names the index; everything uploaded carries a TTL until then (design 0002, C5).
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from typing_extensions import override

from blobstore.base import Created
from blobstore.concurrency import run_blocking
from engine.backup.source import BackupSource, WholeDirectory
from engine.backup.upload import Uploaded, Uploader, UploadSession
from engine.clock import Runtime, Stopwatch
from engine.errors import DamagedError, UsageError
from engine.local.cache import DigestCache
from engine.local.identify import identify, identify_ssts
from engine.local.scan import all_files, file_system_now_ns
from engine.local.transfer import SourceDir
from engine.progress import NO_PROGRESS, Progress
from engine.records.indexes import IndexCache, StoredSnapshot, check_is_of, read_stored_snapshot, write_index
from engine.records.missing import find_missing, key_of
from engine.records.repository import OpenRepository, StoreAddress
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
from index.snapshot.records import StoreReference
from index.spark.names import parse_state_name
from index.text import human_bytes, printable

LATEST: Final = "latest"
# An index carries this many of its ancestors; who needs more reads the oldest of them.
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
    # as packed again too, unless the base's index was missing: then all files are added again, and all count here.
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
        """Return what was backed up, and what of it was new."""
        reference, stats = self.reference, self.stats
        texts = {
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
        return {name: text for name, text in texts.items() if text}


class BackupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one backup is made."""

    # The caller's version of this state, greater than the last of the lineage; None: the base's plus one.
    version: int | None = None
    # A label of this attempt at the version, for people and for Spark; None: a random one.
    unique_id: UniqueId | None = None
    # What to diff against: by default the newest commit's snapshot of the store. None uploads everything.
    base: StoreReference | Literal["latest"] | None = LATEST
    # The versions that this one grew from, oldest first: Spark's lineage of a state store's version (design 0004, R6).
    # None: the source's; else the base and what that grew from; of a state store's directory, nothing (0001, M13).
    lineage: Sequence[LineageItem] | None = None
    # Blobs that are known to be missing, besides those that the repository has met: files with bytes in them are
    # uploaded again, as are all if the base's index is missing (design 0006, M1).
    missing: Collection[str] = ()
    # Look for such blobs: a STAT for each that is retained.
    check_retained: bool = False
    # How bytes are moved, in place of the repository's own settings.
    settings: TransferSettings | None = None


async def backup_source(
    repository: OpenRepository,
    source: BackupSource,
    address: StoreAddress,
    base: StoreReference | None,
    options: BackupOptions,
    *,
    progress: Progress = NO_PROGRESS,
) -> BackupResult:
    """Upload what a source has and its base has not, and write the index of all of it.

    Requests: one GET for the base's index (none if the repository remembers it, one more per delta that leads to it),
    one PUT per pack and blob, one PUT for the index; with `check_retained` a STAT for each blob retained, and for each
    index that would have been read if this process did not have it.

    Args:
        repository: Where to.
        source: What is backed up.
        address: Whose state it is.
        base: The snapshot to diff against; None uploads everything. That of the options is not asked.
        options: Everything else.
        progress: Receives what there is to do and what is done.

    Returns:
        What to commit.

    Raises:
        UnsafeSourceError: The source is in use, changed meanwhile, or has entries that cannot be kept (I3).
        UsageError: Version, lineage, task or store name cannot be written down.
        DamagedError: The base's index is missing or altered, and was not known to be.
        StoreError: As the store says. What was uploaded until then expires.
        EngineError, FormatError: As the source says.
    """
    watch = Stopwatch(repository.runtime)
    session = UploadSession(
        scope=address.scope,
        task=address.task,
        store_name=address.store,
        session=repository.runtime.session(),
        ttl_ms=repository.record.ttl_ms,
        settings=options.settings or repository.settings,
    )
    async with _digests_of(repository, source) as cache:
        facts = await gather_facts(repository, source, base, options, cache)
        watch.end_phase("diff")
        metadata = _describe(facts, source, address, options, repository.runtime)
        _check_metadata(metadata, session.session)
        with SourceDir(source.directory) as opened:
            uploader = Uploader(
                repository.store,
                session,
                opened,
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
        session=session.session,
        uploaded=uploaded.files,
        packs=uploaded.packs,
    )
    snapshot, created = await write_index(
        repository.store, index, scope=address.scope, ttl_ms=session.ttl_ms, base=facts.base
    )
    repository.indexes.keep(snapshot)
    return _summarise(facts, address, index, snapshot.chain[0], uploaded=uploaded, created=created, watch=watch)


async def plan_backup_dir(
    repository: OpenRepository, directory: Path, base: StoreReference | None, options: BackupOptions
) -> BackupPlan:
    """Plan what `backup_source` would do with a directory; nothing is written. Errors likewise."""
    source = WholeDirectory(directory)
    # What is remembered of a base may hide that it is gone.
    asked = msgspec.structs.replace(repository, indexes=IndexCache())
    async with _digests_of(repository, source) as cache:
        return (await gather_facts(asked, source, base, options, cache)).plan


@contextlib.asynccontextmanager
async def _digests_of(repository: OpenRepository, source: BackupSource) -> AsyncIterator[DigestCache]:
    """Yield the known hashes of a source's files; nothing is kept of a directory that will be gone."""
    if source.is_lasting:
        async with repository.digests.of(source.directory) as cache:
            yield cache
    else:
        yield DigestCache()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was gathered before anything was sent."""

    # As scanned; the plan has the identity facts.
    scanned: LocalDir
    base: StoredSnapshot | None
    # That was to be the base; `base` is None too where it is missing.
    reference: StoreReference | None
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
        """Return the same with so much of the base missing; the files need not be looked at again."""
        plan = plan_backup(self.local, self.previous, self.diff, self.limits, missing)
        return msgspec.structs.replace(self, plan=plan)


async def gather_facts(
    repository: OpenRepository,
    source: BackupSource,
    base: StoreReference | None,
    options: BackupOptions,
    cache: DigestCache,
) -> Facts:
    """Look at everything; arguments and errors as `backup_source`."""
    missing = repository.missing_blobs.keys.union(options.missing)
    found = _Base()
    if base is not None:
        found = await _find_base(repository, base, missing, check_retained=options.check_retained)
    previous = found.snapshot.index if found.snapshot is not None else None
    requests = found.requests
    settings = options.settings or repository.settings

    async def compare(scanned: LocalDir) -> _Compared:
        stop = threading.Event()
        try:
            compared = await asyncio.to_thread(
                _compare, source.directory, scanned, previous, settings=settings, cache=cache, stop=stop
            )
        finally:
            # The thread of a cancelled backup stops at its next megabyte, and holds nothing that anybody waits for.
            stop.set()
        return compared.without(missing) if missing else compared

    scanned = await source.look(previous)
    compared = await compare(scanned)
    if options.check_retained:
        retained = compared.plan.blobs_retained
        requests += len(retained)
        missing |= await find_missing(repository.store, retained)
        compared = compared.without(missing)
    brought = await source.prepare(tuple(compared.plan.files))
    if brought is not None:
        scanned = brought
        compared = await compare(scanned)
    of_base = blob_keys(previous) if missing and previous is not None else frozenset[BlobKey]()
    return Facts(
        scanned=scanned,
        base=found.snapshot,
        reference=base,
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
    repository: OpenRepository, base: StoreReference, missing: frozenset[str], *, check_retained: bool
) -> _Base:
    """Read the base's index; it is not an error if that is known to be missing: everything is uploaded again (M1)."""
    known = repository.indexes.find(base.index)
    requests = 0
    if known is not None and check_retained:
        requests = len(known.chain)
        missing |= await find_missing(repository.store, {index.key: index.size_bytes for index in known.chain})
    if known is not None and not missing.isdisjoint(index.key for index in known.chain):
        # Read once more: an index that is not there must not become the base of another, whatever is remembered.
        known = None
    try:
        snapshot = known or await read_stored_snapshot(repository.store, base.index)
    except DamagedError as error:
        key = key_of(error)
        if key not in missing:
            raise
        return _Base(requests=requests + 1, missing=frozenset({key, base.index.key}))
    check_is_of(snapshot.index, base, operation="backup")
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
    """Read of the directory all that decides what to upload, in one hop to a thread."""
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
    # Small files are read as a whole when they are sent, and identified then.
    added = [(item.file.path, item.file.file) for item in plan.blobs if item.file.expected is None]
    ssts = identify_ssts(directory, added, cache, looked_at_ns=looked_at_ns, stop=stop)
    return _Compared(
        local=local, previous=previous, diff=diff, limits=limits, plan=plan, ssts=ssts, looked_at_ns=looked_at_ns
    )


def _describe(
    facts: Facts, source: BackupSource, address: StoreAddress, options: BackupOptions, runtime: Runtime
) -> SnapshotMetadata:
    base = facts.reference
    given = options.lineage if options.lineage is not None else source.lineage
    return SnapshotMetadata(
        job=address.scope.job,
        task=address.task,
        store=address.store,
        version=options.version if options.version is not None else (base.version + 1 if base else 1),
        unique_id=options.unique_id or runtime.unique_id(),
        base=LineageItem(base.version, base.unique_id) if base is not None else None,
        lineage=_lineage(facts) if given is None else tuple(given),
        created_at_ms=runtime.local_now_ms(),
    )


def _lineage(facts: Facts) -> tuple[LineageItem, ...]:
    """Find the versions that this one grew from, as far as that is known.

    Of a state store's directory it is not: the last backup may be of an attempt that lost, or of a version that the
    query was taken back from, and a reader that resolves the state by it would replay a changelog on another state
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


def _summarise(
    facts: Facts,
    address: StoreAddress,
    index: SnapshotIndex,
    stored: IndexReference,
    *,
    uploaded: Uploaded,
    created: Created,
    watch: Stopwatch,
) -> BackupResult:
    changes, metadata = facts.plan.changes, index.metadata
    created_ms = [created.created_at_ms]
    if uploaded.oldest_birth_ms is not None:
        created_ms.append(uploaded.oldest_birth_ms)
    return BackupResult(
        scope=address.scope,
        reference=StoreReference(
            task=address.task,
            store=address.store,
            version=metadata.version,
            unique_id=metadata.unique_id,
            index=stored,
            number=0,
            files_count=changes.files_added + changes.files_retained,
            size_bytes=changes.bytes_added + changes.bytes_retained,
        ),
        base=facts.reference.index if facts.reference is not None else None,
        oldest_birth_ms=min(created_ms),
        new_keys=(*uploaded.keys, stored.key),
        stats=_stats(facts, stored.size_bytes, watch),
        missing_keys=tuple(sorted(facts.missing)),
    )


def _stats(facts: Facts, index_bytes: int, watch: Stopwatch) -> BackupStats:
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
        seconds=watch.total_s(),
        files_healed=changes.files_added if base_is_gone else plan.files_healed,
        bytes_healed=changes.bytes_added if base_is_gone else plan.bytes_healed,
        sub_dirs_added=changes.sub_dirs_added,
        sub_dirs_retained=changes.sub_dirs_retained,
        sub_dirs_removed=changes.sub_dirs_removed,
        diff_seconds=watch.phase_s("diff"),
    )
