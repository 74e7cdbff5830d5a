"""What goes on beside other requests (design 0002, P3 and T1)."""

import asyncio
from pathlib import Path

import pytest

from blobstore.errors import StoreUnavailableError
from engine.backup.backup import BackupOptions, BackupResult
from engine.errors import CommitLostError, UnsafeSourceError
from engine.records.indexes import has_ttl
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.keys import INDEXES, commit_key
from tests.doubles import HELD_S_MAX, Gate
from tests.unit.engine.conftest import JOB, World, text_tree

# All in one pack, and in the index.
SMALL = {"CURRENT": b"MANIFEST-000005", "000007.log": b"log" * 10_000, "000008.log": b"other" * 10_000}


async def refuse() -> None:
    raise StoreUnavailableError("injected", operation="put_if_absent")


def operations(world: World, prefix: str = "") -> list[str]:
    return [operation for operation, key in world.store.requests if key.startswith(prefix)]


# ---------------------------------------------------------------------- backup


async def back_up(repository: Repository, tree: Path) -> BackupResult:
    return await repository.backup(JOB, tree, options=BackupOptions(base=None))


async def test_an_index_is_written_beside_the_packs(world: World) -> None:
    repository, gate = await world.process(), Gate()
    world.store.before("put_if_absent", "blobs/", gate.wait)
    world.store.after("put_if_absent", INDEXES, gate.open)
    result = await back_up(repository, world.tree(SMALL))
    assert result.stats.packs == result.stats.blobs == 1
    await repository.commit(JOB, [result])
    target = world.target()
    await repository.find_and_restore(JOB, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == SMALL


async def test_an_index_comes_after_blobs_that_are_read_while_they_are_sent(world: World) -> None:
    repository = await world.process()
    world.store.requests.clear()
    assert (await back_up(repository, world.tree(text_tree("one")))).stats.blobs > 1
    assert world.store.requests[-1][1].startswith(INDEXES)


async def test_a_pack_that_fails_fails_the_backup_though_its_index_is_written(world: World) -> None:
    repository, gate = await world.process(), Gate()

    async def fail_later() -> None:
        await gate.wait()
        await refuse()

    world.store.before("put_if_absent", "blobs/", fail_later)
    world.store.after("put_if_absent", INDEXES, gate.open)
    tree = world.tree(SMALL)
    with pytest.raises(StoreUnavailableError):
        await back_up(repository, tree)
    (left,) = await world.keys(INDEXES)
    assert await has_ttl(world.store.inner, left)
    assert await world.keys("log/") == set()
    assert left not in (await repository.backup(JOB, tree)).new_keys
    world.clock.advance(2 * 3_600_000)
    await repository.collect(Retention(keep_last=1), delete_share_max=1)
    assert await world.keys(INDEXES) == set()


async def test_a_second_look_that_finds_a_change_takes_back_what_is_being_sent(world: World) -> None:
    repository, tree = await world.process(), world.tree(SMALL)

    async def meddle_and_hang() -> None:
        (tree / "000007.log").write_bytes(b"other")
        await asyncio.sleep(HELD_S_MAX)
        raise AssertionError("it was not given up")

    world.store.before("put_if_absent", "blobs/", meddle_and_hang)
    with pytest.raises(UnsafeSourceError):
        await back_up(repository, tree)
    assert await world.keys("blobs/") | await world.keys(INDEXES) == set()


# ---------------------------------------------------------------------- commit


async def test_ttls_of_blobs_go_beside_the_list_and_those_of_indexes_after_it(world: World) -> None:
    repository, listing = await world.process(), Gate()
    await world.history(repository, "zero", "one")
    result = await world.backup(repository, "two")
    world.store.before("list_page", "log/", listing.wait)
    world.store.after("remove_ttl", "blobs/", listing.open)
    world.store.requests.clear()
    assert (await repository.commit(JOB, [result])).settled
    assert {await has_ttl(world.store.inner, key) for key in result.new_keys} == {False}
    asked = operations(world)
    assert asked[0] == "put_if_absent"
    assert world.store.requests[-1] == ("remove_ttl", result.reference.index.key)
    assert asked.index("list_page") < len(asked) - 1


async def test_an_index_keeps_its_ttl_if_the_list_says_that_the_record_is_lost(world: World) -> None:
    mine, theirs = await world.process(), await world.process()
    await world.history(mine, "zero", "one")
    result = await world.backup(mine, "mine")

    async def take_its_number() -> None:
        await theirs.commit(JOB, [], offsets="theirs")

    world.store.before("put_if_absent", commit_key(JOB, 3), take_its_number)
    with pytest.raises(CommitLostError):
        await mine.commit(JOB, [result])
    assert await has_ttl(world.store.inner, result.reference.index.key)
