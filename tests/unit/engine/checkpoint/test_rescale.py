"""Another number of partitions has the same rows (design 0010, section 3); Spark's view is in tests/spark/state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from typing_extensions import override

from engine.checkpoint import rescale
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.rescale import RescaleChoice, RescalePlan, plan_rescale, rescale_checkpoint
from engine.errors import DamagedError, MisplacedKeyError, NotFoundError, TargetError, UsageError
from engine.local.checksums import crc32c
from engine.rocksdb.sst_run import SstRun
from engine.rocksdb.store import RocksDbSettings, StoreWriter
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.key_rules import StoreRules
from engine.state.query import QueryAt
from index.spark.checkpoint import StoreId
from index.spark.partition_keys import KeyRule
from index.spark.schema import KeyForm, StructType
from tests.unit.engine.checkpoint.checked import flip
from tests.unit.engine.checkpoint.written_query import Rows, WrittenQuery, rows_of

RULE = KeyRule(
    operator=0,
    operator_name="stateStoreSave",
    store="default",
    family="default",
    rule="a test",
    form=KeyForm(),
    is_first=True,
    row=StructType(()),
    count=0,
)


def by_crc(_: KeyRule, keys: Sequence[bytes], partitions: int) -> list[int]:
    return [crc32c(key) % partitions for key in keys]


def by_another_hash(rule: KeyRule, keys: Sequence[bytes], partitions: int) -> list[int]:
    return [(of + 1) % partitions for of in by_crc(rule, keys, partitions)]


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """These queries have keys that are not rows, and no schema: every family is partitioned by the whole key."""

    async def read(_: CheckpointDir, query: QueryAt) -> dict[tuple[int, str], StoreRules]:
        class Every(dict[str, KeyRule]):
            @override
            def get(self, key: str, default: Any = None) -> Any:
                return RULE

        return {
            (operator.id, store): StoreRules(operator=operator, store=store, families=Every())
            for operator in query.operators
            for store in operator.stores
        }

    monkeypatch.setattr(rescale, "read_key_rules", read)


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
        made = await rescale_checkpoint(place, target, RescaleChoice(partitions=partitions), partitioner=by_crc)
        assert (made.stores, made.rows) == (partitions, len(expected))
        found = await rows_of(target, tmp_path / f"rows-{turn}")
        assert sorted(of.partition for of in found) == list(range(partitions))
        assert joined(found) == expected
        if partitions == 6:  # of four, two for each: one sorted run
            assert max(len(list(store.glob("SSTs/*.sst"))) for store in target.glob("state/0/[0-9]")) == 1
        report = await check_checkpoint(target)
        assert report.is_sound
        assert not report.warnings
        place = target
    older = tmp_path / "older"
    await rescale_checkpoint(query.root, older, RescaleChoice(partitions=2, batch=3), partitioner=by_crc)
    assert joined(await rows_of(older, tmp_path / "a")) == joined(await rows_of(query.root, tmp_path / "b", batch=3))


async def test_a_merge_links_and_a_dry_run_says_so_and_writes_nothing(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    split = await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=4), partitioner=by_crc)
    assert (split.files_linked, split.bytes_linked) == (0, 0)
    assert split.bytes_rewritten > 0
    choice = RescaleChoice(partitions=2)
    planned = await plan_rescale(tmp_path / "split", tmp_path / "merged", choice, partitioner=by_crc)
    assert not (tmp_path / "merged").exists()
    merged = await rescale_checkpoint(tmp_path / "split", tmp_path / "merged", choice, partitioner=by_crc)
    names = RescalePlan.__struct_fields__
    assert {name: getattr(merged, name) for name in names} == {name: getattr(planned, name) for name in names} | {
        "dry_run": False
    }
    assert (merged.partitions_before, merged.partitions, merged.partitions_by_reference) == (4, 2, (1, 2))
    assert merged.bytes_rewritten == 0
    assert merged.rows == split.rows

    def ssts(root: Path) -> list[bytes]:
        return sorted(path.read_bytes() for path in root.glob("state/0/*/SSTs/*.sst"))

    assert ssts(tmp_path / "merged") == ssts(tmp_path / "split")
    assert merged.files_linked == len(ssts(tmp_path / "split"))
    with pytest.raises(UsageError, match="0 is not a number of partitions"):
        await rescale_checkpoint(query.root, tmp_path / "no", RescaleChoice(partitions=0), partitioner=by_crc)
    assert not (tmp_path / "no").exists()


def test_rows_are_written_to_files_of_the_usual_size(tmp_path: Path) -> None:
    run = SstRun(tmp_path, 3, RocksDbSettings(file_bytes=1000))
    rows = [(b"key-%04d" % n, b"x" * 92) for n in range(35)]
    for key, value in rows:
        run.put(key, value)
    files = run.finish()
    assert [path.name for path in files] == ["3-0.sst", "3-1.sst", "3-2.sst", "3-3.sst"]
    with StoreWriter.open(tmp_path / "store") as store:
        store.ingest(files)
        assert list(store.items()) == rows
    assert SstRun(tmp_path, 4, RocksDbSettings()).finish() == []


@pytest.mark.parametrize("partitions", [1, 2, 4, 8])
async def test_a_key_in_another_partition_is_refused_whatever_is_to_be_done(tmp_path: Path, partitions: int) -> None:
    query = await written(tmp_path, families=True, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=4), partitioner=by_crc)
    choice = RescaleChoice(partitions=partitions)
    for work in (rescale_checkpoint, plan_rescale):
        with pytest.raises(MisplacedKeyError, match="belongs in partition"):
            await work(tmp_path / "split", tmp_path / "no", choice, partitioner=by_another_hash)
        assert not (tmp_path / "no").exists()


async def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    choice = RescaleChoice(partitions=4)
    await rescale_checkpoint(query.root, tmp_path / "split", choice, partitioner=by_crc)
    with pytest.raises(TargetError):
        await rescale_checkpoint(query.root, tmp_path / "split", choice, partitioner=by_crc)
    with pytest.raises(NotFoundError):
        await rescale_checkpoint(query.root, tmp_path / "no", RescaleChoice(partitions=4, batch=99), partitioner=by_crc)
    with pytest.raises(DamagedError, match="belongs in partition"):
        await rescale_checkpoint(
            tmp_path / "split", tmp_path / "no", RescaleChoice(partitions=8), partitioner=by_another_hash
        )
    assert not (tmp_path / "no").exists()


async def test_a_damaged_sst_is_not_taken_over(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=2), partitioner=by_crc)
    sst = next((tmp_path / "split").glob("state/0/1/SSTs/*.sst"))
    flip(sst, 20)
    with pytest.raises(DamagedError):
        await rescale_checkpoint(tmp_path / "split", tmp_path / "no", RescaleChoice(partitions=1), partitioner=by_crc)
    assert not (tmp_path / "no").exists()
