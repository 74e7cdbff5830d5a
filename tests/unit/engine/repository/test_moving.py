"""Objects that are younger than they were: copied, re-encrypted in place, or put back (design 0002, C5)."""

import asyncio
import shutil
from pathlib import Path

import pytest

from blobstore.memory import MemoryStore
from engine.errors import LeaseExpiredError
from engine.inspect.verify import Level, ProblemKind
from engine.repository.repository import Repository
from index.plan.commits import Retention, as_policy
from index.snapshot.keys import REPOSITORY, commit_key
from index.snapshot.model import Scope
from tests.doubles import InterposedStore
from tests.opaque_store import OpaqueStore, set_created
from tests.unit.engine.conftest import JOB, TTL_MS, World

ALL = Retention(keep_last=100)
FORK = Scope("fork")


def copied(world: World, *, keeps_ttls: bool = True, inner: MemoryStore | None = None) -> World:
    """The repository copied key by key to another store, whose objects are as old as the copy."""
    source = world.store.inner
    assert isinstance(source, MemoryStore)
    inner = inner or MemoryStore(clock=world.clock)
    for key, blob in source._blobs.items():
        ttl_ms = TTL_MS if keeps_ttls and blob.info.expires_at_ms is not None else None
        inner._publish(key, blob.data, ttl_ms)
    directory = world.directory / "copy"
    directory.mkdir()
    return World(InterposedStore(inner), world.clock, directory)


def put_back(world: World, key: str) -> None:
    """Make one object as young as an older version that was copied on top of it."""
    inner = world.store.inner
    assert isinstance(inner, MemoryStore)
    set_created(inner, key, world.clock())


async def check_whole(world: World, numbers: list[int], scope: Scope = JOB) -> None:
    """The log has these commits, newest first, and a collection that keeps all of them deletes none."""
    repository = await world.process()
    latest = await repository.latest(scope)
    assert latest is not None
    assert latest.pointer.number == numbers[0]
    assert [c.pointer.number for c in await repository.commits(scope)] == numbers
    history = await repository.history(scope)
    assert [e.number for e in history.entries if e.restores] == numbers
    report = await repository.verify(level=Level.CONTENT)
    assert not report.damaged
    assert report.late == ()
    plan = MemoryStore(clock=world.clock)
    await repository.collect(ALL, dry_run=True, plan_to=plan)
    check = await repository.verify_plan(plan, meant=lambda _: as_policy(ALL))
    assert check.is_right, check.contradictions
    assert check.is_complete
    world.clock.advance(2 * TTL_MS)
    kept = {c.number for c in (await repository.collect(ALL, delete_share_max=1)).kept if c.scope == scope}
    assert kept == set(numbers)
    for number in numbers:
        commit = await repository.find(scope, number=number)
        await repository.restore(commit, world.target())


@pytest.mark.parametrize("keeps_ttls", [True, False])
async def test_a_copy_keeps_every_commit_of_which_the_newest_is_in_time(world: World, *, keeps_ttls: bool) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    world.clock.advance(2 * TTL_MS)
    await world.history(repository, "four")
    await check_whole(copied(world, keeps_ttls=keeps_ttls), [4, 3, 2, 1])


@pytest.mark.parametrize("keeps_ttls", [True, False])
@pytest.mark.parametrize("newest", ["commit", "rewind", "fork"])
async def test_a_copy_keeps_every_commit_where_all_are_late(world: World, newest: str, *, keeps_ttls: bool) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    numbers, scope = [2, 1], JOB
    if newest == "rewind":
        await repository.rewind(one)
        numbers = [3, 2, 1]
    if newest == "fork":
        await repository.fork(one, FORK)
        numbers, scope = [1], FORK
    world.clock.advance(10 * TTL_MS)
    copy = copied(world, keeps_ttls=keeps_ttls, inner=OpaqueStore(clock=world.clock, removes_ttl=False))
    await check_whole(copy, numbers, scope)


async def test_a_copy_goes_on_where_the_original_ended(world: World) -> None:
    await world.history(await world.process(), "one", "two")
    world.clock.advance(10 * TTL_MS)
    copy = copied(world)
    (three,) = await copy.history(await copy.process(), "three")
    assert three.pointer.number == 3
    assert three.record.predecessor is not None
    await check_whole(copy, [3, 2, 1])


async def test_a_copy_keeps_the_times_of_its_commits(world: World) -> None:
    repository = await world.process()
    originals = []
    for text in ("one", "two", "three", "four", "five"):
        originals += await world.history(repository, text)
        world.clock.advance(TTL_MS)
    one, _, three, four, _ = (commit.committed_at_ms for commit in originals)
    await repository.name(originals[0], "first")
    # The successor of the first is gone before the copy is made.
    await repository.collect(Retention(keep_last=3, keep_named=True), delete_share_max=1)
    world.clock.advance(10 * TTL_MS)
    copy = copied(world)
    copied_ms = world.clock()
    world.clock.advance(TTL_MS)
    moved = await copy.process()
    (six,) = await copy.history(moved, "six")
    found = {c.pointer.number: c.committed_at_ms for c in await moved.commits(JOB)}
    assert found == {6: six.committed_at_ms, 5: copied_ms, 4: four, 3: three, 1: found[1]}
    assert one <= found[1] <= three
    assert list(found.values()) == sorted(found.values(), reverse=True)
    history = {e.number: e.commit.committed_at_ms for e in (await moved.history(JOB)).entries if e.commit is not None}
    assert history == found
    for at_ms, number in ((three, 3), (four - 1, 3), (four, 4), (copied_ms - 1, 4), (copied_ms, 5)):
        assert (await moved.find(JOB, at_ms=at_ms)).pointer.number == number
    since = Retention(keep_since_ms=four, keep_named=False)
    plan = MemoryStore(clock=world.clock)
    await moved.collect(since, dry_run=True, plan_to=plan)
    check = await moved.verify_plan(plan, meant=lambda _: as_policy(since))
    assert check.is_right, check.contradictions
    assert check.is_complete
    report = await moved.collect(since, delete_share_max=1)
    assert [c.number for c in report.kept] == [3, 4, 5, 6]


async def test_a_copy_keeps_its_names(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    await repository.name(one, "kept")
    await repository.collect(Retention(keep_last=1), delete_share_max=1)
    world.clock.advance(10 * TTL_MS)
    copy = copied(world)
    moved = await copy.process()
    assert [n.name for n in await moved.names(JOB)] == ["kept"]
    await moved.collect(Retention(keep_last=1), delete_share_max=1)
    assert await copy.restored_text(moved, name="kept") == "one"
    await moved.release_name(JOB, "kept")
    assert await moved.names(JOB) == ()


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_record_that_was_put_back_counts(world: World, number: int) -> None:
    await world.history(await world.process(), "one", "two", "three")
    world.clock.advance(10 * TTL_MS)
    put_back(world, commit_key(JOB, number))
    await check_whole(world, [3, 2, 1])


async def test_a_record_above_a_boundary_that_was_put_back_counts_as_the_boundary_says(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await repository.collect(Retention(keep_last=2), delete_share_max=1)
    await repository.collect(Retention(keep_last=1), delete_share_max=1)
    world.clock.advance(10 * TTL_MS)
    put_back(world, commit_key(JOB, 3))
    await check_whole(world, [3])


async def late_record(world: World, text: str) -> None:
    """A record that was reported to the writer as void."""
    writer = await world.process()
    result = await world.backup(writer, text)

    async def stand_still() -> None:
        world.clock.advance(2 * TTL_MS)

    world.store.before("put_if_absent", ".commit", stand_still)
    with pytest.raises(LeaseExpiredError):
        await writer.commit(JOB, [result])


async def test_a_record_that_is_late_and_was_not_copied_is_void_and_reported(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    await late_record(world, "two")
    repository = await world.process()
    assert [c.pointer.number for c in await repository.commits(JOB)] == [1]
    entry = (await repository.history(JOB)).entries[0]
    assert (entry.state, entry.problem) == ("void", "late: nothing vouches for it")
    report = await repository.verify()
    assert not report.damaged
    assert report.late == (commit_key(JOB, 2),)


async def test_a_record_that_was_void_and_collected_at_the_old_place_is_void_in_the_copy(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    await late_record(world, "two")
    await repository.collect(ALL, delete_share_max=1)
    copy = copied(world)
    reader = await copy.process()
    await reader.collect(Retention(keep_last=1), delete_share_max=1)
    (commit,) = await reader.commits(JOB)
    assert commit.pointer.number == 1
    assert await copy.restored_text(reader) == "one"


async def test_a_record_that_a_later_one_passed_over_stays_void_in_a_copy(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    await late_record(world, "two")
    await world.history(await world.process(), "three")
    world.clock.advance(10 * TTL_MS)
    moved = await copied(world).process()
    assert [c.pointer.number for c in await moved.commits(JOB)] == [3, 1]


async def test_where_no_record_counts_verify_says_damage(world: World) -> None:
    """A fork brings nothing of its own that could vouch for it."""
    repository = await world.process()
    (one,) = await world.history(repository, "one")
    await repository.fork(one, FORK)
    world.clock.advance(10 * TTL_MS)
    put_back(world, commit_key(FORK, 1))
    repository = await world.process()
    assert await repository.latest(FORK) is None
    report = await repository.verify()
    assert report.damaged
    assert [(p.kind, p.key) for p in report.problems] == [(ProblemKind.ADRIFT, commit_key(FORK, 1))]
    # As the hint says: the next commit counts.
    await world.history(repository, "two", scope=FORK)
    assert not (await repository.verify()).damaged


async def test_a_directory_repository_that_was_copied_keeps_every_commit(tmp_path: Path) -> None:
    """As finding 3 was shown: `cp -r` of a repository whose leases are over."""
    state = tmp_path / "state"
    state.mkdir()
    original = f"file://{tmp_path}/repo"
    async with await Repository.init(original, ttl_ms=900, margin_ms=300, collection_period_ms=TTL_MS) as repository:
        for text in ("one", "two", "three"):
            (state / "x.sst").write_bytes(text.encode() * 50_000)
            await repository.commit(JOB, [await repository.backup(JOB, state)])
    await asyncio.sleep(1)
    shutil.copytree(tmp_path / "repo", tmp_path / "copy", copy_function=shutil.copyfile, symlinks=True)
    async with await Repository.open(f"file://{tmp_path}/copy") as copy:
        assert [c.pointer.number for c in await copy.commits(JOB)] == [3, 2, 1]
        report = await copy.verify(level=Level.CONTENT)
        assert (report.commits_count, report.damaged) == (3, False)
        await asyncio.sleep(1)
        kept = (await copy.collect(ALL, delete_share_max=1)).kept
        assert [c.number for c in kept] == [1, 2, 3]
    assert (tmp_path / "copy" / REPOSITORY).is_file()
