"""Changelogs of a file manager, written and read by their versions."""

from pathlib import Path

import pytest

from blobstore.memory import MemoryStore
from engine.state.changelogs import open_changelog
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import DamagedChangelogError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import PUT, changelog_version
from tests.unit.engine.state.state_bench import StateBench, at, new_changelog


@pytest.fixture
async def bench(tmp_path: Path) -> StateBench:
    return StateBench(tmp_path, (await CheckpointDir.open(MemoryStore())).child("state/0/0"))


@pytest.mark.parametrize("unique_id", [None, "a"], ids=["V1", "V2"])
async def test_a_changelog_is_written_and_read_by_its_version(
    bench: StateBench, tmp_path: Path, unique_id: str | None
) -> None:
    of = at(2, unique_id)
    lineage = () if unique_id is None else (LineageItem(1, UniqueId("before")),)
    for column_families in (False, True):
        path = tmp_path / "written"
        with new_changelog(of, path, column_families=column_families, lineage=lineage) as writer:
            writer.write((PUT, b"key", b"value"))
            writer.finish()
        if column_families and unique_id is not None:
            of = at(3, unique_id)  # nothing is overwritten
        await bench.manager.publish_changelog(of, path)
        scratch = tmp_path / f"scratch-{column_families}"
        scratch.mkdir()
        (fetched,) = await bench.manager.fetch_changelogs([of], scratch)
        with open_changelog(fetched, "lz4", of) as changelog:
            expected = changelog_version(column_families=column_families, unique_ids=unique_id is not None)
            assert (changelog.header.version, changelog.header.lineage) == (expected, lineage)
            assert [record for records in changelog for record in records] == [(PUT, b"key", b"value")]


async def test_a_changelog_of_another_kind_than_its_name_says_is_not_resolved(
    bench: StateBench, tmp_path: Path
) -> None:
    path = tmp_path / "written"
    with new_changelog(at(2), path, column_families=False) as writer:
        writer.finish()
    await bench.manager.publish_changelog(at(2, "a"), path)
    with pytest.raises(DamagedChangelogError, match=r"2_a\.changelog"):
        await bench.manager.resolve(2, UniqueId("a"))
