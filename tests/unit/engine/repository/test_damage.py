"""One object that cannot be read stops nothing but what it concerns (design 0002, D9)."""

from pathlib import Path

import msgspec
import pytest

from blobstore.base import BytesBody
from blobstore.errors import StoreError
from blobstore.memory import MemoryStore
from engine.errors import (
    ConflictError,
    DamagedError,
    FencedError,
    LeaseExpiredError,
    NotFoundError,
    UnsafeStoreError,
    UsageError,
)
from engine.inspect.verify import ProblemKind
from engine.repository.repository import Repository
from index.errors import CorruptIndexError, UnknownFormatError
from index.plan.commits import Retention
from index.snapshot.keys import BLOBS, INDEXES, NAMES, PINS, boundary_key, commit_key
from index.snapshot.model import PIN_DURATION_MS, Scope
from tests.opaque_store import set_created
from tests.unit.engine.conftest import JOB, MARGIN_MS, TTL_MS, World

LAST = Retention(keep_last=1)
OTHER = Scope("other")
FORK = Scope("fork")


def flip(world: World, key: str) -> None:
    """Alter the last byte of an object at rest."""
    inner = world.store.inner
    assert isinstance(inner, MemoryStore)
    blob = inner._blobs[key]
    inner._blobs[key] = msgspec.structs.replace(blob, data=blob.data[:-1] + bytes([blob.data[-1] ^ 1]))


async def two_jobs(world: World) -> Repository:
    """Each of two jobs has two commits; garbage is old enough to go."""
    repository = await world.process()
    await world.history(repository, "one", "two")
    await world.history(repository, "other one", "other two", scope=OTHER)
    world.clock.advance(2 * TTL_MS)
    return repository


async def uploads(world: World, job: str) -> set[str]:
    return {key for prefix in (BLOBS, INDEXES) for key in await world.keys(prefix) if f"/{job}/" in key}


async def collects_all_but(world: World, key: str) -> None:
    """A collection says what it cannot read, leaves what that concerns, and does its work elsewhere."""
    mine, others = await uploads(world, "job"), await uploads(world, "other")
    repository = await world.process()
    with pytest.raises(DamagedError) as caught:
        await repository.collect(LAST, delete_share_max=1)
    assert key in str(caught.value) + str(caught.value.__notes__)
    assert await uploads(world, "job") == mine
    assert await uploads(world, "other") < others
    newest = await repository.latest(OTHER)
    assert newest is not None
    await repository.restore(newest, world.target())
    await world.history(await world.process(), "other three", scope=OTHER)


async def test_a_record_that_cannot_be_read_protects_its_own_job_alone(world: World) -> None:
    await two_jobs(world)
    key = commit_key(JOB, 2)
    flip(world, key)
    await collects_all_but(world, key)
    report = await (await world.process()).verify()
    assert [(p.kind, p.key) for p in report.problems] == [(ProblemKind.UNREADABLE, key)]
    planned = await (await world.process()).collect(LAST, dry_run=True)
    assert [k for k, _ in planned.unreadable] == [key]
    assert planned.protected == ("job",)


async def test_a_record_that_may_be_the_first_of_a_fork_protects_everything(world: World) -> None:
    repository = await two_jobs(world)
    latest = await repository.latest(OTHER)
    assert latest is not None
    await repository.fork(latest, FORK)
    flip(world, commit_key(FORK, 1))
    before = await uploads(world, "job") | await uploads(world, "other")
    with pytest.raises(DamagedError, match="all jobs"):
        await repository.collect(LAST, delete_share_max=1)
    assert await uploads(world, "job") | await uploads(world, "other") == before


async def test_a_void_record_before_a_fork_says_nothing_of_it(world: World) -> None:
    repository = await two_jobs(world)
    source = (await repository.commits(JOB))[1]
    result = await world.backup(repository, "void", scope=FORK)

    async def stand_still() -> None:
        world.clock.advance(TTL_MS)

    world.store.before("put_if_absent", ".commit", stand_still)
    with pytest.raises(LeaseExpiredError):
        await repository.commit(FORK, [result])
    await repository.fork(source, FORK)
    world.clock.advance(TTL_MS)
    flip(world, commit_key(FORK, 2))
    before = await uploads(world, "job")
    with pytest.raises(DamagedError, match="all jobs"):
        await (await world.process()).collect(LAST, delete_share_max=1)
    assert await uploads(world, "job") == before


async def test_a_log_with_a_hole_stops_no_other_job_from_being_settled(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    result = await world.backup(repository, "other", scope=OTHER)
    world.store.fail("remove_ttl", result.new_keys[0])
    assert not (await repository.commit(OTHER, [result])).settled
    await world.store.inner.delete([commit_key(JOB, 2)])
    before = await world.keys(BLOBS)
    with pytest.raises(UnsafeStoreError, match="had holes"):
        await repository.collect(LAST, delete_share_max=1)
    assert await world.keys(BLOBS) == before
    found = [await world.store.inner.stat(key) for key in result.new_keys]
    assert [info.expires_at_ms for info in found if info is not None] == [None] * len(found)


async def test_a_job_with_a_hole_in_its_log_can_be_forgotten_and_begun_again(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await world.store.inner.delete([commit_key(JOB, 2)])
    report = await (await world.process()).forget(JOB)
    assert report.newest is not None
    assert report.newest.pointer.number == 3
    world.clock.advance(2 * TTL_MS)
    await repository.collect(LAST, delete_share_max=1)
    assert await uploads(world, "job") == set()
    repository = await world.process()
    await world.history(repository, "four")
    assert await world.restored_text(repository) == "four"


async def test_a_job_that_goes_on_from_a_fork_protects_what_it_was_forked_from(world: World) -> None:
    repository = await two_jobs(world)
    source = (await repository.commits(JOB))[1]
    await repository.fork(source, FORK)
    await repository.commit(FORK, [], offsets="next")
    world.clock.advance(2 * TTL_MS)
    flip(world, commit_key(FORK, 2))
    await collects_all_but(world, commit_key(FORK, 2))


async def test_an_index_that_cannot_be_read_protects_its_job_alone(world: World) -> None:
    repository = await two_jobs(world)
    index = (await repository.commits(JOB))[0].record.stores[0].index.key
    flip(world, index)
    await collects_all_but(world, index)


async def test_an_index_that_is_kept_only_for_another_broken_one_may_be_broken_too(world: World) -> None:
    await world.history(await world.process(), "zero")
    repository = await two_jobs(world)
    newest, closing, _ = [c.record.stores[0].index.key for c in await repository.commits(JOB)]
    flip(world, newest)
    flip(world, closing)
    await collects_all_but(world, newest)


async def test_an_index_of_which_no_neighbour_can_be_read_protects_everything(world: World) -> None:
    """Another store of a fork has nothing of its source any more, and does not show what this one has."""
    repository = await two_jobs(world)
    left, right = world.tree({"a": b"a" * 200_000}), world.tree({"b": b"b" * 200_000})
    trees = {"left": left, "right": right}
    source = await repository.commit(JOB, [await repository.backup(JOB, t, store=s) for s, t in trees.items()])
    await repository.fork(source, FORK)
    (left / "more").write_bytes(b"m" * 200_000)
    (right / "b").write_bytes(b"c" * 200_000)
    commit = await repository.commit(FORK, [await repository.backup(FORK, t, store=s) for s, t in trees.items()])
    await repository.forget(JOB)
    await repository.collect(LAST, delete_share_max=1)
    world.clock.advance(2 * TTL_MS)
    reference = commit.store("0", "left")
    assert reference is not None
    flip(world, reference.index.key)
    before = await uploads(world, "job")
    with pytest.raises(DamagedError, match="all jobs"):
        await (await world.process()).collect(LAST, delete_share_max=1)
    assert await uploads(world, "job") == before


async def test_a_name_that_cannot_be_read_protects_its_job_alone(world: World) -> None:
    repository = await two_jobs(world)
    await repository.name((await repository.commits(JOB))[1], "kept")
    (key,) = await world.keys(NAMES)
    flip(world, key)
    await collects_all_but(world, key)
    assert [n.name for n in await repository.names(JOB)] == []
    report = await (await world.process()).verify()
    assert [(p.kind, p.key) for p in report.problems] == [(ProblemKind.UNREADABLE, key)]


async def test_a_closed_record_and_a_forgotten_job_decide_nothing(world: World) -> None:
    repository = await two_jobs(world)
    flip(world, commit_key(JOB, 1))
    flip(world, commit_key(JOB, 2))
    await repository.forget(JOB)
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.unreadable == ()
    assert await uploads(world, "job") == set()
    assert await world.keys("log/job/") == {boundary_key(JOB, 1_000_000_002)}


async def test_a_boundary_that_cannot_be_read_protects_its_job_until_it_is_forgotten(world: World) -> None:
    repository = await two_jobs(world)
    await repository.collect(LAST, delete_share_max=1)
    await world.history(repository, "three")
    await world.history(repository, "other three", scope=OTHER)
    world.clock.advance(2 * TTL_MS)
    key = boundary_key(JOB, 1)
    flip(world, key)
    await collects_all_but(world, key)
    with pytest.raises(CorruptIndexError):
        await (await world.process()).latest(JOB)
    repository = await world.process()
    await repository.forget(JOB)
    await repository.collect(LAST, delete_share_max=1)
    assert await uploads(world, "job") == set()
    assert key not in await world.keys("log/")


@pytest.mark.parametrize("age_ms", [0, PIN_DURATION_MS + MARGIN_MS, PIN_DURATION_MS + 2 * MARGIN_MS])
async def test_a_pin_that_cannot_be_read_keeps_everything_until_it_is_older_than_any_pin_lasts(
    world: World, age_ms: int
) -> None:
    repository = await two_jobs(world)
    async with repository.pinned((await repository.commits(JOB))[0]):
        (key,) = await world.keys(PINS)
    flip(world, key)
    world.clock.advance(age_ms)
    before = await uploads(world, "job")
    if age_ms < PIN_DURATION_MS + 2 * MARGIN_MS:
        with pytest.raises(DamagedError, match="all jobs"):
            await repository.collect(LAST, delete_share_max=1)
        assert await uploads(world, "job") == before
        return
    await repository.collect(LAST, delete_share_max=1)
    assert await world.keys(PINS) == set()
    assert await uploads(world, "job") < before


@pytest.mark.parametrize("key", ["log/", "log/job/", "log/job/notes.txt", "names/", "names/job/", "pins/x", "pins/"])
async def test_foreign_keys_are_passed_over_and_shown(world: World, key: str) -> None:
    repository = await two_jobs(world)
    inner = world.store.inner
    assert isinstance(inner, MemoryStore)
    inner._publish(key, b"", None)
    plan = MemoryStore(clock=world.clock)
    await repository.collect(LAST, dry_run=True, plan_to=plan)
    assert (await repository.verify_plan(plan)).is_right
    report = await repository.collect(LAST, delete_share_max=1)
    assert key in report.foreign
    assert key in await world.keys()
    assert not (await repository.verify()).damaged
    await world.history(await world.process(), "three")


async def test_a_copy_without_witnesses_keeps_its_uploads(world: World) -> None:
    """A fork that was put back: nothing vouches for it, and nothing of it goes."""
    repository = await two_jobs(world)
    await repository.fork((await repository.commits(JOB))[0], FORK)
    await repository.forget(JOB)
    world.clock.advance(10 * TTL_MS)
    inner = world.store.inner
    assert isinstance(inner, MemoryStore)
    key = commit_key(FORK, 1)
    set_created(inner, key, world.clock())
    others = await uploads(world, "other")
    mine = await uploads(world, "job")
    report = await (await world.process()).collect(LAST, delete_share_max=1)
    assert report.unreadable == ((key, "late: nothing vouches for it"),)
    assert report.protected == ("fork", "job")
    assert await uploads(world, "job") == mine
    assert await uploads(world, "other") < others


async def test_a_record_of_a_newer_format_is_no_damage(world: World) -> None:
    await two_jobs(world)
    await world.store.inner.put(commit_key(JOB, 1), BytesBody(newer_format(world)))
    with pytest.raises(UnknownFormatError, match="nothing was deleted of all jobs"):
        await (await world.process()).collect(LAST, delete_share_max=1)


async def discarded(world: World, key: str) -> Repository:
    """The repository after an object was discarded, which the dry run did not touch."""
    repository = await world.process()
    before = await world.keys()
    planned = await repository.discard(key, dry_run=True)
    assert await world.keys() == before
    done = await repository.discard(key)
    assert (done.meaning, done.boundary) == (planned.meaning, planned.boundary)
    assert key not in await world.keys()
    repository = await world.process()
    assert not (await repository.verify()).damaged
    await repository.collect(Retention(keep_last=10), delete_share_max=1)
    return repository


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_damaged_record_is_discarded_and_its_job_goes_on(world: World, number: int) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    flip(world, commit_key(JOB, number))
    repository = await discarded(world, commit_key(JOB, number))
    left = [n for n in (3, 2, 1) if n != number]
    assert [c.record.number for c in await repository.commits(JOB)] == left
    (four,) = await world.history(repository, "four")
    assert four.record.number == (4 if number < 3 else 1_000_000_004)
    world.clock.advance(2 * TTL_MS)
    await repository.collect(LAST, delete_share_max=1)
    assert await world.restored_text(await world.process()) == "four"


async def test_of_two_damaged_records_the_older_one_goes_first(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    flip(world, commit_key(JOB, 1))
    flip(world, commit_key(JOB, 2))
    with pytest.raises(UsageError, match=commit_key(JOB, 1)):
        await repository.discard(commit_key(JOB, 2))
    await repository.discard(commit_key(JOB, 1))
    repository = await discarded(world, commit_key(JOB, 2))
    assert [c.record.number for c in await repository.commits(JOB)] == [3]


async def test_who_remembers_a_discarded_commit_does_not_build_on_it(world: World) -> None:
    """It was the newest, and a collection has taken what only it needed."""
    writer = await world.process()
    tree = world.tree({"base": b"b" * 200_000})
    await writer.commit(JOB, [await writer.backup(JOB, tree)])
    (tree / "brought").write_bytes(b"n" * 200_000)
    await writer.commit(JOB, [await writer.backup(JOB, tree)])
    (tree / "next").write_bytes(b"t" * 200_000)
    result = await writer.backup(JOB, tree)
    world.clock.advance(TTL_MS - 2 * MARGIN_MS)
    flip(world, commit_key(JOB, 2))
    repository = await discarded(world, commit_key(JOB, 2))
    with pytest.raises(FencedError):
        await writer.commit(JOB, [result])
    await writer.commit(JOB, [await writer.backup(JOB, tree)])
    latest = await repository.latest(JOB)
    assert latest is not None
    await repository.restore(latest, world.target())


async def test_a_commit_made_while_its_parent_is_discarded_is_reported_as_lost(world: World) -> None:
    """Design 0002, D12: its writer remembers the parent, and had its acknowledgement before the boundary came."""
    writer, repository = await world.process(), await world.process()
    await world.history(writer, "one", "two")
    flip(world, commit_key(JOB, 2))

    async def commit_meanwhile() -> None:
        await world.history(writer, "three")

    world.store.before("put_if_absent", ".boundary", commit_meanwhile)
    with pytest.raises(ConflictError, match="was removed; what came to job meanwhile is closed with it: 3"):
        await repository.discard(commit_key(JOB, 2))
    assert commit_key(JOB, 2) not in await world.keys()
    (again,) = await world.history(await world.process(), "three")
    assert again.record.predecessor is not None
    assert again.record.predecessor.number == 1


async def test_a_commit_that_is_lost_with_its_parent_is_reported_where_that_cannot_be_deleted(world: World) -> None:
    writer, repository = await world.process(), await world.process()
    await world.history(writer, "one", "two")
    flip(world, commit_key(JOB, 2))

    async def commit_meanwhile() -> None:
        await world.history(writer, "three", "four")

    world.store.before("put_if_absent", ".boundary", commit_meanwhile)
    world.store.fail("delete", "log/")
    with pytest.raises(StoreError) as failed:
        await repository.discard(commit_key(JOB, 2))
    assert failed.value.__notes__[0] == "what came to job meanwhile is closed with it: 3, 4"


@pytest.mark.parametrize("weakness", ["consistent_lists", "atomic_create"])
async def test_a_record_is_not_discarded_where_a_newer_one_may_not_be_listed(
    world: World, monkeypatch: pytest.MonkeyPatch, weakness: str
) -> None:
    """The boundary would close the newer one. A pin closes nothing."""
    writer, repository = await world.process(), await world.process()
    await world.history(writer, "one", "two")
    await world.store.put(f"{PINS}{'0' * 20}", BytesBody(b"damaged"))
    flip(world, commit_key(JOB, 2))
    await world.history(writer, "three")
    weak = msgspec.structs.replace(world.store.inner.capabilities, **{weakness: False})
    monkeypatch.setattr(type(world.store), "capabilities", property(lambda _: weak))
    for dry_run in (True, False):
        with pytest.raises(UnsafeStoreError, match=r"stale|both win"):
            await repository.discard(commit_key(JOB, 2), dry_run=dry_run)
    await repository.discard(f"{PINS}{'0' * 20}")


async def test_who_remembers_the_only_commit_is_fenced_where_it_was_discarded_and_forgotten(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one")
    flip(world, commit_key(JOB, 1))
    repository = await discarded(world, commit_key(JOB, 1))
    await repository.forget(JOB)
    with pytest.raises(FencedError):
        await writer.commit(JOB, [], offsets="2")


async def test_a_boundary_that_moves_up_for_its_number_closes_no_commit_between(world: World) -> None:
    """The boundary that took a damaged one's place has the number of the newest record, and lists it."""
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await repository.collect(LAST, delete_share_max=1)
    flip(world, boundary_key(JOB, 2))
    repository = await discarded(world, boundary_key(JOB, 2))
    await world.history(repository, "four")
    flip(world, commit_key(JOB, 3))
    repository = await discarded(world, commit_key(JOB, 3))
    assert [c.record.number for c in await repository.commits(JOB)] == [4]


async def test_a_damaged_boundary_is_discarded_and_what_is_whole_counts(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    world.clock.advance(2 * TTL_MS)
    await repository.collect(LAST, delete_share_max=1)
    flip(world, boundary_key(JOB, 2))
    repository = await discarded(world, boundary_key(JOB, 2))
    assert [c.record.number for c in await repository.commits(JOB)] == [3]
    await world.history(await world.process(), "four")


async def test_damaged_names_and_pins_are_discarded(world: World) -> None:
    repository = await world.process()
    (one,) = await world.history(repository, "one")
    await repository.name(one, "kept")
    for prefix in (PINS, NAMES):
        (key,) = await world.keys(prefix)
        flip(world, key)
        await discarded(world, key)


async def test_what_can_be_read_or_is_needed_is_not_discarded(world: World) -> None:
    repository = await world.process()
    (one,) = await world.history(repository, "one")
    index = one.record.stores[0].index.key
    flip(world, index)
    for key in (commit_key(JOB, 1), index, "repository", "log/job/notes.txt"):
        with pytest.raises((UsageError, NotFoundError)):
            await repository.discard(key)
    await world.store.inner.put(commit_key(JOB, 1), BytesBody(newer_format(world)))
    with pytest.raises(UsageError, match="newer"):
        await repository.discard(commit_key(JOB, 1))


def newer_format(world: World) -> bytes:
    inner = world.store.inner
    assert isinstance(inner, MemoryStore)
    data = bytearray(inner._blobs[commit_key(JOB, 1)].data)
    data[9] = 99
    return bytes(data)


@pytest.mark.parametrize("prefix", ["log/job", "pins", "names/job"])
async def test_no_repository_begins_within_another_one(tmp_path: Path, prefix: str) -> None:
    async with await Repository.init(f"file://{tmp_path}/outer"):
        with pytest.raises(UnsafeStoreError, match="lies within"):
            await Repository.init(f"file://{tmp_path}/outer/{prefix}")
        async with await Repository.init(f"file://{tmp_path}/beside"):
            pass


async def test_no_repository_begins_where_one_has_lost_its_record(world: World) -> None:
    await two_jobs(world)
    inner = world.store.inner
    await inner.delete(["repository"])
    with pytest.raises(UsageError, match="is missing"):
        await Repository.init(inner)


async def test_an_empty_key_that_a_console_made_is_in_nobodys_way() -> None:
    store = MemoryStore()
    store._publish("log/", b"", None)
    await Repository.init(store)
