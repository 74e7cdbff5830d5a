"""Handing a snapshot to Samza: the JSON must lead Samza's own reader to the same files."""

import pytest

from blobstore.base import read_blob
from engine.errors import NotFoundError
from engine.repository.repository import Repository
from engine.repository.samza import export_to_samza
from engine.settings import TransferSettings
from index.errors import SamzaFormatError
from index.plan.commits import Retention
from index.samza.format import SamzaDirIndex, decode_samza_index
from index.snapshot.model import Scope
from tests.unit.engine.conftest import JOB, World, text_tree

SINGLY = TransferSettings(inline_file_bytes_max=0, inline_bytes_max=0, pack_file_bytes_max=0)


async def samza_would_restore(world: World, encoded: bytes) -> dict[str, bytes]:
    """Follow Samza's reader: blobs sorted by offset, appended one after another."""
    return await _restored(world, decode_samza_index(encoded, blob_id="exported").dir_index)


async def _restored(world: World, directory: SamzaDirIndex) -> dict[str, bytes]:
    files = {}
    for file in directory.files_present:
        blobs = sorted(file.blobs, key=lambda blob: blob.offset)
        data = b"".join([await read_blob(world.store, b.blob_id, size_bytes_max=1 << 30) for b in blobs])
        files[file.file_name] = data
        assert len(data) == file.file_metadata.size
    for sub in directory.sub_dirs_present:
        files |= {f"{sub.dir_name}/{name}": data for name, data in (await _restored(world, sub)).items()}
    return files


async def test_packed_and_inline_files_are_refused_without_unpack(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    with pytest.raises(SamzaFormatError) as refused:
        await export_to_samza(repository, commit)
    assert "--unpack" in refused.value.hint


async def test_unpacked_files_are_what_samza_would_restore(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    export = await export_to_samza(repository, commit, unpack=True)
    assert await samza_would_restore(world, export.index_json) == text_tree("one")
    assert export.commit.scope == Scope("job.samza")


async def test_a_snapshot_of_single_blobs_is_exported_as_it_is(world: World) -> None:
    repository = await Repository.open(world.store, settings=SINGLY)
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    world.store.requests.clear()
    export = await export_to_samza(repository, commit)
    assert not [k for o, k in world.store.requests if o.startswith("put") and k.startswith(("blobs/", "indexes/"))]
    assert await samza_would_restore(world, export.index_json) == text_tree("one")


async def test_what_was_exported_outlives_collections_until_its_name_is_released(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    export = await export_to_samza(repository, commit, unpack=True)
    await repository.commit(JOB, [await world.backup(repository, "two")])
    world.clock.advance(10**9)
    await export_to_samza(repository, await repository.find(JOB), unpack=True)
    await repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1)
    assert await samza_would_restore(world, export.index_json) == text_tree("one")
    await repository.release_name(export.commit.scope, export.name)
    freed = await repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1)
    assert freed.freed_bytes > 0


async def test_a_later_export_uploads_only_what_changed(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    await export_to_samza(repository, commit, unpack=True)
    await repository.commit(JOB, [await world.backup(repository, "two")])
    world.store.requests.clear()
    await export_to_samza(repository, await repository.find(JOB), unpack=True)
    blobs = [k for o, k in world.store.requests if o == "put_if_absent" and k.startswith("blobs/")]
    assert len(blobs) == 3  # of four files one is the same


async def test_a_store_that_is_not_there_is_named(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    with pytest.raises(NotFoundError):
        await export_to_samza(repository, commit, store="other")
