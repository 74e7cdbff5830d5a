"""Another number of partitions has the same rows (design 0010, section 3); Spark's view is in tests/spark/state."""

import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint import groups, rescale_stores
from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.rescale import RescaleChoice, RescalePlan, plan_rescale, rescale_checkpoint, run_rescale
from engine.checkpoint.rescale_stores import Here
from engine.checkpoint.restore import RestoreChoice, make_target, plan_checkpoint_restore, restore_checkpoint
from engine.checkpoint.store import staged
from engine.errors import DamagedError, MisplacedKeyError, NotFoundError, TargetError, UsageError
from engine.repository.repository import Repository
from engine.rocksdb.sst_run import SstRun
from engine.rocksdb.store import RocksDbSettings, StoreWriter
from engine.runtime import Runtime
from engine.state.checkpoint_dir import opened_checkpoint
from engine.state.query import StoreAt
from index.errors import FormatError
from index.spark.partition_keys import KeyRule
from tests.unit.engine.checkpoint.checked import flip
from tests.unit.engine.checkpoint.written_query import WrittenQuery, by_crc, joined, rows_of, whole_key_rules

BY_CRC = Here(partitioner=by_crc)


def by_another_hash(rule: KeyRule, keys: Sequence[bytes], partitions: int) -> list[int]:
    return [(of + 1) % partitions for of in by_crc(rule, keys, partitions)]


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "read_key_rules", whole_key_rules)


def files_below(root: Path) -> dict[Path, os.stat_result]:
    return {path: path.stat() for path in root.rglob("*") if path.is_file()}


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
        made = await rescale_checkpoint(place, target, RescaleChoice(partitions=partitions), BY_CRC)
        assert (made.stores, made.keys_checked) == (partitions, len(expected))
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
    await rescale_checkpoint(query.root, older, RescaleChoice(partitions=2, batch=3), BY_CRC)
    assert joined(await rows_of(older, tmp_path / "a")) == joined(await rows_of(query.root, tmp_path / "b", batch=3))


async def test_a_merge_links_and_a_dry_run_says_so_and_writes_nothing(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    split = await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=4), BY_CRC)
    assert (split.files_linked, split.bytes_linked) == (0, 0)
    assert split.bytes_rewritten > 0
    choice = RescaleChoice(partitions=2)
    before = files_below(tmp_path / "split")
    planned = await plan_rescale(tmp_path / "split", tmp_path / "merged", choice, BY_CRC)
    assert not (tmp_path / "merged").exists()
    merged = await rescale_checkpoint(tmp_path / "split", tmp_path / "merged", choice, BY_CRC)
    names = RescalePlan.__struct_fields__
    assert {name: getattr(merged, name) for name in names} == {name: getattr(planned, name) for name in names} | {
        "dry_run": False
    }
    assert (merged.partitions_before, merged.partitions, merged.partitions_by_reference) == (4, 2, (1, 2))
    assert merged.bytes_rewritten == 0
    assert merged.keys_checked == split.keys_checked

    def ssts(root: Path) -> list[bytes]:
        return sorted(path.read_bytes() for path in root.glob("state/0/*/SSTs/*.sst"))

    assert ssts(tmp_path / "merged") == ssts(tmp_path / "split")
    assert merged.files_linked == len(ssts(tmp_path / "split"))
    # They are the same files, which nothing was done to.
    linked = {of.st_ino for path, of in files_below(tmp_path / "merged").items() if path.suffix == ".sst"}
    assert linked == {of.st_ino for path, of in before.items() if path.suffix == ".sst"}
    after = files_below(tmp_path / "split")
    assert {path: of.st_mtime_ns for path, of in after.items()} == {path: of.st_mtime_ns for path, of in before.items()}
    with pytest.raises(UsageError, match="0 is not a number of partitions"):
        await rescale_checkpoint(query.root, tmp_path / "no", RescaleChoice(partitions=0), BY_CRC)
    assert not (tmp_path / "no").exists()


async def test_of_the_targets_of_a_group_two_are_open_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds descriptors, and a group may have as many targets as a process may have files."""
    query = await written(tmp_path, False, 2)
    open_now, open_max = 0, 0

    @asynccontextmanager
    async def counted(*args: Any, **options: Any) -> AsyncIterator[Path]:
        nonlocal open_now, open_max
        async with staged(*args, **options) as directory:
            open_now += 1
            open_max = max(open_max, open_now)
            yield directory
            open_now -= 1

    monkeypatch.setattr("engine.checkpoint.rescale_stores.staged", counted)
    made = await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=6), BY_CRC)
    assert (made.partitions, open_max, open_now) == (6, 2, 0)


@pytest.mark.parametrize("families", [False, True], ids=["one table", "families"])
@pytest.mark.parametrize("format_version", [1, 2])
async def test_a_backup_is_restored_with_another_number_of_partitions(
    tmp_path: Path, repository: Repository, families: bool, format_version: Literal[1, 2]
) -> None:
    query = await written(tmp_path, families, format_version)
    place, expected = query.root, joined(await rows_of(query.root, tmp_path / "rows"))
    for turn, partitions in enumerate((4, 6, 2)):
        await backup_checkpoint(repository, place, BackupChoice(job=f"turn-{turn}"))
        choice = RestoreChoice(job=f"turn-{turn}", partitions=partitions)
        target = tmp_path / f"turn-{turn}"
        planned = await plan_checkpoint_restore(repository, target, choice, partitioner=by_crc)
        if turn:  # in one partition every key is in place
            with pytest.raises(MisplacedKeyError):
                await restore_checkpoint(repository, target, choice, partitioner=by_another_hash)
        assert not target.exists()
        made = await restore_checkpoint(repository, target, choice, partitioner=by_crc)
        assert made.rescaled is not None
        assert made.rescaled == planned.rescaled
        assert (made.stores, made.rescaled.keys_checked) == (partitions, len(expected))
        assert joined(await rows_of(target, tmp_path / f"rows-{turn}")) == expected
        report = await check_checkpoint(target)
        assert report.is_sound
        assert not report.warnings
        assert made.files == len(files_below(target))
        place = target


@given(st.lists(st.sets(st.integers(0, 300)), max_size=4), st.integers(1, 9))
def test_runs_are_merged_by_key(sets: list[set[int]], size: int) -> None:
    runs, taken = [], set[int]()
    for one in sets:
        rows = [(b"%03d" % key, b"", key) for key in sorted(one - taken)]
        taken |= one
        runs.append(iter([rows[at : at + size] for at in range(0, len(rows), size)]))
    merged = [list(rows) for rows in rescale_stores.merge_runs(runs)]
    assert [row[2] for rows in merged for row in rows] == sorted(taken)
    assert all(merged)


def test_rows_are_written_to_files_of_the_usual_size(tmp_path: Path) -> None:
    run = SstRun(tmp_path, 3, RocksDbSettings(file_bytes=50_000))
    rng = random.Random(3)
    rows = [(b"key-%04d" % n, rng.randbytes(92)) for n in range(2000)]
    run.put(rows[:7])
    run.put(rows[7:])
    files = run.finish()
    assert [path.name for path in files] == [f"3-{number}.sst" for number in range(4)]
    assert all(50_000 <= path.stat().st_size <= 100_000 for path in files[:-1])
    with StoreWriter.open(tmp_path / "store") as store:
        store.ingest(files)
        assert list(store.items()) == rows
    assert SstRun(tmp_path, 4, RocksDbSettings()).finish() == []


@pytest.mark.parametrize("partitions", [1, 2, 4, 8])
async def test_a_key_in_another_partition_is_refused_whatever_is_to_be_done(tmp_path: Path, partitions: int) -> None:
    query = await written(tmp_path, families=True, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=4), BY_CRC)
    choice = RescaleChoice(partitions=partitions)
    for work in (rescale_checkpoint, plan_rescale):
        with pytest.raises(MisplacedKeyError, match="belongs in partition"):
            await work(tmp_path / "split", tmp_path / "no", choice, Here(partitioner=by_another_hash))
        assert not (tmp_path / "no").exists()


async def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    choice = RescaleChoice(partitions=4)
    await rescale_checkpoint(query.root, tmp_path / "split", choice, BY_CRC)
    with pytest.raises(TargetError):
        await rescale_checkpoint(query.root, tmp_path / "split", choice, BY_CRC)
    with pytest.raises(NotFoundError):
        await rescale_checkpoint(query.root, tmp_path / "no", RescaleChoice(partitions=4, batch=99), BY_CRC)
    with pytest.raises(DamagedError, match="belongs in partition"):
        await rescale_checkpoint(
            tmp_path / "split", tmp_path / "no", RescaleChoice(partitions=8), Here(partitioner=by_another_hash)
        )
    assert not (tmp_path / "no").exists()


async def test_a_damaged_sst_is_not_taken_over(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=2), BY_CRC)
    sst = next((tmp_path / "split").glob("state/0/1/SSTs/*.sst"))
    flip(sst, 20)
    with pytest.raises(DamagedError):
        await rescale_checkpoint(tmp_path / "split", tmp_path / "no", RescaleChoice(partitions=1), BY_CRC)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("is_row", [False, True], ids=["deletion", "row"])
async def test_a_deletion_of_another_partitions_key_hides_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_row: bool
) -> None:
    """A partition that has deleted a key of another one is compacted first; one that has such a row is refused."""
    query = await written(tmp_path, families=False, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=2), BY_CRC)
    rows = await rows_of(tmp_path / "split", tmp_path / "rows")
    strange = {of.partition: min(key for _, key in found) for of, found in rows.items()}
    load = rescale_stores._load

    async def with_strange_key(files: Any, at: Any, store: StoreAt, *rest: Any) -> Any:
        loaded = await load(files, at, store, *rest)
        source = loaded.source
        with StoreWriter.open(source.directory, RocksDbSettings(compacts=False)) as db:
            key = strange[1 - store.id.partition]
            db.put(key, b"")
            db.flush()
            if not is_row:
                db.delete(key)
            db.checkpoint(source.directory.with_name("strange"))
        source = msgspec.structs.replace(source, directory=source.directory.with_name("strange"))
        return msgspec.structs.replace(loaded, source=source)

    monkeypatch.setattr(rescale_stores, "_load", with_strange_key)
    choice = RescaleChoice(partitions=1)
    if is_row:
        for refused in (rescale_checkpoint, plan_rescale):
            with pytest.raises(MisplacedKeyError, match="belongs in partition"):
                await refused(tmp_path / "split", tmp_path / "merged", choice, BY_CRC)
        assert not (tmp_path / "merged").exists()
        return
    planned = await plan_rescale(tmp_path / "split", tmp_path / "merged", choice, BY_CRC)
    made = await rescale_checkpoint(tmp_path / "split", tmp_path / "merged", choice, BY_CRC)
    assert (made.keys_checked, made.keys_checked) == (planned.keys_checked, len(joined(rows)))
    monkeypatch.undo()
    assert joined(await rows_of(tmp_path / "merged", tmp_path / "merged rows")) == joined(rows)


async def test_stores_that_were_made_elsewhere_are_missed(tmp_path: Path) -> None:
    """As by executors that have another disk under the same path."""
    query = await written(tmp_path, families=False, format_version=2)
    place = make_target(tmp_path / "new", Runtime(), move_aside=False, settings=None)
    async with opened_checkpoint(query.root, None) as root:

        async def elsewhere(_: Path, work: tuple[groups.GroupToRescale, ...]) -> list[groups.GroupRescaled]:
            open_store = rescale_stores.of_checkpoint(root)
            return await rescale_stores.rescale_here(open_store, work, tmp_path / "elsewhere", BY_CRC)

        with pytest.raises(TargetError, match="was made, and is not in"):
            await run_rescale(root, place, RescaleChoice(partitions=2), elsewhere, Runtime())
    assert not (tmp_path / "new").exists()


async def test_checksums_of_sources_are_compared_also_where_none_are_written(tmp_path: Path) -> None:
    query = await written(tmp_path, families=False, format_version=2)
    await rescale_checkpoint(query.root, tmp_path / "split", RescaleChoice(partitions=2), BY_CRC)
    sums = [*(tmp_path / "split").glob("state/0/*/*.zip.crc")]
    assert sums
    for path in sums:
        path.write_bytes(b"{}")
    place = make_target(tmp_path / "new", Runtime(), move_aside=False, settings=None)
    async with opened_checkpoint(tmp_path / "split", None) as root:

        async def unsummed(directory: Path, work: tuple[groups.GroupToRescale, ...]) -> list[groups.GroupRescaled]:
            bare = [msgspec.structs.replace(item, sums_files=False) for item in work]
            return await rescale_stores.rescale_here(rescale_stores.of_checkpoint(root), bare, directory, BY_CRC)

        with pytest.raises(FormatError):
            await run_rescale(root, place, RescaleChoice(partitions=1), unsummed, Runtime())
    assert not (tmp_path / "new").exists()
