"""A writer that remembers a head which others have moved since (design 0002, C8)."""

import pytest

from blobstore.base import BlobStore
from blobstore.errors import BlobNotFoundError
from engine.commit.writer import COMMIT_ATTEMPTS_MAX
from engine.errors import CommitLostError, ConflictError, DamagedError, FencedError, StaleResultError, UsageError
from index.plan.commits import Retention
from index.snapshot.model import CommitRecord, Scope
from tests.unit.engine.conftest import JOB, TTL_MS, World


async def test_a_writer_that_was_overtaken_goes_on_from_the_commit_that_its_caller_has_seen(world: World) -> None:
    """It remembers its own commit as the newest; another process has made one meanwhile, and the caller knows."""
    mine, other = await world.process(), await world.process()
    first = await mine.commit(JOB, [await world.backup(mine, "one")])
    second = await other.commit(JOB, [await world.backup(other, "two")])
    with pytest.raises(CommitLostError):
        await mine.commit(JOB, [], offsets="3", parent=first.pointer)
    newest = await mine.latest(JOB)
    assert newest is not None
    assert newest.pointer == second.pointer
    third = await mine.commit(JOB, [], offsets="3", parent=newest.pointer)
    assert third.pointer.number == 3


async def test_a_writer_that_was_overtaken_rewinds_to_a_commit_that_it_has_not_seen(world: World) -> None:
    mine, other = await world.process(), await world.process()
    await mine.commit(JOB, [await world.backup(mine, "one")])
    second = await other.commit(JOB, [await world.backup(other, "two")])
    rewound = await mine.rewind(second)
    assert rewound.pointer.number == 3
    assert await world.restored_text(other) == "two"
    assert await world.restored_text(mine) == "two"


async def test_a_writer_that_remembers_an_empty_scope_rewinds_after_others_forgot_what_they_wrote(world: World) -> None:
    """There was no newest commit, and there is none: only the next number is another (design 0002, D8)."""
    mine, other = await world.process(), await world.process()
    await world.backup(mine, "never committed")
    first, _ = await world.history(other, "one", "two")
    await other.name(first, "kept")
    await other.forget(JOB)
    rewound = await mine.rewind(await mine.find(JOB, name="kept"))
    assert rewound.pointer.number > 10**9
    assert await world.restored_text(other) == "one"


async def test_a_writer_whose_commits_others_have_forgotten_forks_into_its_scope(world: World) -> None:
    mine, other = await world.process(), await world.process()
    (source,) = await world.history(mine, "one", scope=Scope("source"))
    await world.history(mine, "mine")
    await other.forget(JOB)
    forked = await mine.fork(source, JOB)
    assert forked.pointer.number > 10**9
    with pytest.raises(UsageError, match="has commits already") as caught:
        await mine.fork(source, JOB)
    assert "forget this one first" in caught.value.hint


async def test_a_result_made_on_top_of_another_writers_commit_is_not_stale_to_a_writer_that_remembers_its_own(
    world: World,
) -> None:
    """A driver commits what a task has backed up: against a commit that the driver has not seen."""
    driver, other, task = await world.process(), await world.process(), await world.process()
    await driver.commit(JOB, [await world.backup(driver, "one")])
    await other.commit(JOB, [await world.backup(other, "two")])
    commit = await driver.commit(JOB, [await world.backup(task, "three")])
    assert commit.pointer.number == 3
    assert await world.restored_text(task) == "three"


async def test_a_writer_that_is_overtaken_again_and_again_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = await world.process(), await world.process()
    await other.commit(JOB, [await world.backup(other, "one")])
    overtaken = 0

    async def overtake(store: BlobStore, record: CommitRecord, **_: object) -> None:
        nonlocal overtaken
        if record.number == overtaken + 1:
            overtaken += 1
            await other.commit(JOB, [], offsets=str(overtaken))
            raise DamagedError("is gone", operation="settle") from BlobNotFoundError("is gone", operation="stat")

    monkeypatch.setattr("engine.commit.writer.settle_record", overtake)
    with pytest.raises(CommitLostError, match="other writers keep committing"):
        await mine.commit(JOB, [], offsets="mine")
    assert overtaken == COMMIT_ATTEMPTS_MAX


@pytest.mark.parametrize("age_ms, refused", [(TTL_MS, StaleResultError), (0, FencedError)])
async def test_a_writer_whose_remembered_parent_was_collected_looks_again(
    world: World, age_ms: int, refused: type[ConflictError]
) -> None:
    """Found by the simulation: nothing is damaged, others have gone on."""
    slow, quick = await world.process(), await world.process()
    await quick.commit(JOB, [await world.backup(quick, "one")])
    # Whether the parent's index goes with its record.
    world.clock.advance(age_ms)
    result = await world.backup(
        slow, "late"
    )  # remembers the first commit, of which it does not know that it is settled
    for text in ("two", "three"):
        await quick.commit(JOB, [await world.backup(quick, text)])
    await quick.collect(Retention(keep_last=1), delete_share_max=1)
    with pytest.raises(refused):
        await slow.commit(JOB, [result])
    assert (await slow.commit(JOB, [await world.backup(slow, "late")])).pointer.number == 4
