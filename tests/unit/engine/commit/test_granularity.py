"""K3 of design 0002: a job commits as a whole or by task, also where two begin side by side."""

import pytest

from blobstore.errors import StoreUnavailableError
from engine.errors import CommitUnknownError, UsageError
from index.snapshot.model import Scope
from tests.unit.engine.conftest import JOB, World

TASK = Scope("job", "0")


@pytest.mark.parametrize("step_ms", [1, 0], ids=["later", "at the same time"])
@pytest.mark.parametrize("late, early", [(JOB, TASK), (TASK, JOB)], ids=str)
async def test_of_two_kinds_that_begin_side_by_side_exactly_one_goes_on(
    world: World, late: Scope, early: Scope, step_ms: int
) -> None:
    """Each has looked before the other wrote."""
    mine, theirs = await world.process(), await world.process()
    mine_result = await world.backup(mine, "mine", scope=late)
    theirs_result = await world.backup(theirs, "theirs", scope=early)

    async def begin() -> None:
        await theirs.commit(early, [theirs_result], offsets="1")
        world.clock.advance(step_ms)

    world.store.before("put_if_absent", "log/", begin)
    refused = set()
    for offsets in ("1", "2", "3"):
        for scope, repository, results in ((late, mine, [mine_result]), (early, theirs, [theirs_result])):
            try:
                await repository.commit(scope, results if offsets == "1" else [], offsets=offsets)
            except UsageError:
                refused.add(scope)
    assert refused == {late if step_ms else TASK}


async def test_who_was_refused_is_refused_again(world: World) -> None:
    """The record of the later kind is there, and is not an answer to the same request."""
    mine, theirs = await world.process(), await world.process()
    mine_result = await world.backup(mine, "mine", scope=TASK)
    theirs_result = await world.backup(theirs, "theirs")

    async def begin() -> None:
        await theirs.commit(JOB, [theirs_result])
        world.clock.advance(1000)

    world.store.before("put_if_absent", "log/", begin)
    for _ in range(2):
        with pytest.raises(UsageError, match="as a whole"):
            await mine.commit(TASK, [mine_result])


async def test_a_writer_that_cannot_look_again_does_not_know(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")

    async def refuse() -> None:
        world.store.fail("list_page", "log/job@", StoreUnavailableError("no", operation="list_page", key="log/job@"))

    world.store.before("put_if_absent", "log/", refuse)
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    assert (await repository.commit(JOB, [result])).record.number == 1


async def test_the_other_kind_is_looked_for_until_the_second_commit(world: World) -> None:
    repository = await world.process()
    looked = []
    for offsets in ("1", "2", "3"):
        world.store.requests.clear()
        await repository.commit(JOB, [], offsets=offsets)
        looked.append(sum(operation == "list_page" and "log/job@" in key for operation, key in world.store.requests))
    assert looked == [2, 1, 0]
