"""One state store of a backup, brought back as one version of it (design 0005, R2, R6 and R7)."""

from pathlib import Path

import msgspec

from blobstore.concurrency import run_blocking
from engine.checkpoint.replayed import replay_store
from engine.checkpoint.targets import dirs_below
from engine.clock import Runtime
from engine.progress import NO_PROGRESS, Progress
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of
from engine.restore.staging import Staging
from engine.settings import TransferSettings
from engine.state.files import StateFileManager
from engine.state.query import StoreAt
from engine.state.restore import StateRestoreOptions, restore_state
from engine.state.settings import StateStoreSettings
from engine.state.sources import IndexStateFiles
from index.snapshot.records import StoreReference
from index.spark.checkpoint import StoreId
from index.spark.lineage import target_in_index


class StoreToRestore(msgspec.Struct, frozen=True, kw_only=True):
    """One store, the version to bring back, and where the backup has it."""

    store: StoreAt
    reference: StoreReference

    @property
    def id(self) -> StoreId:
        """Which store."""
        return self.store.id


class StoreRestored(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one store."""

    id: StoreId
    files: int
    size_bytes: int
    # From the repository.
    bytes_fetched: int
    requests: int
    # What was replayed.
    changelogs: int = 0
    records: int = 0
    # What was published to an object store already, as paths of the checkpoint.
    published: tuple[str, ...] = ()


async def restore_store(
    repository: Repository,
    work: StoreToRestore,
    target: Path,
    *,
    replayed: bool,
    transfer: TransferSettings,
    runtime: Runtime,
    replace: bool = False,
    progress: Progress = NO_PROGRESS,
) -> StoreRestored:
    """Bring a store back into a directory of this machine, whole or not at all.

    Args:
        repository: Where from; the caller holds a pin.
        work: Which store and version.
        target: Absent or empty, or with `replace` any directory.
        replayed: Whether its changelogs are to be applied (R7).
        transfer: Limits and sizes for this store.
        runtime: Clock and random numbers.
        replace: Whether what stands there may go: an earlier attempt has left it.
        progress: Told of files and bytes.

    Raises:
        DamagedError, FormatError: Something is missing or altered; the error names the file, and the blob.
        TargetError: The target cannot be used.
        StoreError: As the store says. After any error the target is as it was.
    """
    if replayed:
        found = await _replayed(repository, work, target, transfer, runtime, replace=replace, progress=progress)
        if found is not None:
            return found
    options = StateRestoreOptions(
        version=work.store.at.version,
        unique_id=work.store.at.unique_id,
        codec=work.store.settings.codec,
        replace=replace,
    )
    opened = repository.opened.without_digests(transfer)
    restored = await restore_state(opened, work.reference, target, options, progress)
    result = restored.result
    return StoreRestored(
        id=work.id,
        files=result.files_total,
        size_bytes=result.bytes_total,
        bytes_fetched=result.bytes_fetched,
        requests=result.requests,
    )


async def _replayed(
    repository: Repository,
    work: StoreToRestore,
    target: Path,
    transfer: TransferSettings,
    runtime: Runtime,
    *,
    replace: bool,
    progress: Progress,
) -> StoreRestored | None:
    """As `restore_store`; None if the version is a snapshot, with nothing to replay."""
    index, requests = await read_index_of(repository.store, work.reference)
    files = IndexStateFiles(repository.store, index, transfer)
    settings = msgspec.structs.replace(work.store.settings, fetches_max=transfer.in_flight_max)
    at = work.store.at
    unique_id = None if at.unique_id is None else target_in_index(at.version, at.unique_id, index)
    resolution = await StateFileManager(files, StateStoreSettings(codec=settings.codec)).resolve(at.version, unique_id)
    if not resolution.changelogs:
        return None
    staging = Staging(target, runtime.session(), replace=replace)
    try:
        await run_blocking(staging.open)
        made = await replay_store(
            files,
            resolution,
            settings,
            working=staging.directory.with_name("working"),
            target=staging.directory,
            runtime=runtime,
        )
        await run_blocking(lambda: staging.publish(dirs_below(staging.directory), {}))
    finally:
        await run_blocking(staging.close)
    progress.add(files=made.files, bytes_=made.size_bytes)
    return StoreRestored(
        id=work.id,
        files=made.files,
        size_bytes=made.size_bytes,
        bytes_fetched=made.bytes_fetched,
        requests=requests + files.requests,
        changelogs=made.changelogs,
        records=made.records,
    )
