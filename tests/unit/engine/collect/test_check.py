"""Design 0006, P6: plans that are right, plans that are wrong in one way each, and repositories that have moved on."""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from unittest import mock

import msgspec
import pytest

from blobstore.base import BlobStore, BytesBody, list_blobs, read_blob
from blobstore.memory import MemoryStore
from engine.collect import check as check_module
from engine.collect.check import PlanCheck, WrongKind, verify_plan
from engine.errors import DamagedError, UsageError
from engine.records.indexes import StoredSnapshot, read_stored_snapshot
from engine.repository.repository import Repository
from index.errors import PlanFileError, UnknownFormatError
from index.plan.collect import DeleteReason, PlannedUpload, Upload, sum_totals
from index.plan.commits import Commit, KeepReason, Retention, RetentionPolicy, RetentionRule, as_policy, choose_kept
from index.plan.plan_format import (
    LINES_SUFFIX,
    PLAN_HEADER_NAME,
    PLAN_SUMMARY_NAME,
    PlanHeader,
    PlanSummary,
    decode_lines,
    decode_plan_header,
    decode_plan_summary,
    encode_indented,
    encode_line,
)
from index.snapshot.keys import BLOBS, make_run_id, upload_key
from index.snapshot.model import CommitPointer, CommitRecord, IndexReference, Scope, WriteId
from tests.unit.engine.conftest import JOB, TTL_MS, World

OTHER = Scope("other")
KEEP_TWO = Retention(keep_last=2)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """On a store that shows TTLs in lists, or the one that a test asks for."""
    chosen: World = request.getfixturevalue(getattr(request, "param", "world"))
    return chosen


BOTH_STORES = pytest.mark.parametrize(
    "world", ["world", "opaque_world"], indirect=True, ids=["lists show TTLs", "lists show none"]
)


class Planned:
    """A repository with a bit of everything, and the plan of a dry run."""

    def __init__(self, world: World, repository: Repository) -> None:
        self.world = world
        self.repository = repository
        self.plan = MemoryStore(clock=world.clock)

    async def make(self, retention: Retention | RetentionPolicy = KEEP_TWO) -> None:
        await self.repository.collect(retention, dry_run=True, plan_to=self.plan)

    async def check(self) -> PlanCheck:
        return await verify_plan(self.world.store, self.repository.record, self.plan)

    async def lines(self) -> list[PlannedUpload]:
        names = [blob.key async for blob in list_blobs(self.plan, "") if blob.key.endswith(LINES_SUFFIX)]
        parts = [await read_blob(self.plan, name, size_bytes_max=1 << 20) for name in names]
        return [line for part in parts for line in decode_lines(part, subject="plan")]

    async def header(self) -> PlanHeader:
        return decode_plan_header(await read_blob(self.plan, PLAN_HEADER_NAME, size_bytes_max=1 << 20), subject="plan")

    async def summary(self) -> PlanSummary:
        return decode_plan_summary(
            await read_blob(self.plan, PLAN_SUMMARY_NAME, size_bytes_max=1 << 20), subject="plan"
        )

    async def rewrite(self, lines: list[PlannedUpload]) -> None:
        """Replace the lines, and the totals so that they agree."""
        names = [blob.key async for blob in list_blobs(self.plan, "") if blob.key.endswith(LINES_SUFFIX)]
        await self.plan.delete(names)
        await self.plan.put(f"forged{LINES_SUFFIX}", BytesBody(b"".join(encode_line(line) for line in lines)))
        summary = msgspec.structs.replace(
            await self.summary(),
            lines_count=len(lines),
            size_bytes=sum(line.size_bytes for line in lines),
            totals=sum_totals(lines),
        )
        await self.plan.put(PLAN_SUMMARY_NAME, BytesBody(encode_indented(summary)))

    async def replace_header(self, **fields: object) -> None:
        header = msgspec.structs.replace(await self.header(), **fields)
        await self.plan.put(PLAN_HEADER_NAME, BytesBody(encode_indented(header)))


@pytest.fixture
async def planned(world: World) -> Planned:
    """Five commits, a name, a fork, a pin, an expired upload, a young one; all but the newest two commits may go."""
    repository = await world.process()
    expired = await world.backup(repository, "never committed")
    assert expired.new_keys
    world.clock.advance(TTL_MS + 1)
    for text in ("one", "two", "three", "four", "five"):
        await repository.commit(JOB, [await world.backup(repository, text)])
        world.clock.advance(1000)
    await repository.name(await repository.find(JOB, version=1), "kept")
    await repository.fork(await repository.find(JOB, version=2), OTHER)
    world.clock.advance(TTL_MS)
    await world.backup(repository, "young")
    world.clock.advance(1000)
    made = Planned(world, repository)
    await made.make()
    return made


@BOTH_STORES
async def test_a_plan_of_a_dry_run_is_right_and_complete(planned: Planned) -> None:
    check = await planned.check()
    assert (check.is_right, check.is_complete, check.contradictions, check.changed) == (True, True, (), ())
    assert check.planned_count == len(await planned.lines()) > 0
    assert (check.later_count, check.gone_count, check.rescued_count) == (0, 0, 0)
    assert check.waiting_count > 0


@pytest.mark.parametrize(
    "retention",
    [
        Retention(keep_last=1, keep_named=False),
        Retention(keep_since_ms=1_700_003_602_500),
        Retention(keep_last=1, keep_since_ms=1_700_003_603_001),
        Retention(keep_hourly=1),
        Retention(keep_daily=2, keep_monthly=1),
        RetentionPolicy(rules=(RetentionRule(pattern="oth*", retention=Retention(keep_last=1)),)),
        RetentionPolicy(
            rules=(
                RetentionRule(pattern="j*", retention=None),
                RetentionRule(pattern="*", retention=Retention(keep_last=1)),
            )
        ),
    ],
)
async def test_every_retention_is_understood_alike(planned: Planned, retention: Retention | RetentionPolicy) -> None:
    planned.plan = MemoryStore(clock=planned.world.clock)
    await planned.make(retention)
    check = await planned.check()
    assert (check.is_right, check.is_complete, check.contradictions) == (True, True, ())


async def test_the_repository_is_only_read(planned: Planned) -> None:
    planned.world.store.requests.clear()
    await planned.check()
    assert {operation for operation, _ in planned.world.store.requests} <= {"get", "list_page", "stat"}


# ---------------------------------------------------------------------- plans that are wrong


async def reachable_line(planned: Planned) -> PlannedUpload:
    """A line for the newest index."""
    reference = (await planned.repository.find(JOB)).record.stores[0].index
    info = await planned.world.store.inner.stat(reference.key)
    assert info is not None
    return PlannedUpload(
        reference.key, DeleteReason.UNREACHABLE_UPLOAD, info.size_bytes, created_at_ms=info.created_at_ms
    )


async def test_a_reachable_key_is_wrong(planned: Planned) -> None:
    line = await reachable_line(planned)
    await planned.rewrite([*await planned.lines(), line])
    check = await planned.check()
    assert [(w.key, w.kind) for w in check.wrong] == [(line.key, WrongKind.REACHABLE)]
    assert (check.is_right, check.is_complete) == (False, True)


async def test_what_only_a_name_or_a_fork_keeps_is_wrong_too(planned: Planned) -> None:
    lines = await planned.lines()
    keys = {line.key for line in lines}
    forged = []
    for version in (1, 2):
        index = (await planned.repository.find(JOB, version=version)).record.stores[0].index
        assert index.key not in keys
        forged.append(msgspec.structs.replace(lines[0], key=index.key, size_bytes=index.size_bytes))
    await planned.rewrite([*lines, *forged])
    assert (await planned.check()).wrong_count == 2


@BOTH_STORES
async def test_an_upload_younger_than_the_ttl_is_wrong(planned: Planned) -> None:
    young = await planned.world.backup(planned.repository, "another")
    info = await planned.world.store.inner.stat(young.new_keys[0])
    assert info is not None
    line = PlannedUpload(info.key, DeleteReason.UNREACHABLE_UPLOAD, info.size_bytes, created_at_ms=info.created_at_ms)
    await planned.rewrite([*await planned.lines(), line])
    assert [(w.key, w.kind) for w in (await planned.check()).wrong] == [(line.key, WrongKind.UNEXPIRED)]


@BOTH_STORES
async def test_an_eligible_key_that_the_plan_lacks_is_missed(planned: Planned) -> None:
    lines = await planned.lines()
    await planned.rewrite(lines[1:])
    check = await planned.check()
    assert (check.missed, check.missed_bytes) == ((lines[0].key,), lines[0].size_bytes)
    assert (check.is_right, check.is_complete) == (True, False)


Forge = Callable[[PlannedUpload], PlannedUpload]


@pytest.mark.parametrize(
    "forge, kind",
    [
        (lambda line: msgspec.structs.replace(line, size_bytes=line.size_bytes + 1), WrongKind.SIZE),
        (lambda line: msgspec.structs.replace(line, created_at_ms=line.created_at_ms - 1), WrongKind.TIMES),
    ],
    ids=["size", "creation"],
)
async def test_a_line_that_says_something_else_than_the_store_is_wrong(
    planned: Planned, forge: Forge, kind: WrongKind
) -> None:
    first, *rest = await planned.lines()
    await planned.rewrite([forge(first), *rest])
    check = await planned.check()
    assert (first.key, kind) in {(w.key, w.kind) for w in check.wrong}


@pytest.mark.parametrize("size_bytes", [None, 0], ids=["the same", "of another size"])
async def test_a_line_that_is_there_twice_is_reported(planned: Planned, size_bytes: int | None) -> None:
    lines = await planned.lines()
    again = lines[-1] if size_bytes is None else msgspec.structs.replace(lines[-1], size_bytes=size_bytes)
    await planned.rewrite([*lines, again])
    check = await planned.check()
    assert check.contradictions == ("1 lines repeat another one",)
    assert not check.is_right


async def test_totals_that_do_not_add_up_are_reported(planned: Planned) -> None:
    summary = msgspec.structs.replace(await planned.summary(), lines_count=1, size_bytes=2)
    await planned.plan.put(PLAN_SUMMARY_NAME, BytesBody(encode_indented(summary)))
    assert len((await planned.check()).contradictions) == 2


async def test_totals_of_nothing_are_reported(planned: Planned) -> None:
    forged = msgspec.structs.replace(await planned.summary(), totals=())
    await planned.plan.put(PLAN_SUMMARY_NAME, BytesBody(encode_indented(forged)))
    check = await planned.check()
    assert check.contradictions
    assert not check.is_right


async def test_a_plan_that_moves_its_clock_on_does_not_make_an_upload_older(planned: Planned) -> None:
    """The header's time decides what is old enough: it must be one that the store has reached."""
    later_ms = planned.world.clock.now_ms + 10 * TTL_MS
    young = await planned.world.backup(planned.repository, "another")
    forged = []
    for key in young.new_keys:
        info = await planned.world.store.inner.stat(key)
        assert info is not None
        line = PlannedUpload(key, DeleteReason.UNREACHABLE_UPLOAD, info.size_bytes, created_at_ms=info.created_at_ms)
        forged.append(line)
    await planned.rewrite([*await planned.lines(), *forged])
    await planned.replace_header(now_ms=later_ms, listed_at_ms=later_ms, run=make_run_id(later_ms, "0" * 20))
    check = await planned.check()
    assert any("later than it is now" in text for text in check.contradictions)
    assert {w.key for w in check.wrong if w.kind is WrongKind.UNEXPIRED} == set(young.new_keys)


async def test_a_plan_of_another_time_than_its_run_is_reported(planned: Planned) -> None:
    header = await planned.header()
    await planned.replace_header(now_ms=header.now_ms - 1, listed_at_ms=header.now_ms - 1)
    assert "the plan was made at another time than its run began" in (await planned.check()).contradictions
    await planned.replace_header(now_ms=header.now_ms, listed_at_ms=header.now_ms - TTL_MS - 1)
    assert "the plan's listing is older than a TTL" in (await planned.check()).contradictions


def seven_days(now_ms: int) -> RetentionPolicy:
    return as_policy(Retention(keep_last=2, keep_since_ms=now_ms - 7 * 86_400_000))


async def test_what_is_kept_is_compared_with_what_is_meant(planned: Planned) -> None:
    async def findings_of(meant: Callable[[int], RetentionPolicy]) -> tuple[str, ...]:
        check = await verify_plan(planned.world.store, planned.repository.record, planned.plan, meant=meant)
        assert check.retention_compared
        return check.contradictions

    assert not (await planned.check()).retention_compared
    assert await findings_of(lambda _: as_policy(KEEP_TWO)) == ()
    assert "rule 1 of retention" in (await findings_of(lambda _: as_policy(Retention(keep_last=3))))[0]
    assert await findings_of(lambda _: RetentionPolicy(rules=())) == (
        "the plan has 1 rules of retention, and 0 are meant",
    )
    assert len(await findings_of(seven_days)) == 1
    planned.plan = MemoryStore(clock=planned.world.clock)
    # As worked out a while before the run began.
    await planned.make(seven_days(planned.world.clock.now_ms - 1000))
    assert await findings_of(seven_days) == ()
    assert len(await findings_of(lambda now_ms: seven_days(now_ms - 86_400_000))) == 1
    # As where the clock may have stepped (D11).
    daily = as_policy(Retention(keep_daily=7))
    planned.plan = MemoryStore(clock=planned.world.clock)
    await planned.make(daily.ageless())
    assert await findings_of(lambda _: daily) == ()
    assert len(await findings_of(lambda _: as_policy(Retention(keep_daily=7, keep_last=2)))) == 1


async def test_a_root_that_the_plan_lacks_is_reported(planned: Planned) -> None:
    header = await planned.header()
    await planned.replace_header(commits=tuple(c for c in header.commits if c.scope != OTHER))
    assert (await planned.check()).contradictions == ("commit 1 of other was there, and is not among the roots",)


async def test_a_name_that_the_plan_lacks_is_reported(planned: Planned) -> None:
    await planned.replace_header(names=())
    check = await planned.check()
    assert check.contradictions == ("the name kept of job was there, and is not among the roots",)


async def test_a_commit_that_is_closed_against_the_retention_is_reported(planned: Planned) -> None:
    header = await planned.header()
    forged = tuple(
        msgspec.structs.replace(c, kept=None if c.kept is KeepReason.LAST else c.kept) for c in header.commits
    )
    assert forged != header.commits
    await planned.replace_header(commits=forged)
    check = await planned.check()
    assert check.contradictions == ("commit 4 of job is kept by the retention, and the plan says otherwise",)


async def test_another_retention_than_the_plan_was_made_with_is_reported(planned: Planned) -> None:
    policy = RetentionPolicy(rules=(RetentionRule(pattern="*", retention=Retention(keep_last=1)),))
    await planned.replace_header(retention=policy)
    check = await planned.check()
    assert not check.is_right
    assert check.missed_count > 0


async def test_a_commit_of_another_time_is_reported(planned: Planned) -> None:
    header = await planned.header()
    first, *rest = header.commits
    later = msgspec.structs.replace(first, committed_at_ms=first.committed_at_ms + 1)
    await planned.replace_header(commits=(later, *rest))
    assert any("another time" in text for text in (await planned.check()).contradictions)


async def test_a_plan_of_another_repository_is_refused(planned: Planned) -> None:
    await planned.replace_header(repository_id="another")
    with pytest.raises(UsageError):
        await planned.check()


# ---------------------------------------------------------------------- planners that are wrong


async def test_a_planner_that_forgets_the_bases_of_deltas_is_found_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.records.indexes.WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr("engine.records.indexes.DELTA_GAIN_MIN", 0)
    repository = await world.process()
    for text in ("one", "two", "three"):
        await repository.commit(JOB, [await world.backup(repository, text)])
        world.clock.advance(TTL_MS)
    sound = Planned(world, repository)
    await sound.make(Retention(keep_last=1))
    assert (await sound.check()).is_right

    async def without_bases(store: BlobStore, reference: IndexReference) -> StoredSnapshot:
        return msgspec.structs.replace(await read_stored_snapshot(store, reference), chain=(reference,))

    monkeypatch.setattr("engine.records.roots.read_stored_snapshot", without_bases)
    faulty = Planned(world, repository)
    await faulty.make(Retention(keep_last=1))
    check = await faulty.check()
    assert {wrong.kind for wrong in check.wrong} == {WrongKind.REACHABLE}
    assert check.wrong_count == 2


async def test_a_planner_that_forgets_the_blobs_of_files_is_found_out(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever of the walk over an index is broken: the check has its own.
    monkeypatch.setattr("index.snapshot.contents.files_of", lambda directory: iter(()))
    monkeypatch.setattr("engine.records.indexes.blob_keys", lambda index: frozenset())
    planned.plan = MemoryStore(clock=planned.world.clock)
    await planned.make()
    check = await planned.check()
    assert {wrong.kind for wrong in check.wrong} == {WrongKind.REACHABLE}
    assert all(wrong.key.startswith("blobs/") for wrong in check.wrong)


async def test_a_planner_that_keeps_too_few_commits_is_found_out(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest_alone(
        commits: Sequence[Commit], retention: Retention | None, named: object = ()
    ) -> dict[CommitPointer, KeepReason]:
        del retention, named
        return {commit.pointer: KeepReason.NEWEST for commit in commits[-1:]}

    monkeypatch.setattr("index.plan.collect.choose_kept", newest_alone)
    planned.plan = MemoryStore(clock=planned.world.clock)
    await planned.make()
    check = await planned.check()
    assert WrongKind.REACHABLE in {wrong.kind for wrong in check.wrong}
    assert "commit 4 of job is kept by the retention, and the plan says otherwise" in check.contradictions


async def test_a_planner_that_takes_what_has_not_expired_is_found_out(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything(uploads: Iterable[Upload], *_: object) -> tuple[PlannedUpload, ...]:
        planned = (
            PlannedUpload(u.key, DeleteReason.UNREACHABLE_UPLOAD, u.size_bytes, created_at_ms=u.created_at_ms)
            for u in uploads
        )
        return tuple(planned)

    monkeypatch.setattr("index.plan.collect.choose_uploads", everything)
    planned.plan = MemoryStore(clock=planned.world.clock)
    await planned.make()
    assert WrongKind.UNEXPIRED in {wrong.kind for wrong in (await planned.check()).wrong}


# ---------------------------------------------------------------------- hostile files


def line_of(key: str, *, created_at_ms: int = 1) -> bytes:
    fields = {"key": key, "reason": "unreachable_upload", "size_bytes": 1, "created_at_ms": created_at_ms}
    return msgspec.json.encode(fields) + b"\n"


@pytest.mark.parametrize("name", [PLAN_HEADER_NAME, PLAN_SUMMARY_NAME])
async def test_a_plan_without_its_ends_is_none(planned: Planned, name: str) -> None:
    await planned.plan.delete([name])
    with pytest.raises(PlanFileError):
        await planned.check()


@pytest.mark.parametrize("name", [PLAN_HEADER_NAME, PLAN_SUMMARY_NAME])
@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b"null", b'{"schema": 1}', b'{"schema": "1"}']
)
async def test_a_header_that_is_none_is_refused(planned: Planned, name: str, data: bytes) -> None:
    await planned.plan.put(name, BytesBody(data))
    with pytest.raises(PlanFileError):
        await planned.check()


async def test_totals_below_zero_are_refused(planned: Planned) -> None:
    summary = await planned.summary()
    below = (msgspec.structs.replace(summary.totals[0], count=-1), *summary.totals[1:])
    for fields in ({"totals": below}, {"waiting_bytes": -1}):
        await planned.plan.put(
            PLAN_SUMMARY_NAME, BytesBody(encode_indented(msgspec.structs.replace(summary, **fields)))
        )
        with pytest.raises(PlanFileError):
            await planned.check()


async def test_a_header_of_a_newer_release_is_refused(planned: Planned) -> None:
    await planned.plan.put(PLAN_HEADER_NAME, BytesBody(b'{"schema": 2}'))
    with pytest.raises(UnknownFormatError):
        await planned.check()


async def test_a_header_with_a_retention_that_keeps_nothing_is_refused(planned: Planned) -> None:
    data = await read_blob(planned.plan, PLAN_HEADER_NAME, size_bytes_max=1 << 20)
    await planned.plan.put(PLAN_HEADER_NAME, BytesBody(data.replace(b'"keep_last": 2', b'"keep_last": 0')))
    with pytest.raises(PlanFileError):
        await planned.check()


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"no json\n",
        b"{}\n",
        line_of("../../etc/passwd"),
        line_of("log/job/00000000000000000001.commit"),
        line_of("blobs/zz/job/00000000000000000000-000001"),
        line_of(upload_key(BLOBS, JOB, "0" * 20, 3), created_at_ms=2**63),
        b"[" * 5000 + b"\n",
        b'"' + b"a" * 5000 + b'"\n',
        b'{"cut": "short"',
    ],
    ids=["empty", "no json", "no fields", "a path", "a record", "no shard", "no time", "deep", "long", "cut short"],
)
async def test_lines_that_are_none_are_refused(planned: Planned, line: bytes) -> None:
    await planned.plan.put(f"hostile{LINES_SUFFIX}", BytesBody(line))
    with pytest.raises(PlanFileError):
        await planned.check()


async def test_keys_that_never_were_are_reported_as_gone(planned: Planned) -> None:
    lines = await planned.lines()
    forged = msgspec.structs.replace(lines[0], key=upload_key(BLOBS, JOB, "0" * 20, 7))
    await planned.rewrite([*lines, forged])
    check = await planned.check()
    assert (check.gone_count, check.wrong_count) == (1, 0)


async def test_a_size_that_no_file_has_is_refused(planned: Planned) -> None:
    lines = await planned.lines()
    data = encode_line(lines[0]).replace(f'"size_bytes":{lines[0].size_bytes}'.encode(), b'"size_bytes":' + b"9" * 30)
    assert b"9" * 30 in data
    await planned.plan.put(f"hostile{LINES_SUFFIX}", BytesBody(data))
    with pytest.raises(PlanFileError):
        await planned.check()


# ---------------------------------------------------------------------- repositories that have moved on


async def test_new_commits_make_no_plan_wrong(planned: Planned) -> None:
    for text in ("six", "seven", "eight"):
        await planned.repository.commit(JOB, [await planned.world.backup(planned.repository, text)])
        planned.world.clock.advance(1000)
    check = await planned.check()
    assert (check.is_right, check.is_complete, check.contradictions) == (True, True, ())


@BOTH_STORES
async def test_what_came_later_and_is_not_committed_is_neither_wrong_nor_missed(planned: Planned) -> None:
    late = await planned.world.backup(planned.repository, "late")
    planned.world.clock.advance(2 * TTL_MS)
    check = await planned.check()
    assert (check.is_right, check.is_complete) == (True, True)
    assert check.later_count == len(late.new_keys)


async def test_what_a_newer_root_reaches_is_reported_as_rescued(planned: Planned) -> None:
    await planned.repository.rewind(await planned.repository.find(JOB, version=3))
    check = await planned.check()
    assert check.rescued_count > 0
    assert (check.is_right, check.is_complete) == (True, True)


@BOTH_STORES
async def test_after_the_collection_the_planned_keys_are_gone(planned: Planned) -> None:
    await planned.repository.collect(KEEP_TWO, delete_share_max=1)
    check = await planned.check()
    assert check.gone_count == check.planned_count
    assert (check.is_right, check.is_complete, check.is_over) == (True, True, True)


async def test_a_root_that_is_gone_by_now_is_reported_with_what_looks_missed(planned: Planned) -> None:
    planned.plan = MemoryStore(clock=planned.world.clock)
    await planned.make(Retention(keep_last=2, keep_named=False))
    assert (await planned.check()).is_complete
    await planned.repository.release_name(JOB, "kept")
    check = await planned.check()
    assert check.changed == ("the name kept of job",)
    assert check.missed_count > 0
    assert check.is_right


async def test_a_missing_index_is_damage(planned: Planned) -> None:
    reference = (await planned.repository.find(JOB)).record.stores[0].index
    await planned.world.store.inner.delete([reference.key])
    with pytest.raises(DamagedError):
        await planned.check()


@BOTH_STORES
async def test_a_collection_beside_it_is_waited_out(planned: Planned) -> None:
    async def collected() -> None:
        await planned.repository.collect(KEEP_TWO, delete_share_max=1)

    planned.world.store.before("get", "log/", collected)
    check = await planned.check()
    assert (check.is_right, check.is_complete) == (True, True)


@pytest.mark.parametrize("seed", range(20))
def test_periods_are_understood_alike(seed: int) -> None:
    """The planner counts hours and days since 1970, and the check asks the calendar."""
    random = Random(seed)
    span_ms = random.choice((86_400_000, 90 * 86_400_000, 3000 * 86_400_000))
    times = [1_600_000_000_000 + random.randrange(span_ms) for _ in range(60)]
    # As along a chain (C7), some after a step of the clock.
    times = sorted(times)
    times = [max(times[: n + 1]) if n % 7 else times[n - n % 3] for n in range(len(times))]
    times = [max(times[: n + 1]) for n in range(len(times))]
    scopes = [Scope("a"), Scope("b")]
    commits = [
        Commit(
            record=CommitRecord(
                scope=random.choice(scopes), number=number, write_id=WriteId(f"w{number}"), valid_until_ms=10**15
            ),
            created_at_ms=at_ms,
            committed_at_ms=at_ms,
        )
        for number, at_ms in enumerate(times, start=1)
    ]
    kinds = ("keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_last")
    counts = {kind: random.choice((0, 1, 3, 12)) for kind in kinds} | {"keep_last": 1}
    retention = msgspec.convert(counts, Retention)
    header = mock.Mock(
        retention=as_policy(retention),
        names=(),
        commits=[mock.Mock(scope=c.scope, number=c.pointer.number, committed_at_ms=c.committed_at_ms) for c in commits],
    )
    planned = {
        ("commit", scope, pointer.number)
        for scope in scopes
        for pointer in choose_kept([c for c in commits if c.scope == scope], retention)
    }
    assert check_module._choose_kept(header, set()) == planned
