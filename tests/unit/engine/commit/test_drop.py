"""Design 0006, F3: stores that are dropped from a job."""

import pytest

from engine.errors import CommitUnknownError, NotFoundError, StaleResultError, UsageError
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.keys import commit_key
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.walker import expected_keys


async def two_stores(world: World) -> tuple[Repository, set[str]]:
    """A commit of tasks 0 and 1, and what only task 1 needs."""
    repository = await world.process()
    zero = await world.backup(repository, "zero")
    one = await world.backup(repository, "one", task="1")
    await repository.commit(JOB, [zero, one])
    return repository, set(one.new_keys)


async def test_a_dropped_store_is_not_carried_over_and_goes_with_the_last_commit_that_has_it(world: World) -> None:
    repository, its_own = await two_stores(world)
    commit = await repository.commit(JOB, [], dropped=[("1", "default")])
    assert [s.task for s in commit.record.stores] == ["0"]
    assert its_own <= await world.keys()
    world.clock.advance(TTL_MS)
    await (await world.process()).collect(Retention(keep_last=1), delete_share_max=1)
    assert await world.keys() == await expected_keys(world.store.inner, world.clock.now_ms)
    assert not its_own & await world.keys()
    assert await world.restored_text(repository) == "zero"


async def test_a_dropped_store_comes_back_with_a_rewind(world: World) -> None:
    repository, _ = await two_stores(world)
    before = await repository.find(JOB)
    await repository.commit(JOB, [], dropped=[("1", "default")])
    assert [s.task for s in (await repository.rewind(before)).record.stores] == ["0", "1"]


async def test_a_dropped_store_may_begin_again_and_its_old_base_is_refused(world: World) -> None:
    repository, _ = await two_stores(world)
    stale = await world.backup(repository, "stale", task="1")
    await repository.commit(JOB, [], dropped=[("1", "default")])
    with pytest.raises(StaleResultError):
        await repository.commit(JOB, [stale])
    await repository.commit(JOB, [await world.backup(repository, "again", task="1")])
    target = world.target()
    await repository.find_and_restore(JOB, target, task="1")
    assert (target / "CURRENT").read_text() == "again"


async def test_a_store_that_is_not_there_cannot_be_dropped(world: World) -> None:
    repository, _ = await two_stores(world)
    with pytest.raises(NotFoundError) as caught:
        await repository.commit(JOB, [], dropped=[("7", "default")])
    assert "0/default, 1/default" in caught.value.hint


async def test_a_store_with_a_result_cannot_be_dropped(world: World) -> None:
    repository, _ = await two_stores(world)
    result = await world.backup(repository, "again", task="1")
    with pytest.raises(UsageError):
        await repository.commit(JOB, [result], dropped=[("1", "default")])


async def test_a_request_that_drops_is_another_one_than_one_that_does_not(world: World) -> None:
    """C3: only an equal request adopts the record of which the answer was lost."""
    repository, _ = await two_stores(world)
    world.store.lose_answer("put_if_absent", commit_key(JOB, 2))
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [], offsets="5")
    commit = await repository.commit(JOB, [], offsets="5", dropped=[("1", "default")])
    assert (commit.record.number, [s.task for s in commit.record.stores]) == (3, ["0"])


async def test_a_drop_without_an_answer_is_adopted(world: World) -> None:
    repository, _ = await two_stores(world)
    world.store.lose_answer("put_if_absent", commit_key(JOB, 2))
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [], dropped=[("1", "default")])
    commit = await repository.commit(JOB, [], dropped=[("1", "default")])
    assert (commit.record.number, [s.task for s in commit.record.stores]) == (2, ["0"])
