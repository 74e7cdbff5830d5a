"""A job gets another number of tasks by one commit, or stays as it was (design 0010, T1 to T6)."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.wrappers.forwarding import ForwardingStore
from engine.commit.record import LayoutChange
from engine.errors import (
    CommitLostError,
    ConflictError,
    EngineError,
    MisplacedKeyError,
    NotFoundError,
    StaleResultError,
    UsageError,
)
from engine.repository.repository import Repository
from engine.repository.rescale import RescaledJob, RescaleOptions
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from index.errors import PartitionKeyError, StoreMergeError
from index.plan.commits import Commit, Retention
from index.snapshot.keys import BLOBS, PINS
from index.snapshot.model import Scope, ScopeLayout
from index.spark.task_keys import KEY_HASH, TaskKeys
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.walker import expected_keys

Rows = dict[bytes, bytes]

LAYOUT = ScopeLayout(tasks_count=4, key_hash=KEY_HASH, key_columns=("carrier string", "flight int"))
KEYS = TaskKeys(LAYOUT)
ROWS: Rows = {b"carrier-%d|%d" % (n % 7, n): b"state %d" % n for n in range(600)}


def columns(key: bytes) -> tuple[str, int]:
    carrier, flight = key.decode().split("|")
    return carrier, int(flight)


def placed(rows: Rows, tasks: int) -> dict[int, Rows]:
    found: dict[int, Rows] = {}
    for key, value in rows.items():
        found.setdefault(KEYS.partition_of(columns(key), tasks), {})[key] = value
    return found


class Job:
    """A job as `StatefulJob` keeps one: a RocksDB store per task, of which each run commits those that changed."""

    def __init__(self, world: World, repository: Repository) -> None:
        self.world = world
        self.repository = repository
        self._names = itertools.count()

    async def stores(self, commit: Commit) -> dict[tuple[str, str], Rows]:
        found = {}
        for reference in commit.record.stores:
            target = self.world.target()
            await self.repository.restore_reference(reference, target)
            with StoreReader.open(target) as reader:
                found[reference.task, reference.store] = dict(reader.items())
        return found

    async def run(
        self,
        rows: Mapping[int, Rows],
        *,
        tasks: int = 4,
        store: str = "state",
        deletes: tuple[bytes, bytes] | None = None,
    ) -> Commit:
        newest = await self.repository.latest(JOB)
        results = []
        for task, changed in sorted(rows.items()):
            held = newest.store(str(task), store) if newest else None
            directory = self.world.target()
            if held is not None:
                await self.repository.restore_reference(held, directory)
            captured = self.world.target()
            with StoreWriter.open(directory, RocksDbSettings(file_bytes=64 * 1024, compression="none")) as db:
                for key, value in changed.items():
                    db.put(key, value)
                if deletes is not None:
                    db.delete_range(*deletes)
                db.checkpoint(captured)
            results.append(await self.repository.backup(JOB, captured, task=str(task), store=store))
        layout = msgspec.structs.replace(LAYOUT, tasks_count=tasks)
        parent = newest.pointer if newest else None
        offsets = f"after {next(self._names)}"
        return await self.repository.commit(JOB, results, offsets=offsets, layout=layout, parent=parent)

    async def rescale(self, tasks: int, **options: object) -> RescaledJob:
        chosen = {"key_columns": columns, "scratch": self.world.directory} | options
        return await self.repository.rescale(JOB, RescaleOptions(tasks=tasks, **chosen))  # type: ignore[arg-type]

    async def check(self, rows: Rows, tasks: int) -> Commit:
        """The newest commit has exactly these rows, each in its task."""
        newest = await self.repository.latest(JOB)
        assert newest is not None
        assert newest.record.layout == msgspec.structs.replace(LAYOUT, tasks_count=tasks)
        found = await self.stores(newest)
        assert {task: of for (task, _), of in found.items() if of} == {
            str(task): of for task, of in placed(rows, tasks).items()
        }
        return newest


@pytest.fixture
async def job(world: World) -> Job:
    made = Job(world, await world.process())
    await made.run(placed(ROWS, 4))
    return made


def nothing_left(world: World) -> bool:
    return not list(world.directory.glob("tidemark-rescale-*"))


async def test_rows_are_in_the_tasks_of_every_new_number_and_the_next_run_goes_on(job: Job) -> None:
    """4 to 2 to 4 to 3 to 1; version and offsets stay, and stores keep nothing of the number before."""
    rows = dict(ROWS)
    for turn, tasks in enumerate((2, 4, 3, 1)):
        before = await job.repository.latest(JOB)
        assert before is not None
        done = await job.rescale(tasks)
        commit = await job.check(rows, tasks)
        assert done.commit is not None
        assert done.commit.pointer == commit.pointer
        assert (commit.record.version, commit.record.offsets) == (before.record.version, before.record.offsets)
        assert (done.rows, done.checked, done.stores) == (len(rows), True, len(commit.record.stores))
        assert bool(done.files_linked) == (tasks in {2, 1})
        assert bool(done.bytes_rewritten) == (tasks in {4, 3})
        more = {b"carrier-%d|%d" % (turn, n): b"turn %d" % turn for n in range(turn, 900, 17)}
        rows |= more
        after = await job.run(placed(more, tasks), tasks=tasks)
        assert after.record.version == before.record.version + 1
        await job.check(rows, tasks)
    assert nothing_left(job.world)


async def test_a_merge_uploads_no_sst_and_what_it_refers_to_stays(world: World) -> None:
    """Less than one byte in a hundred; and collections keep what only the new indexes lead to."""
    job = Job(world, await world.process())
    big = {key: value * 900 for key, value in ROWS.items()}
    await job.run(placed(big, 4))
    blobs = await world.keys(BLOBS)
    done = await job.rescale(2)
    assert done.bytes_linked > 4_000_000
    assert done.bytes_uploaded < done.bytes_linked / 100
    uploaded = await world.keys(BLOBS) - blobs
    sizes = [stat.size_bytes for key in uploaded if (stat := await world.store.inner.stat(key)) is not None]
    assert sum(sizes) < done.bytes_linked / 100
    world.clock.advance(2 * TTL_MS)
    for _ in range(2):
        await job.repository.collect(Retention(keep_last=1), delete_share_max=1)
    assert len(await job.repository.commits(JOB)) == 1
    assert (await job.repository.verify()).problems == ()
    await job.check(big, 2)


async def test_a_dry_run_writes_nothing(job: Job) -> None:
    keys = {key for key in await job.world.keys() if not key.startswith(PINS)}
    for tasks in (2, 3):
        done = await job.rescale(tasks, dry_run=True)
        assert (done.commit, done.rows, done.bytes_uploaded) == (None, len(ROWS), 0)
        assert done.stores == tasks
    assert {key for key in await job.world.keys() if not key.startswith(PINS)} == keys
    assert nothing_left(job.world)


async def refused(job: Job, kind: type[Exception], match: str, tasks: int, **options: object) -> None:
    """Nothing is committed."""
    before = await job.repository.latest(JOB)
    with pytest.raises(kind, match=match):
        await job.rescale(tasks, **options)
    after = await job.repository.latest(JOB)
    assert (after and after.pointer) == (before and before.pointer)
    assert nothing_left(job.world)


@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
async def test_a_key_in_another_task_is_refused(job: Job, tasks: int) -> None:
    key = next(iter(placed(ROWS, 4)[3]))
    await job.run({1: {key: b"misplaced"}})
    match = (
        rf"the key {key.hex()} is in task 1 of 4, and belongs in task 3, by spark-hash-v1 of carrier string, flight int"
    )
    await refused(job, MisplacedKeyError, match, tasks)


async def test_a_key_that_two_tasks_have_is_refused_also_where_nothing_is_hashed(job: Job) -> None:
    key = next(iter(placed(ROWS, 4)[3]))
    await job.run({1: {key: b"misplaced"}})
    await refused(
        job, MisplacedKeyError, f"{key.hex()} is in task [13] and in task [13]", 2, key_columns=None, unchecked=True
    )


async def test_a_key_that_another_task_has_deleted_is_not_lost(job: Job) -> None:
    """Its deletion is of no rows, so nothing is misplaced; merged by reference, it would hide the row."""
    of = placed(ROWS, 4)
    key, other = next(iter(of[3])), next(iter(of[1]))
    newest = await job.repository.latest(JOB)
    assert newest is not None
    held = newest.store("1", "state")
    assert held is not None
    directory, captured = job.world.target(), job.world.target()
    await job.repository.restore_reference(held, directory)
    with StoreWriter.open(directory, RocksDbSettings(compacts=False)) as db:
        for _ in range(3):
            db.put(other, of[1][other])
            db.delete(key)
            db.flush()
        db.checkpoint(captured)
    await job.repository.commit(JOB, [await job.repository.backup(JOB, captured, task="1", store="state")])
    await refused(job, StoreMergeError, f"rows from key {key.hex()} on would be others", 2)
    await refused(job, StoreMergeError, f"rows from key {key.hex()} on would be others", 1, dry_run=True)
    await job.rescale(3)
    await job.check(ROWS, 3)


async def test_stores_are_merged_without_a_key_function_only_if_asked(job: Job) -> None:
    await refused(job, UsageError, "no key function for state", 2, key_columns=None)
    await refused(job, UsageError, "splits its stores.* no key function for state", 3, key_columns=None, unchecked=True)
    done = await job.rescale(2, key_columns=None, unchecked=True)
    assert not done.checked
    await job.check(ROWS, 2)


@pytest.mark.parametrize(
    "wrong, kind, match",
    [
        (lambda key: (columns(key)[0], columns(key)[1] + 1), MisplacedKeyError, "belongs in task"),
        (lambda key: columns(key)[:1], PartitionKeyError, "are not values of carrier string, flight int"),
        (lambda key: columns(key)[::-1], PartitionKeyError, "does not fit the key column carrier string"),
        (lambda key: key.decode().split("#")[1], UsageError, "the key function fails: IndexError"),
    ],
)
async def test_a_wrong_key_function_is_refused(job: Job, wrong: object, kind: type[Exception], match: str) -> None:
    for tasks in (2, 3):
        await refused(job, kind, match, tasks, key_columns=wrong)


async def test_stores_of_every_name_are_rescaled_each_by_its_function(job: Job) -> None:
    others = {b"#%s" % key: b"other" for key in ROWS}
    await job.run({task: {b"#%s" % key: b"other" for key in of} for task, of in placed(ROWS, 4).items()}, store="other")
    await refused(job, UsageError, "no key function for other", 2, key_columns={"state": columns})
    await refused(job, MisplacedKeyError, "store other", 2)
    by_name = {"state": columns, "other": lambda key: columns(key[1:])}
    done = await job.rescale(3, key_columns=by_name)
    assert done.commit is not None
    found = await job.stores(done.commit)
    assert {task for task, name in found if name == "other"} == {"0", "1", "2"}
    assert {key: of[key] for (_, name), of in found.items() if name == "other" for key in of} == others


async def test_a_task_without_a_store_and_an_empty_job_are_no_obstacle(world: World) -> None:
    job = Job(world, await world.process())
    of = placed(ROWS, 4)
    few = {task: rows for task, rows in of.items() if task != 2}
    await job.run(few)
    rows = {key: value for each in few.values() for key, value in each.items()}
    await job.rescale(2)
    await job.check(rows, 2)
    await job.rescale(8)
    await job.check(rows, 8)
    empty = Job(world, await world.process())
    dropped = [(s.task, s.store) for s in (await job.check(rows, 8)).record.stores]
    await empty.repository.commit(JOB, [], dropped=dropped)
    await empty.rescale(2)
    await empty.check({}, 2)


async def test_what_cannot_be_rescaled_is_refused(job: Job, world: World) -> None:
    for tasks in (0, 4, 100_001):
        await refused(job, UsageError, "is not another number from 1 to 100000", tasks)
    await job.repository.commit(JOB, [await world.backup(job.repository, "text", task="extra")])
    await refused(job, UsageError, "tasks that are not among its 4: extra", 2)
    with pytest.raises(NotFoundError):
        await job.repository.rescale(Scope("nobody"), RescaleOptions(tasks=2))


async def test_a_job_without_a_layout_is_refused(world: World) -> None:
    """Or with one that no job of Spark has."""
    repository = await world.process()
    for wrong in (ScopeLayout(), ScopeLayout(tasks_count=4), ScopeLayout(tasks_count=2**60, key_hash=KEY_HASH)):
        scope = Scope(f"job-{wrong.tasks_count}")
        await repository.commit(scope, [await world.backup(repository, "one", scope=scope)], layout=wrong)
        with pytest.raises(UsageError, match="do not say how keys are spread"):
            await repository.rescale(scope, RescaleOptions(tasks=2, unchecked=True))


async def test_ranges_that_were_deleted_are_compacted_first(job: Job) -> None:
    rows = {key: value for key, value in ROWS.items() if not b"carrier-3" <= key < b"carrier-5"}
    await job.run({task: {} for task in range(4)}, deletes=(b"carrier-3", b"carrier-5"))
    await job.check(rows, 4)
    done = await job.rescale(2)
    # A compaction writes other files, which are uploaded.
    assert (done.files_linked, done.bytes_linked) == (0, 0)
    assert done.bytes_uploaded > done.bytes_rewritten / 2 > 0
    await job.check(rows, 2)


async def test_a_store_with_column_families_is_refused(job: Job, world: World) -> None:
    from rocksdict import Options, Rdict  # noqa: PLC0415

    directory = world.target()
    db = Rdict(str(directory), Options(raw_mode=True))
    db.create_column_family("more", Options(raw_mode=True)).close()
    db.close()
    result = await job.repository.backup(JOB, directory, task="1", store="state")
    await job.repository.commit(JOB, [result])
    for tasks in (2, 3):
        await refused(job, StoreMergeError, "has column families", tasks)


# ---------------------------------------------------------------------- beside others (C2, C3, K3)


async def test_of_a_rescale_and_a_commit_beside_it_one_wins(job: Job, world: World) -> None:
    """The commit comes while the rescale uploads: the rescale is refused, and the state is that of the commit."""
    other = Job(world, await world.process())
    more = {b"carrier-0|%d" % n: b"more" for n in range(5000, 5100)}

    async def commit() -> None:
        await other.run(placed(more, 4))

    world.store.before("put_if_absent", "indexes/", commit)
    with pytest.raises(CommitLostError):
        await job.rescale(2)
    await job.check(ROWS | more, 4)
    assert nothing_left(world)
    await job.rescale(2)
    await job.check(ROWS | more, 2)


async def test_a_run_that_a_rescale_overtakes_is_refused(job: Job, world: World) -> None:
    """With its parent, with its layout, and by its base: each of these is enough."""
    newest = await job.repository.latest(JOB)
    assert newest is not None
    held = newest.store("1", "state")
    assert held is not None
    directory = world.target()
    await job.repository.restore_reference(held, directory)
    result = await job.repository.backup(JOB, directory, task="1", store="state")
    await (other := Job(world, await world.process())).rescale(2)
    with pytest.raises(CommitLostError):
        await job.repository.commit(JOB, [result], parent=newest.pointer)
    with pytest.raises(StaleResultError):
        await job.repository.commit(JOB, [result])
    with pytest.raises(UsageError, match="tasks_count=2"):
        await job.repository.commit(JOB, [], layout=LAYOUT)
    await other.check(ROWS, 2)


async def test_two_rescales_at_once_make_one_commit(job: Job, world: World) -> None:
    other = Job(world, await world.process())
    outcomes = await asyncio.gather(job.rescale(2), other.rescale(3), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(RescaledJob) == 1
    assert all(isinstance(outcome, RescaledJob | ConflictError) for outcome in outcomes)
    newest = await job.repository.latest(JOB)
    assert newest is not None
    assert newest.record.number == 2
    await job.check(ROWS, newest.record.layout.tasks_count)


@pytest.mark.parametrize("prefix", ["blobs/", "indexes/"])
async def test_a_failure_on_the_way_leaves_the_commit_before(job: Job, world: World, prefix: str) -> None:
    world.store.fail("put_if_absent", prefix)
    with pytest.raises(StoreUnavailableError):
        await job.rescale(3)
    await job.check(ROWS, 4)
    assert nothing_left(world)


async def test_a_lost_answer_to_the_record_is_no_failure(job: Job, world: World) -> None:
    world.store.lose_answer("put_if_absent", "log/")
    await job.rescale(3)
    await job.check(ROWS, 3)


class MortalStore(ForwardingStore):
    """What a process reaches that dies at its n-th request: from then on nothing of it arrives."""

    def __init__(self, inner: BlobStore, requests: int) -> None:
        super().__init__(inner)
        self.left = requests

    @asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        self.left -= 1
        if self.left < 0:
            raise StoreUnavailableError("nobody is there", operation=operation, key=" ".join(keys))
        yield


@pytest.mark.parametrize("tasks", [2, 3])
async def test_wherever_its_process_dies_the_commit_before_is_the_newest(world: World, tasks: int) -> None:
    """Or the new one, whole: with the record it is there, and what is left to do others do."""
    job = Job(world, await world.process())
    rows = dict(itertools.islice(ROWS.items(), 40))
    newest = await job.run(placed(rows, 4))
    for requests in itertools.count(tasks - 1, 2):
        mortal = MortalStore(world.store, requests)
        with contextlib.suppress(StoreError, EngineError):
            await Job(world, await Repository.open(mortal)).rescale(tasks)
        found = await (await world.process()).latest(JOB)
        assert found is not None
        if found.pointer != newest.pointer:
            break
    assert requests > 15
    # Of what it has left a reader of the commit before sees nothing.
    before = await job.stores(newest)
    assert {key: value for of in before.values() for key, value in of.items()} == rows
    job = Job(world, await world.process())
    await job.check(rows, tasks)
    more = {b"carrier-9|9": b"more"}
    await job.run(placed(more, tasks), tasks=tasks)
    await job.check(rows | more, tasks)
    world.clock.advance(2 * TTL_MS)
    for _ in range(2):
        await job.repository.collect(Retention(keep_last=1), delete_share_max=1)
    assert await world.keys() - {"repository"} == await expected_keys(world.store, world.clock()) - {"repository"}
    assert (await job.repository.verify()).problems == ()
    await job.check(rows | more, tasks)


async def test_a_change_of_the_layout_replaces_every_store_of_the_parent_it_names(job: Job, world: World) -> None:
    newest = await job.repository.latest(JOB)
    assert newest is not None
    change = LayoutChange(before=LAYOUT, after=msgspec.structs.replace(LAYOUT, tasks_count=2))
    stores = [(s.task, s.store) for s in newest.record.stores]
    with pytest.raises(UsageError, match="has to name its parent"):
        await job.repository.commit(JOB, [], layout=change, dropped=stores)
    with pytest.raises(UsageError, match="would keep the keys of the layout before: 3/state"):
        await job.repository.commit(JOB, [], layout=change, parent=newest.pointer, dropped=stores[:3])
    wrong = LayoutChange(before=change.after, after=LAYOUT)
    with pytest.raises(UsageError, match="the scope has"):
        await job.repository.commit(JOB, [], layout=wrong, parent=newest.pointer, dropped=stores)
    await job.check(ROWS, 4)


async def test_a_rewind_brings_the_number_of_tasks_back(job: Job) -> None:
    before = await job.repository.latest(JOB)
    assert before is not None
    await job.rescale(2)
    await job.repository.rewind(before)
    await job.check(ROWS, 4)
    await job.rescale(3)
    await job.check(ROWS, 3)
