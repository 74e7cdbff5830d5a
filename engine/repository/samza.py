"""Snapshots handed to Samza, as an index in its JSON whose blob ids are keys of this repository, and taken from it.

Samza knows one kind of blob: a whole file, or a part of one, from its first byte to its last. A snapshot with packed
or inline files is refused, or with `unpack` backed up once more with every file in a blob of its own, under a job name
of its own. What was exported is given a name, so that no collection takes it until the name is released.

Of a snapshot of Samza the files are put together from their blobs, verified, and committed. Its index has a size and a
CRC32 for each file: nothing is taken over unverified. The rules are in design/samza.md.
"""

import os
from pathlib import Path
from typing import ClassVar, Final

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, Buffer, TooLargeError, check_key
from blobstore.concurrency import run_all, run_blocking
from blobstore.errors import BlobNotFoundError, InvalidRequestError
from blobstore.local.files import FileSink, create_to_write
from engine.backup.backup import BackupOptions
from engine.commit.writer import until_known
from engine.errors import DamagedError
from engine.local.checksums import crc32
from engine.local.scratch import scratch_dir
from engine.records.find import require_store
from engine.repository.repository import Repository
from engine.restore.staging import target_errors
from engine.runtime import NO_PROGRESS, Progress
from index.display import DisplayMixin
from index.errors import SamzaFormatError
from index.plan.commits import Commit
from index.samza import format as samza
from index.snapshot.model import Scope, StoreReference, UniqueId

# Samza stores every file as one blob, and its offsets end at 2 GiB.
_ONE_BLOB_BYTES: Final = 2**40
_OPERATION: Final = "import"


class SamzaExport(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported."""

    # The bytes that Samza would read as its SnapshotIndex.
    index_json: bytes
    checkpoint_id: str
    # The commit that holds the blobs, and the name that keeps it.
    commit: Commit
    name: str
    files_count: int
    # False: the JSON refers to the blobs that were there already.
    unpacked: bool


async def export_to_samza(
    repository: Repository,
    commit: Commit,
    *,
    task: str = "0",
    store: str = "default",
    job_id: str = "1",
    unpack: bool = False,
) -> SamzaExport:
    """Export one store of a commit; of Samza's `job_id` tidemark has no counterpart.

    With `unpack` packed and inline files are uploaded singly, as `<job>.samza`; a later export uploads what changed.

    Raises:
        SamzaFormatError: The snapshot has packed or inline files and `unpack` is not given, or a file is cut at an
            offset that Samza cannot express.
        NotFoundError: The commit has no such store, or was collected meanwhile.
    """
    if unpack:
        commit = await _unpack(repository, commit, task, store)
    reference = require_store(commit, task, store)
    millis, nanos = divmod(commit.committed_at_ms * 1_000_000 + commit.pointer.number % 1_000_000, 1_000_000)
    checkpoint_id = samza.samza_checkpoint_id(millis, nanos)
    index = await repository.read_index(reference.index)
    encoded = samza.encode_samza_index(samza.to_samza(index, job_id=job_id, checkpoint_id=checkpoint_id))
    name = f"samza-{task}-{store}-{checkpoint_id}"
    await repository.name(commit, name)
    return SamzaExport(
        index_json=encoded,
        checkpoint_id=checkpoint_id,
        commit=commit,
        name=name,
        files_count=reference.files_count,
        unpacked=unpack,
    )


async def _unpack(repository: Repository, commit: Commit, task: str, store: str) -> Commit:
    """Commit the same files again, each file one blob; needs space for them on this machine."""
    scope = Scope(f"{commit.scope.job}.samza", commit.scope.task)
    settings = msgspec.structs.replace(
        repository.settings,
        inline_file_bytes_max=0,
        inline_bytes_max=0,
        pack_file_bytes_max=0,
        blob_bytes_max=_ONE_BLOB_BYTES,
    )
    singly = Repository(repository.store, repository.record, settings=settings)
    version = require_store(commit, task, store).version
    async with scratch_dir(prefix="tidemark-export-") as scratch:
        target = scratch / "store"
        await repository.restore(commit, target, task=task, store=store)
        newest = await singly.latest(scope)
        held: StoreReference | None = newest.store(task, store) if newest else None
        options = BackupOptions(version=max(version, held.version + 1) if held else version, base=held)
        result = await singly.backup(scope, target, task=task, store=store, options=options)
        return await singly.commit(scope, [result], version=commit.record.version, offsets=commit.record.offsets)


class SamzaImport(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What was imported, or would be."""

    dry_run: bool
    # None: it would be made.
    commit: Commit | None
    # False: the newest commit has the store of this checkpoint of Samza already, and nothing was done.
    is_new: bool
    job: str
    task: str
    store: str
    checkpoint_id: str
    files_count: int
    size_bytes: int

    json_omitted: ClassVar = ("commit",)


class SamzaChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Where an imported snapshot goes; what is not given is as Samza named it."""

    job: str | None = None
    task: str | None = None
    store: str | None = None
    # Read the index, and say what would be done.
    dry_run: bool = False


async def import_samza(
    repository: Repository,
    index_json: bytes,
    blobs: BlobStore,
    choice: SamzaChoice | None = None,
    *,
    progress: Progress = NO_PROGRESS,
) -> SamzaImport:
    """Make a commit of a snapshot that Samza's blob-store backend has written; keys of `blobs` are blob ids.

    The files are gathered on this machine first, in the system's place for temporary files.

    Raises:
        SamzaFormatError, UnsafeNameError: The index is not one of Samza's, or names in it are not safe.
        TargetError: The files cannot be written on this machine.
        DamagedError: A blob is missing, or a file has not the size or CRC32 that the index says. Nothing is committed.
        StoreError: As either store says.
    """
    choice = choice or SamzaChoice()
    decoded = samza.decode_samza_index(index_json, blob_id="index")
    snapshot = samza.from_samza(decoded)
    named = snapshot.metadata
    _check_blob_ids(snapshot)
    job, task = choice.job or named.job_name, choice.task or named.task_name
    store = choice.store or named.store_name
    # The offsets of the commit say what a snapshot index of ours has no field for (S2).
    origin = {
        "kind": "samza",
        "jobId": named.job_id,
        "checkpointId": named.checkpoint_id,
        "creationTimeMillis": decoded.creation_time_millis,
    }
    scope = Scope(job)
    newest = await repository.latest(scope)
    held = newest.store(task, store) if newest else None
    # Stores of one task share a checkpoint, so this is about the store, not about the job (S3).
    is_there = held is not None and held.unique_id == named.checkpoint_id
    found = SamzaImport(
        dry_run=choice.dry_run,
        commit=newest if is_there else None,
        is_new=not is_there,
        job=job,
        task=task,
        store=store,
        checkpoint_id=named.checkpoint_id,
        files_count=len(snapshot.files),
        size_bytes=sum(file.size_bytes for file in snapshot.files),
    )
    if is_there or choice.dry_run:
        return found
    version, offsets = newest.record.version + 1 if newest else 1, msgspec.json.encode(origin).decode()
    async with scratch_dir(prefix="tidemark-import-") as scratch:
        target = scratch / "store"
        progress.total(files=found.files_count, bytes_=found.size_bytes)
        await fetch_samza(snapshot, blobs, target, progress=progress)
        options = BackupOptions(version=version, unique_id=UniqueId(named.checkpoint_id), base=held)
        result = await repository.backup(scope, target, task=task, store=store, options=options)
    commit = await until_known(lambda: repository.commit(scope, [result], version=version, offsets=offsets))
    return msgspec.structs.replace(found, commit=commit)


async def fetch_samza(
    snapshot: samza.SamzaSnapshot, blobs: BlobStore, target: Path, *, progress: Progress = NO_PROGRESS
) -> None:
    """Write the files of a Samza snapshot into the new directory `target`, each verified.

    Raises as `import_samza`.
    """

    def make_directories() -> None:
        target.mkdir()
        for directory in snapshot.directories:
            target.joinpath(*directory).mkdir(exist_ok=True)

    async def fetch(file: samza.SamzaFile) -> None:
        await _fetch(file, blobs, target.joinpath(*file.path))
        progress.add(files=1, bytes_=file.size_bytes)

    with target_errors(target):
        await run_blocking(make_directories)
        await run_all(fetch, snapshot.files)


def _check_blob_ids(snapshot: samza.SamzaSnapshot) -> None:
    for file in snapshot.files:
        for run in file.blobs:
            try:
                check_key(run.key, "import")
            except InvalidRequestError as error:
                message, hint = f"blob id {run.key!r} cannot be a key", "is this the place of the blobs?"
                raise SamzaFormatError(message, subject="/".join(file.path), hint=hint) from error


class _PartSink(FileSink):
    """Writes one blob of a file to its place, and sums the file up."""

    def __init__(self, descriptor: int, start: int, size_bytes_max: int, crc32: int) -> None:
        super().__init__(descriptor, size_bytes_max, start=start)
        self.crc32 = crc32

    @override
    def write(self, data: Buffer) -> None:
        super().write(data)
        self.crc32 = crc32(data, self.crc32)


async def _fetch(file: samza.SamzaFile, blobs: BlobStore, path: Path) -> None:
    found = 0
    async with create_to_write(path) as out:
        for run in file.blobs:
            sink = _PartSink(out, run.file_offset_bytes, run.size_bytes, found)
            try:
                await blobs.read_into(run.key, sink)
            except (BlobNotFoundError, TooLargeError) as error:
                wrong = "is missing" if isinstance(error, BlobNotFoundError) else "is longer than the index says"
                raise _damaged(file, f"blob {run.key!r} {wrong}") from error
            if sink.size_bytes != run.size_bytes:
                message = f"blob {run.key!r} has {sink.size_bytes} bytes, and {run.size_bytes} in the index"
                raise _damaged(file, message)
            found = sink.crc32
    if found != file.crc32:
        raise _damaged(file, f"its CRC32 is {found}, and {file.crc32} in the index")

    def finish() -> None:
        path.chmod(file.mode)
        os.utime(path, ns=(file.modified_at_ms * 1_000_000,) * 2)

    await run_blocking(finish)


def _damaged(file: samza.SamzaFile, message: str) -> DamagedError:
    hint = "nothing was committed; take an earlier snapshot, or the blob from a copy"
    return DamagedError(message, operation=_OPERATION, subject="/".join(file.path), hint=hint)
