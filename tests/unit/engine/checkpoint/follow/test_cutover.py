"""A query goes on at a replica that is cut over, and its source is closed (design 0011, Q7 to Q10)."""

import asyncio
import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from blobstore.concurrency import run_blocking
from blobstore.errors import AccessDeniedError
from engine.checkpoint import cutover
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.cutover import Cutover, CutoverChoice, cut_over, plan_cutover
from engine.checkpoint.follower import FollowChoice, opened_follower
from engine.errors import PromotedError, TargetError, UsageError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StreamingCheckpoint
from index.errors import BatchLogError
from index.spark.query_logs import BatchCommit, BatchOffsets, SourceOffset, decode_offsets, decode_query_id
from index.spark.replica import decode_fence
from tests.doubles import Gate
from tests.unit.engine.checkpoint.follow.followed import (
    STRIDES,
    KilledError,
    Killer,
    Looks,
    check_goes_on,
    step,
    written,
)
from tests.unit.engine.checkpoint.written_query import WrittenQuery, by_crc
from tests.unit.index.spark.written_metadata import encode_query_id


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("planned", [False, True])
async def test_a_cutover_that_is_killed_before_any_write_is_repeated(
    tmp_path: Path, looks: Looks, killer: Killer, planned: bool, stride: int
) -> None:
    query = await written(tmp_path, 2, batches=2)
    source, target = tmp_path / "source", tmp_path / "target"
    await step(query, target, FollowChoice(partitions=4))
    await query.run(1)
    if planned:
        await query.plan()
    shutil.copytree(query.root, source)
    shutil.copytree(target, tmp_path / "followed")
    choice = CutoverChoice(wait_s=0)
    for killed_at in itertools.count(planned, stride):
        for path, like in ((query.root, source), (target, tmp_path / "followed")):
            shutil.rmtree(path)
            shutil.copytree(like, path)
        killer.left = killed_at
        is_killed = False
        try:
            done = await cut_over(query.root, target, choice, partitioner=by_crc)
        except KilledError:
            is_killed = True
            killer.left = None
            # Nobody can start a query there.
            with pytest.raises(BatchLogError, match="is that of a replica"):
                decode_query_id((target / "metadata").read_bytes())
            done = await cut_over(query.root, target, choice, partitioner=by_crc)
        killer.left = None
        assert (done.batch, done.planned_batch) == (2, 3 if planned else None)
        assert decode_query_id((target / "metadata").read_bytes()) == "query-1"
        fence = query.root / "offsets" / ("4" if planned else "3")
        with pytest.raises(BatchLogError, match=f"is closed: the query has moved to {target}"):
            decode_offsets(fence.read_bytes())
        with pytest.raises(PromotedError):
            await cut_over(query.root, target, choice)
        with pytest.raises(PromotedError):
            await step(query, target)
        if planned:
            copied = decode_offsets((target / "offsets/3").read_bytes())
            assert copied.conf["spark.sql.shuffle.partitions"] == "4"
            closing = decode_fence((query.root / "commits/3").read_bytes())
            assert closing is not None
            assert closing.location == str(target)
        if not is_killed:
            break
    assert killed_at > 8
    await check_goes_on(query, target, looks, 2)


async def begin_cutover(query: WrittenQuery, target: Path) -> asyncio.Task[Cutover]:
    """Cut over beside a batch that is planned, until the source is closed; it waits for that batch then."""
    await query.plan()
    cutting = asyncio.create_task(cut_over(query.root, target, CutoverChoice(wait_s=60), partitioner=by_crc))
    while not (query.root / "offsets/3").exists():  # noqa: ASYNC110  (another task of this loop makes it)
        await asyncio.sleep(0.01)
    return cutting


async def test_a_batch_that_is_committed_while_its_source_is_closed_is_followed(tmp_path: Path, looks: Looks) -> None:
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    await step(query, target, FollowChoice(partitions=1))
    cutting = await begin_cutover(query, target)
    await query.run(1)
    done = await cutting
    assert (done.batch, done.planned_batch) == (2, None)
    await check_goes_on(query, target, looks, 2)


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_lost_source_that_gives_no_answer_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    query, target = await written(tmp_path, 2), tmp_path / "target"
    await step(query, target)
    if not is_there:
        shutil.rmtree(query.root)
    read, answers = CheckpointDir.read, threading.Event()

    async def silent(self: CheckpointDir, path: str, **options: Any) -> bytes:
        if self.location == str(query.root):
            await run_blocking(answers.wait, 60)  # as a file system that hangs
        return await read(self, path, **options)

    monkeypatch.setattr(CheckpointDir, "read", silent)
    monkeypatch.setattr(cutover, "_LOST_LOOK_S", 0.01)
    try:
        assert (await cut_over(query.root, target, CutoverChoice(source_lost=True))).batch == 1
    finally:
        answers.set()


async def test_a_cutover_that_may_not_write_to_the_source_does_not_call_it_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = await written(tmp_path, 2)
    await step(query, tmp_path / "target")
    publish = CheckpointDir.publish

    async def deny(self: CheckpointDir, path: str, *args: Any, **options: Any) -> int:
        if path == "offsets/2":
            raise AccessDeniedError("denied", operation="put", key=path)
        return await publish(self, path, *args, **options)

    monkeypatch.setattr(CheckpointDir, "publish", deny)
    with pytest.raises(AccessDeniedError) as caught:
        await cut_over(query.root, tmp_path / "target")
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_cutover_that_is_cancelled_says_that_the_source_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    query = await written(tmp_path, 2)
    await step(query, tmp_path / "target")
    if is_known:
        await query.plan()
    publish = CheckpointDir.publish

    async def slow(self: CheckpointDir, path: str, *args: Any, **options: Any) -> int:
        made = await publish(self, path, *args, **options)
        if path == "offsets/2" and not is_known:
            await asyncio.Event().wait()
        return made

    monkeypatch.setattr(CheckpointDir, "publish", slow)
    # A batch that is planned is waited for.
    closing = query.root / f"offsets/{2 + is_known}"
    cutting = asyncio.create_task(cut_over(query.root, tmp_path / "target", CutoverChoice(wait_s=60)))
    while not closing.exists():  # noqa: ASYNC110  (another task of this loop makes it)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    cutting.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await cutting
    closed = f"the source is closed: cut over again, or delete {closing} to let the query go on there"
    perhaps = f"the source may be closed, if {closing} names a replica: cut over again, then it is"
    assert caught.value.__notes__ == [closed if is_known else perhaps]


async def test_a_cutover_that_is_cancelled_while_it_looks_for_a_lost_source_leaves_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = await written(tmp_path, 2)
    await step(query, tmp_path / "target")
    gate = Gate()
    monkeypatch.setattr(cutover, "check_not_moved", lambda *_: gate.wait())
    cutting = asyncio.create_task(cut_over(query.root, tmp_path / "target", CutoverChoice(source_lost=True)))
    await gate.reached.wait()
    cutting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cutting
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_all_state_can_be_copied_after_the_source_was_closed(tmp_path: Path, looks: Looks) -> None:
    query = await written(tmp_path, 2)
    target = tmp_path / "target"
    await step(query, target, FollowChoice(partitions=4))
    cutting = await begin_cutover(query, target)
    await query.run(1, lost="state/0/1/3_*.changelog")
    assert (await cutting).batch == 2
    await check_goes_on(query, target, looks, 2)


async def test_a_replica_is_known_by_its_id_wherever_it_is_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = await written(tmp_path, 2, families=True)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        await step(query, Path("replica"), FollowChoice(partitions=2))
        # The same once more.
        await step(query, Path("replica"), FollowChoice(partitions=2))
    assert f"file:{tmp_path}/b/replica/" in (tmp_path / "b/replica/state/0/_metadata/v2/0").read_text()
    await query.run(1)
    await cut_over(query.root, Path("replica"), CutoverChoice(wait_s=0), partitioner=by_crc)
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(TargetError, match=f"has moved to {tmp_path}/b/replica"):
        await cut_over(query.root, Path("replica"), CutoverChoice(wait_s=0), partitioner=by_crc)


async def test_logs_that_do_not_have_every_batch_are_not_closed(tmp_path: Path) -> None:
    query = await written(tmp_path, 2)
    await step(query, tmp_path / "target")
    (query.root / "offsets/1").rename(query.root / "offsets/9")
    with pytest.raises(UsageError, match="has no entry for some batches"):
        await plan_cutover(query.root, tmp_path / "target")


async def test_a_query_that_logs_only_some_batches_goes_on_at_its_replica_once_its_source_is_lost(
    tmp_path: Path,
) -> None:
    """With asynchronous progress tracking Spark goes on from the offsets before, of whatever batch."""
    source, target = tmp_path / "query", tmp_path / "target"
    source.mkdir()
    (source / "metadata").write_bytes(encode_query_id("query-1"))
    logs = await StreamingCheckpoint.open(source)

    async def run(*batches: int) -> None:
        for batch in batches:
            offsets = (SourceOffset("0", str(batch)),)
            await logs.offsets.add(batch, BatchOffsets(timestamp_ms=1000 + batch, conf={}, offsets=offsets))
            await logs.commits.add(batch, BatchCommit())

    await run(0, 4)
    async with opened_follower(source, target) as follower:
        for batches in ((9,), (13,), (14, 15), (40,)):
            await run(*batches)
            assert (await follower.step()).batch == batches[-1]
    with pytest.raises(UsageError, match="has no entry for some batches"):
        await cut_over(source, target)
    assert (await cut_over(source, target, CutoverChoice(source_lost=True))).batch == 40
    assert sorted(path.name for path in (target / "offsets").iterdir()) == ["15", "40"]
    assert (await check_checkpoint(target)).findings == ()
