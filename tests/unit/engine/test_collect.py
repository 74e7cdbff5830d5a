"""Design 0002, D1 to D7, each with the interleaving that it is there for; the walker of tests/walker.py judges."""

import asyncio

import msgspec
import pytest

from blobstore.base import BytesBody, list_blobs
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreUnavailableError
from engine.clock import SystemAmbient
from engine.errors import CollectedError, DamagedError, EngineError, NotFoundError, UnsafeStoreError, UsageError
from engine.pins import PIN_DURATION_MS
from engine.repository import Repository
from engine.verify import Level
from index.codec import encode_record
from index.collect_plan import DeleteReason
from index.errors import FormatError, IndexInvariantError
from index.keys import AUDIT, boundary_key, commit_key, pin_key
from index.log import Commit
from index.model import Boundary, Pin, Scope
from index.retention import KeepReason, Retention
from tests.opaque_store import OpaqueStore
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.walker import expected_keys

LAST = Retention(keep_last=1)


@pytest.fixture(params=["world", "opaque_world"], ids=["lists show TTLs", "lists show none"])
def world(request: pytest.FixtureRequest) -> World:
    """Every interleaving on a store that tells TTLs in lists, and on one that does not."""
    chosen: World = request.getfixturevalue(request.param)
    return chosen


async def keys(world: World, prefix: str = "") -> set[str]:
    """All but the evidence of collections."""
    return {blob.key async for blob in list_blobs(world.store.inner, prefix) if not blob.key.startswith(AUDIT)}


async def check_exact(world: World) -> None:
    if isinstance(world.store.inner, OpaqueStore):
        world.store.inner.opaque = False
    await check_keys(world)
    if isinstance(world.store.inner, OpaqueStore):
        world.store.inner.opaque = True


async def check_keys(world: World) -> None:
    everything = {blob.key async for blob in list_blobs(world.store.inner, "")}
    assert everything == await expected_keys(world.store.inner, world.clock.now_ms)


async def history(world: World, repository: Repository, *texts: str) -> None:
    for text in texts:
        await repository.commit(JOB, [await world.backup(repository, text)], offsets=text)
        world.clock.advance(1000)


async def test_closed_commits_go_with_all_that_only_they_needed(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
    before = await keys(world)
    report = await repository.collect(LAST, delete_share_max=1)
    assert {d.reason for d in report.deletes} == {DeleteReason.CLOSED_COMMIT, DeleteReason.CLOSED_UPLOAD}
    assert await keys(world) - before == {boundary_key(JOB, 2)}
    assert report.freed_bytes > 80_000
    await check_exact(world)
    assert await world.restored_text(repository) == "three"
    with pytest.raises(NotFoundError):
        await repository.find(JOB, version=1)


async def test_a_second_collection_finds_nothing(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
    await repository.collect(LAST, delete_share_max=1)
    world.store.requests.clear()
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.deletes == ()
    assert report.boundaries == ()
    changes = {"put", "put_if_absent", "delete", "remove_ttl"}
    assert [(o, k.split("/")[0]) for o, k in world.store.requests if o in changes] == [("put_if_absent", "audit")]


async def test_records_go_before_indexes_and_indexes_before_blobs(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    world.store.requests.clear()
    await repository.collect(LAST, delete_share_max=1)
    rooms = [key.split("/")[0] for operation, key in world.store.requests if operation == "delete"]
    assert rooms == ["log", "indexes", "blobs"]


async def test_the_boundary_is_written_before_anything_is_deleted(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    world.store.requests.clear()
    await repository.collect(LAST, delete_share_max=1)
    operations = [operation for operation, _ in world.store.requests]
    assert operations.index("put_if_absent") < operations.index("delete")


async def test_dry_run_says_the_same_and_touches_nothing(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
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
    await history(world, repository, "one")
    result = await world.backup(repository, "abandoned")
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.deletes == ()
    assert report.waiting_count == len(result.new_keys)
    world.clock.advance(TTL_MS + 1)
    report = await repository.collect(LAST, delete_share_max=1)
    assert {d.key for d in report.deletes} == set(result.new_keys)
    told = world.store.capabilities.list_shows_ttl
    assert {d.reason for d in report.deletes} == {DeleteReason.EXPIRED_UPLOAD if told else DeleteReason.OUTLIVED_UPLOAD}
    await check_exact(world)


async def test_the_newest_commit_stays_whatever_retention_says(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    world.clock.advance(100 * TTL_MS)
    report = await repository.collect(Retention(keep_since_ms=world.clock.now_ms), delete_share_max=1)
    assert [(k.number, k.reason) for k in report.kept] == [(2, KeepReason.NEWEST)]
    assert await world.restored_text(repository) == "two"


async def test_keep_since_keeps_what_was_the_newest_at_that_time(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three", "four")
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
    await history(world, repository, "one")
    await repository.name(await repository.find(JOB), "golden")
    await history(world, repository, "two", "three")
    await repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1)
    assert [c.record.version for c in await repository.commits(JOB)] == [3]
    await check_exact(world)
    assert await world.restored_text(repository, name="golden") == "one"
    await repository.release_name(JOB, "golden")
    with pytest.raises(NotFoundError):
        await repository.find(JOB, name="golden")
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.CLOSED_UPLOAD in {d.reason for d in report.deletes}
    await check_exact(world)
    world.clock.advance(2 * PIN_DURATION_MS)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.RELEASED_NAME in {d.reason for d in report.deletes}
    await check_exact(world)


async def test_a_kept_name_keeps_its_record_in_the_log(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one")
    await repository.name(await repository.find(JOB), "golden")
    await history(world, repository, "two", "three")
    report = await repository.collect(LAST, delete_share_max=1)
    assert (1, KeepReason.NAMED) in [(k.number, k.reason) for k in report.kept]


async def test_a_name_is_given_once(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    commit = await repository.find(JOB, version=1)
    await repository.name(commit, "golden")
    with pytest.raises(UsageError):
        await repository.name(await repository.find(JOB, version=2), "golden")


async def test_a_pinned_commit_restores_while_its_record_is_collected(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
    commit = await repository.find(JOB, version=1)
    async with repository.pinned(commit):
        await repository.collect(LAST, delete_share_max=1)
        assert [c.record.version for c in await repository.commits(JOB)] == [3]
        target = world.target()
        await repository.restore(commit, target, pin=False)
        assert (target / "CURRENT").read_text() == "one"
        await check_exact(world)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.EXPIRED_PIN in {d.reason for d in report.deletes}
    await check_exact(world)


async def test_a_commit_that_was_closed_cannot_be_pinned_any_more(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    commit = await repository.find(JOB, version=1)
    await repository.collect(LAST, delete_share_max=1)
    with pytest.raises(CollectedError):
        await repository.restore(commit, world.target())


async def test_a_pin_written_after_the_collector_looked_meets_the_boundary(world: World) -> None:
    """D5, the other order: the pin comes after the second reading of the roots, and the pinner sees the boundary."""
    repository, reader = await world.process(), await world.process()
    await history(world, repository, "one", "two")
    commit = await reader.find(JOB, version=1)
    refused = []

    async def pin_now() -> None:
        try:
            await reader.restore(commit, world.target())
        except CollectedError:
            refused.append(True)

    world.store.before("delete", "log/", pin_now)
    await repository.collect(LAST, delete_share_max=1)
    assert refused == [True]


async def test_a_pin_written_between_plan_and_second_reading_spares_the_blobs(world: World) -> None:
    repository, reader = await world.process(), await world.process()
    await history(world, repository, "one", "two")
    commit = await reader.find(JOB, version=1)
    leases = []

    async def pin_now() -> None:
        lease = reader.pinned(commit)
        await lease.__aenter__()
        leases.append(lease)

    world.store.before("put_if_absent", ".boundary", pin_now)
    await repository.collect(LAST, delete_share_max=1)
    target = world.target()
    await reader.restore(commit, target, pin=False)
    assert (target / "CURRENT").read_text() == "one"
    await leases[0].__aexit__(None, None, None)


@pytest.mark.parametrize("listing", ["pins/", "names/", "log/"])
async def test_fork_between_the_collectors_second_readings_is_spared(world: World, listing: str) -> None:
    """Design 0002, refinement 1: the fork's pin comes after the first reading of the roots and before the boundary; its
    record comes, and its pin goes, after any one of the listings with which the roots are read for the second time."""
    repository, forker = await world.process(), await world.process()
    await history(world, repository, "one", "two")
    commit = await forker.find(JOB, version=1)
    pin_stands, may_write = asyncio.Event(), asyncio.Event()
    forks: list[asyncio.Task[Commit]] = []

    async def wait_before_the_record() -> None:
        pin_stands.set()
        await may_write.wait()

    async def begin_the_fork() -> None:
        world.store.before("put_if_absent", commit_key(Scope("fork"), 1), wait_before_the_record)
        forks.append(asyncio.create_task(forker.fork(commit, Scope("fork"))))
        await pin_stands.wait()

    async def end_the_fork() -> None:
        may_write.set()
        await forks[0]

    async def end_it_within_the_second_reading() -> None:
        world.store.after("list_page", listing, end_the_fork)

    world.store.before("put_if_absent", ".boundary", begin_the_fork)
    world.store.after("put_if_absent", ".boundary", end_it_within_the_second_reading)
    await repository.collect(LAST, delete_share_max=1)
    assert forks[0].done()
    assert [c.record.version for c in await repository.commits(JOB)] == [2]
    target = world.target()
    await forker.restore(forks[0].result(), target)
    assert (target / "CURRENT").read_text() == "one"
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_an_expired_pin_protects_nothing_and_goes_after_a_margin(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    lease = repository.pinned(await repository.find(JOB, version=1))
    await lease.__aenter__()
    world.clock.advance(10 * PIN_DURATION_MS)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.EXPIRED_PIN in {d.reason for d in report.deletes}
    await check_exact(world)
    await lease.__aexit__(None, None, None)


async def test_a_reader_without_the_right_to_pin_restores_and_says_so(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one")
    world.store.fail("put", "pins/", AccessDeniedError("no", operation="put", key="pins/"))
    restored = await repository.find_and_restore(JOB, world.target())
    assert not restored.pinned


async def test_an_unpinned_reader_that_is_overtaken_chooses_again(world: World) -> None:
    repository, reader = await world.process(), await world.process()
    await history(world, repository, "one")
    world.store.fail("put", "pins/", AccessDeniedError("no", operation="put", key="pins/"))

    async def overtake() -> None:
        await history(world, repository, "two")
        await repository.collect(LAST, delete_share_max=1)

    world.store.before("get", "indexes/", overtake)
    # The hook's own backup reads an index too; the rule is used up by then.
    restored = await reader.find_and_restore(JOB, world.target())
    assert restored.commit.record.version == 2


async def test_a_commit_that_appears_during_a_collection_keeps_its_blobs(world: World) -> None:
    repository, writer = await world.process(), await world.process()
    await history(world, repository, "one", "two")
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
    await history(world, repository, "one")
    result = await world.backup(writer, "late")

    async def sleep_and_let_a_collector_run() -> None:
        world.clock.advance(TTL_MS + 1)
        await repository.collect(LAST, delete_share_max=1)

    world.store.before("put_if_absent", commit_key(JOB, 2), sleep_and_let_a_collector_run)
    with pytest.raises(EngineError):
        await writer.commit(JOB, [result])
    assert await world.restored_text(await world.process()) == "one"


@pytest.mark.parametrize(
    "operation, key",
    [
        ("list_page", "blobs/"),
        ("list_page", "indexes/"),
        ("list_page", "pins/"),
        ("list_page", "names/"),
        ("list_page", "log/"),
        ("get", ".commit"),
        ("get", "indexes/"),
        ("put_if_absent", ".boundary"),
    ],
)
async def test_an_error_on_the_way_means_that_nothing_is_deleted(world: World, operation: str, key: str) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    before = await keys(world)
    world.store.fail(operation, key)
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_an_error_in_the_second_reading_means_that_nothing_is_deleted(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")

    async def break_the_rest() -> None:
        world.store.fail("list_page", "log/")

    world.store.after("put_if_absent", ".boundary", break_the_rest)
    before = await keys(world)
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1)
    assert before < await keys(world)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_a_missing_index_means_that_nothing_is_deleted(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    commit = await repository.find(JOB)
    await world.store.inner.delete([commit.record.stores[0].index.key])
    before = await keys(world)
    with pytest.raises(DamagedError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before


async def test_a_record_of_a_newer_format_means_that_nothing_is_deleted(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    stored = bytearray(encode_record((await repository.find(JOB)).record))
    stored[9] = 99
    await world.store.inner.put(commit_key(Scope("newer"), 1), BytesBody(bytes(stored)))
    before = await keys(world)
    with pytest.raises(FormatError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before


async def test_a_short_listing_means_that_nothing_is_deleted(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
    await world.store.inner.delete([commit_key(JOB, 2)])
    before = await keys(world)
    with pytest.raises(UnsafeStoreError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before


@pytest.mark.parametrize("weakness", ["consistent_lists", "atomic_create"])
async def test_a_store_that_cannot_be_trusted_is_refused(
    world: World, weakness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    weak = msgspec.structs.replace(world.store.inner.capabilities, **{weakness: False})
    monkeypatch.setattr(type(world.store), "capabilities", property(lambda _: weak))
    with pytest.raises(UnsafeStoreError):
        await repository.collect(LAST, delete_share_max=1)


async def test_keys_that_tidemark_never_wrote_are_left_alone(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    await world.store.inner.put("blobs/zz/foreign", BytesBody(b"mine"))
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.foreign == ("blobs/zz/foreign",)
    assert "blobs/zz/foreign" in await keys(world)


async def test_a_taken_boundary_number_is_adopted(world: World) -> None:
    """Another collector with another retention was first: what it keeps open stays open for us too."""
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
    first = await repository.find(JOB, version=1)

    async def another_collector() -> None:
        boundary = Boundary(scope=JOB, number=2, kept=(first.pointer,))
        await world.store.inner.put_if_absent(boundary_key(JOB, 2), BytesBody(encode_record(boundary)))

    world.store.before("put_if_absent", ".boundary", another_collector)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)
    assert [c.record.version for c in await repository.commits(JOB)] == [3, 1]
    assert await world.restored_text(repository, version=1) == "one"


async def test_a_newer_boundary_replaces_an_older_one(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    await repository.collect(LAST, delete_share_max=1)
    await history(world, repository, "three")
    await repository.collect(LAST, delete_share_max=1)
    assert {k for k in await keys(world, "log/") if k.endswith("boundary")} == {boundary_key(JOB, 2)}
    await check_exact(world)


async def test_closed_stays_closed_when_a_newer_boundary_lists_it(world: World) -> None:
    """D3: the older boundary may not go while the newer one would open what it has closed."""
    repository = await world.process()
    await history(world, repository, "one", "two", "three", "four")
    one = await repository.find(JOB, version=1)
    older = Boundary(scope=JOB, number=2, kept=())
    newer = Boundary(scope=JOB, number=3, kept=(one.pointer,))
    for boundary in (older, newer):
        await world.store.inner.put_if_absent(boundary_key(JOB, boundary.number), BytesBody(encode_record(boundary)))
    assert [c.record.version for c in await repository.commits(JOB)] == [4]
    await repository.collect(LAST, delete_share_max=1)
    assert {k for k in await keys(world, "log/") if k.endswith("boundary")} == {
        boundary_key(JOB, 2),
        boundary_key(JOB, 3),
    }
    await check_exact(world)


async def test_a_void_record_goes_once_a_newer_valid_one_stands(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one")
    late = await world.backup(repository, "late")

    async def sleep_through_the_lease() -> None:
        world.clock.advance(TTL_MS)

    world.store.before("put_if_absent", commit_key(JOB, 2), sleep_through_the_lease)
    with pytest.raises(EngineError):
        await repository.commit(JOB, [late])
    await repository.collect(LAST, delete_share_max=1)
    assert commit_key(JOB, 2) in await keys(world)
    await history(world, repository, "three")
    world.clock.advance(TTL_MS)
    await repository.collect(LAST, delete_share_max=1)
    assert commit_key(JOB, 2) not in await keys(world)
    await check_exact(world)


async def test_collection_settles_the_newest_commit(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    world.store.fail("remove_ttl", result.new_keys[0])
    await repository.commit(JOB, [result])
    await (await world.process()).collect(LAST, delete_share_max=1)
    stats = [await world.store.inner.stat(key) for key in await keys(world)]
    assert not [info for info in stats if info is None or info.expires_at_ms is not None]


async def test_what_the_store_will_not_delete_stops_what_comes_later(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")

    async def refuse() -> None:
        raise AccessDeniedError("no", operation="delete", key="indexes/")

    world.store.before("delete", "indexes/", refuse)
    blobs = await keys(world, "blobs/")
    with pytest.raises(AccessDeniedError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world, "blobs/") == blobs
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_two_collectors_at_once_do_what_one_does(world: World) -> None:
    repository, other = await world.process(), await world.process()
    await history(world, repository, "one", "two", "three")

    async def second_collector() -> None:
        await other.collect(LAST, delete_share_max=1)

    for operation, key in [
        ("list_page", "pins/"),
        ("put_if_absent", ".boundary"),
        ("delete", "log/"),
        ("delete", "blobs/"),
    ]:
        await history(world, repository, "more", "and more")
        world.store.before(operation, key, second_collector)
        await repository.collect(LAST, delete_share_max=1)
        await check_exact(world)
        assert await world.restored_text(repository) == "and more"


async def test_stores_of_all_jobs_are_roots(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
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
    await history(world, repository, "one", "two")
    report = await repository.collect(LAST, delete_share_max=1)
    gone = next(d.key for d in report.deletes if d.key.startswith("blobs/"))
    with pytest.raises(BlobNotFoundError):
        async for _ in world.store.inner.get(gone):
            pass


async def pin_at(world: World, commit: Commit) -> None:
    """A pin of a reader that has not yet asked whether the commit is open, and dies."""
    pin = Pin(
        id=SystemAmbient().session(),
        scope=JOB,
        source=commit.pointer,
        duration_ms=PIN_DURATION_MS,
        purpose="read",
        stores=commit.record.stores,
    )
    await world.store.inner.put(pin_key(pin.id), BytesBody(encode_record(pin)))


async def test_a_pin_on_something_collected_keeps_nothing_and_stops_nobody(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    one = await repository.find(JOB, version=1)
    await repository.collect(LAST, delete_share_max=1)
    await pin_at(world, one)
    await history(world, repository, "three")
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.deletes
    assert await world.restored_text(repository) == "three"


async def test_a_late_pin_on_something_collected_does_not_stop_the_second_reading(world: World) -> None:
    repository, other = await world.process(), await world.process()
    await history(world, repository, "one", "two")
    one = await repository.find(JOB, version=1)
    await other.collect(LAST, delete_share_max=1)
    await history(world, repository, "three")

    async def pin() -> None:
        await pin_at(world, one)

    world.store.before("put_if_absent", "boundary", pin)
    assert (await repository.collect(LAST, delete_share_max=1)).deletes
    await check_kept(repository)


async def check_kept(repository: Repository) -> None:
    assert not (await repository.verify(level=Level.CONTENT)).problems


async def test_a_pinned_index_that_a_commit_needs_too_has_to_be_there(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two")
    two = await repository.find(JOB)
    await pin_at(world, two)
    await world.store.inner.delete([two.record.stores[0].index.key])
    before = await keys(world)
    with pytest.raises(DamagedError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_collector_that_is_overtaken_while_marking_plans_again(world: World, dry_run: bool) -> None:
    repository, writer, other = await world.process(), await world.process(), await world.process()
    await history(world, repository, "one", "two")

    async def overtake() -> None:
        await history(world, writer, "three")
        await other.collect(LAST, delete_share_max=1)

    world.store.before("get", "indexes/", overtake)
    world.store.requests.clear()
    report = await repository.collect(LAST, dry_run=dry_run, delete_share_max=1)
    assert [kept.number for kept in report.kept] == [3]
    await check_exact(world)
    await check_kept(repository)


async def test_a_collector_that_is_overtaken_while_settling_plans_again(world: World) -> None:
    repository, writer, other = await world.process(), await world.process(), await world.process()
    await history(world, repository, "one")
    result = await world.backup(repository, "two")
    world.store.fail("remove_ttl", result.new_keys[0])
    await repository.commit(JOB, [result])

    async def overtake() -> None:
        await history(world, writer, "three")
        await other.collect(LAST, delete_share_max=1)

    world.store.before("remove_ttl", "", overtake)
    report = await (await world.process()).collect(LAST, delete_share_max=1)
    assert [kept.number for kept in report.kept] == [3]
    await check_kept(repository)


async def test_a_collector_that_is_overtaken_again_and_again_gives_up(world: World) -> None:
    repository, writer, other = await world.process(), await world.process(), await world.process()
    await history(world, repository, "one", "two")
    overtaken = 0

    async def overtake() -> None:
        nonlocal overtaken
        overtaken += 1
        await history(world, writer, f"more {overtaken}")
        await other.collect(LAST, delete_share_max=1)
        world.store.before("get", "indexes/", overtake)

    world.store.before("get", "indexes/", overtake)
    with pytest.raises(DamagedError):
        await asyncio.wait_for(repository.collect(LAST, delete_share_max=1), 30)
