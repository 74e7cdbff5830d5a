"""Design 0002, D8, and design 0006, F1 and F2: each interleaving of who forgets with a writer that does not know."""

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from blobstore.base import BytesBody, Lost
from blobstore.errors import AccessDeniedError, StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.commit import forget as forgetting
from engine.errors import (
    CollectedError,
    CommitUnknownError,
    EngineError,
    FencedError,
    NotFoundError,
    StaleResultError,
    UnsafeStoreError,
)
from engine.repository.repository import Repository
from index.plan.commits import FORGOTTEN_AHEAD, LogListing, Retention, plan_forget
from index.snapshot.codec import encode_record
from index.snapshot.keys import boundary_key, commit_key
from index.snapshot.model import Boundary, CommitPointer, Scope, ScopeLayout, WriteId
from tests.doubles import AnswerLostError, SteppedClock
from tests.unit.engine.conftest import JOB, TTL_MS, World, make_world
from tests.walker import expected_keys

OTHER = Scope("other")
KEEP_ONE = Retention(keep_last=1)


async def collect(world: World) -> None:
    await (await world.process()).collect(KEEP_ONE, delete_share_max=1)
    assert await world.keys() == await expected_keys(world.store.inner, world.clock.now_ms)


async def forget(world: World) -> None:
    await (await world.process()).forget(JOB)


# ---------------------------------------------------------------------- one process


async def test_a_forgotten_job_has_no_commits_and_leaves_only_its_boundary(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three")
    report = await repository.forget(JOB)
    assert (report.records_count, report.newest.pointer.number if report.newest else None) == (3, 3)
    assert report.boundary == Boundary(scope=JOB, number=3 + FORGOTTEN_AHEAD)
    assert await repository.latest(JOB) is None
    assert await repository.commits(JOB) == ()
    await collect(world)
    assert await world.keys("log/") == {boundary_key(JOB, 3 + FORGOTTEN_AHEAD)}
    assert await world.keys("blobs/") | await world.keys("indexes/") == set()


async def test_forgetting_deletes_nothing_by_itself(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    before = await world.keys()
    world.store.requests.clear()
    await repository.forget(JOB)
    assert [o for o, _ in world.store.requests if o not in {"get", "list_page"}] == ["put_if_absent"]
    assert before < await world.keys()


async def test_it_costs_what_the_table_says_however_long_the_log_is(world: World) -> None:
    """Design 0002, cost: two LISTs, a GET of the newest and one for each boundary and name, and a PUT."""
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await repository.name(await repository.find(JOB), "kept")
    world.store.requests.clear()
    await forget(world)
    assert Counter(operation for operation, key in world.store.requests if key != "repository") == {
        "list_page": 2,
        "get": 2,
        "put_if_absent": 1,
    }
    # And a writer that comes later reads none of the closed records.
    world.store.requests.clear()
    assert await repository.latest(JOB) is None
    assert Counter(operation for operation, _ in world.store.requests) == {"list_page": 1, "get": 1}


async def test_a_dry_run_reports_and_writes_nothing(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    await repository.name(await repository.find(JOB), "kept")
    before = await world.keys()
    report = await repository.forget(JOB, with_names=True, dry_run=True)
    assert (report.records_count, report.released, report.dry_run) == (2, ("kept",), True)
    assert await world.keys() == before
    assert await world.restored_text(repository) == "two"


async def test_forgetting_again_changes_nothing(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    await repository.forget(JOB)
    before = await world.keys()
    report = await repository.forget(JOB)
    assert (report.boundary, report.newest) == (None, None)
    assert await world.keys() == before
    await collect(world)
    assert (await repository.forget(JOB)).boundary is None


async def test_a_scope_that_never_was_is_not_forgotten(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    with pytest.raises(NotFoundError):
        await repository.forget(OTHER)


async def test_other_jobs_stay(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    await repository.fork(await repository.find(JOB), OTHER)
    await repository.forget(JOB)
    await collect(world)
    target = world.target()
    await repository.find_and_restore(OTHER, target)
    assert (target / "CURRENT").read_text() == "one"


async def test_what_a_name_holds_stays_until_it_is_released(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    await repository.name(await repository.find(JOB, version=1), "kept")
    report = await repository.forget(JOB)
    assert (report.names, report.released) == (("kept",), ())
    await collect(world)
    assert await world.restored_text(repository, name="kept") == "one"
    again = await repository.forget(JOB, with_names=True)
    assert (again.boundary, again.names, again.released) == (None, (), ("kept",))
    world.clock.advance(2 * TTL_MS)
    await collect(world)
    assert await world.keys("blobs/") | await world.keys("names/") == set()


async def test_a_forgotten_job_goes_on_from_a_name(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    await repository.name(await repository.find(JOB, version=1), "kept")
    await repository.forget(JOB)
    await collect(world)
    commit = await repository.rewind(await repository.find(JOB, name="kept"))
    assert (commit.record.number, commit.record.predecessor) == (3 + FORGOTTEN_AHEAD, None)
    await repository.release_name(JOB, "kept")
    world.clock.advance(2 * TTL_MS)
    await collect(world)
    assert await world.restored_text(repository) == "one"


async def test_a_forgotten_job_begins_again_with_another_layout(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [], layout=ScopeLayout(tasks_count=2))
    await repository.forget(JOB)
    begun = await (await world.process()).commit(JOB, [], layout=ScopeLayout(tasks_count=3))
    assert (begun.record.layout.tasks_count, begun.record.version) == (3, 1)


async def test_a_task_that_is_forgotten_leaves_the_others(world: World) -> None:
    repository = await world.process()
    tasks = [Scope("job", "0"), Scope("job", "1")]
    for scope in tasks:
        result = await world.backup(repository, "state", task=scope.task or "", scope=scope)
        await repository.commit(scope, [result])
    await repository.forget(tasks[0])
    await collect(world)
    assert await repository.latest(tasks[0]) is None
    assert await repository.latest(tasks[1]) is not None


# ---------------------------------------------------------------------- a writer that does not know


async def test_names_that_may_not_be_released_are_left_and_reported(world: World) -> None:
    """Anyone who may write boundaries may not write names: the boundary is written by then."""
    repository = await world.process()
    await world.history(repository, "one", "two")
    for number, name in ((1, "first"), (2, "second")):
        await repository.name(await repository.find(JOB, number=number), name)
    world.store.fail("put", "/second/", AccessDeniedError("no", operation="put"))
    report = await repository.forget(JOB, with_names=True)
    assert (report.released, report.names) == (("first",), ("second",))
    assert "no" in report.denied
    assert await repository.latest(JOB) is None
    again = await repository.forget(JOB, with_names=True)
    assert (again.boundary, again.released, again.denied) == (None, ("second",), "")


async def test_a_forgetting_that_is_refused_leaves_the_writer_what_it_remembers(world: World) -> None:
    """C3: only the writer that got no answer can find its own record again."""
    repository = await world.process()
    await world.history(repository, "one")
    result = await world.backup(repository, "two")
    world.store.lose_answer("put_if_absent", commit_key(JOB, 2))
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    world.store.fail("put_if_absent", "boundary", AccessDeniedError("no", operation="put_if_absent"))
    with pytest.raises(AccessDeniedError):
        await repository.forget(JOB)
    commit = await repository.commit(JOB, [result])
    assert commit.pointer.number == 2


async def test_a_writer_that_remembers_the_newest_is_fenced_and_begins_again(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one", "two")
    stale = await world.backup(writer, "three")
    await forget(world)
    with pytest.raises(FencedError):
        await writer.commit(JOB, [stale])
    # The same result once more: what it was diffed against is nobody's any more.
    with pytest.raises(StaleResultError):
        await writer.commit(JOB, [stale])
    commit = await writer.commit(JOB, [await world.backup(writer, "three")])
    assert (commit.record.number, commit.record.predecessor) == (3 + FORGOTTEN_AHEAD, None)
    world.clock.advance(2 * TTL_MS)
    await collect(world)
    assert await world.restored_text(writer) == "three"


async def test_a_result_without_a_base_outlives_the_forgetting(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one")
    result = await world.backup(writer, "other", task="1")
    await forget(world)
    await collect(world)
    with pytest.raises(FencedError):
        await writer.commit(JOB, [result])
    commit = await writer.commit(JOB, [result])
    assert [s.task for s in commit.record.stores] == ["1"]
    await collect(world)
    target = world.target()
    await writer.find_and_restore(JOB, target, task="1")
    assert (target / "CURRENT").read_text() == "other"


@pytest.mark.parametrize("collected", [False, True])
async def test_a_commit_between_listing_and_boundary_is_forgotten_and_its_writer_fenced(
    world: World, collected: bool
) -> None:
    """One above everything would not do: the writer's next number would be above the boundary too."""
    writer = await world.process()
    await writer.commit(JOB, [await world.backup(writer, "a"), await world.backup(writer, "b", task="1")])

    async def writer_commits() -> None:
        await world.history(writer, "between")

    world.store.before("put_if_absent", ".boundary", writer_commits)
    await forget(world)
    assert await (await world.process()).latest(JOB) is None
    if collected:
        await collect(world)
    # Task 1 would be carried over, and task 0 retain blobs.
    next_ = await world.backup(writer, "next")
    with pytest.raises(FencedError):
        await writer.commit(JOB, [next_])
    assert await (await world.process()).latest(JOB) is None
    again = await writer.commit(JOB, [await world.backup(writer, "anew")])
    assert [s.task for s in again.record.stores] == ["0"]
    await collect(world)
    assert await world.restored_text(writer) == "anew"


async def test_a_boundary_between_record_and_acknowledgement_fences(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one")
    result = await world.backup(writer, "two")

    async def somebody_forgets() -> None:
        await forget(world)

    world.store.after("put_if_absent", commit_key(JOB, 2), somebody_forgets)
    with pytest.raises(FencedError):
        await writer.commit(JOB, [result])
    world.clock.advance(2 * TTL_MS)
    await collect(world)
    assert await world.keys("blobs/") == set()


async def test_a_zombie_that_wakes_after_the_collection_is_fenced(world: World) -> None:
    zombie = await world.process()
    await world.history(zombie, "one")
    result = await world.backup(zombie, "two")

    async def forgotten_and_collected() -> None:
        await forget(world)
        await collect(world)
        assert await world.store.inner.stat(commit_key(JOB, 1)) is None

    world.store.before("put_if_absent", commit_key(JOB, 2), forgotten_and_collected)
    with pytest.raises(FencedError):
        await zombie.commit(JOB, [result])
    assert await (await world.process()).latest(JOB) is None
    world.clock.advance(2 * TTL_MS)
    await collect(world)
    assert await world.keys("log/") == {boundary_key(JOB, 1 + FORGOTTEN_AHEAD)}


async def test_a_zombie_stays_fenced_when_the_job_has_begun_again_and_the_boundary_was_superseded(world: World) -> None:
    zombie, writer = await world.process(), await world.process()
    await world.history(zombie, "one")
    result = await world.backup(zombie, "two")
    await forget(world)
    for text in ("anew", "newer"):
        await writer.commit(JOB, [await world.backup(writer, text)])
        await collect(world)
    assert boundary_key(JOB, 1 + FORGOTTEN_AHEAD) not in await world.keys()
    with pytest.raises(FencedError):
        await zombie.commit(JOB, [result])
    assert await world.restored_text(await world.process()) == "newer"


async def test_a_record_that_lands_late_is_closed_when_it_arrives(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "one")
    world.store.lose_answer("put_if_absent", commit_key(JOB, 2))
    result = await world.backup(writer, "two")
    with pytest.raises(CommitUnknownError):
        await writer.commit(JOB, [result])
    await forget(world)
    with pytest.raises(CommitUnknownError, match="closed or collected"):
        await writer.commit(JOB, [result])
    await collect(world)
    assert await (await world.process()).latest(JOB) is None


async def test_two_who_forget_at_once_agree(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")

    async def another_forgets() -> None:
        await forget(world)

    world.store.before("put_if_absent", ".boundary", another_forgets)
    report = await repository.forget(JOB)
    assert report.boundary == Boundary(scope=JOB, number=1 + FORGOTTEN_AHEAD)
    assert [k for k in await world.keys("log/") if k.endswith("boundary")] == [boundary_key(JOB, 1 + FORGOTTEN_AHEAD)]


async def test_a_lost_answer_is_found_to_be_the_boundary(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    world.store.lose_answer("put_if_absent", ".boundary")
    report = await repository.forget(JOB)
    assert report.boundary == Boundary(scope=JOB, number=1 + FORGOTTEN_AHEAD)
    assert report.newest is not None


async def test_a_boundary_that_may_arrive_is_sent_again_though_another_has_forgotten(world: World) -> None:
    """It is above the other one, so that it would close what begins again."""
    repository = await world.process()
    await world.history(repository, "one", "two")

    async def on_its_way() -> None:
        # Of somebody who has listed one commit.
        lower = Boundary(scope=JOB, number=1 + FORGOTTEN_AHEAD)
        await world.store.inner.put_if_absent(boundary_key(JOB, lower.number), BytesBody(encode_record(lower)))
        raise AnswerLostError("the request is on its way", operation="put_if_absent")

    world.store.before("put_if_absent", ".boundary", on_its_way)
    report = await repository.forget(JOB)
    assert report.boundary == Boundary(scope=JOB, number=2 + FORGOTTEN_AHEAD)
    assert boundary_key(JOB, report.boundary.number) in await world.keys("log/")


async def test_no_answer_at_all_is_said_and_may_be_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "FORGET_ATTEMPTS_MAX", 1)
    repository = await world.process()
    await world.history(repository, "one")
    world.store.lose_answer("put_if_absent", ".boundary")
    with pytest.raises(StoreUnavailableError, match="no answer") as caught:
        await repository.forget(JOB)
    assert "forget again" in caught.value.hint
    assert (await repository.forget(JOB)).boundary is None


@pytest.mark.parametrize("error", [AccessDeniedError, StoreUnavailableError])
async def test_a_boundary_that_is_refused_is_no_success(
    world: World, error: type[AccessDeniedError | StoreUnavailableError]
) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    world.store.fail("put_if_absent", ".boundary", error("injected", operation="put_if_absent"))
    with pytest.raises(error):
        await repository.forget(JOB)
    assert await world.restored_text(repository) == "one"


# ---------------------------------------------------------------------- others beside


async def test_a_late_copy_of_the_boundary_harms_no_job_that_has_begun_again(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    report = await repository.forget(JOB)
    assert report.boundary is not None
    writer = await world.process()
    for text in ("anew", "newer"):
        await writer.commit(JOB, [await world.backup(writer, text)])
        await collect(world)
    late = await world.store.inner.put_if_absent(
        boundary_key(JOB, report.boundary.number), BytesBody(encode_record(report.boundary))
    )
    assert not isinstance(late, Lost), "the boundary was collected, and its number is free"
    await collect(world)
    assert await world.restored_text(await world.process()) == "newer"


async def test_a_collector_that_has_read_its_roots_before_deletes_nothing_that_is_open_for_it(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")

    async def forgotten_and_begun_again() -> None:
        await forget(world)
        writer = await world.process()
        await writer.commit(JOB, [await world.backup(writer, "anew")])

    world.store.before("put_if_absent", boundary_key(JOB, 1), forgotten_and_begun_again)
    await repository.collect(KEEP_ONE, delete_share_max=1)
    assert await world.restored_text(await world.process()) == "anew"
    await collect(world)
    assert await world.restored_text(await world.process()) == "anew"


Act = Callable[[Repository], Awaitable[object]]


async def _fork(repository: Repository) -> object:
    return await repository.fork(await repository.find(JOB), OTHER)


async def _name(repository: Repository) -> object:
    return await repository.name(await repository.find(JOB), "kept")


@pytest.mark.parametrize("act", [_fork, _name], ids=["fork", "name"])
async def test_who_protects_a_commit_before_it_is_forgotten_keeps_it(world: World, act: Act) -> None:
    repository = await world.process()
    await world.history(repository, "one")

    async def forgotten_and_collected() -> None:
        await forget(world)
        await collect(world)

    # The pin is there and the commit was found open; the fork's record or the naming comes after the collection.
    world.store.before("put_if_absent", "log/other" if act is _fork else "names/", forgotten_and_collected)
    await act(repository)
    await collect(world)
    target = world.target()
    if act is _fork:
        await repository.find_and_restore(OTHER, target)
    else:
        await repository.find_and_restore(JOB, target, name="kept")
        # A name that was given beside is reported by the next call.
        assert (await repository.forget(JOB)).names == ("kept",)
    assert (target / "CURRENT").read_text() == "one"


@pytest.mark.parametrize("act", [_fork, _name], ids=["fork", "name"])
async def test_who_comes_after_the_boundary_is_refused(world: World, act: Act) -> None:
    repository = await world.process()
    await world.history(repository, "one")

    async def somebody_forgets() -> None:
        await forget(world)

    world.store.before("put", "pins/", somebody_forgets)
    with pytest.raises(CollectedError):
        await act(repository)


async def test_a_rewind_under_way_is_fenced(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")

    async def somebody_forgets() -> None:
        await forget(world)

    world.store.before("put_if_absent", commit_key(JOB, 3), somebody_forgets)
    with pytest.raises(FencedError):
        await repository.rewind(await repository.find(JOB, version=1))
    world.clock.advance(3 * TTL_MS)
    await collect(world)
    assert await world.keys("blobs/") == set()


async def test_a_fork_onto_a_forgotten_scope_begins_it_again(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    await repository.fork(await repository.find(JOB), OTHER)
    await forget(world)
    commit = await (await world.process()).fork(await repository.find(OTHER), JOB)
    assert commit.record.number == 2 + FORGOTTEN_AHEAD
    await collect(world)
    assert await world.restored_text(repository) == "one"


async def test_a_store_where_boundaries_are_not_safe_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    weak = msgspec.structs.replace(world.store.inner.capabilities, atomic_create=False)
    monkeypatch.setattr(type(world.store), "capabilities", property(lambda _: weak))
    with pytest.raises(UnsafeStoreError):
        await repository.forget(JOB)


# ---------------------------------------------------------------------- at every request


async def _commits(world: World, writer: Repository) -> None:
    """A commit that retains blobs and carries a store over, if nothing has come between."""
    await writer.commit(JOB, [await world.backup(writer, "next")])


async def _rewinds(world: World, writer: Repository) -> None:
    await writer.rewind(await writer.find(JOB, version=1))


async def _forks(world: World, writer: Repository) -> None:
    await writer.fork(await writer.find(JOB), OTHER)


async def _names(world: World, writer: Repository) -> None:
    await writer.name(await writer.find(JOB), "kept")


async def _forgets(world: World, writer: Repository) -> None:
    await forget(world)


async def _forgets_and_collects(world: World, writer: Repository) -> None:
    await forget(world)
    await collect_beside(world)


async def _collects(world: World, writer: Repository) -> None:
    await collect_beside(world)


async def collect_beside(world: World) -> None:
    await (await world.process()).collect(KEEP_ONE, delete_share_max=1)


Actor = Callable[[World, Repository], Awaitable[None]]


@pytest.mark.parametrize(
    "actor, other",
    [
        *((actor, _forgets_and_collects) for actor in (_commits, _rewinds, _names, _collects)),
        # What a fork does with a pin `_names` and `_rewinds` show too.
        pytest.param(_forks, _forgets_and_collects, marks=pytest.mark.soak),
        *((_forgets, other) for other in (_commits, _rewinds, _forks, _names, _collects)),
    ],
)
async def test_wherever_one_comes_between_everything_that_is_open_can_be_restored(
    tmp_path: Path, actor: Actor, other: Actor
) -> None:
    """All of one actor's work between any two requests of the other's; then a collection, and the writer goes on."""
    at = 0
    while True:
        at += 1
        clock, directory = SteppedClock(), tmp_path / str(at)
        directory.mkdir()
        world = await make_world(MemoryStore(clock=clock), clock, directory)
        writer = await world.process()
        for text in ("one", "two"):
            stores = [await world.backup(writer, text), await world.backup(writer, text, task="1")]
            await writer.commit(JOB, stores)
            clock.advance(1000)

        async def come_between(world: World = world, writer: Repository = writer) -> None:
            with contextlib.suppress(EngineError):
                await other(world, writer)

        world.store.before_request(at, come_between)
        with contextlib.suppress(EngineError):
            await actor(world, writer)
        if world.store.has_waiting:
            return
        await collect(world)
        with contextlib.suppress(EngineError):
            await writer.commit(JOB, [await world.backup(writer, "after")])
        await check_whole(world)
        clock.advance(3 * TTL_MS)
        await collect(world)
        await check_whole(world)


async def check_whole(world: World) -> None:
    """Nothing that is committed or named is missing."""
    assert (await (await world.process()).verify()).problems == ()


# ---------------------------------------------------------------------- the plan


ONE, TWO = CommitPointer(1, WriteId("a")), CommitPointer(2, WriteId("b"))


@pytest.mark.parametrize(
    "records, boundaries, number",
    [
        pytest.param((), (), None, id="nothing was ever there"),
        pytest.param(((1, 0), (2, 0)), (), 2, id="records and no boundary"),
        pytest.param(((2, 0),), (Boundary(scope=JOB, number=1),), 2, id="a boundary, and a record above it"),
        pytest.param(((1, 0),), (Boundary(scope=JOB, number=1, kept=(ONE,)),), 1, id="a boundary that keeps something"),
        pytest.param(((2, 0),), (Boundary(scope=JOB, number=2),), 2, id="a record whose writer may go on above"),
        pytest.param(((1, 0),), (Boundary(scope=JOB, number=9),), None, id="forgotten, and not collected"),
        pytest.param((), (Boundary(scope=JOB, number=9),), None, id="forgotten and collected"),
        pytest.param(((10, 0),), (Boundary(scope=JOB, number=9),), 10, id="forgotten, and begun again"),
    ],
)
def test_what_closes_everything(
    records: tuple[tuple[int, int], ...], boundaries: tuple[Boundary, ...], number: int | None
) -> None:
    listing = LogListing(scope=JOB, records=records, boundaries=tuple(b.number for b in boundaries))
    planned = plan_forget(listing, boundaries)
    assert planned == (None if number is None else Boundary(scope=JOB, number=number + FORGOTTEN_AHEAD))
