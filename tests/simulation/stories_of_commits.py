"""Stories of keys and commits; see `tests.simulation.stories`."""

import asyncio
import contextlib

from engine.errors import (
    CommitLostError,
    CommitUnknownError,
    ConflictError,
    LeaseExpiredError,
    StaleResultError,
)
from tests.simulation.faults import Fault, matching
from tests.simulation.processes import KilledError
from tests.simulation.stories import DAY_S, HOUR_S, LIFECYCLE_MS, Scene, refused, story


@story(expiry_ms=LIFECYCLE_MS)
async def a_put_that_lands_late_brings_no_ttl_back(scene: Scene) -> None:
    writer = await scene.actor("writer")
    scene.server.faults.late_s = (HOUR_S, HOUR_S)
    scene.server.faults.arm(Fault.LATE, matching("put_object", "blobs/"))
    await writer.push("one")
    await asyncio.sleep(30 * DAY_S)
    await scene.check({"a": "one"})
    await scene.check_all_goes()


@story()
async def a_writer_builds_on_what_it_has_loaded_and_on_nothing_later(scene: Scene) -> None:
    first, second = await scene.actor("first"), await scene.actor("second")
    await first.push("one")
    await second.push("two", "b")
    result = await first.backup("three")
    try:
        await first.commit(result)
    except CommitLostError:
        await first.commit(result)
    await scene.check({"a": "three", "b": "two"})
    await scene.check_all_goes()


@story()
async def stores_without_a_result_are_carried_over(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one", "a")
    await writer.push("two", "b")
    await writer.push("three", "a")
    await scene.check({"a": "three", "b": "two"})


@story()
async def a_result_of_another_base_is_refused(scene: Scene) -> None:
    first, second = await scene.actor("first"), await scene.actor("second")
    await first.push("one")
    stale = await second.backup("two")
    await first.push("three")
    third = await scene.actor("third")
    with refused(StaleResultError):
        await third.commit(stale)
    await scene.check({"a": "three"})


@story(kind="direct")
async def a_lost_answer_is_no_conflict(scene: Scene) -> None:
    writer = await scene.actor("writer")
    result = await writer.backup("one")
    scene.server.faults.arm(Fault.LOST, matching("put_object", ".commit"))
    commit = await writer.commit(result)
    assert commit.pointer.number == 1
    await scene.check({"a": "one"})


@story(kind="direct")
async def a_record_that_arrives_after_all_is_adopted(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    result = await writer.backup("two")
    faults, record = scene.server.faults, matching("put_object", ".commit")
    faults.late_s = (600, 600)
    faults.arm(Fault.LATE, record)
    for _ in range(5):
        faults.arm(Fault.RESET, record)
    with refused(CommitUnknownError):
        await writer.commit(result)
    await asyncio.sleep(1200)
    # Its record stands now, with blobs that nobody touched meanwhile.
    assert (await writer.commit(result)).pointer.number == 2
    await scene.check({"a": "two"})
    await scene.check_all_goes()


@story(kind="direct")
async def an_unknown_outcome_is_left_alone(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    result = await writer.backup("two")
    faults, record = scene.server.faults, matching("put_object", ".commit")
    faults.late_s = (600, 600)
    faults.arm(Fault.LATE, record)
    for _ in range(5):
        faults.arm(Fault.RESET, record)
    with contextlib.suppress(CommitUnknownError):
        await writer.commit(result)
    writer.process.kill()
    await asyncio.sleep(1200)
    # The record has landed, and leads to everything that it needs.
    await scene.check({"a": "two"})


@story()
async def a_zombie_whose_number_became_free_is_fenced(scene: Scene) -> None:
    zombie, other, collector = await scene.actor("zombie"), await scene.actor("other"), await scene.actor("collector")
    await zombie.push("one")
    result = await zombie.backup("zombie")
    for text in ("two", "three"):
        await other.push(text)
    await collector.collect()
    acknowledged = False
    with contextlib.suppress(ConflictError):
        await zombie.commit(result)
        acknowledged = True
    await scene.check({"a": "zombie" if acknowledged else "three"})
    await scene.check_all_goes()


@story()
async def a_record_that_comes_after_its_lease_is_void(scene: Scene) -> None:
    writer, collector = await scene.actor("writer"), await scene.actor("collector")
    await writer.push("one")
    result = await writer.backup("two")
    gate = scene.server.faults.hold(matching("put_object", ".commit", "writer"))
    committing = asyncio.ensure_future(writer.commit(result))
    await gate.reached.wait()
    writer.process.stop()
    await asyncio.sleep(3 * HOUR_S)
    await collector.collect()
    gate.open()
    await asyncio.sleep(1)
    writer.process.wake()
    acknowledged = False
    with contextlib.suppress(LeaseExpiredError):
        await committing
        acknowledged = True
    await scene.check({"a": "two" if acknowledged else "one"})
    await scene.check_all_goes()


@story(expiry_ms=LIFECYCLE_MS)
async def whoever_commits_next_settles_what_was_interrupted(scene: Scene) -> None:
    first, second = await scene.actor("first"), await scene.actor("second")
    result = await first.backup("one")
    gate = scene.server.faults.hold(matching("put_object_tagging", "", "first"), after=True)
    committing = asyncio.ensure_future(first.commit(result))
    await gate.reached.wait()
    first.process.kill()
    with contextlib.suppress(KilledError):
        await committing
    await second.push("two", "b")
    await asyncio.sleep(30 * DAY_S)
    await scene.check({"a": "one", "b": "two"})
