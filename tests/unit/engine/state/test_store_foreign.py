"""Files that look as if they were of the history that counts, and are not: by number, by name, by what is in them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.state.changelogs import ChangelogWriter
from index.errors import DamagedChangelogError, LineageError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import PUT, ChangelogVersion
from tests.unit.engine.state.state_store_kit import (
    Bench,
    Conf,
    Ids,
    both_formats,
    last_load,
    rows,
    with_and_without_families,
    write,
)
from tidemark import StateStore


async def grow(store: StateStore, ids: Ids, versions: range, *, snapshots: tuple[int, ...], value: bytes) -> None:
    """Versions that each add a row with their number, with snapshots of some of them."""
    for version in versions:
        store.put(b"%02d" % version, value)
        committed = await store.commit(snapshot=version in snapshots)
        ids[version:] = [committed.unique_id]


def replace_changelog(
    path: Path, version: ChangelogVersion, key: bytes, value: bytes, lineage: Sequence[LineageItem] = ()
) -> None:
    """Write another changelog in the place of one, which nothing outside it shows."""
    with ChangelogWriter(path, "lz4", version, lineage) as writer:
        writer.write((PUT, key, value))
        writer.finish()
    path.with_name(f"{path.name}.crc").unlink()


# --- deletion: what is in the way of a base (design 0004, G7) ---

RARELY: Conf = {"deltas_per_snapshot": 1000, "versions_deleted_min": 0}


@both_formats
@pytest.mark.parametrize("retained", [1, 2, 3, 9, 10])
@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted"])
async def test_after_a_step_back_every_version_to_retain_loads(
    bench: Bench, format_version: int, retained: int, restart: bool
) -> None:
    conf: Conf = {**RARELY, "format_version": format_version, "versions_retained_min": retained}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await store.load(0)
        await grow(store, ids, range(1, 15), snapshots=(6, 14), value=b"left")
        await store.load(6, ids[6])
        await grow(store, ids, range(7, 17), snapshots=(8, 16), value=b"counts")
        if not restart:
            await store.maintain()
    if restart:
        async with bench.store(**conf) as store:
            await store.load(16, ids[16])
            await store.maintain()
    async with bench.store(**conf) as store:
        for version in range(17 - retained, 17):
            await store.load(version, ids[version], read_only=True)
            expected = {b"%02d" % v: b"left" if v <= 6 else b"counts" for v in range(1, version + 1)}
            assert rows(store) == expected


async def test_a_snapshot_of_an_attempt_that_lost_is_no_base_of_what_is_retained(bench: Bench) -> None:
    conf: Conf = {**RARELY, "versions_retained_min": 2}
    ids: Ids = [None]
    async with bench.store(**conf) as store, bench.store(**conf) as lost:
        await store.load(0)
        await grow(store, ids, range(1, 14), snapshots=(4, 8), value=b"counts")
        await write(lost, 13, ids[13], {b"14": b"lost"})
        await lost.load(13, ids[13])
        lost.put(b"14", b"lost")
        await lost.commit(snapshot=True)
        await grow(store, ids, range(14, 17), snapshots=(16,), value=b"counts")
        deleted = (await store.maintain()).deleted
    # What lies below the base of version 15 goes all the same.
    assert (deleted.oldest_kept, deleted.snapshots) == (8, 1)
    assert bench.snapshots() == [8, 14, 16]
    async with bench.store(**conf) as store:
        for version in (15, 16):
            await store.load(version, ids[version], read_only=True)
            assert rows(store) == {b"%02d" % v: b"counts" for v in range(1, version + 1)}


async def test_nothing_is_deleted_where_headers_do_not_lead_to_what_is_retained(bench: Bench) -> None:
    conf: Conf = {**RARELY, "versions_retained_min": 2}
    ids: Ids = [None]
    async with bench.store(**conf) as store, bench.store(**conf) as lost:
        await store.load(0)
        await grow(store, ids, range(1, 14), snapshots=(4, 8), value=b"counts")
        await lost.load(13, ids[13])
        await lost.commit(snapshot=True)
        await grow(store, ids, range(14, 17), snapshots=(16,), value=b"counts")
    (bench.root / f"15_{ids[15]}.changelog").unlink()
    async with bench.store(**conf) as store:
        await store.load(16, ids[16])
        deleted = (await store.maintain()).deleted
    assert (deleted.oldest_kept, deleted.snapshots, deleted.changelogs) == (0, 0, 0)
    assert bench.snapshots() == [4, 8, 14, 16]


# --- loading: names and contents that do not go together (L6, R8) ---


@with_and_without_families
async def test_a_changelog_without_a_lineage_under_a_name_with_an_id_is_damage(bench: Bench, families: bool) -> None:
    conf: Conf = {"deltas_per_snapshot": 100, "column_families": families}
    ids: Ids = [None]
    async with bench.store(**conf, format_version=1) as store:
        # What it would be taken for a continuation of (R4).
        await store.load(0)
        await grow(store, ids, range(1, 4), snapshots=(), value=b"old")
    async with bench.store(**conf) as store:
        await store.load(0)
        await grow(store, ids, range(1, 5), snapshots=(), value=b"new")
    path = bench.root / f"4_{ids[4]}.changelog"
    replace_changelog(path, 2 if families else 1, b"04", b"new")
    async with bench.store(**conf) as store:
        with pytest.raises(DamagedChangelogError, match=rf"{path.name}: has an id in its name"):
            await store.load(4, ids[4])


@with_and_without_families
async def test_a_changelog_with_a_lineage_under_a_name_without_an_id_is_damage(bench: Bench, families: bool) -> None:
    conf: Conf = {"deltas_per_snapshot": 100, "column_families": families}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await store.load(0)
        await grow(store, ids, range(1, 4), snapshots=(), value=b"new")
    async with bench.store(**conf, format_version=1) as store:
        await store.load(0)
        for version in range(1, 4):
            store.put(b"%02d" % version, b"old")
            await store.commit()
    (bench.root / "3.changelog").write_bytes((bench.root / f"3_{ids[3]}.changelog").read_bytes())
    async with bench.store(**conf, format_version=1) as store:
        with pytest.raises(DamagedChangelogError, match=r"3\.changelog: has no id in its name"):
            await store.load(3)


@pytest.mark.parametrize("lineage", [(), ("other",), ("own", "other")], ids=["none", "another one", "two"])
async def test_a_changelog_that_was_written_on_top_of_another_version_is_not_replayed(
    bench: Bench, lineage: tuple[str, ...]
) -> None:
    conf: Conf = {"deltas_per_snapshot": 100}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await store.load(0)
        await grow(store, ids, range(1, 5), snapshots=(1,), value=b"new")
    path = bench.root / f"3_{ids[3]}.changelog"
    names = {"own": str(ids[1]), "other": "of-somebody-else"}
    items = tuple(LineageItem(3 - len(lineage) + at, UniqueId(names[name])) for at, name in enumerate(lineage))
    replace_changelog(path, 3, b"03", b"foreign", items)
    async with bench.store(**conf) as store:
        # Version 4 knows the whole lineage, and need not ask version 3 for anything.
        with pytest.raises(LineageError, match=rf"{path.name}: does not lead back"):
            await store.load(4, ids[4])


# --- without ids: a snapshot of a history that was left (C4) ---


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("back_to", [0, 6, 13])
async def test_after_a_step_back_no_snapshot_of_the_history_that_was_left_is_loaded(
    bench: Bench, restart: bool, back_to: int
) -> None:
    conf: Conf = {"format_version": 1, "deltas_per_snapshot": 1000}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await store.load(0)
        await grow(store, ids, range(1, 15), snapshots=(1, 6, 14), value=b"left")
        if not restart:
            await store.load(back_to)
            await grow(store, ids, range(back_to + 1, 16), snapshots=(), value=b"counts")
    if restart:
        async with bench.store(**conf) as store:
            await store.load(back_to)
            await grow(store, ids, range(back_to + 1, 16), snapshots=(), value=b"counts")
    async with bench.store(**conf) as store:
        for version in (14, 15):
            await store.load(version, read_only=True)
            expected = {b"%02d" % v: b"left" if v <= back_to else b"counts" for v in range(1, version + 1)}
            assert rows(store) == expected
        base = last_load(store).base
    # And what the left history had as snapshots are snapshots of this one now: no more, and no fewer.
    assert base is not None
    assert base.version == 14
    assert bench.snapshots() == [1, 6, 14]
