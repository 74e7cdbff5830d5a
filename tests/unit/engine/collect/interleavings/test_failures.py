"""What goes wrong during a collection, or before it: nothing is deleted that should not be."""

import contextlib
from collections.abc import Iterable

import msgspec
import pytest

from blobstore.base import BytesBody, read_blob
from blobstore.errors import AccessDeniedError, StoreUnavailableError
from engine.backup.backup import BackupResult
from engine.errors import DamagedError, UnsafeStoreError
from index.errors import UnknownFormatError
from index.plan.plan_format import decode_audit
from index.snapshot.codec import encode_record
from index.snapshot.keys import AUDIT, commit_key
from index.snapshot.model import CommitRecord, Scope
from tests.unit.engine.collect.interleavings.judging import LAST, check_exact, keys
from tests.unit.engine.conftest import JOB, TTL_MS, World


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
    await world.history(repository, "one", "two")
    before = await keys(world)
    world.store.fail(operation, key)
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_an_error_in_the_second_reading_means_that_nothing_is_deleted(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")

    async def break_the_rest() -> None:
        world.store.fail("list_page", "log/")

    world.store.after("put_if_absent", ".boundary", break_the_rest)
    before = await keys(world)
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1)
    assert before < await keys(world)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_a_job_that_is_adrift_in_the_second_reading_is_named(world: World) -> None:
    """A record of it came late, and nothing vouches for it (design 0002, C5): nobody can read more than that."""
    repository = await world.process()
    _, two = await world.old_history(repository, "one", "two")
    adrift = Scope("adrift")
    valid_until_ms = await world.store.now_ms()
    world.clock.advance(1)
    record = CommitRecord(
        scope=adrift,
        number=1,
        write_id=two.record.write_id,
        kind="fork",
        version=two.record.version,
        stores=tuple(msgspec.structs.replace(s, number=1) for s in two.record.stores),
        source=two.pointer,
        source_scope=JOB,
        valid_until_ms=valid_until_ms,
    )

    async def come_late() -> None:
        await world.store.inner.put_if_absent(commit_key(adrift, 1), BytesBody(encode_record(record)))

    world.store.after("put_if_absent", ".boundary", come_late)
    blobs = await keys(world, "blobs/")
    with pytest.raises(DamagedError, match="1 object cannot be read, and something more") as failure:
        await repository.collect(LAST, delete_share_max=1)
    assert failure.value.subject == commit_key(adrift, 1)
    assert await keys(world, "blobs/") == blobs


async def test_a_missing_index_means_that_nothing_is_deleted(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    commit = await repository.find(JOB)
    await world.store.inner.delete([commit.record.stores[0].index.key])
    before = await keys(world)
    with pytest.raises(DamagedError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before


async def test_a_record_of_a_newer_format_means_that_no_upload_is_deleted(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    stored = bytearray(encode_record((await repository.find(JOB)).record))
    stored[9] = 99
    await world.store.inner.put(commit_key(Scope("newer"), 1), BytesBody(bytes(stored)))
    before = await world.keys("blobs/") | await world.keys("indexes/")
    world.clock.advance(2 * TTL_MS)
    with pytest.raises(UnknownFormatError, match="all jobs"):
        await repository.collect(LAST, delete_share_max=1)
    assert await world.keys("blobs/") | await world.keys("indexes/") == before


async def test_a_short_listing_means_that_nothing_is_deleted(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
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
    await world.history(repository, "one", "two")
    weak = msgspec.structs.replace(world.store.inner.capabilities, **{weakness: False})
    monkeypatch.setattr(type(world.store), "capabilities", property(lambda _: weak))
    with pytest.raises(UnsafeStoreError):
        await repository.collect(LAST, delete_share_max=1)


async def test_what_the_store_will_not_delete_stops_what_comes_later(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")

    async def refuse() -> None:
        raise AccessDeniedError("no", operation="delete", key="indexes/")

    world.store.before("delete", "indexes/", refuse)
    blobs = await keys(world, "blobs/")
    with pytest.raises(AccessDeniedError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world, "blobs/") == blobs
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def commit_unsettled(world: World, scope: Scope) -> BackupResult:
    """Commit what keeps its TTLs: the writer dies before it removes them."""
    writer = await world.process()
    result = await world.backup(writer, "unsettled", scope=scope)
    world.store.fail("remove_ttl", result.new_keys[0])
    await writer.commit(scope, [result])
    return result


async def with_ttl(world: World, keys: Iterable[str]) -> list[str]:
    there = [await world.store.inner.stat(key) for key in keys]
    return [info.key for info in there if info is not None and info.expires_at_ms is not None]


async def test_a_damaged_index_of_one_job_does_not_keep_another_from_being_settled(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    index = (await repository.find(JOB)).record.stores[0].index
    unsettled = await commit_unsettled(world, Scope("another job"))
    await world.store.inner.put(index.key, BytesBody(b"altered"))
    with contextlib.suppress(DamagedError):
        await repository.collect(LAST)
    assert await with_ttl(world, unsettled.new_keys) == []


async def test_a_scope_that_cannot_be_settled_stops_no_other_one_and_is_reported_at_the_end(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    stuck = await commit_unsettled(world, Scope("a job"))
    settled = await commit_unsettled(world, Scope("b job"))
    world.store.fail("remove_ttl", stuck.new_keys[0])
    before = await keys(world)
    with pytest.raises(StoreUnavailableError, match="injected"):
        await repository.collect(LAST, delete_share_max=1)
    assert await with_ttl(world, settled.new_keys) == []
    assert any(key.startswith("blobs/") for key in before - await keys(world))
    (key,) = await world.keys(AUDIT)
    audit = decode_audit(await read_blob(world.store, key, size_bytes_max=10**6), subject=key)
    assert (audit.outcome, audit.failed_count) == ("failed", 0)
    assert "StoreUnavailableError" in audit.error
    assert audit.deleted
    await repository.collect(LAST, delete_share_max=1)
    assert await with_ttl(world, stuck.new_keys) == []
    await check_exact(world)
