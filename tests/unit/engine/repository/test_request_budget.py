"""Requests and bytes per use case are the formulas of design 0002, "Cost"."""

import math
from collections import Counter
from pathlib import Path

import pytest

from engine.backup.backup import BackupOptions
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.plan.commits import Retention
from tests.unit.engine.conftest import JOB, TTL_MS, World

# Sizes that make each kind of file with little data: packed up to 2 KiB, alone up to 8 KiB, cut above that.
SETTINGS = TransferSettings(
    inline_file_bytes_max=16,
    pack_file_bytes_max=2048,
    pack_bytes_max=8192,
    chunk_bytes=4096,
    blob_bytes_max=8192,
    in_flight_max=4,
)


def requests(world: World) -> Counter[str]:
    counted = Counter(operation for operation, _ in world.store.requests)
    world.store.requests.clear()
    return counted


async def process(world: World) -> Repository:
    repository = await Repository.open(world.store, settings=SETTINGS)
    world.store.requests.clear()
    return repository


def many_files(world: World, *, small: int, single: int, cut: int, changed: int = 0) -> Path:
    """A tree of `small` files of 1 KiB, `single` of 4 KiB and `cut` of 20,000 bytes; the first few are `changed`."""
    files = {f"s{i:05d}": (b"%d" % i).ljust(1024, b"!" if i < changed else b".") for i in range(small)}
    files |= {f"m{i:05d}": (b"%d" % i).ljust(4096, b"!" if i < changed else b".") for i in range(single)}
    files |= {f"l{i:05d}": (b"%d" % i).ljust(20_000, b"!" if i < changed else b".") for i in range(cut)}
    return world.tree(files)


@pytest.mark.parametrize("small, single, cut", [(0, 0, 0), (3, 0, 0), (40, 5, 2), (100, 0, 3)])
async def test_first_backup(world: World, small: int, single: int, cut: int) -> None:
    repository = await process(world)
    await repository.backup(
        JOB, many_files(world, small=small, single=single, cut=cut), options=BackupOptions(base=None)
    )
    packs = math.ceil(small * 1024 / 8192)
    blobs = single + cut * 3
    assert requests(world) == {"put_if_absent": packs + blobs + 1}


async def test_backup_after_one_percent_changed_uploads_those_files_and_the_index_and_nothing_else(
    world: World,
) -> None:
    repository = await process(world)
    first = await repository.commit(
        JOB,
        [
            await repository.backup(
                JOB, many_files(world, small=300, single=100, cut=0), options=BackupOptions(base=None)
            )
        ],
    )
    tree = many_files(world, small=300, single=100, cut=0, changed=3)
    repository = await process(world)
    result = await repository.backup(JOB, tree, options=BackupOptions(base=first.store("0", "default")))
    # 3 of 300 small files are one pack; 3 of 100 larger ones are a blob each; one index is read, one is written.
    assert requests(world) == {"get": 1, "put_if_absent": 1 + 3 + 1}
    assert result.stats.bytes_added == 3 * 1024 + 3 * 4096
    await repository.commit(JOB, [result])
    target = world.target()
    await repository.find_and_restore(JOB, target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {p.name: p.read_bytes() for p in tree.iterdir()}


async def test_backup_without_a_change_uploads_the_index_alone(world: World) -> None:
    repository = await process(world)
    tree = many_files(world, small=20, single=5, cut=1)
    first = await repository.commit(JOB, [await repository.backup(JOB, tree, options=BackupOptions(base=None))])
    for other, gets in ((repository, 0), (await process(world), 1)):
        world.store.requests.clear()
        await other.backup(JOB, tree, options=BackupOptions(base=first.store("0", "default")))
        counted = requests(world)
        assert (counted["get"], counted["put_if_absent"], counted.total()) == (gets, 1, gets + 1)


async def test_commit_of_the_same_writer_is_one_put_and_one_list_and_its_ttl_removals(world: World) -> None:
    repository = await process(world)
    for changed in range(3):
        result = await repository.backup(JOB, many_files(world, small=40, single=5, cut=0, changed=changed))
        world.store.requests.clear()
        await repository.commit(JOB, [result])
        # The other kind of log is looked for before and after the first commit, and before the second one (K3).
        lists = {0: 1 + 2, 1: 1 + 1, 2: 1}[changed]
        assert requests(world) == Counter(put_if_absent=1, list_page=lists, remove_ttl=len(result.new_keys))


async def test_commit_of_a_new_process_loads_the_log_and_settles_the_parent(world: World) -> None:
    repository = await process(world)
    result = await repository.backup(
        JOB, many_files(world, small=40, single=5, cut=0), options=BackupOptions(base=None)
    )
    parent = await repository.commit(JOB, [result])
    other = await process(world)
    tree = many_files(world, small=40, single=5, cut=0, changed=1)
    second = await repository.backup(JOB, tree, options=BackupOptions(base=parent.store("0", "default")))
    world.store.requests.clear()
    await other.commit(JOB, [second])
    # LIST + GET of the newest record; the other kind of log looked for (K3); the parent's index asked whether it is
    # settled; PUT + LIST; the new keys settled.
    assert requests(world) == {
        "list_page": 3,
        "get": 1,
        "stat": 1,
        "put_if_absent": 1,
        "remove_ttl": len(second.new_keys),
    }
    assert len(result.new_keys) > 5


async def test_commit_of_a_new_process_completes_what_the_one_before_left(world: World) -> None:
    repository = await process(world)
    result = await repository.backup(
        JOB, many_files(world, small=40, single=5, cut=0), options=BackupOptions(base=None)
    )
    world.store.fail("remove_ttl", result.new_keys[0])
    parent = await repository.commit(JOB, [result])
    other = await process(world)
    tree = many_files(world, small=40, single=5, cut=0, changed=1)
    second = await repository.backup(JOB, tree, options=BackupOptions(base=parent.store("0", "default")))
    world.store.requests.clear()
    await other.commit(JOB, [second])
    assert requests(world) == {
        "list_page": 3,
        "get": 1 + 1,
        "stat": 1,
        "put_if_absent": 1,
        "remove_ttl": len(result.new_keys) + len(second.new_keys),
    }


async def test_restore_fetches_each_blob_and_each_run_of_a_pack_once(world: World) -> None:
    repository = await process(world)
    result = await repository.backup(
        JOB, many_files(world, small=40, single=5, cut=2), options=BackupOptions(base=None)
    )
    commit = await repository.commit(JOB, [result])
    world.store.requests.clear()
    await repository.restore(commit, world.target())
    packs = math.ceil(40 * 1024 / 8192)
    # Pin and release; the log from the commit's number on; the index; blobs and packs.
    assert requests(world) == {"put": 2, "list_page": 1, "get": 1 + packs + 5 + 2 * 3}


async def test_collection_costs_lists_records_and_indexes_but_nothing_per_blob(world: World) -> None:
    repository = await process(world)
    for changed in range(4):
        result = await repository.backup(JOB, many_files(world, small=40, single=20, cut=0, changed=changed))
        await repository.commit(JOB, [result])
    world.clock.advance(TTL_MS)
    world.store.requests.clear()
    await repository.collect(Retention(keep_last=2), delete_share_max=1)
    counted = requests(world)
    # Blobs and indexes; what older runs and their audits have left; pins, names and logs twice.
    assert counted["list_page"] == 2 + 2 + 2 * 3
    # 4 records once, 2 kept indexes once; the boundary in the second reading.
    assert counted["get"] == 4 + 2 + 1
    # The boundary, and the audit record.
    assert counted["put_if_absent"] == 2
    assert counted["delete"] == 3
    assert counted["list_unfinished"] == 2
    # The index of the newest commit.
    assert counted["stat"] == 1
    assert counted.total() == 10 + 7 + 2 + 3 + 2 + 1


async def test_collection_where_lists_show_no_ttls_asks_no_more(opaque_world: World) -> None:
    world = opaque_world
    repository = await process(world)
    for changed in range(4):
        result = await repository.backup(JOB, many_files(world, small=40, single=20, cut=0, changed=changed))
        await repository.commit(JOB, [result])
        world.clock.advance(TTL_MS // 2)
    await repository.backup(JOB, many_files(world, small=3, single=7, cut=0), options=BackupOptions(base=None))
    world.store.requests.clear()
    report = await repository.collect(Retention(keep_last=2), delete_share_max=1)
    counted = requests(world)
    assert counted["stat"] == 1
    assert report.waiting_count == 1 + 7 + 1
    assert (counted["list_page"], counted["get"], counted["remove_ttl"]) == (10, 7, 0)


@pytest.fixture
def chosen_world(request: pytest.FixtureRequest) -> World:
    chosen: World = request.getfixturevalue(request.param)
    return chosen


@pytest.mark.parametrize("chosen_world, stats", [("world", 0), ("opaque_world", 3)], indirect=["chosen_world"])
async def test_verification_costs_lists_and_indexes_and_where_lists_show_no_ttls_a_stat_for_each_index(
    chosen_world: World, stats: int
) -> None:
    world = chosen_world
    repository = await process(world)
    for changed in range(3):
        result = await repository.backup(JOB, many_files(world, small=40, single=20, cut=0, changed=changed))
        await repository.commit(JOB, [result])
    commits = await repository.commits(JOB)
    world.store.requests.clear()
    assert not (await repository.verify(commits)).problems
    assert requests(world) == Counter(list_page=2, get=3) + Counter(stat=stats)
