"""Directed interleavings of collectors and of those whom they meet; see `interleavings.py`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from engine.errors import (
    CollectedError,
    ConflictError,
    DamagedError,
    EngineError,
    FencedError,
    NotFoundError,
    UnsafeStoreError,
)
from index.errors import FormatError
from index.plan.commits import Retention
from index.snapshot.keys import boundary_key, commit_key
from index.snapshot.model import Scope
from tests.simulation.faults.request_faults import matching
from tests.simulation.scenarios.interleavings import (
    DAY_S,
    FORK,
    HOUR_S,
    JOB,
    Actor,
    Scene,
    interleaving,
    overtaken,
    refused,
    succeeds,
    two_old_commits,
)
from tests.simulation.scenarios.small_trees import tree


@interleaving()
async def records_go_before_indexes_and_indexes_before_blobs(scene: Scene) -> None:
    writer = await scene.actor("writer")
    for text in ("one", "two", "three"):
        await writer.push(text)
    await writer.backup("never committed")
    await asyncio.sleep(2 * DAY_S)
    await writer.collect()
    prefixes = [line.split()[3].split("/")[0] for line in scene.server.history if line.split()[2] == "delete_objects"]
    assert prefixes == ["log", "indexes", "blobs"], prefixes


@interleaving()
async def the_uploads_of_a_backup_under_way_stay(scene: Scene) -> None:
    writer, collector = await scene.actor("writer"), await scene.actor("collector")
    await writer.push("one")
    result = await writer.backup("two")
    await collector.collect()
    await writer.commit(result)
    await scene.check({"a": "two"})


@interleaving()
async def a_commit_that_comes_during_a_collection_stays(scene: Scene) -> None:
    writer, collector = await scene.actor("writer"), await scene.actor("collector")
    await writer.push("one")
    await writer.push("two")
    faults = scene.server.faults
    async with scene.held("put_object", ".boundary", "collector", collector.collect(), after=True) as collecting:
        # Whatever it still does with uploads comes after the second reading of the roots.
        looking = matching("list_objects_v2", "blobs/", "collector"), matching("delete_objects", "", "collector")
        gates = [faults.hold(match) for match in looking]
    reached = [asyncio.ensure_future(gate.reached.wait()) for gate in gates]
    await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
    await writer.push("three")
    for gate in gates:
        gate.open()
    await collecting
    await scene.check({"a": "three"})


@interleaving()
async def a_result_that_is_committed_again_stays(scene: Scene) -> None:
    writer, other, collector = await scene.actor("writer"), await scene.actor("other"), await scene.actor("collector")
    first = await writer.push("one")
    result = await writer.backup("two")
    await writer.commit(result)
    await writer.process.run(writer.repository.rewind(first))
    # The lease of its uploads is not over.
    await asyncio.sleep(0.6 * HOUR_S)
    await collector.collect()
    await other.commit(result)
    await scene.check({"a": "two"})
    await scene.check_all_goes()


@interleaving()
async def a_clock_that_jumps_ages_nothing(scene: Scene) -> None:
    writer, collector = await scene.actor("writer"), await scene.actor("collector")
    await writer.push("one")
    result = await writer.backup("two")
    scene.server.ahead_ms = 25 * 3_600_000
    await collector.collect()
    scene.server.ahead_ms = 0
    await writer.commit(result)
    await scene.check({"a": "two"})
    await scene.check_all_goes()


@interleaving()
async def what_was_never_committed_goes(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    await writer.backup("two")
    await scene.check_all_goes()


@interleaving()
async def what_was_closed_stays_closed(scene: Scene) -> None:
    writer, other = await scene.actor("writer"), await scene.actor("other")
    commits = [await writer.push(text) for text in ("one", "two", "three", "four", "five")]
    await writer.process.run(writer.repository.name(commits[1], "second"))
    await writer.collect()
    await writer.process.run(writer.repository.release_name(JOB, "second"))
    # The boundary that closes the second is below the one that lists it.
    gate = scene.server.faults.hold(matching("delete_objects", "", "collector"))
    collector = await scene.actor("collector")
    collecting = asyncio.ensure_future(collector.collect())
    reached = asyncio.ensure_future(gate.reached.wait())
    await asyncio.wait({collecting, reached}, return_when=asyncio.FIRST_COMPLETED)
    found = [c.pointer.number for c in await other.process.run(other.repository.commits(JOB))]
    assert found == [5], f"{found} seem open, and are about to go"
    gate.open()
    await collecting
    found = [c.pointer.number for c in await other.process.run(other.repository.commits(JOB))]
    assert found == [5]
    await scene.check_all_goes()


@interleaving()
async def the_newest_commit_is_never_closed(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    await writer.push("two")
    await asyncio.sleep(3 * DAY_S)
    await writer.collect(Retention(keep_since_ms=writer.process.runtime.local_now_ms()))
    await scene.check({"a": "two"})


@interleaving()
async def the_last_boundary_stays(scene: Scene) -> None:
    """As the zombie's, but with nothing left that would contradict it except the boundary."""
    zombie, other, collector = await scene.actor("zombie"), await scene.actor("other"), await scene.actor("collector")
    result = await overtaken(zombie, other, collector)
    await other.push("four")
    await collector.collect()
    async with scene.held("list_objects_v2", "log/", "zombie", zombie.commit(result)) as committing:
        boundaries = [name for name in scene.server.objects if name.endswith(".boundary")]
        assert boundaries, "nothing says any more what is closed"
    with refused(FencedError):
        await committing
    await scene.check({"a": "four"})
    await scene.check_all_goes()


@interleaving()
async def a_fork_between_the_two_readings_is_kept(scene: Scene) -> None:
    writer, forker, collector = await scene.actor("writer"), await scene.actor("forker"), await scene.actor("collector")
    old = await two_old_commits(writer)
    async with scene.held("put_object", ".boundary", "collector", collector.collect()) as collecting:
        await forker.process.run(forker.repository.fork(old, FORK))
    await collecting
    await scene.check({"a": "one"}, FORK)
    await scene.check_all_goes()


@interleaving()
async def an_error_means_that_nothing_is_deleted(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one", "a")
    await writer.push("two", "b")
    commit = await writer.process.run(writer.repository.find(JOB))
    reference = commit.store("0", "a")
    assert reference is not None
    name = f"repository/{reference.index.key}"
    hidden = scene.server.objects[name]
    scene.server.delete(name)
    await asyncio.sleep(3 * HOUR_S)
    with contextlib.suppress(DamagedError):
        await writer.collect()
    scene.server.put(name, hidden, if_absent=True)
    await scene.check({"a": "one", "b": "two"})


@interleaving()
async def a_rotten_record_stops_its_own_job_alone(scene: Scene) -> None:
    writer = await scene.actor("writer")
    other = Scope("other")
    for text in ("one", "two"):
        await writer.push(text)
        result = await writer.process.run(writer.repository.backup(other, scene.source(text), store="a"))
        await writer.process.run(writer.repository.commit(other, [result]))
    name = f"repository/{commit_key(JOB, 2)}"
    data = scene.server.rot(name, scene.seed)
    await asyncio.sleep(2 * HOUR_S)
    collector = await scene.actor("collector")
    with contextlib.suppress(EngineError, FormatError):
        await collector.collect()
    found = [c.pointer.number for c in await collector.process.run(collector.repository.commits(other))]
    assert found == [2], f"{found} are left of the other job"
    scene.server.objects[name].data = data
    await scene.check({"a": "two"})
    await scene.check_all_goes()


@interleaving()
async def a_pin_that_came_too_late_protects_nothing(scene: Scene) -> None:
    writer, forker, collector = await scene.actor("writer"), await scene.actor("forker"), await scene.actor("collector")
    old = await two_old_commits(writer)
    async with scene.held("delete_objects", "", "collector", collector.collect()) as collecting:
        forked = await succeeds(forker.process.run(forker.repository.fork(old, FORK)), CollectedError)
    await collecting
    if forked:
        await scene.check({"a": "one"}, FORK)
    await scene.check_all_goes()


@interleaving()
async def a_pin_is_written_before_the_boundaries_are_read(scene: Scene) -> None:
    writer, forker, collector = await scene.actor("writer"), await scene.actor("forker"), await scene.actor("collector")
    old = await two_old_commits(writer)
    fork = forker.process.run(forker.repository.fork(old, FORK))
    async with scene.held("put_object", "pins/", "forker", fork) as forking:
        deleting = scene.server.faults.hold(matching("delete_objects", "", "collector"))
        collecting = asyncio.ensure_future(collector.collect())
        await deleting.reached.wait()
    forked = await succeeds(forking, CollectedError)
    deleting.open()
    await collecting
    if forked:
        await scene.check({"a": "one"}, FORK)
    await scene.check_all_goes()


@interleaving(kind="direct")
async def a_reader_of_old_lists_protects_nothing(scene: Scene) -> None:
    writer, collector = await scene.actor("writer"), await scene.actor("collector")
    forker = await scene.actor("forker", "stale")
    old = await two_old_commits(writer)
    await forker.process.run(forker.repository.commits(JOB))
    async with scene.held("delete_objects", "", "collector", collector.collect()) as collecting:
        forked = await succeeds(forker.process.run(forker.repository.fork(old, FORK)), UnsafeStoreError)
    await collecting
    if forked:
        await scene.check({"a": "one"}, FORK)
    await scene.check_all_goes()


@interleaving()
async def what_is_restored_stays_while_it_is_restored(scene: Scene) -> None:
    writer, reader, collector = await scene.actor("writer"), await scene.actor("reader"), await scene.actor("collector")
    old = await two_old_commits(writer)
    async with scene.held("get_object", "blobs/", "reader", reader.restore(old)) as restoring:
        await collector.collect()
    assert await restoring == tree("one")
    await scene.check_all_goes()


@interleaving()
async def every_store_of_what_is_restored_stays(scene: Scene) -> None:
    writer, reader, collector = await scene.actor("writer"), await scene.actor("reader"), await scene.actor("collector")
    await writer.push("one", "a")
    old = await writer.push("two", "b")
    await writer.commit(await writer.backup("three", "a"), await writer.backup("four", "b"))
    await asyncio.sleep(2 * HOUR_S)
    async with scene.held("get_object", "blobs/", "reader", reader.restore(old, "b")) as restoring:
        await collector.collect()
    assert await restoring == tree("two")
    await scene.check_all_goes()


@interleaving()
async def what_is_closed_by_another_between_two_listings_was_kept(scene: Scene) -> None:
    """A collection did not know the commit, which is pinned after it has read the pins, and closed before the logs."""
    writer, forker, collector = await scene.actor("writer"), await scene.actor("forker"), await scene.actor("collector")
    old = await two_old_commits(writer)
    faults = scene.server.faults
    async with scene.held("put_object", ".boundary", "collector", collector.collect()) as collecting:
        again = await writer.rewind(old)
        reading = faults.hold(matching("list_objects_v2", "names/", "collector"))
    await reading.reached.wait()
    collector.process.stop()
    fork = forker.process.run(forker.repository.fork(again, FORK))
    async with scene.held("put_object", ".commit", "forker", fork) as forking:
        await writer.process.run(writer.repository.forget(JOB))
        reading.open()
        await asyncio.sleep(1)
        collector.process.wake()
        await collecting
    await forking
    await scene.check({"a": "one"}, FORK)
    await scene.check_all_goes()


async def _use_a_name_while_it_is_released(scene: Scene, *, pause_s: float) -> None:
    """Rewind to what a name stands for that a collection did not know, and that is released before it looks again."""
    writer, keeper, collector = await scene.actor("writer"), await scene.actor("keeper"), await scene.actor("collector")
    old = await two_old_commits(writer)
    faults = scene.server.faults
    async with scene.held("put_object", ".boundary", "collector", collector.collect()) as collecting:
        await keeper.process.run(keeper.repository.name(old, "old"))
        reading = faults.hold(matching("list_objects_v2", "names/", "collector"))
    await reading.reached.wait()
    collector.process.stop()
    if pause_s:
        # So long that it reads everything once more.
        await asyncio.sleep(pause_s)
        next_reading = faults.hold(matching("list_objects_v2", "names/", "collector"))
        reading.open()
        await asyncio.sleep(1)
        collector.process.wake()
        await next_reading.reached.wait()
        collector.process.stop()
        reading = next_reading
    named = await writer.process.run(writer.repository.find(JOB, name="old"))
    async with scene.held("put_object", ".commit", "writer", writer.rewind(named)) as rewinding:
        await keeper.process.run(keeper.repository.release_name(JOB, "old"))
        if pause_s:
            await keeper.collect()
        reading.open()
        await asyncio.sleep(1)
        collector.process.wake()
        await collecting
    await rewinding
    await scene.check({"a": "one"})
    await scene.check_all_goes()


@interleaving()
async def a_name_that_is_released_between_two_listings_has_kept_its_commit(scene: Scene) -> None:
    await _use_a_name_while_it_is_released(scene, pause_s=0)


@interleaving()
async def a_released_name_is_there_as_long_as_a_pin_on_it(scene: Scene) -> None:
    # Longer than the lease of the naming itself.
    await _use_a_name_while_it_is_released(scene, pause_s=1.5 * HOUR_S)


@interleaving()
async def a_name_given_by_a_name_that_goes_within_a_listing_keeps_its_commit(scene: Scene) -> None:
    """A collection has listed names; one is given then by another one, which is released and gone when it is read."""
    writer, keeper, collector = await scene.actor("writer"), await scene.actor("keeper"), await scene.actor("collector")
    old = await two_old_commits(writer)
    async with scene.held("put_object", ".boundary", "collector", collector.collect()) as collecting:
        await keeper.process.run(keeper.repository.name(old, "old"))
        reading = scene.server.faults.hold(matching("get_object", "names/", "collector"))
    await reading.reached.wait()
    collector.process.stop()
    named = await writer.process.run(writer.repository.find(JOB, name="old"))
    await writer.process.run(writer.repository.name(named, "new"))
    await keeper.process.run(keeper.repository.release_name(JOB, "old"))
    await asyncio.sleep(1.5 * HOUR_S)
    await keeper.collect()
    reading.open()
    await asyncio.sleep(1)
    collector.process.wake()
    await collecting
    assert await writer.restore(await writer.process.run(writer.repository.find(JOB, name="new"))) == tree("one")
    await scene.check_all_goes()


async def _use_a_number_twice(scene: Scene, meanwhile: Callable[[], Awaitable[object]]) -> bool:
    """Write a boundary once more after it was superseded and deleted; who slept deletes it a second time.

    Who wrote it sleeps before it deletes. `meanwhile` is between. Commit 2 was open, and is closed by that one alone.
    """
    writer, forker = await scene.actor("writer"), await scene.actor("forker")
    hasty, slow, other = await scene.actor("hasty"), await scene.actor("slow"), await scene.actor("other")
    daily, faults = Retention(keep_last=1, keep_daily=3), scene.server.faults
    for text in ("one", "two", "three", "four"):
        await writer.push(text)
        await asyncio.sleep(DAY_S if text == "two" else 60)
    await asyncio.sleep(2 * HOUR_S)
    writing = faults.hold(matching("put_object", ".boundary", "hasty"))
    deleting = faults.hold(matching("delete_objects", "", "hasty"))
    hurrying = asyncio.ensure_future(hasty.collect())
    await writing.reached.wait()
    hasty.process.stop()
    await other.collect(daily)
    for text in ("five", "six"):
        await writer.push(text)
        await asyncio.sleep(60)
    async with scene.held("delete_objects", "", "slow", slow.collect(daily)) as sleeping:
        slow.process.stop()
        await other.collect(daily)
        writing.open()
        hasty.process.wake()
        reached = asyncio.ensure_future(deleting.reached.wait())
        await asyncio.wait({hurrying, reached}, return_when=asyncio.FIRST_COMPLETED)
        await meanwhile()
    slow.process.wake()
    await sleeping
    is_open = await succeeds(_fork_two(forker), NotFoundError)
    deleting.open()
    await hurrying
    await scene.check({"a": "six"})
    if is_open:
        await scene.check({"a": "two"}, FORK)
    await scene.check_all_goes()
    return is_open


async def _fork_two(forker: Actor) -> None:
    old = await forker.process.run(forker.repository.find(JOB, number=2))
    await forker.process.run(forker.repository.fork(old, FORK))


@interleaving()
async def what_the_second_boundary_of_a_number_closes_is_kept(scene: Scene) -> None:
    async def nothing() -> None:
        pass

    assert await _use_a_number_twice(scene, nothing)


@interleaving()
async def what_the_second_boundary_of_a_number_closes_is_closed_again(scene: Scene) -> None:
    third = await scene.actor("third")
    assert not await _use_a_number_twice(scene, lambda: third.collect(Retention(keep_last=1, keep_daily=3)))


@interleaving()
async def what_lists_its_own_number_is_superseded_by_what_closes_it(scene: Scene) -> None:
    """`discard` of a boundary writes one that lists the newest commit, whose number it has; it may come twice, too."""
    writer, sleeper, other = await scene.actor("writer"), await scene.actor("sleeper"), await scene.actor("other")
    for text in ("one", "two"):
        await writer.push(text)
    await writer.collect()
    key = boundary_key(JOB, 1)
    scene.server.rot(f"repository/{key}", -1)
    await writer.process.run(writer.repository.discard(key))
    two = await writer.process.run(writer.repository.find(JOB, number=2))
    await writer.process.run(writer.repository.name(two, "keep"))
    for text in ("three", "four"):
        await writer.push(text)
    await asyncio.sleep(2 * HOUR_S)
    async with scene.held("delete_objects", "", "sleeper", sleeper.collect()) as sleeping:
        sleeper.process.stop()
        await other.collect()
        await writer.process.run(writer.repository.release_name(JOB, "keep"))
        await asyncio.sleep(2 * DAY_S)
        await other.collect()
    sleeper.process.wake()
    await sleeping
    await scene.check({"a": "four"})
    await scene.check_all_goes()


@interleaving()
async def a_forgotten_job_takes_its_writer_with_it(scene: Scene) -> None:
    writer, owner = await scene.actor("writer"), await scene.actor("owner")
    await writer.push("one", "a")
    await asyncio.sleep(2 * HOUR_S)
    result = await writer.backup("two", "b")
    await owner.process.run(owner.repository.forget(JOB))
    await owner.collect()
    acknowledged = await succeeds(writer.commit(result), ConflictError)
    if acknowledged:
        await scene.check({"a": "one", "b": "two"})
    with contextlib.suppress(NotFoundError):
        await owner.process.run(owner.repository.find(JOB))
        assert acknowledged


@interleaving()
async def a_discarded_commit_takes_its_writer_with_it(scene: Scene) -> None:
    writer, owner = await scene.actor("writer"), await scene.actor("owner")
    await writer.push("one", "a")
    await writer.push("two", "a")
    await asyncio.sleep(2 * HOUR_S)
    result = await writer.backup("three", "b")
    key = commit_key(JOB, 2)
    # Its last byte: a flip in the version would make it a newer tidemark's, which discard does not touch.
    scene.server.rot(f"repository/{key}", -1)
    await owner.process.run(owner.repository.discard(key))
    await owner.collect()
    acknowledged = await succeeds(writer.commit(result), ConflictError)
    await scene.check({"a": "two", "b": "three"} if acknowledged else {"a": "one"})
    await scene.check_all_goes()
