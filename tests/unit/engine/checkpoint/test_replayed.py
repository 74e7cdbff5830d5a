"""A store brought back as one snapshot of its version: what Spark would replay is replayed (design 0005, R7)."""

from pathlib import Path
from typing import Any, Literal

import pytest

from blobstore.memory import MemoryStore
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.restore import RestoreChoice, RestoredCheckpoint, restore_checkpoint
from engine.repository.repository import Repository
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from engine.state.query import StoreAt, StreamingCheckpoint
from index.spark.metadata import StateMetadata
from tests.unit.engine.checkpoint.written_query import WrittenQuery, rows_of
from tidemark import StateStore

both_formats = pytest.mark.parametrize("format_version", [1, 2], ids=["V1", "V2"])
codecs = pytest.mark.parametrize("codec", ["lz4", "zstd", "snappy", "lzf"])


class Restored:
    """A query, and its checkpoint as it was restored."""

    def __init__(self, query: WrittenQuery, target: Path, result: RestoredCheckpoint) -> None:
        self.query = query
        self.target = target
        self.result = result

    def names(self, partition: int = 0) -> list[str]:
        root = self.target / f"state/0/{partition}"
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    async def store(self, partition: int = 0) -> StoreAt:
        opened = await StreamingCheckpoint.open(self.target)
        query = await opened.at()
        await opened.close()
        return query.stores[partition]

    async def metadata(self, partition: int = 0) -> StateMetadata:
        at = (await self.store(partition)).at
        manager = StateFileManager(await CheckpointDir.open(self.target / f"state/0/{partition}"))
        return (await manager.read_snapshot(at)).metadata


async def restored(tmp_path: Path, batches: int, **settings: Any) -> Restored:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", **settings).begin()
    await query.run(batches)
    repository = await Repository.init(MemoryStore())
    await backup_checkpoint(repository, query.root)
    result = await restore_checkpoint(repository, tmp_path / "target", RestoreChoice(replayed=True))
    return Restored(query, tmp_path / "target", result)


@both_formats
async def test_there_is_one_snapshot_of_the_version_and_nothing_else(
    tmp_path: Path, format_version: Literal[1, 2]
) -> None:
    found = await restored(tmp_path, 5, format_version=format_version)
    name = f"{(await found.store()).at}.zip"
    metadata = await found.metadata()
    stored = [f"SSTs/{file.stored_name}" for file in metadata.sst_files]
    summed = [f"{name}.crc"] if format_version == 2 else []
    assert found.names() == sorted([name, *summed, *stored, "_metadata/schema"])
    assert (found.result.changelogs, found.result.stores) == (4, 2)
    assert found.result.records > 0


@both_formats
@pytest.mark.parametrize("families", [False, True], ids=["plain", "families"])
@pytest.mark.parametrize("row_checksums", [False, True], ids=["", "row checksums"])
async def test_it_holds_the_same_rows_and_says_how_many(
    tmp_path: Path, format_version: Literal[1, 2], families: bool, row_checksums: bool
) -> None:
    found = await restored(tmp_path, 5, format_version=format_version, families=families, row_checksums=row_checksums)
    expected = await rows_of(found.query.root, tmp_path / "expected")
    rows = await rows_of(found.target, tmp_path / "rows")
    assert rows == expected
    for store, in_store in rows.items():
        metadata = await found.metadata(store.partition)
        internal = [family for family, _ in in_store if family.startswith("$")]
        assert (metadata.num_keys, metadata.num_internal_keys) == (len(in_store) - len(internal), len(internal))
        names = {name for name, _ in metadata.column_family_ids or ()}
        assert names == ({"default", "lists", "$counts"} if families else set())


@codecs
async def test_every_codec_is_replayed(tmp_path: Path, codec: str) -> None:
    found = await restored(tmp_path, 2, codec=codec)  # from nothing: there is no snapshot yet
    assert await rows_of(found.target, tmp_path / "rows") == await rows_of(found.query.root, tmp_path / "expected")
    assert not list(found.target.rglob("*.changelog"))


async def test_operands_keep_what_stands_between_them(tmp_path: Path) -> None:
    found = await restored(tmp_path, 5, families=True, merge_operator_version=1)
    rows = await rows_of(found.target, tmp_path / "rows")
    assert {in_store["lists", b"list"] for in_store in rows.values()} == {b"0,1,2,3,4"}


@both_formats
async def test_ssts_that_are_left_alone_keep_names_bytes_and_times(
    tmp_path: Path, format_version: Literal[1, 2]
) -> None:
    found = await restored(tmp_path, 4, format_version=format_version)
    before = found.query.root / "state/0/0/SSTs"
    kept = [path for path in (found.target / "state/0/0/SSTs").iterdir() if (before / path.name).exists()]
    assert len(kept) == 1
    for path in kept:
        assert path.read_bytes() == (before / path.name).read_bytes()
        assert path.stat().st_mtime_ns == (before / path.name).stat().st_mtime_ns


async def test_what_is_new_has_the_time_of_what_it_stands_for(tmp_path: Path) -> None:
    found = await restored(tmp_path, 5)
    at = (await found.store()).at
    changelog = found.query.root / f"state/0/0/{at}.changelog"
    assert (found.target / f"state/0/0/{at}.zip").stat().st_mtime_ns == changelog.stat().st_mtime_ns


async def test_a_version_with_a_snapshot_of_its_own_comes_as_it_is(tmp_path: Path) -> None:
    found = await restored(tmp_path, 3)
    assert found.result.changelogs == 0
    at = (await found.store()).at
    original = found.query.root / f"state/0/0/{at}.zip"
    assert (found.target / f"state/0/0/{at}.zip").read_bytes() == original.read_bytes()


@both_formats
async def test_the_state_store_loads_it_with_nothing_to_replay_and_goes_on(
    tmp_path: Path, format_version: Literal[1, 2]
) -> None:
    found = await restored(tmp_path, 5, format_version=format_version)
    store = await found.store()
    async with await StateStore.open(found.target / "state/0/0", tmp_path / "load", store.settings) as opened:
        await opened.load(store.at.version, store.at.unique_id, read_only=True)
        assert opened.last_load is not None
        assert (opened.last_load.changelogs, opened.last_load.base) == (0, store.at)
    await found.query.run(2)
    expected = await rows_of(found.query.root, tmp_path / "expected")
    await found.query.resume(found.target, 4)
    await found.query.run(2)
    assert await rows_of(found.target, tmp_path / "rows") == expected
