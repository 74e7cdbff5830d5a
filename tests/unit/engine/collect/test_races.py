"""Commits and other collectors beside a collection, and the boundaries they leave (design 0002, D2 and D3)."""

import asyncio

import pytest

from blobstore.base import BytesBody
from engine.errors import DamagedError, EngineError
from index.codec import encode_record
from index.keys import boundary_key, commit_key
from index.model import Boundary
from tests.unit.engine.collect.judging import LAST, check_exact, check_kept, keys
from tests.unit.engine.conftest import JOB, TTL_MS, World


async def test_a_commit_that_appears_during_a_collection_keeps_its_blobs(world: World) -> None:
    repository, writer = await world.process(), await world.process()
    await world.history(repository, "one", "two")
    result = await world.backup(writer, "three")

    async def commit_now() -> None:
        await writer.commit(JOB, [result])

    world.store.before("list_page", "pins/", commit_now)
    await repository.collect(LAST, delete_share_max=1)
    assert await world.restored_text(repository) == "three"
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_a_blob_whose_ttl_expired_and_that_a_late_commit_names_is_no_loss(world: World) -> None:
    """C5 and D2 together: the commit comes after its lease, is void, and the collector takes the blobs."""
    repository, writer = await world.process(), await world.process()
    await world.history(repository, "one")
    result = await world.backup(writer, "late")

    async def sleep_and_let_a_collector_run() -> None:
        world.clock.advance(TTL_MS + 1)
        await repository.collect(LAST, delete_share_max=1)

    world.store.before("put_if_absent", commit_key(JOB, 2), sleep_and_let_a_collector_run)
    with pytest.raises(EngineError):
        await writer.commit(JOB, [result])
    assert await world.restored_text(await world.process()) == "one"


async def test_a_taken_boundary_number_is_adopted(world: World) -> None:
    """Another collector with another retention was first: what it keeps open stays open for us too."""
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    first = await repository.find(JOB, version=1)

    async def another_collector() -> None:
        boundary = Boundary(scope=JOB, number=2, kept=(first.pointer,))
        await world.store.inner.put_if_absent(boundary_key(JOB, 2), BytesBody(encode_record(boundary)))

    world.store.before("put_if_absent", ".boundary", another_collector)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)
    assert [c.record.version for c in await repository.commits(JOB)] == [3, 1]
    assert await world.restored_text(repository, version=1) == "one"


async def test_a_taken_number_whose_boundary_is_gone_already_needs_none(world: World) -> None:
    """D3: between losing the number and reading it, a third collector has met a newer boundary."""
    repository, writer = await world.process(), await world.process()
    await world.history(repository, "one", "two", "three")

    async def another_collects() -> None:
        await (await world.process()).collect(LAST, delete_share_max=1)
        world.store.before("get", boundary_key(JOB, 2), a_third_collects)

    async def a_third_collects() -> None:
        await world.history(writer, "four")
        await (await world.process()).collect(LAST, delete_share_max=1)

    world.store.before("put_if_absent", ".boundary", another_collects)
    report = await (await world.process()).collect(LAST, delete_share_max=1)
    assert (report.boundaries, report.failed_count) == ((), 0)
    assert {k for k in await keys(world, "log/") if k.endswith("boundary")} == {boundary_key(JOB, 3)}
    await check_exact(world)
    assert await world.restored_text(await world.process()) == "four"


async def test_a_newer_boundary_replaces_an_older_one(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    await repository.collect(LAST, delete_share_max=1)
    await world.history(repository, "three")
    await repository.collect(LAST, delete_share_max=1)
    assert {k for k in await keys(world, "log/") if k.endswith("boundary")} == {boundary_key(JOB, 2)}
    await check_exact(world)


async def test_closed_stays_closed_when_a_newer_boundary_lists_it(world: World) -> None:
    """D3: the older boundary may not go while the newer one would open what it has closed."""
    repository = await world.process()
    await world.history(repository, "one", "two", "three", "four")
    one = await repository.find(JOB, version=1)
    older = Boundary(scope=JOB, number=2, kept=())
    newer = Boundary(scope=JOB, number=3, kept=(one.pointer,))
    for boundary in (older, newer):
        await world.store.inner.put_if_absent(boundary_key(JOB, boundary.number), BytesBody(encode_record(boundary)))
    assert [c.record.version for c in await repository.commits(JOB)] == [4]
    await repository.collect(LAST, delete_share_max=1)
    assert {k for k in await keys(world, "log/") if k.endswith("boundary")} == {
        boundary_key(JOB, 2),
        boundary_key(JOB, 3),
    }
    await check_exact(world)


async def test_a_void_record_goes_once_a_newer_valid_one_stands(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    late = await world.backup(repository, "late")

    async def sleep_through_the_lease() -> None:
        world.clock.advance(TTL_MS)

    world.store.before("put_if_absent", commit_key(JOB, 2), sleep_through_the_lease)
    with pytest.raises(EngineError):
        await repository.commit(JOB, [late])
    await repository.collect(LAST, delete_share_max=1)
    assert commit_key(JOB, 2) in await keys(world)
    await world.history(repository, "three")
    world.clock.advance(TTL_MS)
    await repository.collect(LAST, delete_share_max=1)
    assert commit_key(JOB, 2) not in await keys(world)
    await check_exact(world)


async def test_two_collectors_at_once_do_what_one_does(world: World) -> None:
    repository, other = await world.process(), await world.process()
    await world.history(repository, "one", "two", "three")

    async def second_collector() -> None:
        await other.collect(LAST, delete_share_max=1)

    for operation, key in [
        ("list_page", "pins/"),
        ("put_if_absent", ".boundary"),
        ("delete", "log/"),
        ("delete", "blobs/"),
    ]:
        await world.history(repository, "more", "and more")
        world.store.before(operation, key, second_collector)
        await repository.collect(LAST, delete_share_max=1)
        await check_exact(world)
        assert await world.restored_text(repository) == "and more"


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_collector_that_is_overtaken_while_marking_plans_again(world: World, dry_run: bool) -> None:
    repository, writer, other = await world.process(), await world.process(), await world.process()
    await world.old_history(repository, "one", "two")

    async def overtake() -> None:
        await world.history(writer, "three")
        await other.collect(LAST, delete_share_max=1)

    world.store.before("get", "indexes/", overtake)
    world.store.requests.clear()
    report = await repository.collect(LAST, dry_run=dry_run, delete_share_max=1)
    assert [kept.number for kept in report.kept] == [3]
    await check_exact(world)
    await check_kept(repository)


async def test_a_collector_that_is_overtaken_while_settling_plans_again(world: World) -> None:
    repository, writer, other = await world.process(), await world.process(), await world.process()
    await world.old_history(repository, "one")
    result = await world.backup(repository, "two")
    world.store.fail("remove_ttl", result.new_keys[0])
    await repository.commit(JOB, [result])

    async def overtake() -> None:
        await world.old_history(writer, "three")
        await other.collect(LAST, delete_share_max=1)

    world.store.before("remove_ttl", "", overtake)
    report = await (await world.process()).collect(LAST, delete_share_max=1)
    assert [kept.number for kept in report.kept] == [3]
    await check_kept(repository)


async def test_a_collector_that_is_overtaken_again_and_again_gives_up(world: World) -> None:
    repository, writer, other = await world.process(), await world.process(), await world.process()
    await world.old_history(repository, "one", "two")
    overtaken = 0

    async def overtake() -> None:
        nonlocal overtaken
        overtaken += 1
        await world.old_history(writer, f"more {overtaken}")
        await other.collect(LAST, delete_share_max=1)
        world.store.before("get", "indexes/", overtake)

    world.store.before("get", "indexes/", overtake)
    with pytest.raises(DamagedError):
        await asyncio.wait_for(repository.collect(LAST, delete_share_max=1), 30)
