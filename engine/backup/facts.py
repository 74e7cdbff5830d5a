"""What a backup finds out before it sends anything: what its base has, what is on the disk, and what to upload."""

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path

import msgspec

from blobstore.base import BlobStore
from engine.backup.source import BackupSource
from engine.errors import DamagedError
from engine.local.cache import DigestCache
from engine.local.identify import identify, identify_ssts
from engine.local.scan import FilePath, all_files, file_system_now_ns
from engine.records.indexes import IndexCache, StoredSnapshot, read_stored_snapshot
from engine.records.missing import find_missing, key_of
from engine.settings import TransferSettings
from index.plan.backup import BackupLimits, BackupPlan, plan_backup
from index.snapshot.contents import blob_keys
from index.snapshot.dir_diff import DirDiff, LocalDir, diff_dir
from index.snapshot.model import BlobKey, DirIndex, SnapshotIndex, SstIdentity
from index.snapshot.records import StoreReference


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
