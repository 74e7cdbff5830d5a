"""A result that is committed a second time is not new in that record (design 0002, T4)."""

import pytest

from engine.errors import LeaseExpiredError, StaleResultError
from index.plan.commits import Retention
from index.snapshot.keys import commit_key
from index.snapshot.model import Scope
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.unit.engine.repository.test_damage import flip

OTHER = Scope("other")


def stats(world: World) -> list[str]:
    asked = [key for operation, key in world.store.requests if operation == "stat"]
    world.store.requests.clear()
    return asked


async def test_after_a_rewind_it_is_not_new_and_its_lease_is_as_before(world: World) -> None:
    writer = await world.process()
    first, *_ = await world.history(writer, "one")
    result = await world.backup(writer, "two")
    second = await writer.commit(JOB, [result])
    third = await writer.rewind(first)
    world.store.requests.clear()
    fourth = await writer.commit(JOB, [result])
    assert stats(world) == [result.reference.index.key]
    assert fourth.record.stores[0].index == result.reference.index
    assert (fourth.record.stores[0].number, third.record.number) == (3, 3)
    assert (fourth.settled, fourth.record.valid_until_ms) == (True, second.record.valid_until_ms)
    assert await world.restored_text(await world.process()) == "two"


async def test_after_its_store_was_dropped_it_is_not_new(world: World) -> None:
    writer = await world.process()
    result = await world.backup(writer, "one")
    await writer.commit(JOB, [result])
    await writer.commit(JOB, [], dropped=[("0", "default")])
    assert (await writer.commit(JOB, [result])).record.stores[0].number == 2


async def test_after_its_commit_was_discarded_it_is_not_new(world: World) -> None:
    """Its index has no TTL, and would vouch for a record that came after the lease."""
    writer = await world.process()
    await world.history(writer, "one")
    result = await world.backup(writer, "two")
    await writer.commit(JOB, [result])
    flip(world, commit_key(JOB, 2))
    await writer.discard(commit_key(JOB, 2))

    async def stand_still() -> None:
        world.clock.advance(2 * TTL_MS)

    world.store.before("put_if_absent", ".commit", stand_still)
    with pytest.raises(LeaseExpiredError):
        await (await world.process()).commit(JOB, [result])
    latest = await (await world.process()).latest(JOB)
    assert latest is not None
    assert latest.pointer.number == 1


async def test_after_its_job_was_forgotten_it_is_refused(world: World) -> None:
    writer = await world.process()
    committed = await world.backup(writer, "one")
    waiting = await writer.backup(JOB, world.tree({"a": b"a"}), store="waiting")
    await writer.commit(JOB, [committed])
    world.clock.advance(1000)
    await writer.forget(JOB)
    for result in (committed, waiting):
        with pytest.raises(StaleResultError, match="forgotten") as refused:
            await (await world.process()).commit(JOB, [result])
        assert "back up again" in refused.value.hint
    fresh = await world.process()
    commit = await fresh.commit(JOB, [await world.backup(fresh, "two")])
    assert commit.record.stores[0].number == commit.record.number


async def test_on_a_fork_into_a_forgotten_job_it_is_not_new(world: World) -> None:
    """The base is the fork's again, under the number of the fork."""
    writer = await world.process()
    source, *_ = await world.history(writer, "one", scope=OTHER)
    await writer.fork(source, JOB)
    result = await world.backup(writer, "two")
    await writer.commit(JOB, [result])
    await writer.forget(JOB)
    again = await writer.fork(source, JOB)
    commit = await writer.commit(JOB, [result])
    assert commit.record.stores[0].number == again.record.number


async def test_one_whose_index_is_gone_is_refused_before_anything_is_written(world: World) -> None:
    writer = await world.process()
    first, *_ = await world.history(writer, "one")
    result = await world.backup(writer, "two")
    await writer.commit(JOB, [result])
    await writer.rewind(first)
    world.clock.advance(2 * TTL_MS)
    await writer.collect(Retention(keep_last=1), delete_share_max=1)
    with pytest.raises(LeaseExpiredError):
        await (await world.process()).commit(JOB, [result])
    assert (await writer.latest(JOB)).record.number == 3  # type: ignore[union-attr]


async def test_where_ttls_cannot_be_removed_nothing_is_asked(lasting_world: World) -> None:
    world = lasting_world
    writer = await world.process()
    first, *_ = await world.history(writer, "one")
    result = await world.backup(writer, "two")
    await writer.commit(JOB, [result])
    await writer.rewind(first)
    world.store.requests.clear()
    assert (await writer.commit(JOB, [result])).record.stores[0].number == 4
    assert stats(world) == []


async def test_a_result_on_the_newest_result_of_its_store_is_new_and_nothing_is_asked(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one")
    result = await world.backup(writer, "two")
    world.store.requests.clear()
    await writer.commit(JOB, [result])
    assert stats(world) == []


async def test_a_store_that_was_carried_over_is_asked_about_and_new(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one")
    await writer.commit(JOB, [], offsets="alone")
    result = await world.backup(writer, "two")
    world.store.requests.clear()
    commit = await writer.commit(JOB, [result])
    assert stats(world) == [result.reference.index.key]
    assert commit.record.stores[0].number == commit.record.number
