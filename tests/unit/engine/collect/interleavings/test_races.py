"""Commits and other collectors beside a collection, and the boundaries they leave (design 0002, D2 and D3)."""

import asyncio

import pytest
from typing_extensions import override

from blobstore.base import BytesBody, Created, read_blob
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.errors import ConflictError, DamagedError, EngineError, NotFoundError, UnsafeStoreError
from engine.inspect.explain import Fate
from engine.repository.repository import Repository
from engine.runtime import Runtime
from index.plan.collect import DeleteReason
from index.plan.commits import Commit, KeepReason, Retention
from index.plan.plan_format import decode_audit
from index.snapshot.codec import encode_record
from index.snapshot.keys import AUDIT, boundary_key, commit_key
from index.snapshot.model import Boundary, Scope
from tests.unit.engine.collect.interleavings.judging import LAST, check_exact, check_kept, keys
from tests.unit.engine.conftest import JOB, MARGIN_MS, TTL_MS, World


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
    """D3: the older boundary may not go while the newer one would open what it has closed.

    But its number may have come twice, so that nothing goes because of it until what it closed is closed again.
    """
    repository = await world.process()
    one = await leave_crossing_boundaries(world, repository)
    assert [c.record.version for c in await repository.commits(JOB)] == [4]
    explained = await repository.explain(one.record.stores[0].index.key, LAST)
    assert explained.fate == Fate.DELETED
    await repository.collect(LAST, delete_share_max=1)
    assert {k for k in await keys(world, "log/") if k.endswith("boundary")} == {boundary_key(JOB, 4)}
    await check_exact(world)


async def test_what_no_number_is_left_to_close_again_stays_until_the_job_goes_on(world: World) -> None:
    """D3 and D7: a boundary at the newest commit's number lists what an older one closes that does not last."""
    repository = await world.process()
    one, *_, four = await world.old_history(repository, "one", "two", "three", "four")
    await write_boundary(world, JOB, 2)
    await write_boundary(world, JOB, 4, one, four)
    await repository.collect(LAST, delete_share_max=1)
    await repository.restore_reference(one.record.stores[0], world.target())
    explained = await repository.explain(commit_key(JOB, 1), LAST)
    assert (explained.fate, explained.rule) == (Fate.KEPT, f"{KeepReason.REOPENABLE.value} (0006, P5; 0002, D3)")
    explained = await repository.explain(one.record.stores[0].index.key, LAST)
    assert (explained.fate, explained.paths[0].kept) == (Fate.KEPT, KeepReason.REOPENABLE)
    await check_exact(world)
    await world.history(repository, "five")
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)
    assert await keys(world, "log/") == {boundary_key(JOB, 5), commit_key(JOB, 5)}


async def leave_crossing_boundaries(world: World, repository: Repository) -> Commit:
    """Number 3 lists commit 1, which number 2 closes, and closes number 2; nothing that is closed has gone."""
    one, *_ = await world.old_history(repository, "one", "two", "three", "four")
    await write_boundary(world, JOB, 2)
    await write_boundary(world, JOB, 3, one)
    return one


async def write_boundary(world: World, scope: Scope, number: int, *kept: Commit) -> None:
    boundary = Boundary(scope=scope, number=number, kept=tuple(commit.pointer for commit in kept))
    await world.store.inner.put_if_absent(boundary_key(scope, number), BytesBody(encode_record(boundary)))


async def alter(world: World, key: str) -> None:
    data = await read_blob(world.store.inner, key, size_bytes_max=1 << 20)
    await world.store.inner.delete([key])
    await world.store.inner.put(key, BytesBody(data[:-1] + bytes([data[-1] ^ 1])))


@pytest.mark.parametrize("rotten", ["index", "record"])
async def test_what_is_closed_and_cannot_be_read_keeps_nothing(world: World, rotten: str) -> None:
    """D9, also where no boundary that lasts closes it: nobody could mend it."""
    repository = await world.process()
    one = await leave_crossing_boundaries(world, repository)
    await alter(world, one.record.stores[0].index.key if rotten == "index" else commit_key(JOB, 1))
    world.clock.advance(TTL_MS)
    for _ in range(2):
        await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


@pytest.mark.parametrize("is_gone", [True, False], ids=["missing", "altered"])
async def test_what_is_closed_and_cannot_be_read_does_not_say_what_a_store_refers_to(
    world: World, is_gone: bool
) -> None:
    """D9: of a store of a fork no index can be read, and its blobs are those of a job that was forgotten."""
    repository, fork = await world.process(), Scope("fork")
    (source,) = await world.history(repository, "one")
    await repository.fork(source, fork)
    first = await repository.commit(fork, [await world.backup(repository, "one", scope=fork)])
    await repository.commit(fork, [await world.backup(repository, "one", scope=fork)])
    results = [
        await world.backup(repository, "one", scope=fork),
        await world.backup(repository, "b", scope=fork, task="1"),
    ]
    newest = await repository.commit(fork, results)
    await repository.forget(JOB)
    world.clock.advance(2 * TTL_MS)
    await write_boundary(world, fork, 3)
    await write_boundary(world, fork, 4, first, newest)
    old, new = (next(s for s in c.record.stores if s.task == "0").index.key for c in (first, newest))
    await (world.store.inner.delete([old]) if is_gone else alter(world, old))
    await alter(world, new)
    blobs = {key for key in await keys(world, "blobs/") if "/job/" in key}
    for _ in range(2):
        with pytest.raises(DamagedError, match="nothing was deleted of all jobs"):
            await repository.collect(LAST, delete_share_max=1)
    assert {key for key in await keys(world, "blobs/") if "/job/" in key} == blobs != set()


async def test_what_a_boundary_of_discard_lists_goes_by_the_second_collection(world: World) -> None:
    """D7: it has the number of the commit, which is listed by a name until the job is idle."""
    repository = await world.process()
    *_, two = await world.old_history(repository, "one", "two")
    await write_boundary(world, JOB, 2, two)
    await repository.name(two, "keep")
    await world.old_history(repository, "three", "four", "five", "six")
    for _ in range(2):
        await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)
    await repository.release_name(JOB, "keep")
    world.clock.advance(TTL_MS)
    for _ in range(2):
        await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


@pytest.mark.parametrize("is_overtaken", [False, True])
async def test_a_newest_record_that_is_lost_and_that_a_boundary_lists_is_given_up(
    world: World, is_overtaken: bool
) -> None:
    """D12: the boundary has its number."""
    repository = await world.process()
    await leave_crossing_boundaries(world, repository)
    await world.history(repository, "five")
    await repository.collect(Retention(keep_last=2), delete_share_max=1)
    await repository.collect(LAST, delete_share_max=1)
    assert await keys(world, "log/") == {boundary_key(JOB, 5), commit_key(JOB, 5)}
    result = await world.backup(repository, "six")
    await world.store.inner.delete([commit_key(JOB, 5)])
    with pytest.raises(UnsafeStoreError) as refused:
        await (await world.process()).commits(JOB)
    assert f"`tidemark discard {commit_key(JOB, 5)}`" in refused.value.hint
    with pytest.raises(NotFoundError):
        await (await world.process()).discard(commit_key(JOB, 6))

    async def commit_now() -> None:
        await repository.commit(JOB, [result])

    if is_overtaken:
        world.store.before("put_if_absent", ".boundary", commit_now)
        with pytest.raises(ConflictError, match="what came to job meanwhile is closed with it: 6"):
            await (await world.process()).discard(commit_key(JOB, 5))
    else:
        done = await (await world.process()).discard(commit_key(JOB, 5))
        assert done.meaning == "the newest of job is lost, and given up: 5; the job goes on from what is there"
    assert await (await world.process()).commits(JOB) == ()


async def test_what_is_not_closed_for_good_is_not_missed_in_a_plan(world: World) -> None:
    """0006, P6."""
    repository = await world.process()
    await leave_crossing_boundaries(world, repository)
    plan = MemoryStore(clock=world.clock)
    await repository.collect(LAST, dry_run=True, delete_share_max=1, plan_to=plan)
    found = await repository.verify_plan(plan)
    assert (found.wrong, found.missed, found.contradictions) == ((), (), ())


async def test_what_a_run_closes_that_slept_while_a_name_was_given_goes_once_it_is_released(world: World) -> None:
    """D3 and D7: the job is idle, and what the name kept is listed by a newer boundary than the one that closes it."""
    repository, other, writer = await world.process(), await world.process(), await world.process()
    one, *_ = await world.old_history(repository, "one", "two", "three")

    async def give_the_name_and_collect() -> None:
        await writer.name(one, "keep")
        await world.old_history(writer, "four")
        await other.collect(LAST, delete_share_max=1)

    world.store.before("put_if_absent", ".boundary", give_the_name_and_collect)
    await repository.collect(LAST, delete_share_max=1)
    await repository.release_name(JOB, "keep")
    world.clock.advance(TTL_MS)
    for _ in range(2):
        await repository.collect(LAST, delete_share_max=1)
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


class _OwnClock(Runtime):
    """A machine whose clock does not follow the store's."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms

    @override
    def local_now_ms(self) -> int:
        return self._now_ms


async def test_a_clock_that_steps_forward_makes_nothing_old(world: World) -> None:
    """Protocol S2: the store's clock is set a day ahead, a collection runs, and the clock is put right."""
    writer = await world.process()
    await world.history(writer, "one", "two")
    result = await world.backup(writer, "three")
    collector = await Repository.open(world.store, runtime=_OwnClock(world.clock.now_ms))
    before = await keys(world)
    async with writer.pinned(await writer.find(JOB, number=1)):
        world.clock.advance(25 * 3_600_000)
        report = await collector.collect(LAST, delete_share_max=1)
        world.clock.advance(-25 * 3_600_000)
        assert {key.split("/")[0] for key in before - await keys(world)} == {"log"}
    assert {d.reason for d in report.deletes} == {DeleteReason.CLOSED_COMMIT}
    assert report.clock_ahead_ms == 25 * 3_600_000
    assert "blob store's clock ahead" in report.figures()
    (key,) = await world.keys(AUDIT)
    audit = decode_audit(await read_blob(world.store, key, size_bytes_max=10**6), subject=key)
    assert audit.clock_ahead_ms == report.clock_ahead_ms
    await writer.commit(JOB, [result])
    assert await world.restored_text(writer) == "three"


async def test_a_clock_that_steps_forward_closes_no_commit_for_its_age(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one", "two", "three")
    collector = await Repository.open(world.store, runtime=_OwnClock(world.clock.now_ms))
    world.clock.advance(25 * 3_600_000)
    for keep_last in (0, 1):
        since = Retention(keep_last=keep_last, keep_since_ms=world.clock.now_ms - TTL_MS)
        report = await collector.collect(since, delete_share_max=1)
        assert report.clock_ahead_ms == 25 * 3_600_000
        assert [c.record.number for c in await writer.commits(JOB)] == [3, 2, 1]


@pytest.mark.parametrize("seen", ["the machine", "an upload"])
async def test_what_agrees_with_the_store_on_the_time_lets_it_judge_ages(world: World, seen: str) -> None:
    """A quiet repository, or a machine whose clock is slow, is collected all the same."""
    writer = await world.process()
    await world.old_history(writer, "one", "two")
    behind_ms = world.clock.now_ms - MARGIN_MS - 1
    if seen == "an upload":
        await world.backup(writer, "three")
    runtime = _OwnClock(behind_ms if seen == "an upload" else behind_ms + 1)
    report = await (await Repository.open(world.store, runtime=runtime)).collect(LAST, delete_share_max=1)
    assert report.clock_ahead_ms == 0
    assert DeleteReason.UNREACHABLE_UPLOAD in {d.reason for d in report.deletes}


async def test_a_boundary_without_an_answer_is_reported_and_surprises_nobody_later(world: World) -> None:
    """It may land while the next collection, which would keep more, is at work."""
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three", "four")
    put_if_absent = type(world.store.inner).put_if_absent
    world.store.fail("put_if_absent", ".boundary", StoreUnavailableError("timed out", operation="put", key="log/"))
    with pytest.raises(StoreUnavailableError) as caught:
        await repository.collect(LAST, delete_share_max=1)
    assert "may still arrive" in caught.value.hint
    late = Boundary(scope=JOB, number=3, kept=())

    async def land() -> None:
        key = boundary_key(JOB, 3)
        assert isinstance(await put_if_absent(world.store.inner, key, BytesBody(encode_record(late))), Created)

    world.store.before("put_if_absent", ".boundary", land)
    report = await repository.collect(Retention(keep_last=3), delete_share_max=1)
    assert report.failed_count == 0
    assert [c.record.version for c in await repository.commits(JOB)] == [4]
    await repository.collect(Retention(keep_last=3), delete_share_max=1)
    await check_exact(world)
    assert await world.restored_text(repository) == "four"


async def test_an_unknown_outcome_of_a_boundary_is_reported(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    world.store.lose_answer("put_if_absent", ".boundary")
    with pytest.raises(UnsafeStoreError, match="no answer for the boundary") as caught:
        await repository.collect(LAST, delete_share_max=1)
    assert "may still arrive" in caught.value.hint
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)
