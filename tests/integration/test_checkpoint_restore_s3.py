"""Checkpoints that are restored from a repository on a real S3 server to a prefix of one (design 0005, R4)."""

import asyncio
import contextlib
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from blobstore.errors import CheckpointFileExistsError
from blobstore.opening import StoreSettings
from engine.checkpoint import groups
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.cutover import CutoverChoice, cut_over
from engine.checkpoint.follower import FollowChoice, opened_follower
from engine.checkpoint.groups import GroupRescaled, GroupToRescale
from engine.checkpoint.rescale import RescaleChoice, rescale_checkpoint
from engine.checkpoint.rescale_stores import Here
from engine.checkpoint.restore import (
    CheckpointRestore,
    RestoreChoice,
    RestoredCheckpoint,
    restore_checkpoint,
    target_of,
)
from engine.checkpoint.store import StoreRestored, StoreToRestore
from engine.checkpoint.targets import ObjectTarget, files_below
from engine.errors import DamagedError, TargetError
from engine.repository.repository import Repository
from engine.runtime import Runtime
from engine.spark import checkpoint as spark_checkpoint
from engine.spark.checkpoint import Destination, StoresWork
from engine.spark.checkpoint import restore_checkpoint as restore_on_spark
from engine.spark.errors import decode_error
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import FormatError
from tests.servers.s3_server import S3Server
from tests.unit.engine.checkpoint.written_query import WrittenQuery, by_crc, joined, rows_of, whole_key_rules

pytestmark = pytest.mark.s3


class World:
    """A query on this disk with a backup after batch 4, and a bucket."""

    def __init__(self, bucket: str, tmp_path: Path, *, partitions: int = 2) -> None:
        self.partitions = partitions
        self.bucket = f"s3://{bucket}"
        self.tmp_path = tmp_path
        self.query = tmp_path / "query"
        self._count = 0

    async def begin(self) -> "World":
        query = await WrittenQuery(
            self.query, self.tmp_path / "work", families=True, partitions=self.partitions
        ).begin()
        await query.run(5)
        async with await Repository.init(f"{self.bucket}/repository") as repository:
            await backup_checkpoint(repository, query.root)
        return self

    async def restore(self, **choice: Any) -> RestoredCheckpoint:
        async with await Repository.open(f"{self.bucket}/repository") as repository:
            return await restore_checkpoint(repository, f"{self.bucket}/checkpoints/here", RestoreChoice(**choice))

    async def copy(self, prefix: str = "checkpoints/here") -> Path:
        """What is in the bucket, on this disk."""
        self._count += 1
        target = self.tmp_path / f"copy-{self._count}"
        directory = await CheckpointDir.open(f"{self.bucket}/{prefix}")
        for status in await directory.walk():
            if not status.name or status.name.startswith("."):
                continue
            (target / status.path).parent.mkdir(parents=True, exist_ok=True)
            await directory.fetch(status.path, target / status.path)
        await directory.close()
        return target

    async def check(self, checkpoint: Path, batch: int = 4) -> None:
        work = self.tmp_path / "rows"
        found = await rows_of(checkpoint, work / "found", batch=batch)
        assert found == await rows_of(self.query, work / "expected", batch=batch)
        shutil.rmtree(work)


@pytest.fixture
async def world(s3_bucket: str, tmp_path: Path) -> World:
    return await World(s3_bucket, tmp_path).begin()


async def test_a_checkpoint_comes_back_to_a_prefix_and_again_over_it(world: World, s3_server: S3Server) -> None:
    # As Hadoop marks directories, and leaves what it could not rename.
    for hadoop in ("", "commits/", "commits/.5.0f1d.tmp"):
        bucket, key = world.bucket.removeprefix("s3://"), f"checkpoints/here/{hadoop}"
        s3_server.client.put_object(Bucket=bucket, Key=key, Body=b"")
    await world.restore()
    first = await world.copy()
    await world.check(first)
    assert b"s3a://" in (first / "state/0/_metadata/v2/0").read_bytes()

    with pytest.raises(TargetError, match="with content"):
        await world.restore()
    again = await world.restore(move_aside=True, replayed=True)

    await world.check(await world.copy())
    aside = await world.copy(again.moved_aside.removeprefix(f"{world.bucket}/"))
    await world.check(aside)
    with pytest.raises(TargetError, match="newer than batch 3"):
        await world.restore(move_aside=True, batch=3)


@pytest.mark.parametrize("replayed", [False, True], ids=["as it is", "replayed"])
async def test_executors_publish_their_stores_and_may_be_repeated(world: World, replayed: bool) -> None:
    """What `engine.spark.checkpoint` does, without Spark."""
    target = f"{world.bucket}/checkpoints/here"
    async with await Repository.open(f"{world.bucket}/repository") as repository:
        choice = RestoreChoice(replayed=replayed)
        place = target_of(choice, target, Runtime())
        restore = CheckpointRestore(repository, place, choice, Runtime())
        stores = await restore.begin()
        assert isinstance(place, ObjectTarget)
        await place.clear()
        destination = Destination(root=target, is_directory=False, settings=StoreSettings())
        results = []
        for item in stores:
            await destination.make(spark_checkpoint._restore, repository, item)  # an attempt whose answer nobody heard
            results.append(await destination.make(spark_checkpoint._restore, repository, item))
        assert not (await world.copy() / "commits").exists()
        restored = await restore.finish(results)
        await restore.aclose()
    assert restored.stores == len(stores) == 2
    await world.check(await world.copy())


async def test_executors_rescale_a_backup_and_may_be_repeated(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "read_key_rules", whole_key_rules)
    monkeypatch.setattr(spark_checkpoint, "partitions_of", by_crc)
    world = await World(s3_bucket, tmp_path, partitions=1).begin()
    target = f"{world.bucket}/checkpoints/here"
    async with await Repository.open(f"{world.bucket}/repository") as repository:
        choice = RestoreChoice(partitions=4)
        place = target_of(choice, target, Runtime())
        restore = CheckpointRestore(repository, place, choice, Runtime())

        async def twice(_: CheckpointRestore, work: tuple[GroupToRescale, ...]) -> list[GroupRescaled]:
            assert isinstance(place, ObjectTarget)
            await place.clear()
            destination = Destination(root=target, is_directory=False, settings=StoreSettings())
            results = []
            for item in work:
                # An attempt whose answer nobody heard.
                await destination.make(spark_checkpoint._rescale, repository, item)
                results.append(await destination.make(spark_checkpoint._rescale, repository, item))
            return results

        restored = await restore.finish(await restore.rescale(await restore.begin(), 4, twice))
        await restore.aclose()
    expected = joined(await rows_of(world.query, tmp_path / "expected"))
    assert restored.rescaled is not None
    assert (restored.stores, restored.rescaled.keys_checked) == (4, len(expected))
    copy = await world.copy()
    assert joined(await rows_of(copy, tmp_path / "found")) == expected
    report = await check_checkpoint(copy)
    # A lost attempt leaves SSTs that nothing names, as Spark's own do.
    assert report.is_sound

    # On this machine, from there to another prefix.
    async with await Repository.open(f"{world.bucket}/repository") as repository:
        there = f"{world.bucket}/checkpoints/there"
        await restore_checkpoint(repository, there, RestoreChoice(partitions=3), partitioner=by_crc)
    assert joined(await rows_of(await world.copy("checkpoints/there"), tmp_path / "there")) == expected
    await rescale_checkpoint(target, f"{there}-2", RescaleChoice(partitions=2), Here(partitioner=by_crc))
    assert joined(await rows_of(await world.copy("checkpoints/there-2"), tmp_path / "there-2")) == expected


@pytest.mark.parametrize("replayed", [False, True], ids=["as it is", "replayed"])
def test_on_spark_nothing_is_moved_aside_before_every_store_was_seen(
    s3_bucket: str, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, *, replayed: bool
) -> None:
    """The driver's part; the stores, which Spark would spread, are carried out here."""
    world = asyncio.run(World(s3_bucket, tmp_path).begin())
    trials: list[bool] = []
    indexes: list[str] = []

    def run(work: StoresWork[Repository, StoreToRestore, StoreRestored], *_: object) -> list[StoreRestored]:
        assert isinstance(work.do, partial)
        trials.append(work.do.func.__self__.is_trial)  # type: ignore[attr-defined]
        indexes.extend(item.reference.index.key for item in work.work)
        rows = [msgspec.msgpack.encode(number) for number in range(len(work.work))]
        (answer,) = pickle.loads(cloudpickle.dumps(work))(iter([pa.record_batch([rows], ["work"])]))
        if failed := list(filter(None, answer.column("failed").to_pylist())):
            raise decode_error(failed[0])
        return [msgspec.msgpack.decode(done, type=StoreRestored) for done in answer.column("done").to_pylist()]

    def restore() -> RestoredCheckpoint:
        trials.clear()
        return restore_on_spark(
            cast("SparkSession", None),
            f"{world.bucket}/repository",
            f"{world.bucket}/checkpoints/here",
            RestoreChoice(move_aside=True, replayed=replayed),
        )

    def names(prefix: str) -> set[str]:
        return {o["Key"] for o in s3_server.client.list_objects_v2(Bucket=s3_bucket, Prefix=prefix)["Contents"]}

    monkeypatch.setattr(StoresWork, "run", run)
    assert restore().moved_aside == ""
    assert trials == [False]
    assert restore().moved_aside.startswith(f"{world.bucket}/checkpoints/here.aside-")
    assert trials == [True, False]
    asyncio.run(_check_newest(world))

    before = names("checkpoints/")
    s3_server.client.put_object(Bucket=s3_bucket, Key=f"repository/{indexes[-1]}", Body=b"altered")
    with pytest.raises((DamagedError, FormatError)):
        restore()
    assert trials == [True]
    assert names("checkpoints/") == before


async def _check_newest(world: World) -> None:
    await world.check(await world.copy())


async def test_the_prefix_of_the_repository_is_no_target(world: World) -> None:
    async with await Repository.open(f"{world.bucket}/repository") as repository:
        for target in ("repository", "repository/blobs"):
            with pytest.raises(TargetError, match="the place of the repository itself"):
                await restore_checkpoint(
                    repository, f"s3a://{world.bucket[5:]}/{target}", RestoreChoice(move_aside=True)
                )


@pytest.mark.parametrize("source_is_there", [False, True])
async def test_a_query_is_followed_to_a_prefix_and_cut_over(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_is_there: bool
) -> None:
    for module in ("groups", "follower"):
        monkeypatch.setattr(f"engine.checkpoint.{module}.read_key_rules", whole_key_rules)
    query = WrittenQuery(tmp_path / "query", tmp_path / "work", partitions=2, hashed=True)
    await (await query.begin()).run(2)
    source, target = str(query.root), f"s3://{s3_bucket}/replicas/here"

    async def moved() -> str:
        """The query, as it is by now, in the bucket or on this disk."""
        if not source_is_there:
            return source
        place = await CheckpointDir.open(f"s3://{s3_bucket}/query")
        for path in files_below(query.root):
            with contextlib.suppress(CheckpointFileExistsError):
                await place.publish(path, query.root / path, overwrite=False)
        await place.close()
        return f"s3a://{s3_bucket}/query"

    choice = FollowChoice(partitions=4, snapshot_every=2)
    for _ in range(5):
        async with opened_follower(await moved(), target, choice, partitioner=by_crc) as follower:
            await follower.step()
        await query.run(1)
    done = await cut_over(await moved(), target, CutoverChoice(wait_s=0), partitioner=by_crc)
    assert (done.batch, done.planned_batch, done.batches) == (6, None, 1)
    copy = tmp_path / "copy"
    place = await CheckpointDir.open(target)
    for status in await place.walk():
        (copy / status.path).parent.mkdir(parents=True, exist_ok=True)
        await place.fetch(status.path, copy / status.path)
    await place.close()
    report = await check_checkpoint(copy)
    assert report.is_sound, report.findings
    assert joined(await rows_of(copy, tmp_path / "a")) == joined(await rows_of(query.root, tmp_path / "b", batch=6))
