"""Several histories in one directory, lineages that grow too long, and format 1 continued as format 2."""

from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from blobstore.memory import MemoryStore
from engine.runtime import Runtime
from engine.state.changelogs import open_changelog
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import VersionMissingError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.lineage import LINEAGE_BYTES_MAX, encode_lineage
from index.spark.names import StateVersion
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    check_numbers,
    last_load,
    rows,
    settings_of,
    with_and_without_changelogs,
    with_and_without_families,
    write,
    write_numbers,
)
from tidemark import StateStore


@pytest.mark.spark_case(10)
@with_and_without_families
@with_and_without_changelogs
async def test_two_histories_of_the_same_versions_do_not_see_each_other(
    bench: Bench, families: bool, changelogs: bool
) -> None:
    conf: Conf = {"column_families": families, "changelogs": changelogs, "deltas_per_snapshot": 3}
    ids: dict[str, Ids] = {"A": [None], "B": [None]}
    async with bench.store(**conf) as one, bench.store(**conf) as two:
        for version in range(1, 11):
            for store, name in ((one, "A"), (two, "B")):
                row = {b"%s%d" % (name.encode(), version): b"1"}
                ids[name].append((await write(store, version - 1, ids[name][-1], row)).unique_id)
                if version % 4 == 0:
                    await store.maintain()
    async with bench.store(**conf) as store:
        for version in (10, 9, 4, 1):
            for name in ("A", "B"):
                await store.load(version, ids[name][version])
                assert set(rows(store)) == {b"%s%d" % (name.encode(), v) for v in range(1, version + 1)}
        # Each version has two files of its kind, and some versions two snapshots.
        assert len(bench.changelogs()) == (20 if changelogs else 0)
        assert len(bench.snapshots()) == 2 * len(set(bench.snapshots())) > 0


async def test_a_lineage_begins_at_the_newest_snapshot_and_ends_at_the_loaded_version(bench: Bench) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=4) as store:
        await write_numbers(store, ids, range(1, 7))
        assert [item.version for item in store.lineage] == [1, 2, 3, 4, 5, 6]
        await store.maintain()
        assert [item.version for item in store.lineage] == [4, 5, 6]
        await write_numbers(store, ids, range(7, 8))
        assert [item.unique_id for item in store.lineage] == ids[4:8]
        await store.abort()
        assert store.lineage == ()
    with open_changelog(bench.file(6, "changelog"), "lz4") as changelog:
        assert [item.version for item in changelog.header.lineage] == [1, 2, 3, 4, 5]
    with open_changelog(bench.file(7, "changelog"), "lz4") as changelog:
        assert changelog.header.lineage == tuple(LineageItem(v, ids[v] or "") for v in (4, 5, 6))  # type: ignore[arg-type]
    async with bench.store() as store:
        await store.load(6, ids[6])
        assert [item.version for item in store.lineage] == [4, 5, 6]
        await store.load(3, ids[3])
        assert [item.version for item in store.lineage] == [1, 2, 3]


async def test_with_a_lineage_in_memory_the_header_is_not_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: Ids = [None]
    async with bench.store(deltas_per_snapshot=100) as store:
        await write_numbers(store, ids, range(1, 6))
        # What resolve would read first is the header of version 4: with it in memory, all is fetched at once.
        store.manager._headers.clear()
        reading = store.manager.read_header
        read: list[StateVersion] = []

        async def read_header(of: StateVersion, scratch: Path | None) -> tuple[LineageItem, ...]:
            read.append(of)
            return await reading(of, scratch)

        monkeypatch.setattr(store.manager, "read_header", read_header)
        await check_numbers(store, ids, [4])
        assert read == []
        await store.abort()
        await check_numbers(store, ids, [4])
        assert read == [StateVersion(4, ids[4])]


class LongIds(Runtime):
    """Ids that fill a header in a quarter of the versions."""

    @override
    def unique_id(self) -> UniqueId:
        return UniqueId(super().unique_id() + "x" * 180)


@pytest.mark.parametrize(
    "runtime, newest",
    [
        pytest.param(LongIds(), 270, id="long ids"),
        # Spark: "encoded string too long" at about version 840.
        pytest.param(Runtime(), 900, id="uuids", marks=pytest.mark.soak),
    ],
)
async def test_a_query_without_uploaded_snapshots_does_not_die_of_its_lineage(
    bench: Bench, runtime: Runtime, newest: int
) -> None:
    # Design 0004, §1.4 and C6.
    settings = settings_of(deltas_per_snapshot=10_000, file_checksums=False, count_keys=False)
    files = await CheckpointDir.open(MemoryStore())
    ids: Ids = [None]
    async with await StateStore.open(files, bench.new_work(), settings, runtime=runtime) as store:
        await store.load(0)
        for version in range(1, newest + 1):
            store.put(b"%d" % (version % 50), b"%d" % version)
            ids.append((await store.commit()).unique_id)
        last = rows(store)
        lineage = store.lineage
    (zipped,) = (status.name for status in await files.list() if status.name.endswith(".zip"))
    cut = int(zipped.partition("_")[0])
    assert 0 < newest - cut < 100
    assert [item.version for item in lineage] == [*range(cut, newest + 1)]

    async def header(version: int) -> tuple[LineageItem, ...]:
        path = bench.tmp_path / str(version)
        await files.fetch(f"{version}_{ids[version]}.changelog", path)
        with open_changelog(path, "lz4") as changelog:
            return changelog.header.lineage

    # As many of the newest as a header holds, which begin right behind it; and then again at the snapshot.
    found = await header(cut)
    assert (found[-1].version, found[0].version > 1) == (cut - 1, True)
    assert LINEAGE_BYTES_MAX - 300 < len(encode_lineage(found)) <= LINEAGE_BYTES_MAX
    assert [item.version for item in await header(cut + 1)] == [cut]
    async with await StateStore.open(files, bench.new_work(), settings) as store:
        await store.load(newest, ids[newest])
        assert rows(store) == last
        assert (last_load(store).base, last_load(store).changelogs) == (StateVersion(cut, ids[cut]), newest - cut)
        # Without the snapshot everything is still found, hop by hop.
        await files.delete((zipped,))
        await store.load(0)
        await store.load(newest, ids[newest])
        assert rows(store) == last
        assert (last_load(store).base, last_load(store).changelogs) == (None, newest)


@pytest.mark.parametrize("snapshot_between", [False, True])
@with_and_without_families
async def test_format_1_goes_on_as_format_2_in_the_same_directory(
    bench: Bench, families: bool, snapshot_between: bool
) -> None:
    # Cases i.b and ii.b of SPARK-49883; Spark 4.3 pins the format of a query instead.
    conf: Conf = {"column_families": families, "deltas_per_snapshot": 2 if snapshot_between else 100}
    ids: Ids = [None]
    async with bench.store(**conf, format_version=1) as store:
        await write_numbers(store, ids, range(1, 6), maintain_every=2)
        assert ids == [None] * 6
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(6, 9))
        assert None not in ids[6:]
        await check_numbers(store, ids, range(9))
    with open_changelog(bench.file(6, "changelog"), "lz4") as changelog:
        assert changelog.header.lineage == ()
    async with bench.store(**conf) as store:
        await check_numbers(store, ids, [8, 5, 6, 2, 7])
        await store.load(8, ids[8])
        assert [item.version for item in store.lineage] == [6, 7, 8]
        await write_numbers(store, ids, range(9, 12), maintain_every=1)
    async with bench.store(**conf) as store:
        await check_numbers(store, ids, [11, 3, 9])


async def test_deletion_keeps_what_the_loaded_version_is_made_of(bench: Bench) -> None:
    # Design 0004, §1.2 and G4: Spark's maintenance goes by numbers over all ids, and kills a query that was taken back.
    conf: Conf = {"deltas_per_snapshot": 2, "versions_retained_min": 2, "versions_deleted_min": 0}
    ids: Ids = [None]
    async with bench.store(**{**conf, "versions_retained_min": 100}) as store:
        await write_numbers(store, ids, range(1, 15), maintain_every=2)
        assert bench.snapshots() == [*range(2, 15, 2)]
    async with bench.store(**conf) as store:
        again = ids[:7]
        await write_numbers(store, again, range(7, 8))
        await store.abort()
        await store.maintain()
        await check_numbers(store, again, [7])
        await store.maintain()
    async with bench.store(**conf) as store:
        await check_numbers(store, again, [7])
        await write_numbers(store, again, range(8, 12), maintain_every=1)
    async with bench.store(**conf) as store:
        await check_numbers(store, again, [11, 10])


async def test_versions_that_nobody_needs_are_deleted(bench: Bench) -> None:
    ids: Ids = [None]
    conf: Conf = {"deltas_per_snapshot": 2, "versions_retained_min": 3, "versions_deleted_min": 1}
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 12), maintain_every=6)
        assert bench.snapshots() == [6]
        await write_numbers(store, ids, range(12, 13))
        maintained = await store.maintain()
        assert maintained.uploaded is not None
        assert (maintained.uploaded.version, maintained.deleted.snapshots) == (12, 0)
        await write_numbers(store, ids, range(13, 17))
        maintained = await store.maintain()
        assert maintained.deleted.changelogs == 11
        assert bench.changelogs() == [*range(12, 17)]
        await check_numbers(store, ids, [16, 14, 12])
        with pytest.raises(VersionMissingError, match="cannot be put together"):
            await store.load(11, ids[11])


async def test_what_is_reported_of_a_commit_can_be_stored(bench: Bench) -> None:
    async with bench.store() as store:
        committed = await write(store, 0, None, {b"a": b"1"})
    assert msgspec.json.decode(msgspec.json.encode(committed), type=type(committed)) == committed
