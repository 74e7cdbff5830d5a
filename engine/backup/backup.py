"""Back up one directory, or a part of it: upload what changed since a base, and write an index.

What the base has, what is on the disk, and what to upload is found out before anything is sent. Nothing is visible
until a commit names the index; everything uploaded carries a TTL until then (design 0002, C5).
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Event
from typing import Final, Literal, Protocol

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, Created
from blobstore.concurrency import ByteBudget, both, run_blocking
from blobstore.local.files import place_of
from blobstore.tracing import annotate, traced
from engine.backup.upload import Uploader
from engine.errors import DamagedError, ShrunkError, UnsafeSourceError, UsageError
from engine.local import scan
from engine.local.digests import DigestCache, FactReader
from engine.records.find import find_missing, key_of
from engine.records.indexes import IndexCache, StoredSnapshot, check_is_of, read_stored_snapshot, write_index
from engine.records.journal import UploadJournal
from engine.records.repository import OpenRepository, StoreAddress
from engine.rocksdb.lock import check_not_held
from engine.runtime import NO_PROGRESS, Progress, Runtime, Stopwatch
from engine.settings import TransferSettings
from engine.text import Where
from index.display import DisplayMixin, format_files, format_seconds, human_bytes, printable
from index.errors import FormatError
from index.plan.backup import BackupPlan, PlannedFile, build_snapshot, plan_backup
from index.plan.commits import is_shrunk
from index.snapshot import model
from index.snapshot.contents import blob_keys, new_blob_keys
from index.snapshot.dir_diff import DiffStats, DirDiff, LocalDir, diff_dir
from index.snapshot.invariants import check_snapshot_index
from index.snapshot.keys import parse_upload_key
from index.spark.names import parse_state_name

_LOG: Final = logging.getLogger(__name__)


class BackupSource(Protocol):
    """Files below one directory. Made for one backup."""

    # Where they are read; absolute.
    directory: Path
    # Whether the directory is there for the next backup too, so that hashes of its files are worth keeping.
    is_lasting: bool

    @property
    def lineage(self) -> Sequence[model.LineageItem] | None:
        """The versions that its state grew from, oldest first; known once it was looked at. None: it does not know."""
        return None

    async def look(self, previous: model.SnapshotIndex | None, believed: LocalDir) -> LocalDir:
        """List what there is to back up, sorted by name; raises if it cannot be backed up.

        A file that carries its `blake3` already is known to be the one of `previous`, which it will be compared with:
        it is not read, and need not be in the directory. `believed` has files of an earlier look with facts that may be
        taken over where the stat is the same (I1).
        """
        ...

    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        """Get ready for the reading of some files; raises if one of them must not be backed up.

        Returns what `look` would say now if files came into the directory for it; None if all were there.
        """
        ...

    async def check_held_still(self) -> None:
        """Raise an `UnsafeSourceError`, after the last byte was read, if what was looked at has changed (0002, I3).

        Bytes that were read may still be on their way to the store.
        """
        ...

    async def release(self) -> None:
        """Give up what was made for one backup, such as a copy: the backup has ended, well or not."""
        return


class WholeDirectory(BackupSource):
    """A rocksdb_checkpoint, or any directory that nobody writes to: everything in it. A link at its end is refused."""

    is_lasting = True

    def __init__(self, directory: Path) -> None:
        # Absolute: whatever becomes of the working directory meanwhile.
        self.directory = directory.absolute()
        self._scanned = LocalDir(name="")

    @override
    async def look(self, previous: model.SnapshotIndex | None, believed: LocalDir) -> LocalDir:
        def look() -> LocalDir:
            scanned = scan.scan_dir(self.directory, believed)
            check_not_held(self.directory, scanned)
            return scanned

        self._scanned = await asyncio.to_thread(look)
        return self._scanned

    @override
    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        return None

    @override
    async def check_held_still(self) -> None:
        root, before = self.directory, self._scanned
        difference = await asyncio.to_thread(lambda: scan.find_difference(before, scan.scan_dir(root, before)))
        if difference is not None:
            raise scan.changed_error(root.joinpath(*difference))


LATEST: Final = "latest"
# An index carries this many of its ancestors; who needs more reads the oldest of them.
LINEAGE_KEPT_MAX: Final = 100


class BackupStats(DiffStats, frozen=True, kw_only=True):
    """What a backup did. Retained files count as such even where their pack was packed again."""

    files_total: int
    bytes_total: int
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
    # Retained files that were sent again because bytes of them were missing in the blob store (design 0006, M1). They
    # count as packed again too, unless the base's index was missing: then all are added again, and all count here.
    files_healed: int = 0
    bytes_healed: int = 0
    # Of `seconds`, what it took to look at the directory and to find out what has changed.
    diff_seconds: float = 0.0
    # What a backup that was broken off had uploaded, and this one did not send again (design 0002, U1).
    blobs_resumed: int = 0
    bytes_resumed: int = 0


class BackupResult(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a commit needs to know of a backup; it can be sent to the process that commits."""

    scope: model.Scope
    # Without a number: the commit gives it one.
    reference: model.StoreReference
    # The index that it was diffed against; a commit on another parent refuses the result (design 0002, C2).
    base: model.IndexReference | None
    # When the store created the oldest upload: the lease begins there (C5).
    oldest_birth_ms: int
    # Everything that carries a TTL: blobs, then the index.
    new_keys: tuple[model.BlobKey, ...]
    stats: BackupStats
    # What the base needs, is missing, and is not needed any more: the commit does not stumble over it.
    missing_keys: tuple[str, ...] = ()

    @override
    def _figures(self) -> dict[str, str]:
        reference, stats = self.reference, self.stats
        return {
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


class BackupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one backup is made."""

    # The caller's version of this state, greater than the last of the lineage; None: the base's plus one.
    version: int | None = None
    # A label of this attempt at the version, for people and for Spark; None: a random one.
    unique_id: model.UniqueId | None = None
    # What to diff against: by default the newest commit's snapshot of the store. None uploads everything.
    base: model.StoreReference | Literal["latest"] | None = LATEST
    # The versions that this one grew from, oldest first: Spark's lineage of a state store's version (design 0004, R6).
    # None: the source's; else the base and what that grew from; of a state store's directory, nothing (0001, M13).
    lineage: Sequence[model.LineageItem] | None = None
    # Blobs that are known to be missing, besides those that the repository has met: files with bytes in them are
    # uploaded again, as are all if the base's index is missing (design 0006, M1).
    missing: Collection[str] = ()
    # Take from the base only what has the same hash, with every file read: it may have been damaged.
    by_content: bool = False
    # Look for such blobs: a STAT for each that is retained.
    check_retained: bool = False
    # Refuse to shrink the store by more than this share of its bytes (design 0006, P8); None: never refuse.
    shrink_max: float | None = None
    # How bytes are moved, in place of the repository's own settings.
    settings: TransferSettings | None = None


@traced("backup_store")
async def backup_source(
    repository: OpenRepository,
    source: BackupSource,
    address: StoreAddress,
    base: model.StoreReference | None,
    options: BackupOptions,
    *,
    progress: Progress = NO_PROGRESS,
    previous: model.SnapshotIndex | None = None,
) -> BackupResult:
    """Upload what a source has and its base has not, and write the index of all of it.

    Requests: one GET for the base's index (none if the repository remembers it, one more per delta that leads to it),
    one PUT per pack and blob, one PUT for the index; with `check_retained` a STAT for each blob retained, and for each
    index that would have been read if this process did not have it.

    The base is the snapshot to diff against; None uploads everything. That of the options is not asked. `previous` is
    diffed against in place of the base's files: what a commit has of these files, in any of its stores, by the names
    that they have here. Only a commit whose parent is that one, by its pointer, may take the result (design 0010, T4).

    Raises:
        UnsafeSourceError: The source is in use, changed meanwhile, or has entries that cannot be kept (I3).
        ShrunkError: The source has so much less than the base that it may be the wrong one; nothing was uploaded.
        UsageError: Version, lineage, task or store name cannot be written down.
        DamagedError: The base's index is missing or altered, and was not known to be.
        StoreError: As the store says. What was uploaded until then expires.
        EngineError, FormatError: As the source says.
    """
    watch = Stopwatch(repository.runtime)
    annotate(job=address.scope.job, task=address.task, store=address.store)
    repository = _as_asked(repository, source, options)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(source.release)
        cache = await stack.enter_async_context(repository.digests.of(source.directory))
        facts = await _gather_facts(repository, source, _Base(reference=base, previous=previous), options, cache)
        watch.end_phase("diff")
        plan, journal = facts.plan, UploadJournal(address.scope, journal_name(address), repository.runtime)
        stack.callback(journal.close)
        await _open_journal(repository, journal, facts, options)
        metadata = _describe(facts, source, address, options, repository.runtime)
        try:
            # What could not be written down after the last upload is refused before the first one.
            check_snapshot_index(
                model.SnapshotIndex(metadata=metadata, session=journal.session, dir=model.DirIndex(""))
            )
        except FormatError as error:
            subject = f"{metadata.job}/{metadata.task}/{metadata.store} version {metadata.version}"
            hint = "versions grow along a lineage; names are not empty and not too long"
            message = f"cannot be written down: {error}"
            raise UsageError(message, operation="backup", subject=subject, hint=hint) from error
        with scan.opened_dir(source.directory) as opened:
            uploader = Uploader(
                repository=repository,
                address=address,
                journal=journal,
                source=opened,
                ssts=facts.ssts,
                cache=cache,
                looked_at_ns=facts.looked_at_ns,
                progress=progress,
                budget=ByteBudget(repository.settings.memory_bytes_max),
                missing=facts.missing,
            )

            async def describe() -> tuple[StoredSnapshot, Created]:
                """Look again and write the index, while packs are still sent from memory (design 0002, P3)."""
                await uploader.all_read.wait()
                await source.check_held_still()
                packs = [model.Pack(uploader.key(pack.counter), pack.size_bytes) for pack in plan.packs]
                index = await run_blocking(
                    build_snapshot,
                    plan,
                    metadata=metadata,
                    session=journal.session,
                    uploaded=uploader.files,
                    packs=packs,
                )
                return await write_index(
                    repository.store,
                    index,
                    scope=address.scope,
                    ttl_ms=repository.record.ttl_ms,
                    base=facts.base.snapshot,
                    counter=journal.counter_first,
                )

            _, (snapshot, created) = await both(uploader.upload(plan), describe())
    repository.indexes.keep(snapshot)
    annotate(blobs=plan.uploads_count - len(uploader.resumed), bytes_planned=plan.upload_bytes)
    stored, stats = snapshot.chain[0], _stats(facts, uploader, snapshot.chain[0].size_bytes, watch)
    # Of a session that goes on, its earlier uploads are new too (U5).
    uploads = new_blob_keys(snapshot.index) if journal.goes_on else map(uploader.key, range(plan.uploads_count))
    _LOG.info(
        "%s: backed up version %d: %d files, of them %d new and %d retained; %d bytes uploaded; its index is %s",
        Where(repository.store, address),
        metadata.version,
        stats.files_total,
        stats.files_added,
        stats.files_retained,
        stats.bytes_uploaded,
        stored.key,
    )
    return BackupResult(
        scope=address.scope,
        reference=model.StoreReference(
            task=address.task,
            store=address.store,
            version=metadata.version,
            unique_id=metadata.unique_id,
            index=stored,
            number=0,
            files_count=stats.files_total,
            size_bytes=stats.bytes_total,
        ),
        base=base.index if base is not None else None,
        oldest_birth_ms=min((created.created_at_ms, *uploader.created_ms)),
        new_keys=(*uploads, stored.key),
        stats=stats,
        missing_keys=tuple(sorted(facts.base.missing)),
    )


async def plan_backup_source(
    repository: OpenRepository, source: BackupSource, base: model.StoreReference | None, options: BackupOptions
) -> BackupPlan:
    """Plan what `backup_source` would do; nothing is written to the store. Errors likewise."""
    # What is remembered of a base may hide that it is gone.
    repository = msgspec.structs.replace(_as_asked(repository, source, options), indexes=IndexCache())
    async with repository.digests.of(source.directory) as cache:
        return (await _gather_facts(repository, source, _Base(reference=base), options, cache)).plan


def _check_apart(store: BlobStore, source: BackupSource) -> None:
    if where := scan.find_overlap(place_of(source.directory), store.place()):
        message, hint = f"is {where} the place of the repository itself", "keep the repository beside what it backs up"
        raise UnsafeSourceError(message, operation="backup", subject=str(source.directory), hint=hint)


def journal_name(address: StoreAddress) -> str:
    """Return what the journal of a store is called."""
    return repr((address.scope.job, address.scope.task, address.task, address.store))


async def _open_journal(
    repository: OpenRepository, journal: UploadJournal, facts: "_Facts", options: BackupOptions
) -> None:
    base = facts.base

    def spent() -> frozenset[str]:
        """Return the sessions of the base: what it retains would be new once more (U2)."""
        previous = base.previous
        keys = frozenset[model.BlobKey]() if previous is None else blob_keys(previous)
        return frozenset({parse_upload_key(key).session for key in keys} | ({previous.session} if previous else set()))

    # All is sent where that is asked for, or the base is lost.
    sends_all = options.base is None or (base.reference is not None and base.previous is None)
    await repository.journals.open(
        journal, repository.store, repository.record, facts.plan.uploads_count, None if sends_all else spent
    )


class _Base(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup is diffed against, as far as it is there."""

    reference: model.StoreReference | None = None
    # None: there is no base, its index is missing, or files are compared with others.
    snapshot: StoredSnapshot | None = None
    # What files are compared with.
    previous: model.SnapshotIndex | None = None
    # That it took to find out.
    requests: int = 0
    # What of it is missing: with its index, that and what it is a delta on.
    missing: frozenset[str] = frozenset()


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was gathered before anything was sent: a source beside its base."""

    base: _Base
    local: LocalDir
    diff: DirDiff
    plan: BackupPlan
    ssts: dict[model.FilePath, model.SstIdentity]
    # By the clock of the source's file system, after the scan.
    looked_at_ns: int
    # What was known to be missing or altered before anything was sent, of the base or not.
    missing: frozenset[str] = frozenset()


def _as_asked(repository: OpenRepository, source: BackupSource, options: BackupOptions) -> OpenRepository:
    """Return the repository with the settings of a backup; no hash is kept of a directory that will be gone."""
    settings = options.settings or repository.settings
    if source.is_lasting and not options.by_content:
        return msgspec.structs.replace(repository, settings=settings)
    return repository.without_digests(settings)


async def _gather_facts(
    repository: OpenRepository, source: BackupSource, base: _Base, options: BackupOptions, cache: DigestCache
) -> _Facts:
    await run_blocking(_check_apart, repository.store, source)
    missing, reference = repository.missing_blobs.keys.union(options.missing), base.reference
    if reference is not None and base.previous is None:
        base = await _find_base(repository, reference, missing, check_retained=options.check_retained)
    previous = base.previous
    settings = repository.settings

    def read(scanned: LocalDir, stop: Event) -> _Facts:
        """Read of the directory all that decides what to upload, in one hop to a thread."""
        looked_at_ns = scan.file_system_now_ns(source.directory, scanned)
        reader = FactReader(source.directory, cache, stop=stop, looked_at_ns=looked_at_ns)
        remote = previous.dir if previous is not None else model.DirIndex("")
        local = reader.identify(scanned, remote, by_content=options.by_content)
        diff = diff_dir(local, remote)
        plan = plan_backup(local, previous, diff, settings)
        cache.trim(scan.all_files(scanned))
        # Small files are read as a whole when they are sent, and identified then.
        ssts = reader.identify_ssts([(i.file.path, i.file.file) for i in plan.blobs if i.file.expected is None])
        return _Facts(base=base, local=local, diff=diff, plan=plan, ssts=ssts, looked_at_ns=looked_at_ns)

    async def compare(scanned: LocalDir) -> _Facts:
        stop = Event()
        try:
            facts = await asyncio.to_thread(read, scanned, stop)
        finally:
            # The thread of a cancelled backup stops at its next megabyte, and holds nothing that anybody waits for.
            stop.set()
        return plan_again(facts) if missing else facts

    def plan_again(facts: _Facts) -> _Facts:
        """Plan with what is missing by now; the files need not be looked at again."""
        plan = plan_backup(facts.local, previous, facts.diff, settings, missing)
        return msgspec.structs.replace(facts, plan=plan)

    facts = await compare(await source.look(None if options.by_content else previous, cache.believed))
    requests = base.requests
    if options.check_retained:
        retained = facts.plan.blobs_retained
        requests += len(retained)
        missing |= await find_missing(repository.store, retained)
        facts = plan_again(facts)
    brought = await source.prepare(facts.plan.files)
    if brought is not None:
        facts = await compare(brought)
    if reference is not None:
        size_bytes = facts.plan.changes.bytes_added + facts.plan.changes.bytes_retained
        subject = f"{reference.task}/{reference.store}"
        check_shrinking(reference.size_bytes, size_bytes, options.shrink_max, subject=subject)
    of_base = blob_keys(previous) if missing and previous is not None else frozenset[model.BlobKey]()
    base = msgspec.structs.replace(base, requests=requests, missing=base.missing | (missing & of_base))
    return msgspec.structs.replace(facts, base=base, missing=missing)


def check_shrinking(
    before_bytes: int, after_bytes: int, shrink_max: float | None, *, subject: str, floor_bytes: int = 0
) -> None:
    """Refuse what looks like an unmounted disk, or another directory (design 0006, P8); None: never refuse.

    Raises:
        ShrunkError: More than `shrink_max` of the bytes would go, and at least `floor_bytes`.
    """
    if shrink_max is None or not is_shrunk(before_bytes, after_bytes, shrink_max, floor_bytes=floor_bytes):
        return
    sizes = f"from {human_bytes(before_bytes)} to {human_bytes(after_bytes)}"
    message = f"would shrink {sizes}, by more than {shrink_max:.0%}; nothing was committed"
    raise ShrunkError(message, operation="backup", subject=subject)


async def _find_base(
    repository: OpenRepository, base: model.StoreReference, missing: frozenset[str], *, check_retained: bool
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
        return _Base(reference=base, requests=requests + 1, missing=frozenset({key, base.index.key}))
    check_is_of(snapshot.index, base, operation="backup")
    requests += len(snapshot.chain) if known is None else 0
    return _Base(reference=base, snapshot=snapshot, previous=snapshot.index, requests=requests)


def _describe(
    facts: _Facts, source: BackupSource, address: StoreAddress, options: BackupOptions, runtime: Runtime
) -> model.SnapshotMetadata:
    base = facts.base.reference
    given = options.lineage if options.lineage is not None else source.lineage
    return model.SnapshotMetadata(
        job=address.scope.job,
        task=address.task,
        store=address.store,
        version=options.version if options.version is not None else (base.version + 1 if base else 1),
        unique_id=options.unique_id or runtime.unique_id(),
        base=model.LineageItem(base.version, base.unique_id) if base is not None else None,
        lineage=_lineage(facts) if given is None else tuple(given),
        created_at_ms=runtime.local_now_ms(),
    )


def _lineage(facts: _Facts) -> tuple[model.LineageItem, ...]:
    """Find the versions that this one grew from, as far as that is known.

    Of a state store's directory it is not: the last backup may be of an attempt that lost, or of a version that the
    query was taken back from, and a reader that resolves the state by it would replay a changelog on another state
    than its own (design 0004, R2).
    """
    base = facts.base.snapshot
    if base is None or any(parse_state_name(file.name) is not None for file in facts.local.files):
        return ()
    metadata = base.index.metadata
    return (*metadata.lineage, model.LineageItem(metadata.version, metadata.unique_id))[-LINEAGE_KEPT_MAX:]


def _stats(facts: _Facts, uploader: Uploader, index_bytes: int, watch: Stopwatch) -> BackupStats:
    plan, changes = facts.plan, facts.plan.changes
    resumed_bytes = sum(size_bytes for _, size_bytes in uploader.resumed.values())
    base_is_gone = facts.base.previous is None and bool(facts.base.missing)
    return BackupStats(
        **msgspec.structs.asdict(changes),
        files_total=changes.files_added + changes.files_retained,
        bytes_total=changes.bytes_added + changes.bytes_retained,
        files_repacked=plan.files_repacked,
        bytes_repacked=plan.bytes_repacked,
        files_inline=len(plan.inline),
        packs=len(plan.packs),
        blobs=plan.uploads_count - len(uploader.resumed),
        bytes_uploaded=plan.upload_bytes - resumed_bytes,
        blobs_resumed=len(uploader.resumed),
        bytes_resumed=resumed_bytes,
        index_bytes=index_bytes,
        requests=facts.base.requests + plan.uploads_count + 1,
        seconds=watch.total_s(),
        files_healed=changes.files_added if base_is_gone else plan.files_healed,
        bytes_healed=changes.bytes_added if base_is_gone else plan.bytes_healed,
        diff_seconds=watch.phase_s("diff"),
    )
