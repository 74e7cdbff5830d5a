"""Another number of partitions has the same rows (design 0010, section 3); Spark's view is in tests/spark/state."""

from pathlib import Path
from typing import Literal

import pytest

from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.rescale import RescaleChoice, rescale_checkpoint
from engine.errors import DamagedError, NotFoundError, TargetError, UsageError
from engine.local.checksums import crc32c
from index.spark.checkpoint import StoreId
from tests.unit.engine.checkpoint.checked import flip
from tests.unit.engine.checkpoint.written_query import Rows, WrittenQuery, rows_of


def hash_key(_: StoreId, key: bytes) -> int:
    return crc32c(key) - 2**31


def joined(found: dict[StoreId, Rows]) -> Rows:
    """The rows of all stores, of which no two have the same key."""
    rows: Rows = {}
    for each in found.values():
        assert not rows.keys() & each.keys()
        rows |= each
    return rows


async def written(tmp_path: Path, families: bool, format_version: Literal[1, 2]) -> WrittenQuery:
    planted = {b"planted-%d" % n: b"%d" % n for n in range(50)}
    query = WrittenQuery(
        tmp_path / "query",
        tmp_path / "work",
        partitions=1,
        families=families,
        format_version=format_version,
        planted=planted,
    )
    await (await query.begin()).run(5)
    return query


@pytest.mark.parametrize("families", [False, True], ids=["one table", "families"])
@pytest.mark.parametrize("format_version", [1, 2])
async def test_rows_are_the_same_after_splits_and_merges(
    tmp_path: Path, families: bool, format_version: Literal[1, 2]
) -> None:
    query = await written(tmp_path, families, format_version)
    expected = joined(await rows_of(query.root, tmp_path / "rows"))
    place = query.root
    for turn, partitions in enumerate((4, 6, 3, 2, 1)):
        target = tmp_path / f"turn-{turn}"
        made = await rescale_checkpoint(place, target, RescaleChoice(partitions=partitions), hash_key)
        assert sorted(store.id.partition for store in made) == list(range(partitions))
        found = await rows_of(target, tmp_path / f"rows-{turn}")
        assert sorted(of.partition for of in found) == list(range(partitions))
        assert joined(found) == expected
        report = await check_checkpoint(target)
        assert report.is_sound
        assert not report.warnings
        place = target
    older = tmp_path / "older"
    await rescale_checkpoint(query.root, older, RescaleChoice(partitions=2, batch=3), hash_key)
    assert joined(await rows_of(older, tmp_path / "a")) == joined(await rows_of(query.root, tmp_path / "b", batch=3))


async def test_a_merge_links_and_needs_no_hash_and_a_split_does(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=4), hash_key)
    await rescale_checkpoint(tmp_path / "split", tmp_path / "merged", RescaleChoice(partitions=2))

    def ssts(root: Path) -> list[bytes]:
        return sorted(path.read_bytes() for path in root.glob("state/0/*/SSTs/*.sst"))

    assert ssts(tmp_path / "merged") == ssts(tmp_path / "split")
    with pytest.raises(UsageError, match="hashed"):
        await rescale_checkpoint(query.root, tmp_path / "no", RescaleChoice(partitions=2))
    with pytest.raises(UsageError, match="0 is not a number of partitions"):
        await rescale_checkpoint(query.root, tmp_path / "no", RescaleChoice(partitions=0))
    assert not (tmp_path / "no").exists()


async def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    choice = RescaleChoice(partitions=4)
    await rescale_checkpoint(query.root, tmp_path / "split", choice, hash_key)
    with pytest.raises(TargetError):
        await rescale_checkpoint(query.root, tmp_path / "split", choice, hash_key)
    with pytest.raises(NotFoundError):
        await rescale_checkpoint(query.root, tmp_path / "no", RescaleChoice(partitions=4, batch=99), hash_key)
    with pytest.raises(DamagedError, match="belongs in partition"):
        await rescale_checkpoint(
            tmp_path / "split", tmp_path / "no", RescaleChoice(partitions=8), lambda of, key: hash_key(of, key) + 1
        )
    assert not (tmp_path / "no").exists()


async def test_a_damaged_sst_is_not_taken_over(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=2), hash_key)
    sst = next((tmp_path / "split").glob("state/0/1/SSTs/*.sst"))
    flip(sst, 20)
    with pytest.raises(DamagedError):
        await rescale_checkpoint(tmp_path / "split", tmp_path / "no", RescaleChoice(partitions=1))
    assert not (tmp_path / "no").exists()
