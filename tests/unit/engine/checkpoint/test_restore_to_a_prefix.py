"""A checkpoint that is restored to an object store: what may be there, and what is there meanwhile (0005, R4)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.base import BytesBody, list_blobs
from blobstore.errors import InvalidRequestError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.opening import open_store
from blobstore.wrappers.forwarding import ForwardingStore
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.restore import (
    CheckpointRestore,
    RestoreChoice,
    RestoredCheckpoint,
    make_target,
    plan_checkpoint_restore,
    restore_checkpoint,
    target_of,
)
from engine.checkpoint.targets import ObjectTarget, check_apart
from engine.cli.errors import describe
from engine.errors import TargetError, UsageError
from engine.repository.repository import Repository
from engine.runtime import Runtime
from index.spark.query_logs import decode_operator
from tests.contract.store_calls import get_bytes
from tests.doubles import InterposedStore
from tests.unit.engine.checkpoint.written_query import WrittenQuery, rows_of

LOCATION = "s3a://bucket/above/place"


class World:
    """A query of five batches with a backup, and an object store that is empty."""

    def __init__(self, query: Path, repository: Repository) -> None:
        self.query = query
        self.repository = repository
        self.bucket = InterposedStore(MemoryStore())

    async def restore(self, **choice: Any) -> RestoredCheckpoint:
        target = ObjectTarget(
            self.bucket, "place", location=LOCATION, runtime=Runtime(), move_aside=choice.pop("move_aside", False)
        )
        return await restore_checkpoint(self.repository, target, RestoreChoice(**choice))

    async def keys(self, prefix: str = "") -> list[str]:
        return [blob.key async for blob in list_blobs(self.bucket.inner, prefix)]

    async def put(self, path: str, data: bytes = b"x") -> None:
        await self.bucket.inner.put(f"place/{path}", BytesBody(data))

    async def content(self, prefix: str) -> dict[str, bytes]:
        found = {}
        for key in await self.keys(f"{prefix}/"):
            found[key.removeprefix(f"{prefix}/")] = await get_bytes(self.bucket.inner, key)
        return found

    async def local_copy(self, target: Path) -> Path:
        for path, data in (await self.content("place")).items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(data)
        return target

    def published(self) -> list[str]:
        """Paths in the order in which they came."""
        puts = [key for operation, key in self.bucket.requests if operation.startswith("put")]
        return [key.removeprefix("place/") for key in puts if key.startswith("place/")]


async def back_up(root: Path) -> None:
    query = await WrittenQuery(root / "query", root / "work", families=True).begin()
    await query.run(5)
    async with await Repository.init(str(root / "repository")) as repository:
        await backup_checkpoint(repository, query.root)


@pytest.fixture(scope="module")
def backed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A query and its backup, which no test changes."""
    root = tmp_path_factory.mktemp("backed_up")
    asyncio.run(back_up(root))
    return root


@pytest.fixture
async def world(backed_up: Path) -> AsyncIterator[World]:
    async with await Repository.open(str(backed_up / "repository")) as repository:
        yield World(backed_up / "query", repository)


@pytest.mark.parametrize("replayed", [False, True])
async def test_a_checkpoint_comes_to_an_empty_prefix(world: World, tmp_path: Path, replayed: bool) -> None:
    restored = await world.restore(replayed=replayed)
    assert (restored.location, restored.moved_aside) == (LOCATION, "")
    copy = await world.local_copy(tmp_path / "copy")
    assert await rows_of(copy, tmp_path / "a") == await rows_of(world.query, tmp_path / "b")
    operator = decode_operator((copy / "state/0/_metadata/v2/0").read_bytes())
    assert operator.stores[0].schema_paths == (f"{LOCATION}/state/0/_stateSchema/default/0_abc",)
    assert restored.files == len(await world.keys())


async def test_what_names_a_file_comes_after_it_and_the_commits_come_last(world: World) -> None:
    await world.restore()
    order = world.published()
    kinds = [
        next(n for n, match in enumerate(("SSTs/", ".zip", ".changelog", "", "offsets/", "commits/")) if match in path)
        if not path.startswith(("offsets/", "commits/"))
        else 4 + path.startswith("commits/")
        for path in order
    ]
    assert kinds == sorted(kinds)
    assert set(kinds) == {0, 1, 2, 3, 4, 5}
    assert order[-2:] == ["commits/3", "commits/4"]


async def test_content_is_refused_unless_it_may_be_moved_aside(world: World) -> None:
    await world.restore()
    before = await world.content("place")
    with pytest.raises(TargetError, match="is a prefix with content"):
        await world.restore()
    assert await world.content("place") == before


async def test_the_same_query_is_moved_aside_as_it_was(world: World) -> None:
    await world.restore()
    await world.put("state/0/0/left-over")
    before = await world.content("place")

    restored = await world.restore(move_aside=True)

    assert restored.moved_aside.startswith("s3a://bucket/above/place.aside-2")
    aside = restored.moved_aside.rpartition("/")[2]
    assert await world.content(aside) == before
    assert set(before) - set(await world.content("place")) == {"state/0/0/left-over"}


@pytest.mark.parametrize(
    "newer",
    [
        "commits/5",
        "offsets/6",
        "state/0/0/6.zip",
        "state/0/1/6_abc.changelog",
        "state/0/1/6_abc.changelog.crc",
        "state/3/7/left-keyToNumValues/9_abc.zip",
    ],
)
async def test_what_is_newer_is_not_moved_aside(world: World, newer: str) -> None:
    await world.restore()
    await world.put(newer)
    before = await world.keys()
    with pytest.raises(TargetError, match=f"holds {newer}, which is newer than batch 4"):
        await world.restore(move_aside=True)
    assert await world.keys() == before


@pytest.mark.parametrize("same", ["commits/4", "offsets/5", "state/0/0/5_abc.zip", "state/0/0/SSTs/000099-x.sst"])
async def test_what_is_no_newer_goes_aside(world: World, same: str) -> None:
    await world.restore()
    await world.put(same)
    await world.restore(move_aside=True)


async def test_an_older_batch_needs_a_new_prefix(world: World) -> None:
    await world.restore()
    with pytest.raises(TargetError, match="newer than batch 3") as caught:
        await world.restore(batch=3, move_aside=True)
    assert "new prefix" in caught.value.hint


async def test_another_query_is_not_moved_aside(world: World) -> None:
    await world.put("metadata", b'{"id":"another"}')
    with pytest.raises(TargetError, match="holds query another"):
        await world.restore(move_aside=True)


@pytest.mark.parametrize("path", ["data.csv", "commits/0", "images/a"])
async def test_what_nobody_knows_the_owner_of_is_not_moved_aside(world: World, path: str) -> None:
    await world.put(path)
    with pytest.raises(TargetError, match=f"holds {path}, and no metadata"):
        await world.restore(move_aside=True)
    assert await world.keys() == [f"place/{path}"]


@pytest.mark.parametrize("at", [".zip", ".changelog", "metadata", "offsets/", "commits/"])
async def test_an_interrupted_restore_is_no_checkpoint_and_can_be_repeated(world: World, at: str) -> None:
    world.bucket.fail("put", at)
    with pytest.raises(StoreUnavailableError):
        await world.restore()
    assert not [path for path in await world.content("place") if path.startswith("commits/4")]

    restored = await world.restore(move_aside=at != ".zip" or bool(await world.keys()))

    assert restored.batch == 4
    assert "commits/4" in await world.content("place")


async def test_what_cannot_be_copied_aside_is_not_deleted(world: World) -> None:
    await world.restore()
    before = await world.content("place")
    world.bucket.fail("put", "aside")
    with pytest.raises(StoreUnavailableError):
        await world.restore(move_aside=True)
    assert await world.content("place") == before


@pytest.mark.parametrize("written", ["state/0/0/5_abc.changelog", "state/0/0/SSTs/000099-x.sst", "metadata"])
async def test_what_is_written_while_it_is_moved_aside_is_not_deleted(world: World, written: str) -> None:
    await world.restore()

    async def write() -> None:
        await world.put(written, b"of an executor that lives")

    world.bucket.after("put", "aside", write)
    with pytest.raises(TargetError, match=f"changes while it is moved aside: {written}; nothing was deleted"):
        await world.restore(move_aside=True)
    assert (await world.content("place"))[written] == b"of an executor that lives"
    assert "commits/4" in await world.content("place")
    assert not [operation for operation, _ in world.bucket.requests if operation == "delete"]


@pytest.mark.parametrize("written", ["commits/9", "offsets/6", "state/0/0/7.changelog", "sources/0/4", "data.csv"])
async def test_somebody_else_who_writes_meanwhile_is_seen(world: World, written: str) -> None:
    async def write() -> None:
        await world.put(written, b"another's")

    world.bucket.after("put", "offsets/", write)
    with pytest.raises(TargetError, match=f"{written}; somebody else writes there"):
        await world.restore()
    assert "commits/4" not in await world.content("place")


async def test_somebody_else_who_deletes_meanwhile_is_seen(world: World) -> None:
    async def delete() -> None:
        await world.bucket.inner.delete(["place/metadata"])

    world.bucket.after("put", "offsets/", delete)
    with pytest.raises(TargetError, match="metadata; somebody else writes there"):
        await world.restore()


async def test_a_failure_after_moving_aside_says_where_the_old_content_is(world: World) -> None:
    await world.restore()
    before = await world.content("place")
    world.bucket.fail("put", "place/state")
    with pytest.raises(StoreUnavailableError) as caught:
        await world.restore(move_aside=True)
    (aside,) = {key.partition("/")[0] for key in await world.keys() if "aside" in key}
    assert await world.content(aside) == before
    shown = describe(caught.value, "spark restore")
    assert f"its former content is at s3a://bucket/above/{aside}: keep it, and restore again; " in shown.hint
    assert shown.causes[0] == f"the former content of {LOCATION} is at s3a://bucket/above/{aside}, whole"


async def test_a_failure_before_moving_aside_says_nothing_of_it(world: World) -> None:
    await world.restore()
    world.bucket.fail("put", "aside")
    with pytest.raises(StoreUnavailableError) as caught:
        await world.restore(move_aside=True)
    assert "aside" not in caught.value.hint


async def test_a_foreign_name_beside_the_same_query_is_not_moved_aside(world: World) -> None:
    await world.restore()
    await world.put("data/part-0.parquet")
    with pytest.raises(TargetError, match=r"holds data/part-0.parquet, which is not part of a checkpoint"):
        await world.restore(move_aside=True)


@pytest.mark.parametrize("is_preview", [False, True])
async def test_the_store_of_the_repository_is_no_target(world: World, is_preview: bool) -> None:
    async with await Repository.init(world.bucket) as repository:
        target = ObjectTarget(
            ForwardingStore(world.bucket), "place", location=LOCATION, runtime=Runtime(), move_aside=True
        )
        with pytest.raises(TargetError, match="is below the place of the repository itself"):
            await (
                plan_checkpoint_restore(repository, target, RestoreChoice())
                if is_preview
                else restore_checkpoint(repository, target)
            )


@pytest.mark.parametrize(
    "url, where",
    [
        ("s3://bucket/a/repository", "at"),
        ("s3a://bucket/a/repository/", "at"),
        ("s3n://bucket/a", "above"),
        ("S3://bucket/a/repository/in/it", "below"),
        ("s3a://bucket/a/repository-2", ""),
        ("s3a://other/a/repository", ""),
    ],
)
async def test_a_prefix_that_overlaps_with_the_repository_is_no_target(url: str, where: str) -> None:
    target, store = (target_of(RestoreChoice(move_aside=True), url, Runtime()), open_store("s3://bucket/a/repository"))
    try:
        if where:
            with pytest.raises(TargetError, match=f"is {where} the place of the repository itself"):
                await check_apart(target, store)
        else:
            await check_apart(target, store)
    finally:
        await store.close()
        await target.aclose()


def test_before_it_is_open_a_prefix_is_gathered_nowhere() -> None:
    with pytest.raises(UsageError, match="not open"):
        _ = target_of(RestoreChoice(), "s3://bucket/place", Runtime()).directory


async def test_nothing_is_published_while_a_store_is_missing(world: World) -> None:
    target = ObjectTarget(world.bucket, "place", location=LOCATION, runtime=Runtime(), move_aside=False)
    restore = CheckpointRestore(world.repository, target, RestoreChoice(), Runtime())
    await restore.begin()
    with pytest.raises(UsageError, match="stores were not restored: 0/0, 0/1"):
        await restore.finish([])
    await restore.aclose()
    assert await world.keys() == []


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3a:///place", "memory://name"])
def test_a_bucket_is_no_prefix(url: str) -> None:
    with pytest.raises(TargetError, match="not a prefix"):
        target_of(RestoreChoice(), url, Runtime())


@pytest.mark.parametrize("url", ["s3://KEY:hunter2@bucket", "s3a://KEY:hun/ter2@bucket/prefix", "s3://bucket?hunter2"])
def test_a_target_that_holds_a_secret_is_refused_without_it(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_target(url, Runtime(), move_aside=False, settings=None)
    assert "hun" not in str(caught.value)
