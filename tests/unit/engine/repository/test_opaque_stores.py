"""Collection, settling and verification on stores that show and can do less: as S3, and as S3 without tags."""

import pytest

from blobstore.errors import AccessDeniedError, CapabilityMissingError, StoreUnavailableError
from engine.collect.collect import ABORT_BATCH_MAX
from engine.inspect.verify import Level, ProblemKind
from index.plan.collect import DeleteReason
from index.plan.commits import Retention
from index.snapshot.keys import AUDIT, BLOBS, INDEXES, upload_key
from index.snapshot.model import Scope
from tests.opaque_store import OpaqueStore
from tests.unit.engine.conftest import JOB, TTL_MS, World

LAST = Retention(keep_last=1)


def opaque(world: World) -> OpaqueStore:
    assert isinstance(world.store.inner, OpaqueStore)
    return world.store.inner


def count(world: World, operation: str) -> int:
    return sum(asked == operation for asked, _ in world.store.requests)


def forgotten_key(counter: int = 1, prefix: str = BLOBS) -> str:
    return upload_key(prefix, Scope("job"), "f" * 20, counter)


# ---------------------------------------------------------------------- puts that were never finished


async def test_forgotten_puts_are_found_and_given_up(opaque_world: World) -> None:
    world, store = opaque_world, opaque(opaque_world)
    repository = await world.process()
    await world.history(repository, "one")
    store.begin(forgotten_key(1), "old blob", world.clock.now_ms)
    store.begin(forgotten_key(1), "old blob, begun again", world.clock.now_ms)
    store.begin(forgotten_key(0, INDEXES), "old index", world.clock.now_ms)
    world.clock.advance(TTL_MS)
    store.begin(forgotten_key(2), "under way", world.clock.now_ms - TTL_MS + 1)
    store.begin("blobs/theirs", "foreign", 0)
    store.begin("elsewhere/theirs", "foreign and not ours to look at", 0)
    planned = await repository.collect(LAST, dry_run=True, delete_share_max=1)
    assert len(store.unfinished) == 6
    done = await repository.collect(LAST, delete_share_max=1)
    assert planned.deletes == done.deletes
    assert sorted((d.key, d.reason) for d in done.deletes) == [
        (forgotten_key(1), DeleteReason.UNFINISHED_UPLOAD),
        (forgotten_key(1), DeleteReason.UNFINISHED_UPLOAD),
        (forgotten_key(0, INDEXES), DeleteReason.UNFINISHED_UPLOAD),
    ]
    assert (done.unfinished_count, done.unfinished_hidden) == (1, "")
    assert done.foreign == ("blobs/theirs",)
    assert done.failed == ()
    assert [p.upload_id for p in store.unfinished] == ["under way", "foreign", "foreign and not ours to look at"]
    assert count(world, "list_unfinished") == 4
    assert await world.restored_text(repository) == "one"


async def test_puts_that_cannot_be_given_up_are_reported(opaque_world: World) -> None:
    world, store = opaque_world, opaque(opaque_world)
    for number in range(ABORT_BATCH_MAX + 2):
        store.begin(forgotten_key(number), f"upload {number}", 0)
    store.stuck = {"upload 3"}
    repository = await world.process()
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.failed == (forgotten_key(3),)
    assert len(report.deletes) == ABORT_BATCH_MAX + 1
    assert count(world, "abort_unfinished") == 2
    world.store.fail("abort_unfinished", "", AccessDeniedError("no", operation="abort_unfinished"))
    report = await repository.collect(LAST, delete_share_max=1)
    assert (report.failed, report.deletes) == ((forgotten_key(3),), ())


@pytest.mark.parametrize("error", [AccessDeniedError, CapabilityMissingError])
async def test_what_may_not_be_looked_for_stops_nothing_else(
    opaque_world: World, error: type[AccessDeniedError | CapabilityMissingError]
) -> None:
    world = opaque_world
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    opaque(world).begin(forgotten_key(), "old", 0)
    world.store.fail("list_unfinished", "", error("not for you", operation="list_unfinished"))
    report = await repository.collect(LAST, delete_share_max=1)
    assert "not for you" in report.unfinished_hidden
    assert DeleteReason.UNREACHABLE_UPLOAD in {d.reason for d in report.deletes}
    assert report.failed == ()
    assert len(opaque(world).unfinished) == 1


async def test_unfinished_puts_that_cannot_be_listed_for_now_mean_that_nothing_is_deleted(opaque_world: World) -> None:
    world = opaque_world
    repository = await world.process()
    await world.history(repository, "one", "two")
    before = await world.keys()
    world.store.fail("list_unfinished", INDEXES)
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1)
    assert {key for key in await world.keys() if not key.startswith(AUDIT)} == before


async def test_forgotten_puts_are_listed_before_roots_are_read_and_given_up_last(opaque_world: World) -> None:
    world = opaque_world
    repository = await world.process()
    await world.history(repository, "one", "two")
    opaque(world).begin(forgotten_key(), "old", 0)
    world.store.requests.clear()
    await repository.collect(LAST, delete_share_max=1)
    steps = [(operation, key.split("/")[0]) for operation, key in world.store.requests]
    assert steps.index(("list_unfinished", "indexes")) < steps.index(("list_page", "pins"))
    assert steps[-2:] == [("abort_unfinished", "blobs"), ("put_if_absent", "audit")]


# ---------------------------------------------------------------------- lists that do not show TTLs


async def test_only_the_indexes_of_newest_commits_are_looked_up(opaque_world: World) -> None:
    world = opaque_world
    repository = await world.process()
    await world.history(repository, "one", "two")
    old = await world.backup(repository, "abandoned long ago")
    world.clock.advance(TTL_MS)
    await world.history(repository, "three")
    young = await world.backup(repository, "abandoned lately")
    world.store.requests.clear()
    report = await repository.collect(Retention(keep_last=2), delete_share_max=1)
    looked_up = {key for operation, key in world.store.requests if operation == "stat"}
    assert looked_up == {(await repository.find(JOB)).record.stores[0].index.key}
    assert set(old.new_keys) <= {d.key for d in report.deletes}
    assert report.waiting_count == len(young.new_keys)
    assert report.waiting_until_ms == world.clock.now_ms + TTL_MS


async def test_a_settled_newest_commit_costs_a_look_at_its_indexes_and_nothing_more(opaque_world: World) -> None:
    world = opaque_world
    repository = await world.process()
    await world.history(repository, "one")
    world.store.requests.clear()
    await repository.collect(LAST, delete_share_max=1)
    assert (count(world, "stat"), count(world, "remove_ttl")) == (1, 0)


@pytest.mark.parametrize("failing", [0, 1])
async def test_an_index_loses_its_ttl_after_all_its_blobs_or_not_at_all(world: World, failing: int) -> None:
    """Design 0002, T1: so that the next reader need only ask the index."""
    repository = await world.process()
    result = await world.backup(repository, "one")
    world.store.fail("remove_ttl", result.new_keys[:-1][failing])
    await repository.commit(JOB, [result])
    index = await world.store.inner.stat(result.reference.index.key)
    assert index is not None
    assert index.expires_at_ms is not None
    world.store.requests.clear()
    await (await world.process()).collect(LAST, delete_share_max=1)
    removed = [key for operation, key in world.store.requests if operation == "remove_ttl"]
    assert removed[-1] == result.reference.index.key
    assert set(removed) == set(result.new_keys)


async def test_the_indexes_of_all_stores_come_after_the_blobs_of_all(world: World) -> None:
    repository = await world.process()
    results = [await world.backup(repository, "one", task=task) for task in "abc"]
    world.store.requests.clear()
    await repository.commit(JOB, results)
    removed = [key for operation, key in world.store.requests if operation == "remove_ttl"]
    assert set(removed[-3:]) == {result.reference.index.key for result in results}


# ---------------------------------------------------------------------- TTLs that cannot be removed


async def test_where_ttls_cannot_be_removed_nobody_asks_or_tries(lasting_world: World) -> None:
    world = lasting_world
    await world.history(await world.process(), "one")
    repository = await world.process()
    await world.history(repository, "two")
    commit = await repository.find(JOB)
    await repository.name(commit, "golden")
    await repository.fork(commit, Scope("fork"))
    await repository.rewind(await repository.find(JOB, number=1))
    assert commit.record.number == 2
    report = await repository.collect(LAST, delete_share_max=1)
    for level in Level:
        for heal in (False, True):
            assert not (await repository.verify(level=level, heal=heal)).problems
    assert report.waiting_count == 0  # the name holds what the boundary has closed
    assert (count(world, "remove_ttl"), count(world, "stat")) == (0, 0)


async def test_where_ttls_cannot_be_removed_a_commit_is_settled_at_once(lasting_world: World) -> None:
    repository = await lasting_world.process()
    commit = await repository.commit(JOB, [await lasting_world.backup(repository, "one")])
    assert commit.settled


async def test_where_ttls_cannot_be_removed_garbage_waits_for_them_and_what_is_reachable_stays(
    lasting_world: World,
) -> None:
    world = lasting_world
    repository = await world.process()
    await world.history(repository, "one", "two")
    report = await repository.collect(LAST, delete_share_max=1)
    assert {d.reason for d in report.deletes} == {DeleteReason.CLOSED_COMMIT}
    assert report.waiting_count > 0
    world.clock.advance(10 * TTL_MS)
    report = await repository.collect(LAST, delete_share_max=1)
    assert {d.reason for d in report.deletes} == {DeleteReason.UNREACHABLE_UPLOAD}
    assert (report.waiting_count, count(world, "stat")) == (0, 0)
    assert await world.restored_text(await world.process()) == "two"
    # A backup that retains blobs whose TTL has been over for long is as safe: its parent is a root.
    await world.history(repository, "three")
    await repository.collect(LAST, delete_share_max=1)
    assert await world.restored_text(await world.process()) == "three"
    assert not (await repository.verify(level=Level.CONTENT)).problems


# ---------------------------------------------------------------------- verification


async def test_verification_asks_each_index_once_and_no_blob(opaque_world: World) -> None:
    world = opaque_world
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    world.store.requests.clear()
    assert not (await repository.verify()).problems
    assert count(world, "stat") == 3
    world.store.requests.clear()
    report = await repository.verify(level=Level.CONTENT)
    assert count(world, "stat") == 3 + report.blobs_count


async def test_an_unsettled_commit_is_found_and_healed_index_last(opaque_world: World) -> None:
    world = opaque_world
    repository = await world.process()
    await world.history(repository, "one")
    result = await world.backup(repository, "two")
    for key in result.new_keys[:-1]:
        world.store.fail("remove_ttl", key)
    await repository.commit(JOB, [result])
    other = await world.process()
    report = await other.verify()
    assert {(p.key, p.kind) for p in report.problems} == {(k, ProblemKind.AT_RISK) for k in result.new_keys}
    world.store.requests.clear()
    healed = await other.verify(heal=True)
    assert all(p.healed for p in healed.problems)
    removed = [key for operation, key in world.store.requests if operation == "remove_ttl"]
    assert set(removed) == set(result.new_keys)
    assert removed[-1] == result.reference.index.key
    assert not (await other.verify(level=Level.CONTENT)).problems


async def test_an_index_that_is_only_a_delta_s_base_is_healed_after_blobs_of_its_own(
    opaque_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing brings this about (T2); healing must not make the base vouch for blobs that it has not looked at."""
    world = opaque_world
    monkeypatch.setattr("engine.records.indexes.delta_pays", lambda **sizes: True)
    monkeypatch.setattr("engine.records.indexes.WHOLE_BYTES_MAX", 0)
    repository = await world.process()
    first = await world.backup(repository, "one")
    await repository.commit(JOB, [first])
    await world.history(repository, "two")
    await repository.collect(LAST, delete_share_max=1)
    (newest,) = await repository.commits(JOB)
    base, own = first.reference.index.key, newest.record.stores[0].index.key
    kept = [key for key in first.new_keys if key in await world.keys()]
    assert {base} < set(kept)
    for key in kept:
        opaque(world)._publish(key, opaque(world)._blobs[key].data, TTL_MS)
    report = await repository.verify()
    assert {p.key for p in report.problems} == set(kept)
    assert own not in kept
    world.store.requests.clear()
    assert all(p.healed for p in (await repository.verify(heal=True)).problems)
    removed = [key for operation, key in world.store.requests if operation == "remove_ttl"]
    assert (set(removed), removed[-1]) == (set(kept), base)


async def test_content_level_finds_a_ttl_that_no_index_has(opaque_world: World) -> None:
    """A blob that was copied back with its tag, say: only who trusts nobody's word can see it."""
    world = opaque_world
    repository = await world.process()
    result = await world.backup(repository, "one")
    await repository.commit(JOB, [result])
    blob = opaque(world)._blobs[result.new_keys[0]]
    opaque(world)._publish(result.new_keys[0], blob.data, TTL_MS)
    assert not (await repository.verify()).problems
    report = await repository.verify(level=Level.CONTENT)
    assert [(p.key, p.kind) for p in report.problems] == [(result.new_keys[0], ProblemKind.AT_RISK)]
