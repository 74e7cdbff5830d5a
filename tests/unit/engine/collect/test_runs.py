"""Plans, refusals, audit records and what old runs have left (design 0006, P1 to P5, R6 and A1)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from typing_extensions import override

from blobstore import installed_release
from blobstore.base import BlobStore, BytesBody, DeleteFailure, list_blobs, read_blob
from blobstore.errors import AccessDeniedError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.opening import open_store
from blobstore.wrappers.forwarding import ForwardingStore
from engine.collect.backend import CollectOptions, Deleted, InProcessBackend, Listing, Rules
from engine.collect.collect import collect
from engine.collect.report import POINTERS_LISTED_MAX, Audit, make_audit
from engine.collect.runs import AUDITS_KEPT_MAX, end_run, resume_run
from engine.errors import TargetError, TooMuchToDeleteError, UsageError
from engine.records.roots import References
from engine.repository.repository import Repository
from index.errors import CorruptIndexError, UnknownFormatError
from index.plan.collect import DeleteReason
from index.plan.commits import KeepReason, Retention, RetentionPolicy, RetentionRule, as_policy
from index.plan.plan_format import (
    PLAN_HEADER_NAME,
    PLAN_SUMMARY_NAME,
    RUN_ENDED,
    RUN_HEADER,
    AuditRecord,
    decode_audit,
    decode_lines,
    decode_plan_header,
    decode_plan_summary,
    encode_indented,
)
from index.snapshot.keys import (
    AUDIT,
    BLOBS,
    INDEXES,
    RUNS,
    RunId,
    audit_key,
    commit_key,
    make_run_id,
    run_key,
    upload_key,
)
from index.snapshot.model import NEVER_MS, Boundary, CommitPointer, Scope, WriteId
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.walker import expected_keys

LAST = Retention(keep_last=1)
LISTED_AT_MS = 1_700_000_001_000


async def keys(store: BlobStore, prefix: str = "") -> list[str]:
    return [blob.key async for blob in list_blobs(store, prefix)]


async def expiring(world: World) -> list[str]:
    there = [await world.store.inner.stat(key) for key in await keys(world.store.inner)]
    return [info.key for info in there if info is not None and info.expires_at_ms is not None]


async def audits(world: World) -> list[AuditRecord]:
    found = await keys(world.store.inner, AUDIT)
    data = [await read_blob(world.store.inner, key, size_bytes_max=10**6) for key in found]
    return [decode_audit(one, subject=key) for key, one in zip(found, data, strict=True)]


# ---------------------------------------------------------------------- refusal


async def test_a_run_that_would_delete_more_than_it_may_deletes_nothing_but_protects_and_says_so(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three")
    unsettled = await world.backup(repository, "four")
    world.store.fail("remove_ttl", unsettled.new_keys[0])
    await repository.commit(JOB, [unsettled])
    before = await keys(world.store.inner)
    world.store.requests.clear()
    with pytest.raises(TooMuchToDeleteError, match=r"may delete 20\.0%; nothing was deleted") as caught:
        await (await world.process()).collect(LAST)
    changes = {"put", "put_if_absent", "delete", "abort_unfinished"}
    assert [(o, k.split("/")[0]) for o, k in world.store.requests if o in changes] == [("put_if_absent", "audit")]
    assert [caught.value.subject] == await keys(world.store.inner, AUDIT)
    # Nobody else may do it before the store lets the newest commit expire.
    assert await expiring(world) == []
    assert sorted(await keys(world.store.inner)) == sorted([*before, *await keys(world.store.inner, AUDIT)])
    (audit,) = await audits(world)
    assert (audit.outcome, audit.boundaries, audit.deleted) == ("refused", (), ())
    assert "TooMuchToDeleteError" in audit.error
    assert sum(total.size_bytes for total in audit.planned) > 0.2 * audit.listed_bytes


async def test_a_dry_run_reports_that_it_would_be_refused(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three")
    assert (await repository.collect(LAST, dry_run=True)).refused
    assert not (await repository.collect(LAST, dry_run=True, delete_share_max=0.99)).refused


async def test_the_share_is_of_blobs_and_indexes_and_may_be_met_exactly(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    planned = await repository.collect(LAST, dry_run=True)
    share = planned.freed_bytes / planned.listed_bytes
    listed = [b.size_bytes async for b in list_blobs(world.store.inner, "") if b.key.startswith(("blobs", "indexes"))]
    assert planned.listed_bytes == sum(listed)
    with pytest.raises(TooMuchToDeleteError):
        await repository.collect(LAST, delete_share_max=share - 1e-9)
    assert (await repository.collect(LAST, delete_share_max=share)).freed_bytes == planned.freed_bytes


async def test_nothing_to_delete_is_never_too_much(world: World) -> None:
    repository = await world.process()
    assert (await repository.collect(LAST, delete_share_max=0)).deletes_count == 0
    await world.history(repository, "one")
    assert (await repository.collect(LAST, delete_share_max=0)).live_count == 3


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
async def test_a_share_that_is_none_is_refused(world: World, share: float) -> None:
    with pytest.raises(UsageError):
        await (await world.process()).collect(LAST, delete_share_max=share)


# ---------------------------------------------------------------------- many jobs


async def test_each_job_is_collected_by_its_own_rule(world: World) -> None:
    repository = await world.process()
    for job in ("flights-eu", "flights-us", "ledger"):
        await world.history(repository, "one", "two", "three", scope=Scope(job))
    policy = RetentionPolicy(
        rules=(
            RetentionRule(pattern="*-us", retention=LAST),
            RetentionRule(pattern="flights-*", retention=Retention(keep_last=2)),
        )
    )
    report = await repository.collect(policy, delete_share_max=1)
    kept = [(k.scope.job, k.number, k.reason) for k in report.kept]
    assert kept == [
        ("flights-eu", 2, KeepReason.LAST),
        ("flights-eu", 3, KeepReason.NEWEST),
        ("flights-us", 3, KeepReason.NEWEST),
        ("ledger", 1, KeepReason.UNRULED),
        ("ledger", 2, KeepReason.UNRULED),
        ("ledger", 3, KeepReason.NEWEST),
    ]
    assert set(await keys(world.store.inner)) == await expected_keys(world.store.inner, world.clock.now_ms)


# ---------------------------------------------------------------------- plans


async def planned_keys(plan: BlobStore) -> list[str]:
    lines: list[str] = []
    for key in await keys(plan):
        if key.endswith(".jsonl"):
            data = await read_blob(plan, key, size_bytes_max=10**6)
            lines += [planned.key for planned in decode_lines(data, subject=key)]
    return lines


async def test_a_dry_run_writes_its_plan_and_nothing_in_the_repository(world: World, tmp_path: Path) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await repository.name(await repository.find(JOB, version=1), "golden")
    plan = open_store(str(tmp_path / "plan"))
    before = await keys(world.store.inner)
    report = await repository.collect(LAST, dry_run=True, plan_to=plan)
    assert await keys(world.store.inner) == before
    header = decode_plan_header(await read_blob(plan, PLAN_HEADER_NAME, size_bytes_max=10**6), subject=PLAN_HEADER_NAME)
    summary = decode_plan_summary(
        await read_blob(plan, PLAN_SUMMARY_NAME, size_bytes_max=10**6), subject=PLAN_SUMMARY_NAME
    )
    lines = await planned_keys(plan)
    assert (header.run, header.repository_id, header.release) == (report.run, repository.record.id, installed_release())
    assert [(c.number, c.kept) for c in header.commits] == [(1, KeepReason.NAMED), (2, None), (3, KeepReason.NEWEST)]
    assert [(n.name, n.number, n.is_live) for n in header.names] == [("golden", 1, True)]
    assert lines == [d.key for d in report.deletes if d.key.startswith(("blobs", "indexes"))]
    assert lines == sorted(lines)
    assert (summary.lines_count, summary.size_bytes) == (len(lines), report.freed_bytes)
    assert (summary.listed_count, summary.listed_bytes) == (report.listed_count, report.listed_bytes)
    await plan.close()


async def test_a_plan_is_written_for_a_refused_run_too(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    plan = MemoryStore()
    with pytest.raises(TooMuchToDeleteError):
        await repository.collect(LAST, plan_to=plan)
    assert len(await planned_keys(plan)) > 1


async def test_a_plan_has_a_place_of_its_own(world: World, tmp_path: Path) -> None:
    url = str(tmp_path / "repository")
    async with await Repository.init(url) as repository:
        for place, message in ((f"{url}/plan", "overlaps the repository"), (str(tmp_path / "used"), "is not empty")):
            plan = open_store(place)
            if "used" in place:
                await plan.put("something", BytesBody(b""))
            with pytest.raises(TargetError, match=message):
                await repository.collect(LAST, dry_run=True, plan_to=plan)
            await plan.close()


async def test_a_run_that_is_overtaken_replaces_its_plan(world: World) -> None:
    repository, writer, other = await world.process(), await world.process(), await world.process()
    await world.old_history(repository, "one", "two")
    plan = MemoryStore()

    async def overtake() -> None:
        await world.old_history(writer, "three")
        await other.collect(LAST, delete_share_max=1)

    world.store.fail("remove_ttl", "")
    unsettled = await world.backup(repository, "unsettled")
    await repository.commit(JOB, [unsettled])
    # After the sweep, when the newest commit is settled.
    world.store.before("remove_ttl", "", overtake)
    report = await (await world.process()).collect(LAST, plan_to=plan, delete_share_max=1)
    lines = await planned_keys(plan)
    header = decode_plan_header(await read_blob(plan, PLAN_HEADER_NAME, size_bytes_max=10**6), subject=PLAN_HEADER_NAME)
    assert [k.number for k in report.kept] == [4]
    assert [c.number for c in header.commits] == [4]
    assert lines == [d.key for d in report.deletes if d.key.startswith(("blobs", "indexes"))]


async def test_lines_of_an_earlier_plan_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.collect.backend.LINES_PER_FILE", 2)
    store, plan = MemoryStore(), MemoryStore()
    uploads = [upload_key(BLOBS, JOB, "0" * 20, n) for n in range(5)]
    backend = InProcessBackend(store, plan_to=plan)
    for planned in (uploads, uploads[1:4], [], uploads):
        await store.delete(uploads)
        for key in planned:
            await store.put(key, BytesBody(b"x"))
        await backend.list_uploads(make_run_id(0, "a" * 20), NEVER_MS)
        await backend.sweep(References(neighbours=(), optional=frozenset()), NEVER_MS, TTL_MS)
        assert await planned_keys(plan) == sorted(planned)


# ---------------------------------------------------------------------- evidence


async def test_each_run_leaves_a_record_of_what_it_did(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await repository.collect(LAST, dry_run=True)
    assert await audits(world) == []
    report = await repository.collect(LAST, delete_share_max=1)
    (audit,) = await audits(world)
    assert await keys(world.store.inner, AUDIT) == [audit_key(report.run)]
    assert (audit.run, audit.outcome, audit.error, audit.release) == (report.run, "done", "", installed_release())
    assert audit.retention.choose("job") == LAST
    assert [(s.scope, s.newest, s.kept_count) for s in audit.scopes] == [(JOB, 3, 1)]
    assert [(b.scope, b.number) for b in audit.boundaries] == [(JOB, 2)]
    assert audit.deleted == report.totals
    assert decode_audit(encode_indented(audit), subject="audit") == audit


@pytest.mark.parametrize(
    "operation, key",
    [("list_page", "pins/"), ("get", "indexes/"), ("put_if_absent", ".boundary"), ("delete", "blobs/")],
)
async def test_a_run_that_fails_leaves_a_record_too(world: World, operation: str, key: str) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    world.store.fail(operation, key, StoreUnavailableError("no answer", operation=operation, key=key))
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1)
    (audit,) = await audits(world)
    assert audit.outcome == "failed"
    assert "StoreUnavailableError" in audit.error
    gone = {total.reason for total in audit.deleted}
    assert gone == ({DeleteReason.CLOSED_COMMIT, DeleteReason.UNREACHABLE_UPLOAD} if operation == "delete" else set())
    # The pack of the first commit is alive; of its blob there was no answer.
    assert (audit.failed_count, audit.unknown_count) == (0, 1 if operation == "delete" else 0)


async def test_what_is_gone_when_a_deletion_fails_is_reported_and_of_what_nobody_knows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.collect.backend.DELETE_BATCH_MAX", 1)
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three", "four", "five")
    shown: list[tuple[dict[DeleteReason, int], int, int]] = []
    for key in (commit_key(JOB, 1), "blobs/"):
        world.store.fail("delete", key)
        with pytest.raises(StoreUnavailableError):
            await repository.collect(LAST, delete_share_max=1)
        audit = (await audits(world))[-1]
        shown.append(({t.reason: t.count for t in audit.deleted}, audit.unknown_count, audit.failed_count))
        world.clock.advance(1)
    # The very first one: nothing is gone. Then indexes are, and no blob; of the first one of each nobody knows.
    assert shown == [({}, 1, 3 + 4 + 7), ({DeleteReason.CLOSED_COMMIT: 4, DeleteReason.UNREACHABLE_UPLOAD: 4}, 1, 6)]


class _LostBackend(InProcessBackend):
    """As tasks that are lost: nobody knows what they did below `blobs/`."""

    @override
    def so_far(self, prefix: str) -> Deleted:
        if prefix == INDEXES:
            return super().so_far(prefix)
        return Deleted(totals=(), unknown_count=sum(p.key.startswith(prefix) for p in self._planned))


async def test_what_lost_tasks_did_is_reported_as_unknown(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three")
    world.store.fail("delete", "blobs/")
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1, backend=_LostBackend(world.store))
    (audit,) = await audits(world)
    assert {t.reason: t.count for t in audit.deleted} == {
        DeleteReason.CLOSED_COMMIT: 2,
        DeleteReason.UNREACHABLE_UPLOAD: 2,
    }
    # Blobs of two commits, and a pack.
    assert (audit.unknown_count, audit.failed_count) == (3, 0)


async def test_of_lost_tasks_nobody_knows_of_their_own_prefix_only(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three")
    world.store.fail("delete", INDEXES)
    with pytest.raises(StoreUnavailableError):
        await repository.collect(LAST, delete_share_max=1, backend=_LostBackend(world.store))
    (audit,) = await audits(world)
    assert (audit.unknown_count, audit.failed_count) == (2, 3)
    # Blobs were not begun: all of them are there.
    assert [key.split("/")[0] for key in audit.failed] == ["blobs"] * 3


async def test_a_record_says_of_a_store_s_error_what_was_asked_and_not_what_it_answered(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    world.store.fail("list_page", "pins/", AccessDeniedError("account 1234", operation="list_page", key="pins/"))
    with pytest.raises(AccessDeniedError):
        await repository.collect(LAST)
    (audit,) = await audits(world)
    assert audit.error == "AccessDeniedError: list_page pins/"


async def test_of_a_long_boundary_the_newest_records_are_reported(world: World) -> None:
    repository = await world.process()
    kept = tuple(CommitPointer(number, WriteId(f"{number:032x}")) for number in range(1, POINTERS_LISTED_MAX + 3))
    rules = Rules(
        run=make_run_id(0, "a" * 20),
        repository=repository.record,
        policy=as_policy(LAST),
        now_ms=0,
        options=CollectOptions(delete_share_max=1),
    )
    audit = Audit(rules=rules, boundaries=(Boundary(scope=JOB, number=99, kept=kept),))
    (listed,) = make_audit(audit, "done", seconds=0).boundaries
    assert (listed.kept_count, listed.kept) == (len(kept), kept[2:])


class _Resuming(InProcessBackend):
    """Goes on with a listing of before the newest commit."""

    @override
    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        self._uploads = tuple(u for u in self._uploads if u.created_at_ms < LISTED_AT_MS)
        listing = await super().list_uploads(run, now_ms)
        self._uploads = tuple(u for u in self._uploads if u.created_at_ms < LISTED_AT_MS)
        return replace(listing, listed_at_ms=LISTED_AT_MS, resumed_from=make_run_id(LISTED_AT_MS, "a" * 20))


async def test_a_newest_commit_that_an_old_listing_lacks_is_settled(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    assert world.clock.now_ms == LISTED_AT_MS
    unsettled = await world.backup(repository, "two")
    world.store.fail("remove_ttl", unsettled.new_keys[0])
    await repository.commit(JOB, [unsettled])
    world.clock.advance(1000)
    await (await world.process()).collect(LAST, delete_share_max=1, backend=_Resuming(world.store))
    assert await expiring(world) == []
    (audit,) = await audits(world)
    assert audit.resumed_from == make_run_id(LISTED_AT_MS, "a" * 20)


class _StuckBackend(InProcessBackend):
    @override
    async def end(self) -> None:
        raise StoreUnavailableError("no answer", operation="delete", key=RUNS)


async def test_a_run_that_was_recorded_as_done_is_done_though_its_objects_stay(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    report = await repository.collect(LAST, delete_share_max=1, backend=_StuckBackend(world.store))
    assert report.deletes_count
    assert "no answer" in report.run_left
    assert (await audits(world))[0].outcome == "done"


async def test_what_only_waited_is_waiting_though_the_second_reading_excludes_it(world: World) -> None:
    # As the tasks of Spark count: what left the plan is excluded, and nothing else.
    repository, other = await world.process(), await world.process()
    await world.old_history(repository, "one", "two")

    async def commit() -> None:
        world.store.before("list_page", "pins/", late)

    async def late() -> None:
        await other.commit(JOB, [uploaded])

    uploaded = await world.backup(other, "three")
    world.store.after("put_if_absent", ".boundary", commit)
    report = await repository.collect(LAST, delete_share_max=1)
    assert (report.excluded_count, report.waiting_count) == (0, len(uploaded.new_keys))


async def test_a_record_that_cannot_be_written_is_reported_and_stops_nothing(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    world.store.fail("put_if_absent", AUDIT, AccessDeniedError("denied", operation="put", key=AUDIT))
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.deletes_count
    assert "denied" in report.audit_missing
    world.store.fail("list_page", "pins/")
    world.store.fail("put_if_absent", AUDIT, AccessDeniedError("denied", operation="put", key=AUDIT))
    with pytest.raises(StoreUnavailableError) as caught:
        await repository.collect(LAST)
    assert "no audit record" in caught.value.__notes__[0]


async def test_a_cancelled_run_writes_nothing_more(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    world.store.before("delete", "indexes/", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await repository.collect(LAST, delete_share_max=1)
    assert await audits(world) == []


async def test_what_is_no_audit_record_is_refused() -> None:
    with pytest.raises(CorruptIndexError):
        decode_audit(b"{}", subject="audit")


async def test_an_audit_record_of_a_newer_tidemark_is_refused_as_such(world: World) -> None:
    await (await world.process()).collect(LAST)
    (audit,) = await audits(world)
    with pytest.raises(UnknownFormatError):
        decode_audit(encode_indented(audit).replace(b'"schema": 1', b'"schema": 2'), subject="audit")


async def test_only_the_newest_thousand_records_are_kept(world: World) -> None:
    repository = await world.process()
    for number in range(AUDITS_KEPT_MAX + 3):
        await world.store.inner.put(audit_key(make_run_id(number, "0" * 20)), BytesBody(b"{}"))
    await world.store.inner.put(f"{AUDIT}notes", BytesBody(b"of somebody else"))
    report = await repository.collect(LAST)
    left = await keys(world.store.inner, AUDIT)
    assert len(left) == AUDITS_KEPT_MAX + 1
    assert left[0] == audit_key(make_run_id(4, "0" * 20))
    assert left[-2:] == [audit_key(report.run), f"{AUDIT}notes"]
    assert [(t.reason, t.count) for t in report.totals] == [(DeleteReason.OLD_AUDIT, 4)]


# ---------------------------------------------------------------------- what old runs have left


async def leave_run(world: World, began_at_ms: int, *names: str) -> RunId:
    run = make_run_id(began_at_ms, "b" * 20)
    for name in names:
        await world.store.inner.put(run_key(run, name), BytesBody(b"x"))
    return run


async def test_runs_that_began_a_ttl_ago_go_header_last_and_younger_ones_stay(world: World) -> None:
    repository = await world.process()
    old = await leave_run(world, world.clock.now_ms - TTL_MS, "run", "a", "z")
    young = await leave_run(world, world.clock.now_ms - TTL_MS + 1, "run", "a")
    await world.store.inner.put(f"{RUNS}notes", BytesBody(b"of somebody else"))
    assert (await repository.collect(LAST, dry_run=True)).deletes_count == 3
    world.store.requests.clear()
    report = await repository.collect(LAST)
    deleted = [key for operation, key in world.store.requests if operation == "delete"]
    assert deleted == [" ".join(run_key(old, name) for name in ("a", "z")), run_key(old, "run")]
    assert await keys(world.store.inner, RUNS) == [run_key(young, "a"), run_key(young, "run"), f"{RUNS}notes"]
    assert [(t.reason, t.count) for t in report.totals] == [(DeleteReason.LEFT_RUN, 3)]


async def test_a_run_that_has_ended_is_not_resumed_and_what_is_left_of_it_goes(world: World) -> None:
    repository = await world.process()
    store, now_ms = world.store.inner, world.clock.now_ms
    begun = (await resume_run(store, repository.record, make_run_id(now_ms, "c" * 20), now_ms, installed_release())).id
    await leave_run(world, now_ms, "unrelated")
    await store.put(run_key(begun, "plan-of-yesterday"), BytesBody(b"x"))
    world.store.fail("delete", RUNS)
    with pytest.raises(StoreUnavailableError):
        await end_run(world.store, begun)
    again = make_run_id(now_ms, "d" * 20)
    assert (await resume_run(store, repository.record, again, now_ms, installed_release())).id == again
    world.store.requests.clear()
    await repository.collect(LAST)
    deleted = [key for operation, key in world.store.requests if operation == "delete"]
    assert deleted == [run_key(begun, name) for name in ("plan-of-yesterday", RUN_HEADER, RUN_ENDED)]


@pytest.mark.parametrize(
    "stuck, left",
    [("plan", ["plan", RUN_HEADER, RUN_ENDED]), (RUN_HEADER, [RUN_HEADER, RUN_ENDED]), (RUN_ENDED, [RUN_ENDED])],
)
async def test_of_an_ended_run_nothing_goes_before_what_has_to_go_first(
    world: World, stuck: str, left: list[str]
) -> None:
    repository, now_ms = await world.process(), world.clock.now_ms
    run = await leave_run(world, now_ms, "plan", RUN_HEADER, RUN_ENDED)
    report = await collect(_Refusing(world.store, run_key(run, stuck)), repository.record, LAST)
    assert report.failed == tuple(run_key(run, name) for name in left)
    assert report.failed_count == len(left)
    assert sorted(report.failed) == await keys(world.store.inner, RUNS)
    again = make_run_id(now_ms, "d" * 20)
    assert (await resume_run(world.store, repository.record, again, now_ms, installed_release())).id == again
    assert (await repository.collect(LAST)).failed == ()


async def test_an_audit_record_that_stays_keeps_no_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.collect.runs.AUDITS_KEPT_MAX", 1)
    repository = await world.process()
    await leave_run(world, world.clock.now_ms, "plan", RUN_HEADER, RUN_ENDED)
    old = audit_key(make_run_id(1, "0" * 20))
    await world.store.inner.put(old, BytesBody(b"{}"))
    report = await collect(_Refusing(world.store, AUDIT), repository.record, LAST)
    assert report.failed == (old,)
    assert await keys(world.store.inner, RUNS) == []


# ---------------------------------------------------------------------- what is reported of many


async def test_of_many_keys_some_are_listed_and_all_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("report", "backend"):
        monkeypatch.setattr(f"engine.collect.{module}.KEYS_LISTED_MAX", 2)
    repository = await world.process()
    await world.old_history(repository, *(f"text {n}" for n in range(6)))
    planned = await repository.collect(LAST, dry_run=True)
    report = await repository.collect(LAST, delete_share_max=1)
    assert planned.deletes == report.deletes
    assert [d.key.split("/")[0] for d in report.deletes] == ["log", "log", "blobs", "blobs"]
    # Records; indexes, blobs, and packs but the first.
    assert report.deletes_count == planned.deletes_count == 5 + 5 + 5 + 4
    assert report.freed_bytes == planned.freed_bytes > 400_000


class _Refusing(ForwardingStore):
    """Will not delete what begins so."""

    def __init__(self, inner: BlobStore, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = prefix

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        refused = tuple(DeleteFailure(key=key, reason="locked") for key in keys if key.startswith(self._prefix))
        return (*refused, *await super().delete([k for k in keys if not k.startswith(self._prefix)]))


class _Backend(InProcessBackend):
    """Return whether the run has ended, after its record was written."""

    ended = False

    @override
    async def end(self) -> None:
        self.ended = bool(await keys(self._store, AUDIT))


@pytest.mark.parametrize(
    "listed_max, failed", [(1, ["indexes"]), (4, ["indexes"] * 3 + ["blobs"]), (1000, ["indexes"] * 3 + ["blobs"] * 5)]
)
async def test_what_the_store_would_not_delete_is_counted_and_no_later_prefix_is_begun(
    world: World, monkeypatch: pytest.MonkeyPatch, listed_max: int, failed: list[str]
) -> None:
    monkeypatch.setattr("engine.collect.backend.KEYS_LISTED_MAX", listed_max)
    repository = await world.process()
    await world.old_history(repository, "one", "two", "three", "four")
    backend = _Backend(_Refusing(world.store, INDEXES))
    report = await repository.collect(LAST, delete_share_max=1, backend=backend)
    assert not backend.ended
    assert report.failed_count == 3 + 3 + 2
    assert [key.split("/")[0] for key in report.failed] == failed
    assert [(t.reason, t.count) for t in report.totals] == [(DeleteReason.CLOSED_COMMIT, 3)]
    assert not [d for d in report.deletes if not d.key.startswith("log/")]
    (audit,) = await audits(world)
    assert (audit.outcome, audit.failed_count) == ("partly", 8)
    backend = _Backend(world.store)
    again = await repository.collect(LAST, delete_share_max=1, backend=backend)
    assert backend.ended
    assert (again.failed_count, again.deletes_count) == (0, 8)
