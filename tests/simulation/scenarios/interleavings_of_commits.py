"""Directed interleavings of keys and commits; see `interleavings.py`."""

import asyncio
import contextlib
from typing import Final

from blobstore.s3 import bucket_rules as s3_bucket
from blobstore.s3.bucket_rules import EXPIRING
from engine.backup.backup import BackupResult
from engine.commit.record import LayoutChange
from engine.errors import (
    CommitDamagedError,
    CommitLostError,
    CommitUnknownError,
    ConflictError,
    LeaseExpiredError,
    StaleResultError,
    UsageError,
)
from index.plan.commits import Commit
from index.snapshot.model import Scope, ScopeLayout
from tests.simulation.faults.request_faults import Fault, matching
from tests.simulation.model.processes import KilledError
from tests.simulation.scenarios.interleavings import (
    DAY_S,
    HOUR_S,
    JOB,
    LIFECYCLE_MS,
    MARGIN_MS,
    TTL_MS,
    Actor,
    Scene,
    interleaving,
    overtaken,
    refused,
    succeeds,
)
from tests.simulation.scenarios.schedule import Times
from tests.simulation.scenarios.small_trees import tree

_DAY_MS: Final = 86_400_000


@interleaving(expiry_ms=LIFECYCLE_MS)
async def a_put_that_lands_late_brings_no_ttl_back(scene: Scene) -> None:
    writer = await scene.actor("writer")
    scene.server.faults.late_s = (HOUR_S, HOUR_S)
    scene.server.faults.arm(Fault.LATE, matching("put_object", "blobs/"))
    await writer.push("one")
    await asyncio.sleep(30 * DAY_S)
    await scene.check({"a": "one"})
    await scene.check_all_goes()


@interleaving()
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


@interleaving()
async def a_change_of_the_layout_follows_its_parent_alone(scene: Scene) -> None:
    """Who was before it, or comes after it with the layout that was, is refused."""
    writer, other = await scene.actor("writer"), await scene.actor("other")
    of = [ScopeLayout(tasks_count=tasks, key_hash="h", key_columns=("k int",)) for tasks in (4, 2)]

    async def rescale(result: BackupResult, parent: Commit, name: str) -> Commit:
        # By a driver that has loaded nothing before.
        actor = await scene.actor(name)
        change = LayoutChange(before=of[0], after=of[1])
        asking = actor.repository.commit(JOB, [result], layout=change, parent=parent.pointer, dropped=[("0", "b")])
        return await actor.process.run(asking)

    await writer.process.run(
        writer.repository.commit(JOB, [await writer.backup("one"), await writer.backup("two", "b")], layout=of[0])
    )
    seen = await other.process.run(other.repository.latest(JOB))
    assert seen is not None
    merged = await other.backup("both")
    # The base of the result is still what the newest commit has.
    third = await writer.push("three", "b")
    with refused(CommitLostError):
        await rescale(merged, seen, "early")
    await scene.check({"a": "one", "b": "three"})
    late = await writer.backup("four", "c")
    await rescale(merged, third, "late")
    last = await scene.actor("last")
    with refused(UsageError):
        await last.process.run(last.repository.commit(JOB, [late], layout=of[0]))
    await scene.check({"a": "both"})
    await scene.check_all_goes()


@interleaving()
async def stores_without_a_result_are_carried_over(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one", "a")
    await writer.push("two", "b")
    await writer.push("three", "a")
    await scene.check({"a": "three", "b": "two"})


@interleaving()
async def a_result_of_another_base_is_refused(scene: Scene) -> None:
    first, second = await scene.actor("first"), await scene.actor("second")
    await first.push("one")
    stale = await second.backup("two")
    await first.push("three")
    third = await scene.actor("third")
    with refused(StaleResultError):
        await third.commit(stale)
    await scene.check({"a": "three"})


@interleaving(kind="direct")
async def a_lost_answer_is_not_a_conflict(scene: Scene) -> None:
    writer = await scene.actor("writer")
    result = await writer.backup("one")
    scene.server.faults.arm(Fault.LOST, matching("put_object", ".commit"))
    commit = await writer.commit(result)
    assert commit.pointer.number == 1
    await scene.check({"a": "one"})


@interleaving(kind="direct")
async def a_record_that_arrives_after_all_is_adopted(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    result = await writer.backup("two")
    scene.delay_record()
    with refused(CommitUnknownError):
        await writer.commit(result)
    await asyncio.sleep(1200)
    # Its record is there now, with blobs that nobody touched meanwhile.
    assert (await writer.commit(result)).pointer.number == 2
    await scene.check({"a": "two"})
    await scene.check_all_goes()


@interleaving(kind="direct")
async def an_unknown_outcome_is_left_alone(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    result = await writer.backup("two")
    scene.delay_record()
    with contextlib.suppress(CommitUnknownError):
        await writer.commit(result)
    writer.process.kill()
    await asyncio.sleep(1200)
    # The record has landed, and leads to everything that it needs.
    await scene.check({"a": "two"})


@interleaving()
async def a_zombie_whose_number_became_free_is_fenced(scene: Scene) -> None:
    zombie, other, collector = await scene.actor("zombie"), await scene.actor("other"), await scene.actor("collector")
    result = await overtaken(zombie, other, collector)
    acknowledged = await succeeds(zombie.commit(result), ConflictError)
    await scene.check({"a": "zombie" if acknowledged else "three"})
    await scene.check_all_goes()


@interleaving()
async def a_record_that_comes_after_its_lease_is_void(scene: Scene) -> None:
    writer, collector = await scene.actor("writer"), await scene.actor("collector")
    await writer.push("one")
    result = await writer.backup("two")
    async with scene.held("put_object", ".commit", "writer", writer.commit(result)) as committing:
        writer.process.stop()
        await asyncio.sleep(3 * HOUR_S)
        await collector.collect()
    await asyncio.sleep(1)
    writer.process.wake()
    acknowledged = await succeeds(committing, LeaseExpiredError)
    await scene.check({"a": "two" if acknowledged else "one"})
    await scene.check_all_goes()


@interleaving()
async def a_record_that_comes_within_the_margin_is_void(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    result = await writer.backup("two")
    async with scene.held("put_object", ".commit", "writer", writer.commit(result)) as committing:
        writer.process.stop()
        await asyncio.sleep((scene.times.ttl_ms - scene.times.margin_ms // 2) / 1000)
    await asyncio.sleep(1)
    writer.process.wake()
    with refused(LeaseExpiredError):
        await committing
    await scene.check({"a": "one"})
    await scene.check_all_goes()


async def end_at_a_ttl(scene: Scene, committer: Actor, *, after: bool) -> None:
    """Kill a process that commits, before the first TTL is removed or after it."""
    result = await committer.backup("one")
    gate = scene.server.faults.hold(matching("put_object_tagging", "", committer.process.name), after=after)
    committing = asyncio.ensure_future(committer.commit(result))
    await gate.reached.wait()
    committer.process.kill()
    with contextlib.suppress(KilledError):
        await committing


@interleaving(expiry_ms=LIFECYCLE_MS)
async def the_next_committer_settles_what_was_interrupted(scene: Scene) -> None:
    first, second = await scene.actor("first"), await scene.actor("second")
    await end_at_a_ttl(scene, first, after=True)
    await second.push("two", "b")
    await asyncio.sleep(30 * DAY_S)
    await scene.check({"a": "one", "b": "two"})


@interleaving(expiry_ms=LIFECYCLE_MS)
async def the_one_who_completes_it_may_be_interrupted_too(scene: Scene) -> None:
    first, second, third = await scene.actor("first"), await scene.actor("second"), await scene.actor("third")
    for committer, after in ((first, False), (second, True)):
        await end_at_a_ttl(scene, committer, after=after)
    await third.push("two", "b")
    await asyncio.sleep(30 * DAY_S)
    await scene.check({"a": "one", "b": "two"})


@interleaving()
async def two_snapshots_of_one_id_are_two(scene: Scene) -> None:
    writer, slow, third = await scene.actor("writer"), await scene.actor("slow"), await scene.actor("third")
    first = await writer.push("one", label="v1")
    await writer.push("two", label="v2")
    result = await slow.backup("three", label="v3")
    await writer.rewind(first)
    await writer.push("four", label="v2")
    with refused(StaleResultError):
        await third.commit(result)
    await scene.check({"a": "four"})
    await scene.check_all_goes()


@interleaving(kind="direct")
async def another_result_is_not_answered_with_the_first_ones_record(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("zero")
    result = await writer.backup("one", label="v2")
    scene.delay_record()
    with refused(CommitUnknownError):
        await writer.commit(result)
    await asyncio.sleep(1200)
    await writer.push("two", label="v2")
    await scene.check({"a": "two"})
    await scene.check_all_goes()


@interleaving()
async def a_copied_repository_keeps_its_commits(scene: Scene) -> None:
    writer = await scene.actor("writer")
    commits = [await writer.push(text) for text in ("one", "two", "three")]
    await writer.process.run(writer.repository.name(commits[0], "first"))
    await asyncio.sleep(2 * DAY_S)
    writer.process.kill()
    scene.server.copy()
    reader, collector = await scene.actor("reader"), await scene.actor("collector")
    found = [c.pointer.number for c in await reader.process.run(reader.repository.commits(commits[0].scope))]
    assert found == [3, 2, 1], f"{found} are left of three commits"
    await collector.collect()
    await asyncio.sleep(2 * DAY_S)
    await collector.collect()
    assert await reader.restore(commits[0]) == tree("one"), "the named commit is lost"
    await reader.push("four")
    await scene.check({"a": "four"})


@interleaving()
async def a_copied_repository_keeps_its_times(scene: Scene) -> None:
    writer = await scene.actor("writer")
    commits = []
    for text in ("one", "two", "three"):
        commits.append(await writer.push(text))
        await asyncio.sleep(HOUR_S)
    await asyncio.sleep(2 * DAY_S)
    writer.process.kill()
    scene.server.copy()
    reader = await scene.actor("reader")
    repository = reader.repository
    listed = [c.committed_at_ms for c in await reader.process.run(repository.commits(JOB))]
    assert listed[1:] == [c.committed_at_ms for c in commits[1::-1]], "the times are those of the copy"
    found = await reader.process.run(repository.find(JOB, at_ms=commits[2].committed_at_ms))
    assert found.pointer.number == 2


@interleaving()
async def of_two_kinds_of_scope_one_goes_on(scene: Scene) -> None:
    writer, task = await scene.actor("writer"), await scene.actor("task")
    scope = Scope("job", "0")
    result = await task.process.run(task.repository.backup(scope, scene.source("two"), store="a"))
    commit = task.process.run(task.repository.commit(scope, [result]))
    async with scene.held("put_object", ".commit", "task", commit) as committing:
        await writer.push("one")
        await asyncio.sleep(1)
    with refused(UsageError):
        await committing
    await writer.push("three", "b")
    await scene.check({"a": "one", "b": "three"})


@interleaving()
async def a_result_that_comes_again_after_its_lease_is_void(scene: Scene) -> None:
    writer, other, collector = await scene.actor("writer"), await scene.actor("other"), await scene.actor("collector")
    first = await writer.push("one")
    result = await writer.backup("two")
    await writer.commit(result)
    await writer.rewind(first)
    faults = scene.server.faults
    async with scene.held("put_object", ".commit", "writer", writer.commit(result)) as committing:
        writer.process.stop()
        await asyncio.sleep(3 * HOUR_S)
        deleting = faults.hold(matching("delete_objects", "", "collector"))
        collecting = asyncio.ensure_future(collector.collect())
        await deleting.reached.wait()
    await asyncio.sleep(1)
    # Its index is still there, and has lost its TTL long ago: that says nothing of this record.
    await other.push("three", "b")
    deleting.open()
    await collecting
    writer.process.wake()
    with refused(LeaseExpiredError):
        await committing
    await scene.check({"a": "one", "b": "three"})
    await scene.check_all_goes()


@interleaving()
async def a_commit_whose_blob_is_gone_is_not_acknowledged(scene: Scene) -> None:
    writer = await scene.actor("writer")
    await writer.push("one")
    result = await writer.backup("two")
    scene.server.delete(f"repository/{result.new_keys[0]}")
    with refused(CommitDamagedError):
        await writer.commit(result)


@interleaving()
async def the_backstop_waits_for_a_collection_after_the_last_lease(scene: Scene) -> None:
    scene.times = Times(ttl_ms=7 * _DAY_MS, margin_ms=_DAY_MS // 24, period_ms=2 * _DAY_MS)
    days = s3_bucket.backstop_days(
        ttl_ms=scene.times.ttl_ms, margin_ms=scene.times.margin_ms, collection_period_ms=scene.times.period_ms
    )
    scene.server.expiry_ms = days * _DAY_MS
    writer, collector = await scene.actor("writer"), await scene.actor("collector")
    result = await writer.backup("one")
    for wait_d in (2, 2, 2, 0.9):
        await asyncio.sleep(wait_d * DAY_S)
        await collector.collect()
    # Shortly before its lease ends it commits, and does not come to removing a TTL.
    gate = scene.server.faults.hold(matching("put_object_tagging", "", "writer"))
    committing = asyncio.ensure_future(writer.commit(result))
    await gate.reached.wait()
    writer.process.kill()
    with contextlib.suppress(KilledError):
        await committing
    for _ in range(3):
        await asyncio.sleep(2 * DAY_S)
        await collector.collect()
    await asyncio.sleep(20 * DAY_S)
    await scene.check({"a": "one"})


async def killed_before_it_ends(scene: Scene, text: str) -> None:
    """A backup on the machine `m` ends when all is uploaded, its index too, and nobody was informed of that."""
    first = await scene.actor("first", machine="m")
    async with scene.held("put_object", "indexes/", "first", first.backup(text), after=True) as working:
        first.process.kill()
    with contextlib.suppress(KilledError):
        await working


@interleaving()
async def a_backup_that_was_broken_off_goes_on(scene: Scene) -> None:
    await killed_before_it_ends(scene, "one")
    second = await scene.actor("second", machine="m")
    result = await second.backup("one")
    assert result.stats.blobs_resumed, "nothing was used again"
    await second.commit(result)
    await scene.check({"a": "one"})
    assert not [name for name, stored in scene.server.objects.items() if "/blobs/" in name and stored.tag == EXPIRING]
    await scene.check_all_goes()


@interleaving()
async def what_a_collection_took_of_an_earlier_attempt_is_sent_again(scene: Scene) -> None:
    await killed_before_it_ends(scene, "one")
    await asyncio.sleep(2 * HOUR_S)
    await (await scene.actor("collector")).collect()
    # By its clock nothing is old.
    second = await scene.actor("second", machine="m", behind_s=2 * HOUR_S)
    await second.push("one")
    await scene.check({"a": "one"})
    await scene.check_all_goes()


@interleaving()
async def the_lease_begins_with_the_first_upload_that_is_used(scene: Scene) -> None:
    lease_s = (TTL_MS - MARGIN_MS) / 1000
    await killed_before_it_ends(scene, "one")
    await asyncio.sleep(lease_s / 4 - 60)
    second = await scene.actor("second", machine="m")
    result = await second.backup("one")
    await asyncio.sleep(lease_s * 3 / 4 + 120)
    with refused(LeaseExpiredError):
        await second.commit(result)
    # Nothing of it is used once more.
    await second.push("one")
    await scene.check({"a": "one"})
    await scene.check_all_goes()


@interleaving()
async def what_is_old_by_the_clock_of_the_store_is_sent_again(scene: Scene) -> None:
    await killed_before_it_ends(scene, "one")
    since_s = (TTL_MS - MARGIN_MS // 2) / 1000
    await asyncio.sleep(since_s)
    # By its clock nothing is old.
    second = await scene.actor("second", machine="m", behind_s=since_s - 60)
    await second.push("one")
    await scene.check({"a": "one"})
    await scene.check_all_goes()


@interleaving()
async def what_was_uploaded_before_a_job_was_forgotten_is_sent_again(scene: Scene) -> None:
    await (await scene.actor("owner")).push("zero", "b")
    await killed_before_it_ends(scene, "one")
    await asyncio.sleep(60)
    keeper = await scene.actor("keeper")
    await keeper.process.run(keeper.repository.forget(JOB))
    second = await scene.actor("second", machine="m")
    await second.push("one")
    await scene.check({"a": "one"})
    await scene.check_all_goes()
