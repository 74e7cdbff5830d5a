"""What `Repository` adds to the parts: a base that goes meanwhile, and choices that contradict each other."""

import pytest

from engine.errors import DamagedError, StaleResultError, UsageError
from index.retention import Retention
from tests.unit.engine.conftest import JOB, World


async def overtake(world: World) -> None:
    """Another process commits, and collects what is older."""
    other = await world.process()
    await other.commit(JOB, [await world.backup(other, "theirs")])
    await other.collect(Retention(keep_last=1))


async def test_a_backup_whose_base_is_collected_meanwhile_builds_on_the_next_one(world: World) -> None:
    await (await world.process()).commit(JOB, [await world.backup(await world.process(), "one")])
    repository = await world.process()
    world.store.before("get", "indexes/", lambda: overtake(world))
    result = await world.backup(repository, "mine")
    newest = await repository.latest(JOB)
    assert newest is not None
    assert result.base_unique_id == newest.record.stores[0].unique_id
    assert result.reference.version == newest.record.stores[0].version + 1
    assert (await repository.commit(JOB, [result])).record.number == 3


async def test_a_base_that_is_gone_and_that_the_newest_commit_needs_is_damage(world: World) -> None:
    first = await (await world.process()).commit(JOB, [await world.backup(await world.process(), "one")])
    base = first.record.stores[0]
    repository, tree = await world.process(), world.tree({"CURRENT": b"mine"})
    await world.store.inner.delete([base.index.key])
    with pytest.raises(DamagedError):
        await repository.backup(JOB, tree, base=base)
    with pytest.raises(DamagedError):
        await repository.backup(JOB, tree)


async def test_a_given_base_that_was_collected_is_stale(world: World) -> None:
    first = await (await world.process()).commit(JOB, [await world.backup(await world.process(), "one")])
    await overtake(world)
    repository, tree = await world.process(), world.tree({"CURRENT": b"mine"})
    with pytest.raises(StaleResultError) as refused:
        await repository.backup(JOB, tree, base=first.record.stores[0])
    assert isinstance(refused.value.__cause__, DamagedError)


async def test_a_name_and_another_choice_do_not_go_together(world: World) -> None:
    repository = await world.process()
    await repository.name(await repository.commit(JOB, [await world.backup(repository, "one")]), "golden")
    with pytest.raises(UsageError):
        await repository.find(JOB, name="golden", version=99)


async def test_hashes_are_remembered_of_the_directories_used_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.digest_cache.DIRECTORIES_REMEMBERED_MAX", 2)
    repository = await world.process()
    trees = [world.tree({"f": b"x"}) for _ in range(4)]
    for tree in (*trees, trees[2]):
        await repository.backup(JOB, tree)
    assert list(repository._digests._caches) == [trees[3], trees[2]]
