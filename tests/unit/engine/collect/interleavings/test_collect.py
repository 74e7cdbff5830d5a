"""What a collection takes and what it leaves, in which order."""

import pytest

from blobstore.base import BytesBody, read_blob
from blobstore.errors import BlobNotFoundError
from engine.errors import NotFoundError, UsageError
from index.errors import IndexInvariantError
from index.plan.collect import DeleteReason
from index.plan.commits import KeepReason, Retention
from index.snapshot.keys import boundary_key
from index.snapshot.model import PIN_DURATION_MS, Scope
from tests.unit.engine.collect.interleavings.judging import LAST, check_exact, keys
from tests.unit.engine.conftest import JOB, TTL_MS, World


async def test_closed_commits_go_with_all_that_only_they_needed(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three")
    before = await keys(world)
    report = await repository.collect(LAST, delete_share_max=1)
    assert {d.reason for d in report.deletes} == {DeleteReason.CLOSED_COMMIT, DeleteReason.UNREACHABLE_UPLOAD}
    assert await keys(world) - before == {boundary_key(JOB, 2)}
    assert report.freed_bytes > 80_000
    await check_exact(world)
    assert await world.restored_text(repository) == "three"
    with pytest.raises(NotFoundError):
        await repository.find(JOB, version=1)


async def test_a_second_collection_finds_nothing(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await repository.collect(LAST, delete_share_max=1)
    world.store.requests.clear()
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.deletes == ()
    assert report.boundaries == ()
    changes = {"put", "put_if_absent", "delete", "remove_ttl"}
    assert [(o, k.split("/")[0]) for o, k in world.store.requests if o in changes] == [("put_if_absent", "audit")]


async def test_records_go_before_indexes_and_indexes_before_blobs(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    world.store.requests.clear()
    await repository.collect(LAST, delete_share_max=1)
    prefixes = [key.split("/")[0] for operation, key in world.store.requests if operation == "delete"]
    assert prefixes == ["log", "indexes", "blobs"]


async def test_the_boundary_is_written_before_anything_is_deleted(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    world.store.requests.clear()
    await repository.collect(LAST, delete_share_max=1)
    operations = [operation for operation, _ in world.store.requests]
    assert operations.index("put_if_absent") < operations.index("delete")


async def test_dry_run_says_the_same_and_touches_nothing(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    before = await keys(world)
    world.store.requests.clear()
    planned = await repository.collect(LAST, dry_run=True, delete_share_max=1)
    assert {o for o, _ in world.store.requests} <= {"get", "list_page", "list_unfinished", "stat"}
    assert await keys(world) == before
    done = await repository.collect(LAST, delete_share_max=1)
    assert set(planned.deletes) == set(done.deletes)
    assert planned.kept == done.kept


async def test_uploads_that_no_commit_took_over_wait_for_their_ttl(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    result = await world.backup(repository, "abandoned")
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.deletes == ()
    assert report.waiting_count == len(result.new_keys)
    world.clock.advance(TTL_MS + 1)
    report = await repository.collect(LAST, delete_share_max=1)
    assert {d.key for d in report.deletes} == set(result.new_keys)
    assert {d.reason for d in report.deletes} == {DeleteReason.UNREACHABLE_UPLOAD}
    await check_exact(world)


async def test_the_newest_commit_stays_whatever_retention_says(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    world.clock.advance(100 * TTL_MS)
    report = await repository.collect(Retention(keep_since_ms=world.clock.now_ms), delete_share_max=1)
    assert [(k.number, k.reason) for k in report.kept] == [(2, KeepReason.NEWEST)]
    assert await world.restored_text(repository) == "two"


async def test_keep_since_keeps_what_was_the_newest_at_that_time(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three", "four")
    since = (await repository.find(JOB, version=3)).committed_at_ms - 1
    await repository.collect(Retention(keep_since_ms=since), delete_share_max=1)
    assert [c.record.version for c in await repository.commits(JOB)] == [4, 3, 2]
    assert await world.restored_text(repository, at_ms=since) == "two"


@pytest.mark.parametrize("arguments", [{}, {"keep_last": -1}, {"keep_since_ms": -5}, {"keep_named": True}])
def test_a_retention_that_keeps_nothing_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(IndexInvariantError):
        Retention(**arguments)  # type: ignore[arg-type]


async def test_a_named_commit_survives_collection_until_the_name_is_released(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one")
    await repository.name(await repository.find(JOB), "golden")
    await world.history(repository, "two", "three")
    await repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1)
    assert [c.record.version for c in await repository.commits(JOB)] == [3]
    await check_exact(world)
    assert await world.restored_text(repository, name="golden") == "one"
    await repository.release_name(JOB, "golden")
    with pytest.raises(NotFoundError):
        await repository.find(JOB, name="golden")
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.UNREACHABLE_UPLOAD in {d.reason for d in report.deletes}
    await check_exact(world)
    world.clock.advance(2 * PIN_DURATION_MS)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.RELEASED_NAME in {d.reason for d in report.deletes}
    await check_exact(world)


async def test_a_kept_name_keeps_its_record_in_the_log(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    await repository.name(await repository.find(JOB), "golden")
    await world.history(repository, "two", "three")
    report = await repository.collect(LAST, delete_share_max=1)
    assert (1, KeepReason.NAMED) in [(k.number, k.reason) for k in report.kept]


async def test_a_name_is_given_once(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    commit = await repository.find(JOB, version=1)
    await repository.name(commit, "golden")
    with pytest.raises(UsageError):
        await repository.name(await repository.find(JOB, version=2), "golden")


async def test_keys_that_tidemark_never_wrote_are_left_alone(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    await world.store.inner.put("blobs/zz/foreign", BytesBody(b"mine"))
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.foreign == ("blobs/zz/foreign",)
    assert "blobs/zz/foreign" in await keys(world)


async def test_collection_settles_the_newest_commit(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    world.store.fail("remove_ttl", result.new_keys[0])
    await repository.commit(JOB, [result])
    await (await world.process()).collect(LAST, delete_share_max=1)
    stats = [await world.store.inner.stat(key) for key in await keys(world)]
    assert not [info for info in stats if info is None or info.expires_at_ms is not None]


async def test_stores_of_all_jobs_are_roots(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    other = Scope("another job", "täsk")
    await repository.commit(other, [await world.backup(repository, "theirs", scope=other, task="täsk")])
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)
    commit = await repository.find(other)
    target = world.target()
    await repository.restore(commit, target, task="täsk")
    assert (target / "CURRENT").read_text() == "theirs"


async def test_deleted_blobs_are_gone_for_readers(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    report = await repository.collect(LAST, delete_share_max=1)
    gone = next(d.key for d in report.deletes if d.key.startswith("blobs/"))
    with pytest.raises(BlobNotFoundError):
        await read_blob(world.store.inner, gone, size_bytes_max=1)
