"""A checkpoint comes back as one of its batches left it, whole, or the target is as it was (design 0005, section 3)."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from click.testing import CliRunner

from blobstore.base import BytesBody
from blobstore.errors import InvalidRequestError, StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.restore import RestoreChoice, plan_checkpoint_restore, restore_checkpoint
from engine.cli import tidemark
from engine.errors import DamagedError, NotFoundError, TargetError, UsageError
from engine.repository.repository import Repository
from engine.restore.staging import Staging
from index.plan.commits import Commit
from index.snapshot.model import Scope
from index.spark.checkpoint import StoreId
from index.spark.query_logs import decode_operator
from tests.contract.store_calls import get_bytes
from tests.doubles import InterposedStore, SteppedClock
from tests.unit.engine.checkpoint.written_query import WrittenQuery, rows_of

GOLDEN = Path(__file__).resolve().parents[3] / "golden/spark"
both_formats = pytest.mark.parametrize("format_version", [1, 2], ids=["V1", "V2"])
as_it_is_or_replayed = pytest.mark.parametrize("replayed", [False, True], ids=["as it is", "replayed"])


class World:
    """A repository in memory, and queries on this disk."""

    def __init__(self, store: InterposedStore, clock: SteppedClock, tmp_path: Path) -> None:
        self.store = store
        self.clock = clock
        self.tmp_path = tmp_path
        self._count = 0

    async def repository(self) -> Repository:
        return await Repository.open(self.store)

    def new_path(self, name: str = "target") -> Path:
        self._count += 1
        return self.tmp_path / f"{name}-{self._count}"

    async def query(self, batches: int, **settings: Any) -> WrittenQuery:
        query = await WrittenQuery(self.new_path("query"), self.new_path("work"), **settings).begin()
        await query.run(batches)
        return query

    async def back_up(self, query: WrittenQuery, job: str = "query") -> Commit:
        return (await backup_checkpoint(await self.repository(), query.root, BackupChoice(job=job))).commit

    async def rows(self, checkpoint: Path, batch: int | None = None) -> Any:
        return await rows_of(checkpoint, self.new_path("rows"), batch=batch)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    clock = SteppedClock()
    store = InterposedStore(MemoryStore(clock=clock))
    await Repository.init(store)
    return World(store, clock, tmp_path)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def batches_in(root: Path, log: str) -> list[int]:
    return sorted(int(path.name) for path in (root / log).iterdir())


@both_formats
@pytest.mark.parametrize("families", [False, True], ids=["plain", "families"])
@as_it_is_or_replayed
async def test_a_restored_checkpoint_holds_the_newest_batch(
    world: World, format_version: Literal[1, 2], families: bool, replayed: bool
) -> None:
    query = await world.query(6, format_version=format_version, families=families)
    await world.back_up(query)
    expected = await world.rows(query.root)
    target = world.new_path()

    restored = await restore_checkpoint(await world.repository(), target, RestoreChoice(replayed=replayed))

    assert (restored.batch, restored.stores, restored.pinned) == (5, 2, True)
    assert await world.rows(target) == expected
    found = tree(target)
    assert restored.files == len(found)
    assert restored.size_bytes == sum(map(len, found.values())) or families  # paths may have another length
    assert not [name for name in found if Path(name).name.startswith(".")]
    assert [p.name for p in target.parent.iterdir() if p.name.startswith(".")] == []


@both_formats
@as_it_is_or_replayed
async def test_a_query_goes_on_where_it_was_restored(
    world: World, format_version: Literal[1, 2], replayed: bool
) -> None:
    query = await world.query(6, format_version=format_version)
    await world.back_up(query)
    other = world.new_path()
    await restore_checkpoint(await world.repository(), other, RestoreChoice(replayed=replayed))

    await query.run(3)
    expected = await world.rows(query.root)
    await query.resume(other, 5)
    await query.run(3)

    assert await world.rows(other) == expected


@both_formats
async def test_a_batch_in_the_middle_comes_back_with_nothing_newer(world: World, format_version: Literal[1, 2]) -> None:
    query = await world.query(5, format_version=format_version)  # with a snapshot of version 3
    expected = await world.rows(query.root, 3)
    await world.back_up(query)
    target = world.new_path()

    restored = await restore_checkpoint(await world.repository(), target, RestoreChoice(batch=3))

    assert (restored.batch, restored.oldest_batch, restored.backup.batch) == (3, 2, 4)
    assert await world.rows(target) == expected
    assert batches_in(target, "commits") == [2, 3]
    assert batches_in(target, "offsets") == [1, 2, 3, 4]
    versions = {int(p.name.partition("_")[0].partition(".")[0]) for p in target.glob("state/0/*/*.*")}
    assert versions == {3, 4}
    assert [await world.rows(target, batch) for batch in (2, 3)] == [await world.rows(query.root, b) for b in (2, 3)]


async def test_the_logs_of_a_replayed_one_have_its_batch_alone(world: World) -> None:
    query = await world.query(5)
    await world.back_up(query)
    target = world.new_path()
    restored = await restore_checkpoint(await world.repository(), target, RestoreChoice(replayed=True))
    assert (restored.oldest_batch, batches_in(target, "commits"), batches_in(target, "offsets")) == (4, [4], [3, 4])


@pytest.mark.parametrize("batch, backup", [(2, 2), (4, 4), (3, 4), (5, 6), (None, 6)])
async def test_the_backup_of_a_batch_or_the_oldest_later_one_is_used(
    world: World, batch: int | None, backup: int
) -> None:
    query = await world.query(1)
    for _ in range(3):
        await query.run(2)
        await world.back_up(query)
    restored = await restore_checkpoint(await world.repository(), world.new_path(), RestoreChoice(batch=batch))
    assert restored.backup.batch == backup
    assert restored.batch == (6 if batch is None else batch)


async def test_a_time_finds_the_backup_that_was_the_newest_then(world: World) -> None:
    query = await world.query(2)
    repository = await world.repository()
    first = await world.back_up(query)
    world.clock.now_ms += 1000
    await query.run(1)
    await world.back_up(query)
    found = await restore_checkpoint(repository, world.new_path(), RestoreChoice(at_ms=first.committed_at_ms + 999))
    assert (found.commit.pointer, found.batch) == (first.pointer, 1)
    with pytest.raises(NotFoundError, match="no backup has"):
        await restore_checkpoint(repository, world.new_path(), RestoreChoice(at_ms=1))


async def test_a_batch_that_no_backup_has_is_reported_with_those_that_there_are(world: World) -> None:
    query = await world.query(7)
    await world.back_up(query)
    with pytest.raises(NotFoundError, match="no backup has batch 2") as caught:
        await restore_checkpoint(await world.repository(), world.new_path(), RestoreChoice(batch=2))
    assert caught.value.hint.startswith("batches that can be restored: ")
    assert "6" in caught.value.hint


async def test_the_only_job_need_not_be_named(world: World) -> None:
    repository = await world.repository()
    with pytest.raises(NotFoundError, match="no checkpoint backup"):
        await restore_checkpoint(repository, world.new_path())
    query = await world.query(2)
    await world.back_up(query, job="one")
    assert (await restore_checkpoint(repository, world.new_path())).job == "one"
    await world.back_up(query, job="two")
    with pytest.raises(UsageError, match="more than one job") as caught:
        await restore_checkpoint(repository, world.new_path())
    assert f"one: {query.root}, batch 1" in caught.value.hint
    assert (await restore_checkpoint(repository, world.new_path(), RestoreChoice(job="two"))).job == "two"


async def test_schema_files_are_named_where_they_are_now(world: World) -> None:
    query = await world.query(3, families=True)
    await world.back_up(query)
    target = world.new_path()
    before = (query.root / "state/0/_metadata/v2/0").stat()
    await restore_checkpoint(await world.repository(), target)
    operator = decode_operator((target / "state/0/_metadata/v2/0").read_bytes())
    assert operator.stores[0].schema_paths == (f"file:{target}/state/0/_stateSchema/default/0_abc",)
    assert (target / "state/0/_metadata/v2/0").stat().st_mtime_ns == before.st_mtime_ns


async def test_files_keep_their_times(world: World) -> None:
    query = await world.query(5)
    await world.back_up(query)
    target = world.new_path()
    await restore_checkpoint(await world.repository(), target)
    for path in target.rglob("*"):
        if path.is_file():
            assert path.stat().st_mtime_ns == (query.root / path.relative_to(target)).stat().st_mtime_ns


async def test_inputs_that_moved_are_mapped(world: World) -> None:
    query = await world.query(2)
    await world.back_up(query)
    target = world.new_path()
    await restore_checkpoint(await world.repository(), target, RestoreChoice(map_paths={"/in": "/new place"}))
    assert b'"path":"file:///new%20place/1.json","timestamp":1' in (target / "sources/0/1").read_bytes()
    with pytest.raises(UsageError, match="nothing in sources/ begins with /i"):
        await restore_checkpoint(await world.repository(), world.new_path(), RestoreChoice(map_paths={"/i": "/other"}))


async def test_a_target_with_content_is_refused_or_moved_aside(world: World) -> None:
    query = await world.query(3)
    await world.back_up(query)
    repository = await world.repository()
    before = tree(query.root)
    with pytest.raises(TargetError, match="is a directory with content"):
        await restore_checkpoint(repository, query.root)
    assert tree(query.root) == before

    restored = await restore_checkpoint(repository, query.root, RestoreChoice(move_aside=True))

    aside = Path(restored.moved_aside)
    assert aside.parent == query.root.parent
    assert aside.name.startswith(f"{query.root.name}.aside-2")
    assert tree(aside) == before
    assert await world.rows(query.root) == await world.rows(aside)
    again = await restore_checkpoint(repository, query.root, RestoreChoice(move_aside=True))
    assert again.moved_aside not in {"", restored.moved_aside}
    assert tree(aside) == before


@pytest.mark.parametrize("where, below", [("at", "repository"), ("above", ""), ("below", "repository/new")])
@pytest.mark.parametrize("name", ["here", "link"])
async def test_the_place_of_the_repository_is_no_target(world: World, where: str, below: str, name: str) -> None:
    query = await world.query(1)
    here = world.tmp_path / "here"
    (world.tmp_path / "link").symlink_to(here)
    async with await Repository.init(f"file://{here}/repository") as repository:
        await backup_checkpoint(repository, query.root)
        before = tree(here)
        target = world.tmp_path / name / below
        with pytest.raises(TargetError, match=f"is {where} the place of the repository itself"):
            await restore_checkpoint(repository, target, RestoreChoice(move_aside=True))
        with pytest.raises(TargetError, match=f"is {where} the place of the repository itself"):
            await plan_checkpoint_restore(repository, f"file://{target}", RestoreChoice(move_aside=True))
        assert tree(here) == before
        await restore_checkpoint(repository, world.tmp_path / "here-2")


async def test_a_target_that_cannot_come_back_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    query = await world.query(1)
    await world.back_up(query)
    before = tree(query.root)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no more")

    monkeypatch.setattr(Staging, "_check_moved_aside", fail)
    monkeypatch.setattr(Staging, "_swap_back", fail)
    with pytest.raises(TargetError) as caught:
        await restore_checkpoint(await world.repository(), query.root, RestoreChoice(move_aside=True))
    (aside,) = query.root.parent.glob("*.aside-*")
    assert tree(aside) == before
    assert str(aside) in caught.value.hint


@pytest.mark.parametrize("url", ["file:///a#b", "file:///a?b=c", "file://host/a", "file:a", "s3://b/a#c/d"])
async def test_a_target_follows_the_grammar_of_stores(world: World, url: str) -> None:
    query = await world.query(1)
    await world.back_up(query)
    with pytest.raises(InvalidRequestError):
        await restore_checkpoint(await world.repository(), url)


async def test_a_file_is_no_target(world: World) -> None:
    query = await world.query(1)
    await world.back_up(query)
    target = world.new_path()
    target.write_bytes(b"mine")
    with pytest.raises(TargetError, match="not a directory"):
        await restore_checkpoint(await world.repository(), target, RestoreChoice(move_aside=True))
    assert target.read_bytes() == b"mine"


def is_blob(key: str) -> bool:
    return key.startswith("blobs/")


def is_index(key: str) -> bool:
    return key.startswith("indexes/")


@pytest.mark.parametrize("kind", [is_blob, is_index])
@as_it_is_or_replayed
async def test_any_altered_byte_of_the_repository_leaves_the_target_as_it_was(
    world: World, kind: Callable[[str], bool], replayed: bool
) -> None:
    query = await world.query(5)
    await world.back_up(query)
    inner = world.store.inner
    assert isinstance(inner, MemoryStore)
    page = await inner.list_page("")
    keys = [blob.key for blob in page.blobs if kind(blob.key)]
    assert keys
    target = world.new_path()
    for key in keys:
        data = await get_bytes(inner, key)
        altered = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        await _replace(inner, key, altered)
        with pytest.raises(DamagedError) as caught:
            await restore_checkpoint(await world.repository(), target, RestoreChoice(replayed=replayed))
        assert key in str(caught.value)
        await _replace(inner, key, data)
        assert not target.exists()
        assert [p.name for p in target.parent.iterdir() if p.name.startswith(".")] == []
    await restore_checkpoint(await world.repository(), target, RestoreChoice(replayed=replayed))


async def _replace(store: MemoryStore, key: str, data: bytes) -> None:
    await store.put(key, BytesBody(data))


async def test_a_store_that_the_query_has_and_the_backup_lacks_is_named(world: World) -> None:
    query = await world.query(2)
    repository = await world.repository()
    commit = await world.back_up(query)
    left = [r for r in commit.record.stores if r.task != "0-1"]
    torn = msgspec.structs.replace(commit, record=msgspec.structs.replace(commit.record, stores=tuple(left)))

    async def latest(scope: str | Scope) -> Any:
        return torn

    repository.latest = latest  # type: ignore[method-assign]
    with pytest.raises(DamagedError, match="store 0/1"):
        await restore_checkpoint(repository, world.new_path(), RestoreChoice(job="query"))


async def test_an_unavailable_repository_leaves_nothing_behind(world: World) -> None:
    query = await world.query(4)
    await world.back_up(query)
    target = world.new_path()
    repository = await world.repository()

    async def fail_the_next_one() -> None:
        world.store.fail("get", "indexes/")

    # The first index is that of the query's files.
    world.store.before("get", "indexes/", fail_the_next_one)
    with pytest.raises(StoreUnavailableError):
        await restore_checkpoint(repository, target)
    assert not target.exists()
    assert [p.name for p in target.parent.iterdir() if p.name.startswith(".")] == []


async def test_a_query_without_state_has_its_logs(world: World) -> None:
    query = await world.query(3, format_version=1)
    shutil.rmtree(query.root / "state")
    await world.back_up(query)
    target = world.new_path()
    restored = await restore_checkpoint(await world.repository(), target)
    assert (restored.stores, restored.batch) == (0, 2)
    assert batches_in(target, "commits")[-1] == 2


async def test_a_source_that_leads_is_cut_where_the_offsets_end(world: World) -> None:
    query = await world.query(5, file_offsets=True)
    await world.back_up(query)
    target = world.new_path()
    await restore_checkpoint(await world.repository(), target, RestoreChoice(batch=3))
    assert batches_in(target, "offsets")[-1] == 4
    assert batches_in(target, "sources/0") == [0, 1, 2, 3, 4]
    await restore_checkpoint(
        await world.repository(), world.new_path(), RestoreChoice(batch=3, map_paths={"/in": "/new"})
    )
    query_at_two = world.new_path()
    await restore_checkpoint(await world.repository(), query_at_two, RestoreChoice(batch=2))
    assert batches_in(query_at_two, "sources/0") == [0, 1, 2, 3]


async def test_the_log_beside_one_of_a_source_that_is_used_twice_is_cut_by_its_own_offset(world: World) -> None:
    query = await world.query(5, file_offsets=True)
    for batch in range(5):
        file = query.root / f"offsets/{batch}"
        own = file.read_text()
        file.write_text(f'{own}\n{own.splitlines()[-1]}\n{{"logOffset":{batch + 2}}}')
    shutil.copytree(query.root / "sources/0", query.root / "sources/1")
    for entry in (5, 6):
        shutil.copy(query.root / "sources/0/0", query.root / f"sources/1/{entry}")
    await world.back_up(query)
    target = world.new_path()
    await restore_checkpoint(await world.repository(), target, RestoreChoice(batch=2))
    assert batches_in(target, "offsets")[-1] == 3
    assert batches_in(target, "sources/0") == [0, 1, 2, 3]
    assert batches_in(target, "sources/1") == [0, 1, 2, 3, 4, 5]


async def test_a_plan_says_what_would_come_and_writes_nothing(world: World) -> None:
    query = await world.query(5)
    await world.back_up(query)
    repository = await world.repository()
    target = world.new_path()
    plan = await plan_checkpoint_restore(repository, target, RestoreChoice())
    assert not target.exists()
    assert plan.changelogs == 4  # versions 4 and 5 on top of 3, of two stores
    restored = await restore_checkpoint(repository, target)
    assert (plan.files, plan.size_bytes, plan.stores) == (restored.files, restored.size_bytes, restored.stores)
    with pytest.raises(TargetError, match="with content"):
        await plan_checkpoint_restore(repository, target, RestoreChoice())


@pytest.mark.parametrize("name", [f"changelog-v{n}-lz4" for n in (1, 2, 3, 4)] + ["row-checksums"])
@as_it_is_or_replayed
async def test_checkpoints_of_spark_come_back_row_by_row(
    world: World, tmp_path: Path, name: str, replayed: bool
) -> None:
    original = shutil.copytree(GOLDEN / name, tmp_path / "spark")
    # The copies that are kept have none.
    for operator in original.glob("state/*/_metadata/v2/*"):
        for store in decode_operator(operator.read_bytes()).stores:
            for schema in store.schema_paths:
                path = original / schema[schema.index("state/") :]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"schema")
    # Nor sources.
    choice = BackupChoice(despite_damage=True)
    await backup_checkpoint(await world.repository(), original, choice)
    target = world.new_path()
    await restore_checkpoint(await world.repository(), target, RestoreChoice(replayed=replayed))
    rows = await world.rows(target)
    assert rows == await world.rows(original)
    assert rows[StoreId(0, 0)]


def test_the_help_says_to_stop_the_query_before_it_is_moved_aside() -> None:
    shown = CliRunner().invoke(tidemark, ["spark", "restore", "--help"]).stdout
    assert "Stop the query first: its executors write by path." in " ".join(shown.split())
