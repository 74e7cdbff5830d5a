"""A replica has the rows of its source, batch by batch, whatever comes between (design 0011, Q1 to Q6)."""

import asyncio
import errno
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from click.testing import CliRunner

from blobstore.errors import StoreUnavailableError
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.convert import convert_checkpoint
from engine.checkpoint.cutover import CutoverChoice, cut_over, plan_cutover
from engine.checkpoint.errors import QueryMovedOnError
from engine.checkpoint.follower import FollowChoice, QueryFollower, opened_follower
from engine.checkpoint.live import QueryFiles
from engine.checkpoint.replica import QueryFollowStatus, read_status
from engine.checkpoint.rescale_stores import Here
from engine.checkpoint.route import ReplicaStore
from engine.cli import tidemark
from engine.errors import (
    MisplacedKeyError,
    NotFoundError,
    PromotedError,
    TargetBusyError,
    TargetError,
    UnsafeSourceError,
    UsageError,
)
from engine.runtime import Runtime
from engine.state.checkpoint_dir import CheckpointDir
from index.errors import BatchLogError, ClosedCheckpointError
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FilePath
from index.spark.query_logs import decode_offsets, encode_offsets
from index.spark.replica import decode_replica
from tests.unit.engine.checkpoint.follow.followed import (
    PLANTED,
    STRIDES,
    KilledError,
    Killer,
    Looks,
    check_goes_on,
    newest,
    step,
    written,
)
from tests.unit.engine.checkpoint.test_rescale import by_another_hash
from tests.unit.engine.checkpoint.written_query import WrittenQuery, by_crc
from tests.unit.index.spark.written_metadata import encode_query_id


@pytest.mark.parametrize(
    "before, after, format_version, options",
    [
        (4, 2, 2, {}),
        pytest.param(4, 8, 2, {"families": True}, marks=pytest.mark.soak),
        (4, 6, 1, {"row_checksums": True}),
        pytest.param(4, 1, 1, {"families": True}, marks=pytest.mark.soak),
        (3, None, 2, {"row_checksums": True, "families": True}),
        pytest.param(2, None, 1, {"codec": "zstd"}, marks=pytest.mark.soak),
    ],
)
async def test_a_replica_has_every_batch_and_goes_on_after_a_cutover(
    tmp_path: Path, looks: Looks, before: int, after: int | None, format_version: Literal[1, 2], options: dict[str, Any]
) -> None:
    query = await written(tmp_path, before, format_version=format_version, **options)
    target, choice = tmp_path / "target", FollowChoice(partitions=after, snapshot_every=3)
    async with opened_follower(query.root, target, choice, partitioner=by_crc) as follower:
        assert (await follower.status()).batch is None
        first = await follower.step()
        assert (first.batch, first.copied) == (1, "there was no replica yet")
        snapshots = 0
        for batch in range(2, 9):
            await query.run(1)
            step = await follower.step()
            assert (step.batch, step.batches, step.copied) == (batch, 1, "")
            assert await looks.at(target) == await looks.at(query.root)
            snapshots += step.snapshots
        assert snapshots >= (after or before)
        await query.run(3)
        assert (await follower.step()).batches == 3
    assert [path.name for path in (tmp_path / ".target.tidemark-follow").iterdir()] == ["lock"]
    done = await cut_over(query.root, target, CutoverChoice(wait_s=0), partitioner=by_crc)
    assert (done.batch, done.planned_batch, done.batches) == (11, None, 0)
    expected = await looks.at(query.root, 11)
    assert await looks.at(target) == expected
    report = await check_checkpoint(target)
    assert report.is_sound, report.findings
    assert not report.warnings
    await query.resume(target, 11)
    await query.run(2)
    assert (await looks.at(target)).items() >= {("default", key): value for key, value in PLANTED.items()}.items()


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("format_version", [1, 2])
async def test_a_follower_that_is_killed_before_any_write_leaves_an_exact_batch(
    tmp_path: Path, looks: Looks, killer: Killer, format_version: Literal[1, 2], stride: int
) -> None:
    query = await written(tmp_path, 2, batches=2, format_version=format_version)
    whole, target = tmp_path / "whole", tmp_path / "target"
    await step(query, whole, FollowChoice(partitions=3, snapshot_every=2))
    await query.run(2)
    for killed_at in itertools.count(format_version - 1, stride):
        shutil.copytree(whole, target)
        killer.left = killed_at
        try:
            await step(query, target, FollowChoice(snapshot_every=2))
        except KilledError:
            is_done = False
        else:
            is_done = True
        killer.left = None
        batch = newest(target)
        assert batch in {1, 2, 3}
        # The next follower goes on; and without one the query does, if its source is lost.
        lost = tmp_path / "lost"
        shutil.copytree(target, lost)
        done = await cut_over(query.root, lost, CutoverChoice(source_lost=True), partitioner=by_crc)
        assert done.batch == batch
        assert done.planned_batch in {None, batch + 1}
        await check_goes_on(query, lost, looks, batch)
        after = await step(query, target)
        assert (after.batch, after.copied) == (3, "")
        assert await looks.at(target) == await looks.at(query.root, 3)
        for path in (lost, target):
            shutil.rmtree(path)
        if is_done:
            break
    assert killed_at > 12


async def test_what_cannot_be_routed_is_copied_whole(tmp_path: Path, looks: Looks) -> None:
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    choice = FollowChoice(partitions=4)

    async def copied() -> str:
        done = await step(query, target, choice)
        assert await looks.at(target) == await looks.at(query.root)
        assert decode_replica((target / "metadata").read_bytes()) is not None
        return done.copied

    assert await copied() == "there was no replica yet"
    await query.run(1)
    for file in (query.root / "state/0/1").glob("3_*.changelog"):
        file.unlink()
    assert "is not there" in await copied()
    await query.run(3)
    for log, oldest in (("commits", 5), ("offsets", 4)):
        for number in range(oldest):
            (query.root / log / str(number)).unlink()
    assert await copied() == "batch 2 is not there any more"
    await query.run(1)
    path = query.root / "offsets" / str(query.batch)
    offsets = decode_offsets(path.read_bytes())
    conf = offsets.conf | {"spark.sql.streaming.stateStore.rocksdb.mergeOperatorVersion": "1"}
    path.write_bytes(encode_offsets(msgspec.structs.replace(offsets, conf=conf)))
    assert "settings changed with batch 6" in await copied()
    done = await cut_over(query.root, target, CutoverChoice(wait_s=0), partitioner=by_crc)
    assert done.batch == 6
    assert (await check_checkpoint(target)).is_sound


async def test_a_misplaced_key_ends_a_step_and_the_replica_stays(tmp_path: Path, looks: Looks) -> None:
    query = await written(tmp_path, 2)
    target, choice = tmp_path / "target", FollowChoice(partitions=4)
    async with opened_follower(query.root, target, choice, partitioner=by_another_hash) as follower:
        with pytest.raises(MisplacedKeyError):
            await follower.step()
    assert not target.exists()
    await step(query, target, choice)
    before = await looks.at(target)
    await query.run(1)
    async with opened_follower(query.root, target, choice, partitioner=by_another_hash) as follower:
        with pytest.raises(MisplacedKeyError, match=r"is in partition . of 2"):
            await follower.step()
        status = await follower.status()
    assert (status.batch, status.newest_batch, status.lag_batches) == (1, 2, 1)
    assert await looks.at(target) == before


async def opened(source: Path, target: Path, choice: FollowChoice) -> None:
    async with opened_follower(source, target, choice, partitioner=by_crc):
        pass


async def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        await opened(tmp_path / "nothing", target, FollowChoice())
    with pytest.raises(NotFoundError, match="there is no replica"):
        await cut_over(query.root, target)
    with pytest.raises(UsageError, match="cannot change partitions and provider at once"):
        await opened(query.root, target, FollowChoice(partitions=2, provider="rocksdb"))
    with pytest.raises(TargetError, match="below the place of the source"):
        await opened(query.root, query.root / "state/replica", FollowChoice())
    with pytest.raises(PromotedError, match="is a checkpoint of its own"):
        await opened(tmp_path / "nothing", query.root, FollowChoice())
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(TargetError, match="is a directory with content"):
        await opened(query.root, tmp_path / "full", FollowChoice())
    (tmp_path / ".target.tidemark-follow").symlink_to("full")
    with pytest.raises(TargetError, match=r"\.target\.tidemark-follow: is a symbolic link"):
        await opened(query.root, target, FollowChoice())
    assert (tmp_path / "full/file").exists()
    (tmp_path / ".target.tidemark-follow").unlink()
    await step(query, target, FollowChoice(partitions=4))
    with pytest.raises(UsageError, match="is followed with partitions 4"):
        await opened(query.root, target, FollowChoice(partitions=3))
    with pytest.raises(BatchLogError, match="is that of a replica of"):
        await opened(target, tmp_path / "of a replica", FollowChoice())
    another = WrittenQuery(tmp_path / "another", tmp_path / "work")
    await (await another.begin()).run(1)
    with pytest.raises(TargetError, match="is a replica of"):
        await opened(another.root, target, FollowChoice())
    async with opened_follower(query.root, target, partitioner=by_crc):
        with pytest.raises(TargetBusyError):
            await step(query, target)
    planned = await plan_cutover(query.root, target)
    assert (planned.batch, planned.planned_batch, planned.batches, planned.closed) == (1, None, 0, True)
    # Of two replicas one gets the query.
    other = tmp_path / "other"
    await step(query, other)
    await cut_over(query.root, target, CutoverChoice(wait_s=0), partitioner=by_crc)
    for lost in (False, True):
        choice = CutoverChoice(wait_s=0, source_lost=lost)
        for cut in (plan_cutover, cut_over):
            with pytest.raises(TargetError, match=f"has moved to {target}"):
                await cut(query.root, other, choice)
    for is_later in (False, True):
        if is_later:
            # As if it had begun another batch before it was closed.
            (query.root / "offsets/2").rename(query.root / "offsets/3")
            (query.root / "offsets/2").write_bytes((query.root / "offsets/1").read_bytes())
        for work in (read_status(query.root, other), opened(query.root, tmp_path / "third", FollowChoice())):
            with pytest.raises(TargetError, match=f"has moved to {target}"):
                await work
    assert decode_replica((other / "metadata").read_bytes()) is not None
    with pytest.raises(ClosedCheckpointError, match="is that of a replica of") as refused:
        await convert_checkpoint(other, tmp_path / "converted")
    assert "`tidemark spark cutover` makes it a checkpoint" in refused.value.hint


async def test_another_query_at_the_place_of_the_source_is_not_followed(tmp_path: Path, looks: Looks) -> None:
    """One that began there since, and has purged the batches that would show it."""
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    await step(query, target, FollowChoice(partitions=4))
    before = await looks.at(target)
    shutil.rmtree(query.root)
    query = await written(tmp_path, 2, batches=5)
    (query.root / "metadata").write_bytes(encode_query_id("query-2"))
    for log, oldest in (("commits", 3), ("offsets", 2)):
        for number in range(oldest):
            (query.root / log / str(number)).unlink()
    for work in (step(query, target), cut_over(query.root, target, CutoverChoice(wait_s=0), partitioner=by_crc)):
        with pytest.raises(TargetError, match="follows query query-1, and the source has query query-2 by now"):
            await work
    assert not (query.root / "offsets/5").exists()
    assert await looks.at(target) == before


def elsewhere(query: WrittenQuery, target: Path, work: Path, choice: FollowChoice | None = None) -> QueryFollower:
    """A follower of another machine, which shares no lock."""
    source, there = (CheckpointDir(LocalStore(at), local_root=at, location=str(at)) for at in (query.root, target))
    found = decode_replica((target / "metadata").read_bytes())
    assert found is not None
    how = Here(partitioner=by_crc, runtime=Runtime())
    return QueryFollower(source, there, found, choice or FollowChoice(), work, how)


class HeldUp:
    """Holds a follower up before it publishes a path, until somebody else has done something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str, meanwhile: Callable[[], Any]) -> None:
        publish = CheckpointDir.publish

        async def held_up(self: CheckpointDir, at: str, *args: Any, **options: Any) -> int:
            if at == path:
                monkeypatch.setattr(CheckpointDir, "publish", publish)
                await meanwhile()
            return await publish(self, at, *args, **options)

        monkeypatch.setattr(CheckpointDir, "publish", held_up)


@pytest.mark.parametrize("format_version", [1, 2])
async def test_a_copy_that_is_held_up_takes_nothing_from_a_query_that_was_cut_over(
    tmp_path: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch, format_version: Literal[1, 2]
) -> None:
    query = await written(tmp_path, 2, format_version=format_version)
    target = tmp_path / "target"
    await step(query, target, FollowChoice(partitions=4))
    await query.run(4)
    for log, oldest in (("commits", 4), ("offsets", 3)):
        for number in range(oldest):
            (query.root / log / str(number)).unlink()
    source = query.root

    async def meanwhile() -> None:
        await cut_over(source, target, CutoverChoice(source_lost=True))
        await query.resume(target, 1)
        await query.run(4)

    HeldUp(monkeypatch, "offsets/4", meanwhile)
    follower = elsewhere(query, target, tmp_path / "elsewhere")
    with pytest.raises((PromotedError, TargetBusyError)):
        await follower.step()
    await follower.aclose()
    assert sorted(int(path.name) for path in (target / "commits").iterdir()) == [1, 2, 3, 4, 5]
    assert len(await looks.at(target)) > len(PLANTED)


async def test_a_follower_that_is_held_up_leaves_what_the_query_has_read_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    await step(query, target)
    await query.run(1)
    source = query.root

    async def meanwhile() -> None:
        await step(query, target)
        await cut_over(source, target, CutoverChoice(wait_s=0))
        await query.resume(target, 2)
        await query.run(2)

    HeldUp(monkeypatch, "commits/2", meanwhile)
    with pytest.raises((PromotedError, TargetBusyError)):
        await elsewhere(query, target, tmp_path / "elsewhere").step()
    assert {path.name for path in (target / "sources/0").iterdir()} >= {"3", "4"}
    assert (await check_checkpoint(target)).is_sound


async def test_batches_come_before_snapshots_that_take_longer_than_they_do(
    tmp_path: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One snapshot in each step, of the store that waits longest, and no more batches of lag from step to step."""
    query = await written(tmp_path, 4)
    target, snapshot = tmp_path / "target", ReplicaStore.snapshot
    choice = FollowChoice(partitions=2, snapshot_every=2)
    async with opened_follower(query.root, target, choice, partitioner=by_crc) as follower:
        await follower.step()

        async def slow(self: ReplicaStore) -> None:
            await snapshot(self)
            await query.run(1)

        monkeypatch.setattr(ReplicaStore, "snapshot", slow)
        await query.run(3)
        steps = [await follower.step() for _ in range(6)]
    assert [step.batches for step in steps] == [3, 1, 1, 1, 1, 1]
    assert [step.snapshots for step in steps] == [1] * 6
    assert await looks.at(target, steps[-1].batch) == await looks.at(query.root, steps[-1].batch)


async def test_files_of_the_query_that_are_only_compared_are_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step gathers the whole log of a file source, and publishes one entry of it."""
    query, target, synced = await written(tmp_path, 2, 1), tmp_path / "target", list[int]()
    async with opened_follower(query.root, target, FollowChoice(), partitioner=by_crc) as follower:
        await follower.step()
        monkeypatch.setattr("engine.checkpoint.restore.flush", synced.append)
        await query.run(2)
        assert (await follower.step()).batches == 2
    assert (target / "sources/0/2").is_file()
    assert synced == []


async def test_logs_that_the_query_deletes_while_they_are_copied_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark deletes the entries of a file source's log ten minutes after it has put them into one file."""
    query = await written(tmp_path, 2, 3)
    bring, target = QueryFiles.bring, tmp_path / "target"
    deleted = iter(["sources/0/0", "sources/0/1"])

    async def bring_and_lose(self: QueryFiles) -> dict[FilePath, LocalFile]:
        found = await bring(self)
        if path := next(deleted, None):
            (query.root / path).unlink()
        return found

    monkeypatch.setattr(QueryFiles, "bring", bring_and_lose)
    await step(query, target)
    assert [path.name for path in (target / "sources/0").iterdir() if path.name.isdigit()] == ["2"]
    await query.run(1)
    deleted = iter(["sources/0/2", "sources/0/3", "commits/3"])
    with pytest.raises(UnsafeSourceError, match="vanished"):
        await step(query, target)


async def test_what_ends_a_follower_leaves_nothing_of_its_work(tmp_path: Path) -> None:
    query = await written(tmp_path, 2)
    work = tmp_path / ".target.tidemark-follow"

    async def follow() -> None:
        async with opened_follower(query.root, tmp_path / "target"):
            (work / "store-0-0-default").mkdir()
            raise KilledError

    with pytest.raises(KilledError):
        await follow()
    assert [path.name for path in work.iterdir()] == ["lock"]


@pytest.mark.parametrize("writer", ["checkpoint.convert.write_like", "state.changelogs.ChangelogWriter._write"])
async def test_a_follower_without_space_for_its_work_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    query = await written(tmp_path, 2)
    await step(query, tmp_path / "target")
    await query.run(1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(f"engine.{writer}", refuse)
        with pytest.raises(TargetError, match="there is no space"):
            await step(query, tmp_path / "target")
    assert (await step(query, tmp_path / "target")).batch == 2


async def test_a_source_that_goes_on_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    await step(query, target)

    async def purge() -> None:
        for log, oldest in (("commits", newest(query.root)), ("offsets", newest(query.root) - 1)):
            for path in (query.root / log).iterdir():
                if int(path.name) < oldest:
                    path.unlink()

    await query.run(3)
    await purge()

    async def meanwhile() -> None:
        await query.run(3)
        await purge()

    HeldUp(monkeypatch, "commits/4", meanwhile)
    with pytest.raises(QueryMovedOnError, match="batch 4 was copied, and by now the query has purged it"):
        await step(query, target)
    assert (await step(query, target)).batch == 7


async def test_a_query_that_was_taken_back_is_not_followed(tmp_path: Path) -> None:
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    shutil.copytree(query.root, tmp_path / "earlier")
    await query.run(1)
    await step(query, target, FollowChoice(partitions=4))
    shutil.rmtree(query.root)
    shutil.copytree(tmp_path / "earlier", query.root)
    await query.resume(query.root, 1)
    for look in (step(query, target), read_status(query.root, target), plan_cutover(query.root, target)):
        with pytest.raises(TargetError, match="is at batch 2, and the query at batch 1"):
            await look
    await query.run(1)
    for work in (step(query, target), cut_over(query.root, target, CutoverChoice(wait_s=0), partitioner=by_crc)):
        with pytest.raises(TargetError, match="has another batch 2 than the query by now"):
            await work
    assert not (query.root / "offsets/3").exists()


def test_a_follower_goes_on_where_a_look_at_the_lag_gets_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = asyncio.run(written(tmp_path, 2))
    looked, status = itertools.count(), QueryFollower.status

    async def fails(self: QueryFollower) -> QueryFollowStatus:
        match next(looked):
            case 1:
                raise StoreUnavailableError("no answer", operation="list")
            case 2:
                raise TargetError("somebody else writes there", operation="follow")
        return await status(self)

    monkeypatch.setattr(QueryFollower, "status", fails)
    words = ["spark", "follow", str(query.root), str(tmp_path / "target"), "--every", "100ms"]
    result = CliRunner().invoke(tidemark, words)
    assert (result.exit_code, next(looked)) == (9, 3)
    assert "stays at batch 1: list: no answer" in result.stderr


async def test_a_replica_on_an_object_store(tmp_path: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    query = await written(tmp_path, 2)
    store, open_dir = MemoryStore(), CheckpointDir.open

    async def opened(location: Any, prefix: str = "", *, settings: Any = None) -> CheckpointDir:
        if not str(location).startswith("s3://bucket"):
            return await open_dir(location, prefix, settings=settings)
        path = str(location).removeprefix("s3://bucket").strip("/")
        found = CheckpointDir(store, path, location=str(location))
        return found.child(prefix) if prefix else found

    monkeypatch.setattr(CheckpointDir, "open", opened)
    target, choice = "s3://bucket/replica", FollowChoice(partitions=4, snapshot_every=2)
    async with opened_follower(query.root, target, choice, partitioner=by_crc):
        pass
    for lost in (False, True):
        with pytest.raises(NotFoundError, match="the replica has no batch yet"):
            await cut_over(query.root, target, CutoverChoice(source_lost=lost))
    for _ in range(6):
        await step(query, target, choice)  # type: ignore[arg-type]
        await query.run(1)
    done = await cut_over(query.root, target, CutoverChoice(wait_s=0), partitioner=by_crc)
    assert (done.batch, done.location) == (7, target)
    fetched = tmp_path / "fetched"
    there = await opened(target)
    for status in await there.walk():
        path = fetched / status.path
        path.parent.mkdir(parents=True, exist_ok=True)
        await there.fetch(status.path, path)
    await check_goes_on(query, fetched, looks, 7)
