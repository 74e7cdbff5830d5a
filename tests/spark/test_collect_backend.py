"""The backend that works in Spark's tasks: killed anywhere, resumed, and beside others; all of it in this process."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, list_blobs, read_blob
from blobstore.errors import AccessDeniedError, StoreError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import ForwardingStore
from engine.backup.backup import BackupResult
from engine.collect.backend import CollectOptions
from engine.collect.collect import collect
from engine.collect.report import CollectReport
from engine.collect.runs import end_run, resume_run
from engine.errors import ConflictError, DamagedError, UnsafeStoreError
from engine.repository.repository import Repository
from engine.spark.collection.backend import TASKS_PER_CORE
from engine.spark.collection.tasks import NOTHING, encode_inventory
from engine.spark.errors import RunEndedError
from index.plan.collect import DeleteReason, PlannedUpload, ReasonTotal, Upload, sum_totals
from index.plan.commits import Commit, Retention
from index.plan.plan_format import (
    POSITIONS_COUNT,
    RUN_HEADER,
    SHARDS,
    RunHeader,
    decode_audit,
    decode_lines,
    encode_run_header,
)
from index.snapshot.keys import AUDIT, BLOBS, INDEXES, RUNS, RunId, make_run_id, run_key
from index.snapshot.model import Scope
from tests.doubles import InterposedStore, SteppedClock
from tests.spark.one_process import backend_on, tasks_started
from tests.walker import expected_keys

T = TypeVar("T")

KEEP_TWO = Retention(keep_last=2)
JOB = Scope("job")
TTL_MS = 14 * 86_400_000
UPLOADS = {DeleteReason.UNREACHABLE_UPLOAD}
CHANGES = {"put", "put_if_absent", "delete", "remove_ttl"}


class MortalStore(ForwardingStore):
    """Of one process: it dies at its n-th change, before it is carried out or after; nothing is asked after that."""

    def __init__(self, inner: BlobStore, dies_at: int, *, after: bool = False) -> None:
        super().__init__(inner)
        self._after = after
        self._left = dies_at

    def died(self) -> bool:
        return self._left <= 0

    @override
    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        if self.died():
            raise StoreUnavailableError("is dead", operation=operation)
        if operation not in CHANGES:
            return await request()
        self._left -= 1
        if not self.died():
            return await request()
        if self._after:
            await request()
        raise StoreUnavailableError("died", operation=operation)


class BrokenStore(ForwardingStore):
    """Requests of a kind for some keys fail in one way, however often they are tried."""

    def __init__(self, inner: BlobStore, operation: str, part: str, error: type[StoreError]) -> None:
        super().__init__(inner)
        self._operation = operation
        self._part = part
        self._error = error

    @override
    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        if operation == self._operation and any(self._part in key for key in keys):
            raise self._error("will not", operation=operation, key=keys[0], hint="ask somebody")
        return await request()


class Bench:
    """A repository with four commits, an upload that was never committed, and one whose TTL is over."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = SteppedClock()
        self.store = MemoryStore(clock=self.clock)

    async def fill(self) -> "Bench":
        self.repository = await Repository.init(self.store, ttl_ms=TTL_MS)
        self.commits = [await self.commit(generation) for generation in range(1, 3)]
        await self._back_up(99)
        self.clock.advance(TTL_MS)
        self.commits += [await self.commit(generation) for generation in range(3, 5)]
        await self._back_up(100)
        return self

    async def commit(self, generation: int) -> Commit:
        return await self.repository.commit(JOB, [await self._back_up(generation)])

    async def _back_up(self, generation: int) -> BackupResult:
        directory = self.root / "state"
        directory.mkdir(parents=True, exist_ok=True)
        for name in (f"{generation:06d}.sst", "CURRENT"):
            (directory / name).write_bytes(f"{name} {generation}\n".encode() * 20_000)
        result = await self.repository.backup(JOB, directory, task="0", store="facts")
        (directory / f"{generation - 1:06d}.sst").unlink(missing_ok=True)
        return result

    async def collect(self, store: BlobStore | None = None, *, dry_run: bool = False) -> CollectReport:
        store = store or self.store
        options = CollectOptions(delete_share_max=1, dry_run=dry_run)
        backend = backend_on(store, self.repository.record, options)
        return await collect(store, self.repository.record, KEEP_TWO, options, backend=backend)

    async def carried_out(self) -> list[PlannedUpload]:
        """The lines of the plans that are there and are marked as carried out."""
        marks = [key for key in await self.keys(RUNS) if "/done-" in key]
        plans = [key.replace("/done-", "/plan-") for key in marks]
        return [p for key in plans for p in decode_lines(await read(self.store, key), subject=key)]

    async def keys(self, prefix: str = "") -> set[str]:
        return {blob.key async for blob in list_blobs(self.store, prefix)}

    async def check(self, *, without_runs: bool = False) -> None:
        """Exactly what has a reason to be there."""
        runs = await self.keys(RUNS) if without_runs else set[str]()
        assert await self.keys() - runs == await expected_keys(self.store, self.clock.now_ms)


def facts(report: CollectReport) -> dict[str, object]:
    """What a report says, but of which run it is and whether it was resumed."""
    shown = {name: getattr(report, name) for name in report.__struct_fields__}
    return {name: value for name, value in shown.items() if name not in {"run", "dry_run", "resumed"}}


async def test_a_dry_run_plans_it_and_writes_its_plan_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if there were many: the keys of a shard are reported in several rows.
    monkeypatch.setattr("engine.spark.collection.tasks.REFERENCES_PER_ITEM", 1)
    monkeypatch.setattr("engine.spark.collection.tasks.KEYS_HELD_MAX", 2)
    bench, elsewhere = await Bench(tmp_path).fill(), MemoryStore()
    before = await bench.keys()
    record = bench.repository.record
    mine = await collect(bench.store, record, KEEP_TWO, CollectOptions(delete_share_max=1, dry_run=True))
    tasks_started.clear()
    options = CollectOptions(delete_share_max=1, dry_run=True, plan_to=elsewhere)
    backend = backend_on(bench.store, record, options, partitions_max=200, cores=2)
    planned_only = await collect(bench.store, record, KEEP_TWO, options, backend=backend)
    assert facts(planned_only) == facts(mine)
    # Lists; indexes; inventories: little work is not spread over 200 tasks.
    assert tasks_started == [2 * TASKS_PER_CORE, 1, 2]
    assert await bench.keys() == before
    lines = [blob.key async for blob in list_blobs(elsewhere, "") if blob.key.endswith(".jsonl")]
    planned = [p for name in lines for p in decode_lines(await read(elsewhere, name), subject=name)]
    assert planned == [d for d in planned_only.deletes if d.key.startswith(("blobs/", "indexes/"))]
    assert {p.reason for p in planned} == {DeleteReason.UNREACHABLE_UPLOAD}
    assert facts(await bench.collect()) == facts(planned_only)
    await bench.check()


async def die_and_be_resumed(root: Path, dies_at: int, *, after: bool) -> bool:
    """A collection dies at a change, and the next one ends as a single one would have; whether it died at all."""
    bench = await Bench(root).fill()
    options = CollectOptions(delete_share_max=1, dry_run=True)
    expected = await collect(bench.store, bench.repository.record, KEEP_TWO, options)
    mortal = MortalStore(bench.store, dies_at, after=after)
    try:
        report = await bench.collect(mortal)
    except (StoreUnavailableError, UnsafeStoreError):
        pass
    else:
        # What it died of came after its last delete, the audit record or its own objects: that is not a reason to fail.
        assert report.audit_missing or report.run_left or not mortal.died()
        return mortal.died()
    left = await bench.keys(RUNS)
    is_unfinished = any("/run" in key for key in left) and not any("/ended" in key for key in left)
    is_listed = any("/inventory-" in key for key in left)
    gone = sum_totals(await bench.carried_out()) if is_listed else ()
    bench.clock.advance(1000)
    report = await bench.collect()
    assert report.resumed == is_unfinished
    if is_unfinished and is_listed:
        # Of what was listed, but for the plans that were carried out; the log is read again.
        assert uploads_of(*report.totals, *gone) == uploads_of(*expected.totals)
    assert await bench.keys(RUNS) == set()
    await bench.check()
    for commit in bench.commits[2:]:
        target = root / f"restored {commit.pointer.number}"
        await bench.repository.restore(commit, target, task="0", store="facts")
    return True


def uploads_of(*totals: ReasonTotal) -> tuple[ReasonTotal, ...]:
    return sum_totals(total for total in totals if total.reason in UPLOADS)


async def test_what_a_run_has_deleted_is_not_reported_again_by_who_resumes_it(tmp_path: Path) -> None:
    bench = await Bench(tmp_path).fill()
    before = await bench.collect(BrokenStore(bench.store, "put", "/ended", StoreUnavailableError))
    assert uploads_of(*before.totals)
    assert before.failed == ()
    bench.clock.advance(1000)
    after = await bench.collect()
    assert after.resumed
    assert (after.totals, after.deletes, after.failed_count) == ((), (), 0)
    assert await bench.keys(RUNS) == set()
    await bench.check()


# Among the inventories; among the deletes of indexes.
@pytest.mark.parametrize("dies_at, after", [pytest.param(300, False, marks=pytest.mark.soak), (524, True)])
async def test_a_collection_that_died_is_resumed(tmp_path: Path, dies_at: int, after: bool) -> None:
    assert await die_and_be_resumed(tmp_path, dies_at, after=after)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_collection_that_died_anywhere_is_resumed(tmp_path: Path) -> None:
    for after in (False, True):
        dies_at = 1
        while await die_and_be_resumed(tmp_path / f"{dies_at} {after}", dies_at, after=after):
            # One inventory is as good as another, and what follows them is tried change by change.
            dies_at += 100 if dies_at + 100 < POSITIONS_COUNT else 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("put", "plan-"), marks=pytest.mark.soak),
        ("put_if_absent", ".boundary"),
        pytest.param(("put", "done-"), marks=pytest.mark.soak),
        pytest.param(("delete", "/run"), marks=pytest.mark.soak),
    ],
)
async def test_two_collections_on_one_run(tmp_path: Path, change: tuple[str, str]) -> None:
    """The second begins while the first is at work, resumes its run and ends it."""
    bench = await Bench(tmp_path).fill()
    interposed = InterposedStore(bench.store)
    others: list[CollectReport] = []

    async def overtake() -> None:
        bench.clock.advance(1000)
        others.append(await bench.collect())

    interposed.before(*change, overtake)
    # It may find that its run has gone: that is nobody's failure.
    with contextlib.suppress(RunEndedError):
        assert (await bench.collect(interposed)).failed == ()
    # A run that has come to its end is finished, though its objects are still there.
    assert [report.resumed for report in others] == [change[0] != "delete"]
    await bench.check(without_runs=True)
    # What was written down after the end goes once the run is old.
    bench.clock.advance(TTL_MS)
    await bench.collect()
    assert await bench.keys(RUNS) == set()
    await bench.check()


async def test_what_is_protected_meanwhile_is_taken_out_of_the_plan(tmp_path: Path) -> None:
    bench = await Bench(tmp_path).fill()
    interposed = InterposedStore(bench.store)

    async def fork() -> None:
        await bench.repository.fork(bench.commits[0], Scope("fork"))

    interposed.before("put_if_absent", ".boundary", fork)
    report = await bench.collect(interposed)
    assert report.excluded_count > 0
    assert await excluded_by_one_process(tmp_path / "twin") == (report.excluded_count, report.waiting_count)
    excluded = bench.commits[0].record.stores[0].index.key
    assert excluded not in {delete.key for delete in report.deletes}
    await bench.check()
    forked = await bench.repository.commits(Scope("fork"))
    await bench.repository.restore(forked[0], tmp_path / "restored", task="0", store="facts")


async def excluded_by_one_process(root: Path) -> tuple[int, int]:
    bench = await Bench(root).fill()
    interposed = InterposedStore(bench.store)

    async def fork() -> None:
        await bench.repository.fork(bench.commits[0], Scope("fork"))

    interposed.before("put_if_absent", ".boundary", fork)
    report = await collect(interposed, bench.repository.record, KEEP_TWO, CollectOptions(delete_share_max=1))
    return report.excluded_count, report.waiting_count


@pytest.mark.parametrize("dry_run", [False, pytest.param(True, marks=pytest.mark.soak)])
async def test_a_task_fails_as_one_process_would(tmp_path: Path, dry_run: bool) -> None:
    bench = await Bench(tmp_path).fill()
    altered = bench.commits[-1].record.stores[0].index.key
    listed = bench.commits[-2].record.stores[0].index.key
    kind = StoreUnavailableError if dry_run else AccessDeniedError
    interposed = InterposedStore(bench.store)
    interposed.fail("get", listed, kind("will not", operation="get", key=listed, hint="ask somebody"))
    with pytest.raises(kind, match="will not") as failed:
        await bench.collect(interposed, dry_run=dry_run)
    assert (failed.value.key, failed.value.hint) == (listed, "ask somebody")
    before = await bench.keys("blobs/")
    await bench.store.put(altered, BytesBody(b"altered"))
    if dry_run:
        report = await bench.collect(dry_run=True)
        assert (report.damaged, [key for key, _ in report.unreadable]) == (True, [altered])
    else:
        with pytest.raises(DamagedError, match="cannot be read") as damaged:
            await bench.collect()
        assert damaged.value.subject == altered
    assert await bench.keys("blobs/") == before


async def test_a_deletion_that_is_denied_ends_it_before_the_next_prefix(tmp_path: Path) -> None:
    bench = await Bench(tmp_path).fill()
    before = await bench.keys("blobs/")
    planned = [d.key for d in (await bench.collect(dry_run=True)).deletes]
    with pytest.raises(AccessDeniedError, match="will not"):
        await bench.collect(BrokenStore(bench.store, "delete", INDEXES, AccessDeniedError))
    assert await bench.keys("blobs/") == before
    # A task that fails returns nothing of what it has done: nobody knows of the indexes, and of blobs all are there.
    (key,) = await bench.keys(AUDIT)
    audit = decode_audit(await read(bench.store, key), subject=key)
    prefixes = [sum(key.startswith(prefix) for key in planned) for prefix in (INDEXES, BLOBS)]
    assert [audit.unknown_count, audit.failed_count] == prefixes
    assert min(prefixes) > 0


async def test_a_missing_index_stops_it_and_a_missing_inventory_too(tmp_path: Path) -> None:
    bench = await Bench(tmp_path).fill()
    interposed = InterposedStore(bench.store)

    async def lose() -> None:
        (run,) = {key.split("/")[1] for key in await bench.keys(RUNS)}
        keys = [run_key(RunId(run), shard.inventory_name) for shard in SHARDS]
        await bench.store.delete([key for key in keys if await read(bench.store, key) != NOTHING][:1])

    interposed.before("get", "log/job/", lose)
    with pytest.raises(RunEndedError, match="inventory-blobs-"):
        await bench.collect(interposed)
    assert issubclass(RunEndedError, ConflictError)
    before = await bench.keys("blobs/")
    await bench.store.delete([bench.commits[-1].record.stores[0].index.key])
    with pytest.raises(DamagedError, match=bench.commits[-1].record.stores[0].index.key):
        await bench.collect()
    assert await bench.keys("blobs/") == before


async def test_an_inventory_that_somebody_has_altered_is_refused(tmp_path: Path) -> None:
    bench = await Bench(tmp_path).fill()
    with pytest.raises(StoreUnavailableError):
        await bench.collect(MortalStore(bench.store, POSITIONS_COUNT + 1, after=True))
    (run,) = {key.split("/")[1] for key in await bench.keys(RUNS)}
    key = run_key(RunId(run), SHARDS[3].inventory_name)
    other = await read(bench.store, run_key(RunId(run), SHARDS[4].inventory_name))
    for wrong in (b"", b"altered", other[:-20], encode_inventory((Upload("log/job/1.commit", 1, 0),), ())):
        await bench.store.put(key, BytesBody(wrong))
        with pytest.raises((DamagedError, UnsafeStoreError)):
            await bench.collect()


async def test_a_run_that_is_old_or_is_not_understood_is_not_resumed(tmp_path: Path) -> None:
    bench = await Bench(tmp_path).fill()
    with pytest.raises(StoreUnavailableError):
        await bench.collect(MortalStore(bench.store, 5, after=True))
    (old,) = {key.split("/")[1] for key in await bench.keys(RUNS)}
    bench.clock.advance(1000)
    key = run_key(RunId(old), RUN_HEADER)
    header = await read(bench.store, key)
    assert await resume(bench) == old
    others = RunHeader(run=RunId(old), repository_id="of another repository", release="1")
    for wrong in (b"{}", header.replace(b'"schema":1', b'"schema":99'), encode_run_header(others)):
        await bench.store.put(key, BytesBody(wrong))
        begun = await resume(bench)
        assert begun != old
        await end_run(bench.store, begun)
    await bench.store.put(key, BytesBody(header))
    assert await resume(bench) == old
    bench.clock.advance(TTL_MS - 2000)
    assert await resume(bench) == old
    bench.clock.advance(2000)
    report = await bench.collect()
    assert not report.resumed
    assert await bench.keys(RUNS) == set()


async def resume(bench: Bench) -> RunId:
    now_ms = bench.clock.now_ms
    run = await resume_run(bench.store, bench.repository.record, make_run_id(now_ms, "f" * 20), now_ms, "1")
    return run.id


async def read(store: BlobStore, key: str) -> bytes:
    return await read_blob(store, key, size_bytes_max=1 << 30)
