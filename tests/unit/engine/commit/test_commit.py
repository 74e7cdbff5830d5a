"""Design 0002, C1 to C7, T1, T2 and K3, each with the interleaving that it is there for."""

import asyncio

import msgspec
import pytest

from blobstore.base import BytesBody, list_blobs, read_blob
from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from engine.errors import (
    CommitLostError,
    CommitUnknownError,
    DamagedError,
    FencedError,
    LeaseExpiredError,
    NotFoundError,
    StaleResultError,
    UnsafeStoreError,
    UsageError,
)
from engine.records.log import read_commit
from index.display import iso_time
from index.plan.commits import Retention
from index.snapshot.codec import decode_pin, encode_record
from index.snapshot.keys import PINS, boundary_key, commit_key
from index.snapshot.model import Boundary, CommitPointer, Scope, ScopeLayout, WriteId
from tests.unit.engine.conftest import JOB, MARGIN_MS, TTL_MS, World


async def ttl_keys(world: World) -> set[str]:
    return {b.key async for b in list_blobs(world.store.inner, "") if b.expires_at_ms is not None}


async def held_ms(world: World, key: str) -> int:
    """For how long a pin holds."""
    return decode_pin(await read_blob(world.store.inner, key, size_bytes_max=1 << 16), subject=key).duration_ms


async def test_first_commit_has_number_one_and_no_predecessor(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")], offsets="o1")
    record = commit.record
    assert (record.number, record.predecessor, record.version, record.offsets) == (1, None, 1, "o1")
    assert await world.restored_text(repository) == "one"


async def test_uploads_are_created_with_a_ttl_and_the_commit_removes_it_from_the_new_ones_only(world: World) -> None:
    repository = await world.process()
    first = await world.backup(repository, "one")
    assert await ttl_keys(world) == set(first.new_keys)
    await repository.commit(JOB, [first])
    assert await ttl_keys(world) == set()
    second = await world.backup(repository, "two")
    world.store.requests.clear()
    await repository.commit(JOB, [second])
    touched = {key for operation, key in world.store.requests if operation == "remove_ttl"}
    assert touched == set(second.new_keys)
    assert not touched & set(first.new_keys)


async def test_stores_without_a_result_are_carried_over(world: World) -> None:
    repository = await world.process()
    both = [await world.backup(repository, "a1", task="a"), await world.backup(repository, "b1", task="b")]
    first = await repository.commit(JOB, both)
    second = await repository.commit(JOB, [await world.backup(repository, "b2", task="b")])
    assert second.store("a", "default") == first.store("a", "default")
    assert second.store("b", "default") != first.store("b", "default")
    assert second.record.predecessor == first.pointer


async def test_a_commit_without_results_moves_the_offsets_alone(world: World) -> None:
    repository = await world.process()
    first = await repository.commit(JOB, [await world.backup(repository, "one")], offsets="1")
    second = await repository.commit(JOB, [], offsets="2")
    assert second.record.stores == first.record.stores
    assert second.record.offsets == "2"


async def test_of_two_writers_at_one_number_one_learns_that_it_lost(world: World) -> None:
    mine, theirs = await world.process(), await world.process()
    await mine.commit(JOB, [await world.backup(mine, "zero")])
    my_result, their_result = await world.backup(mine, "mine"), await world.backup(theirs, "theirs")
    await theirs.commit(JOB, [their_result])
    with pytest.raises(CommitLostError):
        await mine.commit(JOB, [my_result])
    assert await world.restored_text(mine) == "theirs"


async def test_after_a_lost_race_the_same_result_is_stale_and_a_new_backup_commits(world: World) -> None:
    mine, theirs = await world.process(), await world.process()
    await mine.commit(JOB, [await world.backup(mine, "zero")])
    my_result = await world.backup(mine, "mine")
    await theirs.commit(JOB, [await world.backup(theirs, "theirs")])
    with pytest.raises(CommitLostError):
        await mine.commit(JOB, [my_result])
    with pytest.raises(StaleResultError):
        await mine.commit(JOB, [my_result])
    await mine.commit(JOB, [await world.backup(mine, "again")])
    assert await world.restored_text(mine) == "again"


async def test_a_parent_that_is_not_the_newest_any_more_is_refused_before_anything_is_written(world: World) -> None:
    mine, theirs = await world.process(), await world.process()
    first = await mine.commit(JOB, [await world.backup(mine, "zero")])
    await theirs.commit(JOB, [], offsets="theirs")
    fresh = await world.process()
    with pytest.raises(CommitLostError):
        await fresh.commit(JOB, [], parent=first.pointer)
    assert (await fresh.latest(JOB)).record.number == 2  # type: ignore[union-attr]


async def test_lost_answer_is_adopted(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    commit = await repository.commit(JOB, [result])
    assert commit.record.number == 1
    assert [c.record.number for c in await repository.commits(JOB)] == [1]
    assert await ttl_keys(world) == set()


async def test_a_request_that_never_arrived_is_sent_again_with_the_same_write_id(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    world.store.fail("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    commit = await repository.commit(JOB, [result])
    assert commit.record.number == 1
    puts = [key for operation, key in world.store.requests if operation == "put_if_absent" and key.startswith("log/")]
    assert puts == [commit_key(JOB, 1)] * 2


async def test_an_answer_of_lost_for_the_own_record_is_no_conflict(world: World) -> None:
    """The HTTP client below may send a PUT twice: the second answer says that the key is taken, by us."""
    repository = await world.process()
    result = await world.backup(repository, "one")
    pending: list[bytes] = []

    async def land_early() -> None:
        sent = next(iter(repository._writer(JOB)._unresolved.values()))
        pending.append(encode_record(sent.record))
        await world.store.inner.put_if_absent(commit_key(JOB, 1), BytesBody(pending[0]))

    world.store.before("put_if_absent", "log/", land_early)
    commit = await repository.commit(JOB, [result])
    assert pending
    assert commit.record.number == 1


async def test_a_late_record_of_an_earlier_attempt_becomes_the_parent(world: World) -> None:
    """C3: the first attempt's PUT lands while the second attempt, with other results, is under way."""
    repository = await world.process()
    zero = await repository.commit(JOB, [], offsets="0")
    world.store.fail("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [], offsets="first")
    late = encode_record(next(iter(repository._writer(JOB)._unresolved.values())).record)

    async def land_late() -> None:
        await world.store.inner.put_if_absent(commit_key(JOB, 2), BytesBody(late))

    world.store.before("put_if_absent", commit_key(JOB, 2), land_late)
    commit = await repository.commit(JOB, [await world.backup(repository, "second")], offsets="second")
    assert commit.record.number == 3
    assert commit.record.predecessor is not None
    assert commit.record.predecessor.number == 2
    assert (await read_commit(world.store, JOB, 2)).offsets == "first"
    assert zero.record.number == 1


async def test_a_confirmation_that_fails_is_unknown_and_found_again(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [], offsets="0")
    result = await world.backup(repository, "one")
    world.store.fail("list_page", "log/job/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    assert (await repository.commit(JOB, [result])).record.number == 2


async def test_a_commit_whose_fate_another_request_has_found_out_is_still_found_by_its_own(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [], offsets="0")
    result = await world.backup(repository, "one")
    world.store.fail("list_page", "log/job/")
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result], offsets="mine")
    other = await repository.commit(JOB, [], offsets="other")
    found = await repository.commit(JOB, [result], offsets="mine")
    assert found.record.number < other.record.number
    assert (await repository.commit(JOB, [], offsets="more")).record.number == other.record.number + 1


async def test_a_cancelled_commit_does_not_poison_the_next_one(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")

    async def cancel() -> None:
        raise asyncio.CancelledError

    world.store.after("put_if_absent", "log/", cancel)
    with pytest.raises(asyncio.CancelledError):
        await repository.commit(JOB, [result])
    assert (await repository.commit(JOB, [result])).record.number == 1


async def test_a_failed_commit_does_not_poison_the_next_one(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    for _ in range(3):
        world.store.fail("put_if_absent", "log/")
        with pytest.raises(CommitUnknownError):
            await repository.commit(JOB, [result])
    await repository.commit(JOB, [result])
    await repository.commit(JOB, [await world.backup(repository, "two")])
    assert await world.restored_text(repository) == "two"


async def test_a_record_created_after_its_lease_is_void_and_never_read(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one")])
    result = await world.backup(repository, "late")

    async def sleep_through_the_lease() -> None:
        world.clock.advance(TTL_MS - MARGIN_MS + 1)

    world.store.before("put_if_absent", "log/", sleep_through_the_lease)
    with pytest.raises(LeaseExpiredError):
        await repository.commit(JOB, [result])
    for process in (repository, await world.process()):
        assert (await process.latest(JOB)).record.number == 1  # type: ignore[union-attr]
        assert await world.restored_text(process) == "one"


async def test_the_next_writer_loads_past_a_void_record_and_names_the_valid_one(world: World) -> None:
    repository = await world.process()
    one = await repository.commit(JOB, [await world.backup(repository, "one")])
    late = await world.backup(repository, "late")

    async def sleep_through_the_lease() -> None:
        world.clock.advance(TTL_MS)

    world.store.before("put_if_absent", "log/", sleep_through_the_lease)
    with pytest.raises(LeaseExpiredError):
        await repository.commit(JOB, [late])
    for process in (await world.process(), repository):
        commit = await process.commit(JOB, [await world.backup(process, "next")])
        assert commit.record.predecessor is not None
    numbers = [(c.record.number, c.record.predecessor) for c in await repository.commits(JOB)]
    assert [n for n, _ in numbers] == [4, 3, 1]
    assert numbers[1][1] == one.pointer


async def test_a_collected_number_that_is_created_again_is_fenced(world: World) -> None:
    """Fact: create-if-absent forgets once a collector deletes. A stalled writer wakes up and its number is free."""
    zombie, other = await world.process(), await world.process()
    await zombie.commit(JOB, [], offsets="0")

    async def others_go_on_and_collect() -> None:
        for i in range(3):
            await other.commit(JOB, [], offsets=f"other {i}")
        await other.collect(Retention(keep_last=1), delete_share_max=1)
        assert await world.store.inner.stat(commit_key(JOB, 2)) is None

    world.store.before("put_if_absent", commit_key(JOB, 2), others_go_on_and_collect)
    # The inner requests of the others pass through the same store: only the first matching request runs the hook.
    with pytest.raises(FencedError):
        await zombie.commit(JOB, [], offsets="zombie")
    assert (await other.latest(JOB)).record.offsets == "other 2"  # type: ignore[union-attr]
    assert (await (await world.process()).latest(JOB)).record.offsets == "other 2"  # type: ignore[union-attr]
    await other.collect(Retention(keep_last=1), delete_share_max=1)
    assert await world.store.inner.stat(commit_key(JOB, 2)) is None


async def test_a_boundary_that_lists_the_record_does_not_fence_it(world: World) -> None:
    writer, other = await world.process(), await world.process()
    await writer.commit(JOB, [], offsets="1")
    await writer.commit(JOB, [], offsets="2")

    async def others_go_on_and_collect() -> None:
        await other.commit(JOB, [], offsets="4")
        await other.collect(Retention(keep_last=2), delete_share_max=1)

    world.store.after("put_if_absent", commit_key(JOB, 3), others_go_on_and_collect)
    commit = await writer.commit(JOB, [], offsets="3")
    assert commit.record.number == 3


async def test_later_records_that_do_not_descend_mean_lost(world: World) -> None:
    writer = await world.process()
    first = await writer.commit(JOB, [], offsets="1")
    stranger = msgspec.structs.replace(
        first.record, number=3, write_id=WriteId("stranger"), predecessor=CommitPointer(2, WriteId("another two"))
    )

    async def plant() -> None:
        await world.store.inner.put_if_absent(commit_key(JOB, 3), BytesBody(encode_record(stranger)))

    world.store.after("put_if_absent", commit_key(JOB, 2), plant)
    with pytest.raises(CommitLostError):
        await writer.commit(JOB, [], offsets="2")


async def test_later_records_that_descend_leave_the_commit_acknowledged(world: World) -> None:
    writer, other = await world.process(), await world.process()
    await writer.commit(JOB, [], offsets="1")

    async def another_writer_builds_on_it() -> None:
        await other.commit(JOB, [], offsets="3")

    world.store.after("put_if_absent", commit_key(JOB, 2), another_writer_builds_on_it)
    assert (await writer.commit(JOB, [], offsets="2")).record.number == 2
    with pytest.raises(CommitLostError):
        await writer.commit(JOB, [], offsets="beaten")
    assert (await writer.commit(JOB, [], offsets="4")).record.number == 4


async def test_interrupted_ttl_removal_is_completed_by_the_next_commit(world: World) -> None:
    repository = await world.process()
    first = await world.backup(repository, "one")
    world.store.fail("remove_ttl", first.new_keys[0])
    commit = await repository.commit(JOB, [first])
    assert not commit.settled
    assert await ttl_keys(world)
    other = await world.process()
    second = await world.backup(other, "two")
    before = await ttl_keys(world)
    assert before & set(first.new_keys)
    await other.commit(JOB, [second])
    assert await ttl_keys(world) == set()


async def test_a_parent_is_settled_before_the_record_that_builds_on_it(world: World) -> None:
    repository = await world.process()
    first = await world.backup(repository, "one")
    world.store.fail("remove_ttl", first.new_keys[0])
    await repository.commit(JOB, [first])
    other = await world.process()
    world.store.requests.clear()
    await other.commit(JOB, [], offsets="2")
    operations = [operation for operation, key in world.store.requests if operation in {"remove_ttl", "put_if_absent"}]
    assert operations[-1] == "put_if_absent"
    assert operations.count("remove_ttl") == len(first.new_keys)


async def test_a_rewind_that_fails_before_it_sends_anything_lets_go_of_its_pin(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it can arrive any more, so that nothing has to be protected."""
    repository = await world.process()
    first, _ = await world.history(repository, "one", "two")

    async def refuse(*_: object) -> None:
        raise DamagedError("injected", operation="rewind")

    monkeypatch.setattr("engine.commit.writer.CommitWriter._settle_parent", refuse)
    with pytest.raises(DamagedError):
        await repository.rewind(first)
    assert {await held_ms(world, key) for key in await world.keys(PINS)} == {0}


async def test_a_commit_is_refused_when_a_blob_of_its_parent_is_gone(world: World) -> None:
    repository = await world.process()
    first = await world.backup(repository, "one")
    world.store.fail("remove_ttl", first.new_keys[0])
    await repository.commit(JOB, [first])
    await world.store.inner.delete([first.new_keys[0]])
    with pytest.raises(DamagedError):
        await (await world.process()).commit(JOB, [], offsets="2")


async def test_commit_time_never_goes_backwards(world: World) -> None:
    repository = await world.process()
    first = await repository.commit(JOB, [], offsets="1")
    world.clock.advance(-100_000)
    second = await repository.commit(JOB, [], offsets="2")
    world.clock.advance(200_000)
    third = await repository.commit(JOB, [], offsets="3")
    assert first.committed_at_ms <= second.committed_at_ms < third.committed_at_ms
    assert second.created_at_ms < first.created_at_ms
    assert (await repository.find(JOB, at_ms=third.committed_at_ms - 1)).record.number == 2


async def test_a_time_before_all_commits_is_reported_with_the_oldest(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [], offsets="1")
    world.clock.advance(5_000)
    commit = await repository.commit(JOB, [], offsets="2")
    world.clock.advance(5_000)
    first = await repository.find(JOB, number=1)
    with pytest.raises(NotFoundError) as shown:
        await repository.find(JOB, at_ms=first.committed_at_ms - 1)
    assert iso_time(first.committed_at_ms - 1) in str(shown.value)
    assert shown.value.hint == f"the oldest is commit 1, of {iso_time(first.committed_at_ms)}"
    with pytest.raises(NotFoundError) as shown:
        await repository.find(JOB, at_ms=commit.committed_at_ms, version=99)
    assert shown.value.hint == NotFoundError.default_hint


async def test_rewind_takes_the_next_number_and_the_old_stores(world: World) -> None:
    repository = await world.process()
    for text in ("one", "two", "three"):
        await repository.commit(JOB, [await world.backup(repository, text)], offsets=text)
    rewound = await repository.rewind(await repository.find(JOB, version=1))
    assert (rewound.record.number, rewound.record.kind, rewound.record.offsets) == (4, "rewind", "one")
    assert await world.restored_text(repository) == "one"
    await repository.commit(JOB, [await world.backup(repository, "after")])
    assert await world.restored_text(repository) == "after"


async def test_fork_begins_another_job_without_copying_a_byte(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    world.store.requests.clear()
    forked = await repository.fork(commit, Scope("fork"))
    assert forked.record.source == commit.pointer
    puts = [key for operation, key in world.store.requests if operation.startswith("put")]
    assert not [key for key in puts if key.startswith(("blobs/", "indexes/"))]
    await repository.commit(Scope("fork"), [await world.backup(repository, "branch", scope=Scope("fork"))])
    with pytest.raises(UsageError):
        await repository.fork(commit, Scope("fork"))


async def test_another_layout_is_refused(world: World) -> None:
    repository = await world.process()
    layout = ScopeLayout(tasks_count=4, key_hash="h", key_columns=("k",))
    await repository.commit(JOB, [], layout=layout)
    with pytest.raises(UsageError):
        await repository.commit(JOB, [], layout=msgspec.structs.replace(layout, tasks_count=8))
    assert (await repository.commit(JOB, [])).record.layout == layout


@pytest.mark.parametrize("first, second", [(JOB, Scope("job", "0")), (Scope("job", "0"), JOB)])
async def test_a_job_commits_as_a_whole_or_by_task(world: World, first: Scope, second: Scope) -> None:
    repository = await world.process()
    await repository.commit(first, [])
    with pytest.raises(UsageError):
        await repository.commit(second, [])
    await repository.commit(Scope("job2"), [])


async def test_two_results_for_one_store_are_refused(world: World) -> None:
    repository = await world.process()
    results = [await world.backup(repository, "one"), await world.backup(repository, "other")]
    with pytest.raises(UsageError):
        await repository.commit(JOB, results)


async def test_a_result_of_another_scope_is_refused(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one", scope=Scope("other"))
    with pytest.raises(UsageError):
        await repository.commit(JOB, [result])


async def test_a_listing_with_a_hole_is_refused(world: World) -> None:
    repository = await world.process()
    for i in range(3):
        await repository.commit(JOB, [], offsets=str(i))
    await world.store.inner.delete([commit_key(JOB, 2)])
    with pytest.raises(UnsafeStoreError):
        await (await world.process()).latest(JOB)


async def test_a_boundary_explains_a_hole(world: World) -> None:
    repository = await world.process()
    commits = [await repository.commit(JOB, [], offsets=str(i)) for i in range(3)]
    boundary = Boundary(scope=JOB, number=2, kept=(commits[0].pointer,))
    await world.store.inner.put_if_absent(boundary_key(JOB, 2), BytesBody(encode_record(boundary)))
    await world.store.inner.delete([commit_key(JOB, 2)])
    assert [c.record.number for c in await (await world.process()).commits(JOB)] == [3, 1]


async def test_a_scope_without_commits_has_no_latest(world: World) -> None:
    repository = await world.process()
    assert await repository.latest(JOB) is None
    with pytest.raises(NotFoundError):
        await repository.find(JOB)


async def test_a_store_that_is_no_repository_is_refused(world: World) -> None:
    await world.store.inner.delete(["repository"])
    with pytest.raises(NotFoundError):
        await world.process()


async def test_an_unavailable_store_fails_the_load_with_its_own_error(world: World) -> None:
    world.store.fail("list_page", "log/")
    with pytest.raises(StoreUnavailableError):
        await (await world.process()).latest(JOB)


async def test_a_record_that_was_collected_is_not_found(world: World) -> None:
    with pytest.raises(BlobNotFoundError):
        await read_commit(world.store, JOB, 7)


async def test_a_first_commit_can_insist_on_being_the_first(world: World) -> None:
    mine, theirs = await world.process(), await world.process()
    await theirs.commit(JOB, [], parent=None)
    with pytest.raises(CommitLostError):
        await mine.commit(JOB, [], parent=None)
