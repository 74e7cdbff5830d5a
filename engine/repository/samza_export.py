"""Handing a snapshot to Samza: an index in Samza's JSON whose blob ids are keys of this repository.

Samza knows one kind of blob: a whole file, or a part of one, from its first byte to its last. A snapshot with packed
or inline files is refused, or with `unpack` backed up once more with every file in a blob of its own, under a job name
of its own. What was exported is given a name, so that no collection takes it until the name is released.
"""

import tempfile
from pathlib import Path
from typing import Final

import msgspec

from engine.backup.backup import BackupOptions
from engine.records.find import require_store
from engine.repository.repository import Repository
from index.plan.commits import Commit
from index.samza.format import encode_samza_index, samza_checkpoint_id, to_samza
from index.snapshot.model import Scope, StoreReference

# Samza stores every file as one blob, and its offsets end at 2 GiB.
_ONE_BLOB_BYTES: Final = 2**40


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
    checkpoint_id = samza_checkpoint_id(millis, nanos)
    index = await repository.read_index(reference.index)
    encoded = encode_samza_index(to_samza(index, job_id=job_id, checkpoint_id=checkpoint_id))
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
    with tempfile.TemporaryDirectory(prefix="tidemark-export-") as scratch:
        target = Path(scratch) / "store"
        await repository.restore(commit, target, task=task, store=store)
        newest = await singly.latest(scope)
        held: StoreReference | None = newest.store(task, store) if newest else None
        options = BackupOptions(version=max(version, held.version + 1) if held else version, base=held)
        result = await singly.backup(scope, target, task=task, store=store, options=options)
        return await singly.commit(scope, [result], version=commit.record.version, offsets=commit.record.offsets)
