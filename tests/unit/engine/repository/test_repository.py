"""What `Repository` adds to the parts: a base that goes meanwhile, contradictory choices, stores that are refused."""

from pathlib import Path

import pytest
from typing_extensions import override

from blobstore.base import Body, BytesBody, Created, CreateOutcome, list_blobs, read_blob
from blobstore.errors import StoreUnavailableError
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from engine.backup.backup import BackupOptions
from engine.errors import DamagedError, NotFoundError, StaleResultError, UnsafeStoreError, UsageError
from engine.records.repository import REFUSED_STORE
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.keys import PREFIXES, REPOSITORY
from index.snapshot.model import Scope
from tests.doubles import InterposedStore
from tests.opaque_store import OpaqueStore
from tests.unit.engine.conftest import JOB, TTL_MS, World


async def overtake(world: World) -> None:
    """Another process commits, and collects what is older."""
    world.clock.advance(TTL_MS)
    other = await world.process()
    await other.commit(JOB, [await world.backup(other, "theirs")])
    await other.collect(Retention(keep_last=1), delete_share_max=1)


async def test_a_backup_whose_base_is_collected_meanwhile_builds_on_the_next_one(world: World) -> None:
    await (await world.process()).commit(JOB, [await world.backup(await world.process(), "one")])
    repository = await world.process()
    world.store.before("get", "indexes/", lambda: overtake(world))
    result = await world.backup(repository, "mine")
    newest = await repository.latest(JOB)
    assert newest is not None
    assert result.base == newest.record.stores[0].index
    assert result.reference.version == newest.record.stores[0].version + 1
    assert (await repository.commit(JOB, [result])).record.number == 3


async def test_a_given_base_that_was_collected_is_stale(world: World) -> None:
    first = await (await world.process()).commit(JOB, [await world.backup(await world.process(), "one")])
    await overtake(world)
    repository, tree = await world.process(), world.tree({"CURRENT": b"mine"})
    with pytest.raises(StaleResultError) as refused:
        await repository.backup(JOB, tree, options=BackupOptions(base=first.record.stores[0]))
    assert isinstance(refused.value.__cause__, DamagedError)


async def test_a_name_and_another_choice_do_not_go_together(world: World) -> None:
    repository = await world.process()
    await repository.name(await repository.commit(JOB, [await world.backup(repository, "one")]), "golden")
    with pytest.raises(UsageError):
        await repository.find(JOB, name="golden", version=99)


async def test_a_misspelt_choice_is_not_the_newest_commit(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one")])
    with pytest.raises(TypeError, match="verson"):
        await repository.find(JOB, verson=7)  # type: ignore[call-arg]


async def test_hashes_are_remembered_of_the_directories_used_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.local.digests.DIRECTORIES_REMEMBERED_MAX", 2)
    repository = await world.process()
    trees = [world.tree({"f": b"x"}) for _ in range(4)]
    for tree in (*trees, trees[2]):
        await repository.backup(JOB, tree)
    assert list(repository.opened.digests._caches) == [trees[3], trees[2]]


# ---------------------------------------------------------------------- stores on which nothing is built


class ReplacingStore(MemoryStore):
    """Ignores `If-None-Match`, as some servers do: every create replaces what is there."""

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        created: Created = await self.put(key, body, ttl_ms=ttl_ms)
        return created


async def test_init_refuses_a_store_that_creates_twice_and_leaves_nothing_to_open() -> None:
    store = ReplacingStore()
    with pytest.raises(UnsafeStoreError, match="Created to a second create") as refused:
        await Repository.init(store)
    assert "tidemark doctor" in refused.value.hint
    assert [blob.key async for blob in list_blobs(store, "")] == [REPOSITORY]
    assert await read_blob(store, REPOSITORY, size_bytes_max=1000) == REFUSED_STORE
    for again in (Repository.open, Repository.init):
        with pytest.raises(UnsafeStoreError, match="has refused this blob store"):
            await again(store)
    await store.delete([REPOSITORY])
    with pytest.raises(NotFoundError):
        await Repository.open(store)


async def test_init_does_not_replace_a_repository_on_a_store_that_would_let_it(world: World) -> None:
    record = await read_blob(world.store.inner, REPOSITORY, size_bytes_max=1000)
    store = ReplacingStore()
    await store.put(REPOSITORY, BytesBody(record))
    with pytest.raises(UsageError, match="already"):
        await Repository.init(store)
    assert await read_blob(store, REPOSITORY, size_bytes_max=1000) == record


async def test_init_looks_at_the_place_once_and_writes_the_record_twice() -> None:
    store = InterposedStore(MemoryStore())
    repository = await Repository.init(store)
    looks = ["get", "check_unused", *["list_page"] * len(PREFIXES)]
    assert [operation for operation, _ in store.requests] == [*looks, "put_if_absent", "put_if_absent"]
    assert (await Repository.open(store)).record == repository.record


@pytest.mark.parametrize("lost", [1, 2])
async def test_init_without_an_answer_says_so(lost: int) -> None:
    store = InterposedStore(MemoryStore())

    async def lose_the_next_but(count: int) -> None:
        if count == 0:
            store.lose_answer("put_if_absent", REPOSITORY)
        else:
            store.before("put_if_absent", REPOSITORY, lambda: lose_the_next_but(count - 1))

    store.before("put_if_absent", REPOSITORY, lambda: lose_the_next_but(lost - 1))
    with pytest.raises(StoreUnavailableError):
        await Repository.init(store)


async def test_of_two_that_init_at_once_one_makes_the_repository() -> None:
    store = InterposedStore(MemoryStore())

    async def other() -> None:
        await Repository.init(store)

    store.before("put_if_absent", REPOSITORY, other)
    with pytest.raises(UsageError, match="already"):
        await Repository.init(store)
    await Repository.open(store)


async def test_init_refuses_a_store_that_says_what_it_lacks_and_writes_nothing() -> None:
    store = OpaqueStore()
    store.weaknesses["atomic_create"] = False
    with pytest.raises(UnsafeStoreError):
        await Repository.init(store, ttl_ms=30 * 86_400_000)
    assert not [blob async for blob in list_blobs(store, "")]


async def test_nothing_new_is_built_on_an_unsafe_store_and_what_is_there_can_be_restored(opaque_world: World) -> None:
    world = opaque_world
    repository = await world.process()
    commit = await repository.commit(JOB, [await world.backup(repository, "one")])
    assert isinstance(world.store.inner, OpaqueStore)
    world.store.inner.weaknesses["atomic_create"] = False
    result = await world.backup(repository, "two")
    before = [blob.key async for blob in list_blobs(world.store.inner, "")]
    for attempt in (
        repository.commit(JOB, [result]),
        repository.rewind(commit),
        repository.fork(commit, Scope("fork")),
        repository.name(commit, "golden"),
    ):
        with pytest.raises(UnsafeStoreError):
            await attempt
    assert [blob.key async for blob in list_blobs(world.store.inner, "")] == before
    assert await world.restored_text(await world.process()) == "one"


async def test_a_store_that_was_opened_for_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def close(self: LocalStore) -> None:
        closed.append("closed")

    monkeypatch.setattr(LocalStore, "close", close)
    with pytest.raises(NotFoundError):
        await Repository.open(f"file://{tmp_path}")
    with pytest.raises(UsageError):
        await Repository.init(f"file://{tmp_path}", ttl_ms=1)
    await Repository.init(f"file://{tmp_path}")
    with pytest.raises(UsageError):
        await Repository.init(f"file://{tmp_path}")
    # Settings that do not fit are found before anything is opened.
    assert closed == ["closed"] * 2
