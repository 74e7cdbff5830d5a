"""One result that is committed a second time, beside collections (design 0002, T4 and D2)."""

import pytest

from engine.errors import NotFoundError, StaleResultError
from engine.repository.repository import Repository
from index.plan.commits import Commit
from tests.unit.engine.collect.interleavings.judging import LAST, check_exact, check_kept
from tests.unit.engine.conftest import JOB, TTL_MS, World


async def rewind(repository: Repository, first: Commit) -> None:
    await repository.rewind(first)


async def drop(repository: Repository, first: Commit) -> None:
    del first
    await repository.commit(JOB, [], dropped=[("0", "default")])


async def forget(repository: Repository, first: Commit) -> None:
    del first
    await repository.forget(JOB)


UNDO = pytest.mark.parametrize("undo", [rewind, drop, forget])


@UNDO
@pytest.mark.parametrize("moment", ["before", "between the second reading and the deletes"])
async def test_a_result_that_is_committed_again_can_be_restored_or_is_refused(
    world: World, undo: object, moment: str
) -> None:
    assert callable(undo)
    repository, other = await world.process(), await world.process()
    # A drop and a forget leave nothing that a result could be based on.
    first = (await world.old_history(repository, "one"))[0] if undo is rewind else None
    result = await world.backup(repository, "two")
    committed = await repository.commit(JOB, [result])
    await undo(repository, first or committed)
    again: list[Commit] = []

    async def commit_again() -> None:
        try:
            again.append(await other.commit(JOB, [result]))
        except StaleResultError:
            assert undo is forget

    if moment == "before":
        await repository.collect(LAST, delete_share_max=1)
        await commit_again()
    else:
        # Something has to go, so that there are deletes before which a commit can come.
        world.store.before("delete", "", commit_again)
        await repository.collect(LAST, delete_share_max=1)
    for commit in again:
        world.clock.advance(TTL_MS)
        await repository.collect(LAST, delete_share_max=1)
        assert (await repository.find(JOB)).pointer == commit.pointer
        assert await world.restored_text(repository) == "two"
        await check_kept(repository)
    if not again:
        with pytest.raises(NotFoundError):
            await repository.find(JOB)
    world.clock.advance(TTL_MS)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)
