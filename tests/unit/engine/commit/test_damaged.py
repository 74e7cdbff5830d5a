"""T1 of design 0002: a blob of the commit just made that is gone is an error at once."""

import pytest

from engine.cli.run import ExitCode, choose_exit_code
from engine.errors import CommitDamagedError
from index.plan.commits import Retention
from tests.unit.engine.conftest import JOB, World


@pytest.mark.parametrize("place", [0, -1], ids=["blob", "index"])
async def test_a_commit_of_which_something_new_is_gone_says_so_and_the_next_backup_sends_it_again(
    world: World, place: int
) -> None:
    writer = await world.process()
    await world.history(writer, "one")
    result = await world.backup(writer, "two")
    gone = result.new_keys[place]
    await world.store.inner.delete([gone])
    for _ in range(2):
        with pytest.raises(CommitDamagedError, match="commit 2 of job is committed and damaged") as caught:
            await writer.commit(JOB, [result])
        assert caught.value.subject == gone
        assert "back up again" in caught.value.hint
        assert choose_exit_code(caught.value) == ExitCode.DAMAGED
    assert gone in writer.missing_blobs.keys
    again = await world.backup(writer, "two")
    assert again.stats.files_healed
    assert (await writer.commit(JOB, [again])).settled
    assert await world.restored_text(await world.process()) == "two"


async def test_what_a_collection_took_because_others_stand_on_the_commit_is_no_damage(world: World) -> None:
    writer, other = await world.process(), await world.process()
    result = await world.backup(writer, "one")

    async def go_on() -> None:
        await world.history(other, "two")
        await other.collect(Retention(keep_last=1), delete_share_max=1)
        await world.store.inner.delete([result.reference.index.key])

    world.store.before("remove_ttl", "", go_on)
    assert (await writer.commit(JOB, [result])).record.number == 1
    assert await world.restored_text(writer) == "two"


async def test_a_store_that_cannot_be_asked_is_no_damage(world: World) -> None:
    writer = await world.process()
    result = await world.backup(writer, "one")
    world.store.fail("remove_ttl", "")
    assert not (await writer.commit(JOB, [result])).settled
