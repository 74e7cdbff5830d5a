"""Design 0002, C3 and D5: lost answers, late requests and cancellations, for commits, rewinds and forks alike."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from blobstore.base import Body, BytesBody, CreateOutcome
from blobstore.errors import AccessDeniedError, StoreError
from engine.backup.backup import BackupResult
from engine.commit.writer import CommitWriter
from engine.errors import (
    CommitUnknownError,
    ConflictError,
    EngineError,
    LeaseExpiredError,
    StaleResultError,
    UsageError,
)
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.codec import encode_record
from index.snapshot.keys import boundary_key, commit_key
from index.snapshot.model import PIN_DURATION_MS, Scope
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.unit.engine.repository.test_damage import flip

LAST = Retention(keep_last=1)
FORK = Scope("fork")


async def land_late(world: World, writer: CommitWriter) -> None:
    """The request of an unanswered attempt arrives at the store after all."""
    record = next(iter(writer._unresolved.values())).record
    await world.store.inner.put_if_absent(commit_key(record.scope, record.number), BytesBody(encode_record(record)))


def never_arrives(world: World) -> None:
    world.store.fail("put_if_absent", "log/")


def is_cancelled(world: World) -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError

    world.store.before("put_if_absent", "log/", cancel)


@pytest.mark.parametrize("interrupt", [never_arrives, is_cancelled])
@pytest.mark.parametrize("scope", [JOB, FORK])
async def test_a_rewind_or_fork_that_lands_late_finds_its_blobs(
    world: World, scope: Scope, interrupt: Callable[[World], None]
) -> None:
    repository, collector = await world.process(), await world.process()
    one, *_ = await world.history(repository, "one", "two")
    interrupt(world)
    with pytest.raises((CommitUnknownError, asyncio.CancelledError)):
        await (repository.rewind(one) if scope == JOB else repository.fork(one, FORK))
    await collector.collect(LAST, delete_share_max=1)
    await land_late(world, repository._writer(scope))
    fresh, target = await world.process(), world.target()
    await fresh.restore(await fresh.find(scope), target)
    assert (target / "CURRENT").read_text() == "one"
    await fresh.commit(JOB, [], offsets="next")
    world.clock.advance(100 * TTL_MS)
    await collector.collect(LAST, delete_share_max=1)


async def test_a_rewind_that_lands_after_its_pin_is_void(world: World) -> None:
    repository, collector = await world.process(), await world.process()
    one, *_ = await world.history(repository, "one", "two")
    never_arrives(world)
    with pytest.raises(CommitUnknownError):
        await repository.rewind(one)
    world.clock.advance(2 * PIN_DURATION_MS)
    await collector.collect(LAST, delete_share_max=1)
    await land_late(world, repository._writer(JOB))
    assert await world.restored_text(await world.process()) == "two"


async def test_a_pin_that_lapsed_and_is_renewed_protects_no_fork(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is paused for two days within a fork; a collector takes the commit; then the renewal comes."""
    repository, collector = await world.process(), await world.process()
    one, *_ = await world.history(repository, "one", "two")
    real_sleep = asyncio.sleep
    awake = asyncio.Event()

    async def sleep(delay: float) -> None:
        await (awake.wait() if delay > 60 else real_sleep(delay))
        awake.clear()

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def stand_still() -> None:
        world.clock.advance(48 * PIN_DURATION_MS)
        await collector.collect(LAST, delete_share_max=1)
        awake.set()
        await real_sleep(0.01)

    world.store.after("list_page", "log/fork", stand_still)
    with pytest.raises((LeaseExpiredError, EngineError)):
        await repository.fork(one, FORK)
    assert await (await world.process()).latest(FORK) is None


async def test_a_pin_renewed_after_its_end_is_pinned_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one")
    real_sleep = asyncio.sleep

    async def sleep(delay: float) -> None:
        await real_sleep(min(delay, 0.01))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    async with repository.pinned(one) as lease:
        seen = []
        for _ in range(2):
            await real_sleep(0.05)
            seen.append((lease.pinned, lease.valid_until_ms))
            world.clock.advance(2 * PIN_DURATION_MS)
        until = seen[0][1]
    assert seen == [(True, until), (False, until)]


@pytest.mark.parametrize("how", ["lose_answer", "fail"])
async def test_other_offsets_are_another_commit(world: World, how: str) -> None:
    repository = await world.process()
    await repository.commit(JOB, [], offsets="0")
    getattr(world.store, how)("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [], offsets="1")
    assert (await repository.commit(JOB, [], offsets="2")).record.offsets == "2"


async def test_the_same_results_with_other_offsets_are_another_commit(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    never_arrives(world)
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result], offsets="1", version=7)
    record = (await repository.commit(JOB, [result], offsets="2", version=8)).record
    assert (record.offsets, record.version) == ("2", 8)


async def test_an_unanswered_rewind_is_not_the_answer_to_a_commit(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.rewind(one)
    record = (await repository.commit(JOB, [], offsets="3")).record
    assert (record.kind, record.offsets, record.number) == ("commit", "3", 4)


async def test_a_value_that_cannot_be_written_down_leaves_nothing_behind(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    with pytest.raises(UsageError):
        await repository.commit(JOB, [result], version=-1)
    assert (await repository.commit(JOB, [result], version=1)).record.number == 1


@pytest.mark.parametrize("operation", ["get", "list_page"])
async def test_an_adoption_that_is_interrupted_is_tried_again(world: World, operation: str) -> None:
    repository = await world.process()
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [], offsets="1")

    async def break_the_second() -> None:
        world.store.fail(operation, "log/")

    world.store.after(operation, "log/", break_the_second)
    with pytest.raises((StoreError, EngineError)):
        await repository.commit(JOB, [], offsets="1")
    assert (await repository.commit(JOB, [], offsets="1")).record.number == 1


async def test_a_commit_cancelled_while_ttls_are_removed_is_found_again(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    reached = asyncio.Event()

    async def block() -> None:
        reached.set()
        await asyncio.Event().wait()

    world.store.before("remove_ttl", "", block)
    committing = asyncio.create_task(repository.commit(JOB, [result]))
    await reached.wait()
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    again = await repository.commit(JOB, [result])
    assert (again.record.number, again.settled) == (1, True)


async def test_a_fork_whose_answer_was_lost_is_found_again(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.fork(one, FORK)
    assert (await repository.fork(one, FORK)).record.number == 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_rewind_whose_answer_was_lost_is_done_once(world: World, late: bool) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    if late:
        never_arrives(world)
    else:
        world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.rewind(one)
    if late:
        await land_late(world, repository._writer(JOB))
    assert (await repository.rewind(one)).record.number == 3
    assert (await repository.latest(JOB)).record.number == 3  # type: ignore[union-attr]


async def test_a_backup_that_looks_for_its_base_does_not_disturb_a_commit(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [], offsets="1")
    looking: list[asyncio.Task[object]] = []

    async def look() -> None:
        looking.append(asyncio.create_task(repository._writer(JOB).head()))
        await asyncio.sleep(0.01)

    world.store.before("put_if_absent", "log/", look)
    await repository.commit(JOB, [], offsets="2")
    await looking[0]
    assert (await repository.commit(JOB, [], offsets="3")).record.number == 3


async def test_a_definite_refusal_is_reported_as_such(world: World) -> None:
    repository = await world.process()
    world.store.fail("put_if_absent", "log/", AccessDeniedError("no", operation="put_if_absent", key="log/"))
    with pytest.raises(AccessDeniedError):
        await repository.commit(JOB, [], offsets="1")
    assert (await repository.commit(JOB, [], offsets="2")).record.number == 1


async def test_a_record_adopted_below_newer_ones_does_not_hide_them(world: World) -> None:
    repository, other = await world.process(), await world.process()
    result = await world.backup(repository, "one")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    await other.commit(JOB, [], offsets="other")
    assert (await repository.commit(JOB, [result])).record.number == 1
    assert (await repository.commit(JOB, [], offsets="next")).record.number == 3


async def test_a_lost_race_is_reported_after_an_unanswered_attempt_too(world: World) -> None:
    repository, other = await world.process(), await world.process()
    await repository.commit(JOB, [], offsets="0")
    result = await world.backup(repository, "mine")
    never_arrives(world)
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    await other.commit(JOB, [await world.backup(other, "theirs")])
    with pytest.raises(ConflictError):
        await repository.commit(JOB, [result])


async def unconfirmed(world: World, writer: Repository, text: str) -> BackupResult:
    """A backup whose record is there, though its writer never learned of it."""
    result = await world.backup(writer, text)
    world.store.after("put_if_absent", "log/", lambda: _refuse_lists(world))
    with pytest.raises(CommitUnknownError):
        await writer.commit(JOB, [result], offsets=text)
    return result


async def _refuse_lists(world: World) -> None:
    world.store.fail("list_page", "log/")


@pytest.mark.parametrize("is_deleted", [False, True], ids=["closed", "deleted"])
async def test_a_record_that_was_collected_before_its_writer_could_ask_stays_unknown(
    world: World, is_deleted: bool
) -> None:
    """It may have been there, so nobody calls its results stale; the newest commit shows its caller how to go on."""
    writer, other = await world.process(), await world.process()
    result = await unconfirmed(world, writer, "one")
    await world.history(other, "two", "three")
    if not is_deleted:
        world.store.fail("delete", "log/")
    with contextlib.suppress(StoreError):
        await other.collect(LAST, delete_share_max=1)
    for _ in range(2):
        with pytest.raises(CommitUnknownError, match="record 1 was closed or collected") as caught:
            await writer.commit(JOB, [result], offsets="one")
        assert "look at the newest commit" in caught.value.hint
    commit = await writer.commit(JOB, [await world.backup(writer, "four")], offsets="four")
    assert commit.pointer.number == 4


async def test_a_rewind_that_was_collected_before_its_writer_could_ask_may_be_asked_for_again(world: World) -> None:
    writer, other = await world.process(), await world.process()
    one, *_ = await world.history(writer, "one", "two")
    await writer.name(one, "kept")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await writer.rewind(one)
    await world.history(other, "three", "four")
    await other.collect(LAST, delete_share_max=1)
    target = await writer.find(JOB, name="kept")
    with pytest.raises(CommitUnknownError, match="record 3 was closed or collected"):
        await writer.rewind(target)
    assert (await writer.rewind(target)).pointer.number == 6


async def test_a_record_that_another_request_has_passed_is_found_by_its_own(world: World) -> None:
    writer, other = await world.process(), await world.process()
    result = await unconfirmed(world, writer, "one")
    await writer.commit(JOB, [], offsets="two")
    await world.history(other, "three")
    assert (await writer.commit(JOB, [result], offsets="one")).pointer.number == 1


async def test_the_newest_commit_answers_if_its_results_are_asked_for_again(world: World) -> None:
    """The writer that got no answer is gone; what it was to commit was saved."""
    writer, another = await world.process(), await world.process()
    result = await world.backup(writer, "one")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await writer.commit(JOB, [result], offsets="one", parent=None)
    commit = await another.commit(JOB, [result], offsets="one", parent=None)
    assert (commit.pointer.number, commit.settled) == (1, True)
    assert (await another.commit(JOB, [result], offsets="one")).pointer == commit.pointer
    for other in ({"offsets": "two"}, {"offsets": "one", "version": 9}):
        with pytest.raises(StaleResultError):
            await another.commit(JOB, [result], **other)


async def test_a_writer_remembers_a_bounded_number_of_records_without_an_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.commit.writer.UNRESOLVED_MAX", 2)
    writer = await world.process()
    for text in ("one", "two", "three", "four"):
        await unconfirmed(world, writer, text)
    assert [pointer.number for pointer in writer._writer(JOB)._unresolved] == [3, 4]


async def test_a_record_that_is_collected_while_its_writer_looks_whose_it_is_stays_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carried out, not answered, sent again and refused: before the writer reads what is there, others go on."""
    writer, other = await world.process(), await world.process()
    first, _ = await world.history(writer, "one", "two")
    put = world.store.inner.put_if_absent

    async def put_twice(key: str, body: Body, **how: Any) -> CreateOutcome:
        await put(key, body, **how)
        return await put(key, body, **how)

    async def go_on() -> None:
        monkeypatch.undo()
        await world.history(other, "three")
        await other.collect(LAST, delete_share_max=1)

    monkeypatch.setattr(world.store.inner, "put_if_absent", put_twice)
    world.store.before("get", "3.commit", go_on)
    with pytest.raises(CommitUnknownError, match="closed or collected"):
        await writer.rewind(first)


@pytest.mark.parametrize("unreadable", ["the record at the number", "a boundary above"])
async def test_what_cannot_be_read_after_a_record_was_sent_leaves_its_outcome_unknown(
    world: World, unreadable: str
) -> None:
    writer, other = await world.process(), await world.process()
    result = await world.backup(writer, "one")

    async def begin() -> None:
        await other.commit(JOB, [], offsets="other")
        flip(world, commit_key(JOB, 1))

    async def close() -> None:
        boundary = (await other.forget(JOB)).boundary
        assert boundary is not None
        flip(world, boundary_key(JOB, boundary.number))

    if unreadable == "the record at the number":
        world.store.before("put_if_absent", ".commit", begin)
    else:
        world.store.after("put_if_absent", ".commit", close)
    with pytest.raises(CommitUnknownError):
        await writer.commit(JOB, [result])
