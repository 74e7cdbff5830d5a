import asyncio
from pathlib import Path

import pytest

from blobstore.base import BlobStore, Unknown
from blobstore.errors import CheckpointUnknownError
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from engine.errors import UsageError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import BatchLog, StreamingCheckpoint
from index.errors import BatchLogError, UnknownFormatError
from index.snapshot.model import UniqueId
from index.spark.query_logs import BatchCommit, BatchOffsets, SourceOffset
from tests.unit.blobstore.scripted_store import LostAnswer, ScriptedStore

COMMIT = BatchCommit(version=2, unique_ids={0: ((UniqueId("a"),),)})
OTHER = BatchCommit(version=2, unique_ids={0: ((UniqueId("b"),),)})


@pytest.fixture(params=["memory", "directory"])
async def root(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointDir:
    store: BlobStore = MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "root")
    return await CheckpointDir.open(store)


@pytest.fixture
def directory(root: CheckpointDir) -> CheckpointDir:
    return root.child("commits")


@pytest.fixture
def commits(root: CheckpointDir) -> BatchLog[BatchCommit]:
    return StreamingCheckpoint(root).commits


async def test_an_empty_log_has_nothing(commits: BatchLog[BatchCommit]) -> None:
    assert await commits.batches() == ()
    assert await commits.get(0) is None


async def test_what_was_added_is_there(commits: BatchLog[BatchCommit]) -> None:
    assert await commits.add(0, BatchCommit())
    assert await commits.add(1, COMMIT)
    assert await commits.get(0) == BatchCommit()
    assert await commits.get(1) == COMMIT
    assert await commits.get(2) is None


async def test_a_batch_that_is_there_is_not_added_and_not_changed(commits: BatchLog[BatchCommit]) -> None:
    assert await commits.add(3, COMMIT)
    assert not await commits.add(3, OTHER)
    assert not await commits.add(3, COMMIT)
    assert await commits.get(3) == COMMIT


async def test_of_many_who_add_one_batch_one_does(commits: BatchLog[BatchCommit]) -> None:
    entries = [BatchCommit(version=2, unique_ids={0: ((UniqueId(str(n)),),)}) for n in range(10)]
    added = await asyncio.gather(*(commits.add(7, entry) for entry in entries))
    assert sum(added) == 1
    assert await commits.get(7) == entries[added.index(True)]


async def test_batches_are_in_the_order_of_their_numbers(commits: BatchLog[BatchCommit]) -> None:
    for batch in (9, 10, 100, 2):
        assert await commits.add(batch, BatchCommit(next_watermark_ms=batch))
    assert await commits.batches() == (2, 9, 10, 100)


async def test_foreign_files_are_no_batches(commits: BatchLog[BatchCommit], directory: CheckpointDir) -> None:
    for name in ("0_copy", "1.tmp", "007", "5/inside"):
        await directory.publish(name, b"v1\n{}", overwrite=False)
    assert await commits.add(2, COMMIT)
    assert await commits.batches() == (2,)


async def test_what_cannot_be_read_names_its_file_and_is_never_passed_over(
    commits: BatchLog[BatchCommit], directory: CheckpointDir
) -> None:
    await commits.add(0, COMMIT)
    await directory.publish("1", b"v9\n{}", overwrite=False)
    with pytest.raises(UnknownFormatError, match="commits/1: is of version 9"):
        await commits.get(1)
    await directory.publish("1", b"v2\n{", overwrite=True)
    with pytest.raises(BatchLogError, match="commits/1"):
        await commits.get(1)
    assert await commits.get(0) == COMMIT


async def test_each_file_is_read_by_its_own_version(commits: BatchLog[BatchCommit]) -> None:
    await commits.add(0, BatchCommit(next_watermark_ms=1))
    await commits.add(1, COMMIT)
    assert [entry.version for batch in (0, 1) if (entry := await commits.get(batch))] == [1, 2]


async def test_a_number_that_is_no_batch_is_refused(commits: BatchLog[BatchCommit]) -> None:
    for batch in (-1, 2**63):
        with pytest.raises(UsageError, match="is not a batch"):
            await commits.add(batch, COMMIT)


async def test_the_offset_log_keeps_what_a_batch_reads(root: CheckpointDir) -> None:
    offsets = StreamingCheckpoint(root).offsets
    entry = BatchOffsets(timestamp_ms=5, conf={"a": "b"}, offsets=(SourceOffset("0", '{"logOffset":1}'),))
    assert await offsets.add(4, entry)
    assert not await offsets.add(4, entry)
    assert await offsets.get(4) == entry


async def test_an_answer_that_never_came_is_no_success() -> None:
    store = ScriptedStore(LostAnswer(Unknown(reason="the connection broke")))
    commits = StreamingCheckpoint(await CheckpointDir.open(store)).commits
    with pytest.raises(CheckpointUnknownError):
        await commits.add(0, COMMIT)
    # It did arrive, and reading shows it.
    assert await commits.get(0) == COMMIT
    assert not await commits.add(0, COMMIT)
