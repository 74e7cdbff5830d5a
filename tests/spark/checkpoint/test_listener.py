"""The listener, notified of a query whose batches a test commits one by one; and of a real one with a slow backup."""

import asyncio
import contextlib
import shutil
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    SinkProgress,
    StreamingQueryProgress,
)
from typing_extensions import override

from blobstore.errors import StoreFullError
from blobstore.local.store import LocalStore
from engine.checkpoint.backup import BackupChoice
from engine.errors import UsageError
from engine.repository.repository import SyncRepository
from engine.spark.listener import BackupListener
from index.spark.checkpoint import decode_checkpoint_backup
from index.spark.query_logs import decode_query_id
from tests.doubles import InterposedStore
from tests.spark.checkpoint.shows import Show, flip_byte, wait_until
from tests.spark.state.queries import AGGREGATION, FORMAT
from tests.unit.index.spark.written_metadata import encode_query_id

GOLDEN: Final = Path(__file__).parents[2] / "golden" / "spark" / "lost-attempts"
LONG_S: Final = 30.0


class Query:
    """A query that Spark ran long ago; it commits when it is asked to.

    Attributes:
        checkpoint: Its checkpoint; everything is there but the newer commits.
    """

    def __init__(self, root: Path) -> None:
        self.checkpoint = root / "checkpoint"
        shutil.copytree(GOLDEN, self.checkpoint)
        # The log of its source was left out of this copy.
        (self.checkpoint / "sources/0").mkdir(parents=True)
        for entry in range(10):
            line = f'{{"path":"file:///in/{entry}","timestamp":0,"batchId":{entry}}}'
            (self.checkpoint / f"sources/0/{entry}").write_text(f"v1\n{line}")
        shutil.rmtree(self.checkpoint / "commits")
        (self.checkpoint / "commits").mkdir()
        self.id = uuid.UUID(decode_query_id((self.checkpoint / "metadata").read_bytes()))

    def commit(self, *batches: int, listener: BackupListener | None = None) -> None:
        for batch in batches:
            shutil.copy(GOLDEN / "commits" / str(batch), self.checkpoint / "commits" / str(batch))
            if listener is not None:
                listener.onQueryProgress(progress(self.id, batch))

    def begin_again(self) -> None:
        """Another query, in the same place; nothing is committed yet."""
        shutil.rmtree(self.checkpoint / "commits")
        (self.checkpoint / "commits").mkdir()
        self.id = uuid.uuid4()
        (self.checkpoint / "metadata").write_bytes(encode_query_id(str(self.id)))

    def end(self, listener: BackupListener) -> None:
        listener.onQueryTerminated(QueryTerminatedEvent(self.id, uuid.uuid4(), None, None))


def progress(of: uuid.UUID, batch: int) -> QueryProgressEvent:
    shown = StreamingQueryProgress(
        id=of,
        runId=uuid.uuid4(),
        name=None,
        timestamp="2026-05-01T00:00:00.000Z",
        batchId=batch,
        batchDuration=1,
        durationMs={},
        eventTime={},
        stateOperators=[],
        sources=[],
        sink=SinkProgress("noop", -1, {}),
        numInputRows=1,
        inputRowsPerSecond=1.0,
        processedRowsPerSecond=1.0,
        observedMetrics={},
    )
    return QueryProgressEvent(shown)


class SlowStore(InterposedStore):
    """A store whose uploads wait, while it is set to.

    Attributes:
        is_asked: Set once an upload waits.
        may_go_on: Uploads wait until this is set.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(LocalStore(root))
        self.is_asked = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @contextlib.asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        async with super()._around(operation, *keys):
            while operation == "put_if_absent" and not self.may_go_on.is_set():
                self.is_asked.set()
                await asyncio.sleep(0.01)
            yield


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


@pytest.fixture
def store(url: str) -> SlowStore:
    return SlowStore(Path(url.removeprefix("file://")))


def batches_of(url: str) -> list[int]:
    """The batches whose backups a repository has, in the order in which they were taken."""
    with SyncRepository.open(url) as repository:
        (scope,) = repository.scopes()
        commits = sorted(repository.commits(scope), key=lambda commit: commit.record.number)
    backups = [decode_checkpoint_backup(commit.record.offsets) for commit in commits]
    return [backup.batch for backup in backups if backup is not None]


def has_failed(listener: BackupListener) -> bool:
    return listener.last_error is not None


def test_a_backup_follows_every_nth_batch(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url, every=2) as listener:
        for batch in range(5):
            query.commit(batch, listener=listener)
            # The batch's second event is one of a trigger that found nothing.
            listener.onQueryProgress(progress(query.id, batch))
            assert listener.wait(LONG_S)
        assert listener.backups == 2
        assert listener.last_backup is not None
        assert listener.last_backup.backup.batch == 3
        query.end(listener)
    assert listener.backups == 3
    assert listener.last_error is None
    assert batches_of(url) == [1, 3, 4]


def test_the_end_of_a_query_adds_nothing_to_a_backup_of_its_last_batch(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url) as listener:
        query.commit(0, listener=listener)
        assert listener.wait(LONG_S, batch=0)
        query.end(listener)
    assert (listener.backups, batches_of(url)) == (1, [0])


def test_without_at_end_the_end_is_no_reason(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url, every=2, at_end=False) as listener:
        query.commit(0, 1, listener=listener)
        assert listener.wait(LONG_S, batch=1)
        query.commit(2, listener=listener)
        query.end(listener)
    assert batches_of(url) == [1]


def test_batches_that_come_during_a_backup_count_for_the_next_one(query: Query, url: str, store: SlowStore) -> None:
    store.may_go_on.clear()
    with BackupListener(query.checkpoint, store, BackupChoice(job="slow"), every=2) as listener:
        query.commit(0, 1, listener=listener)
        assert store.is_asked.wait(LONG_S)
        query.commit(2, 3, 4, 5, 6, listener=listener)
        assert not listener.wait(0.05)
        store.may_go_on.set()
        assert listener.wait(LONG_S)
        assert listener.backups == 2
        query.commit(7, listener=listener)
        assert listener.wait(LONG_S)
        assert listener.backups == 2
        query.commit(8, listener=listener)
    assert batches_of(url) == [1, 6, 8]


def test_a_failure_is_kept_and_the_backup_tried_again(query: Query, url: str, store: SlowStore) -> None:
    with BackupListener(query.checkpoint, store, every=2) as listener:
        store.fail("put_if_absent", "indexes/", StoreFullError("no space", operation="put", key="k"))
        query.commit(0, 1, listener=listener)
        assert listener.wait(LONG_S)
        assert "no space" in str(listener.last_error)
        query.commit(2, listener=listener)
        assert listener.wait(LONG_S)
        assert listener.backups == 0
        assert has_failed(listener)
        query.commit(3, listener=listener)
        assert listener.wait(LONG_S, batch=3)
        assert listener.backups == 1
        assert not has_failed(listener)
    assert batches_of(url) == [3]


def test_a_repository_that_is_not_there_yet_is_found_when_it_is(query: Query, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'later'}"
    with BackupListener(query.checkpoint, url) as listener:
        query.commit(0, listener=listener)
        assert listener.wait(LONG_S)
        assert has_failed(listener)
        SyncRepository.init(url).close()
        query.commit(1, listener=listener)
        assert listener.wait(LONG_S, batch=1)
        assert not has_failed(listener)


def test_damage_is_reported_and_not_backed_up(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url, every=10) as listener:
        query.commit(*range(9), listener=listener)
        for file in query.checkpoint.glob("state/0/0/SSTs/*.sst"):
            flip_byte(file, 20)
        query.commit(9, listener=listener)
    assert listener.backups == 0
    assert ".sst" in str(listener.last_error) + str(getattr(listener.last_error, "exceptions", ""))


def test_a_new_query_in_the_same_place_is_followed(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url, every=2) as listener:
        for batch in (1, 3):
            query.commit(batch - 1, batch, listener=listener)
            assert listener.wait(LONG_S, batch=batch)
        first = query.id
        query.begin_again()
        query.commit(0, listener=listener)
        assert listener.wait(LONG_S)
        assert listener.last_backup is not None
        assert listener.last_backup.backup.query_id == str(first)
        assert not listener.wait(0.01, batch=0)
        query.commit(1, listener=listener)
        assert listener.wait(LONG_S, batch=1)
        assert listener.last_backup.backup.query_id == str(query.id)
        assert listener.last_error is None


def test_a_query_that_comes_back_to_the_place_is_followed(query: Query, url: str) -> None:
    kept = query.checkpoint.with_name("kept")
    with BackupListener(query.checkpoint, url) as listener:
        shutil.copytree(query.checkpoint, kept)
        other = query.id
        query.begin_again()
        query.commit(0, listener=listener)
        listener.onQueryProgress(progress(other, 0))
        assert listener.wait(LONG_S, batch=0)
        shutil.rmtree(query.checkpoint)
        kept.rename(query.checkpoint)
        listener.onQueryStarted(QueryStartedEvent(other, uuid.uuid4(), None, "2026-05-01T00:00:00.000Z", set()))
        query.id = other
        query.commit(0, listener=listener)
        assert listener.wait(LONG_S, batch=0)
        assert listener.last_backup is not None
        assert listener.last_backup.backup.query_id == str(other)


def test_a_fresh_listener_counts_from_the_newest_backup(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url, every=4) as listener:
        query.commit(*range(4), listener=listener)
    with BackupListener(query.checkpoint, url, every=4, at_end=False) as listener:
        query.commit(4, 5)
        query.commit(6, listener=listener)
        assert listener.wait(LONG_S)
        assert listener.backups == 0
        query.commit(7, listener=listener)
        assert listener.wait(LONG_S, batch=7)
    assert batches_of(url) == [3, 7]


def test_a_query_that_was_taken_back_is_counted_from_there(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url, every=2) as listener:
        # In pairs: a busy listener would begin at an even number.
        for batch in (1, 3, 5):
            query.commit(batch - 1, batch, listener=listener)
            assert listener.wait(LONG_S, batch=batch)
        for batch in range(2, 6):
            (query.checkpoint / "commits" / str(batch)).unlink()
        query.commit(2, listener=listener)
        assert listener.wait(LONG_S)
        assert batches_of(url)[-1] == 5
        query.commit(3, listener=listener)
        assert listener.wait(LONG_S)
    assert batches_of(url)[-1] == 3


@pytest.mark.parametrize("ends", [False, True])
def test_what_could_not_be_judged_is_judged_later(query: Query, url: str, *, ends: bool) -> None:
    metadata = (query.checkpoint / "metadata").read_bytes()
    with BackupListener(query.checkpoint, url, every=1) as listener:
        (query.checkpoint / "metadata").write_bytes(b"not yet whole")
        query.commit(0, listener=None if ends else listener)
        if ends:
            query.end(listener)
        assert listener.wait(LONG_S)
        assert has_failed(listener)
        (query.checkpoint / "metadata").write_bytes(metadata)
        # Nobody reports this query any more.
        listener.onQueryProgress(progress(uuid.uuid4(), 0))
        assert listener.wait(LONG_S, batch=0)
    assert batches_of(url) == [0]


def test_nobody_waits_for_a_backup_that_cannot_be_taken(query: Query, tmp_path: Path) -> None:
    listener = BackupListener(query.checkpoint, f"file://{tmp_path / 'nowhere'}")
    query.commit(0, listener=listener)
    assert not listener.wait(batch=0)
    assert has_failed(listener)
    listener.close(LONG_S)
    assert not listener.wait(batch=7)


def test_events_of_other_queries_are_ignored(query: Query, url: str) -> None:
    with BackupListener(query.checkpoint, url) as listener:
        query.commit(0)
        listener.onQueryProgress(progress(uuid.uuid4(), 0))
        listener.onQueryTerminated(QueryTerminatedEvent(uuid.uuid4(), uuid.uuid4(), None, None))
        assert listener.wait(LONG_S)
        assert (listener.backups, listener.last_error) == (0, None)


def test_events_of_other_queries_before_there_is_a_checkpoint_are_no_error(tmp_path: Path, url: str) -> None:
    with BackupListener(tmp_path / "to come", url) as listener:
        listener.onQueryProgress(progress(uuid.uuid4(), 0))
        assert listener.wait(LONG_S)
        assert (listener.backups, listener.last_error) == (0, None)


def test_a_closed_listener_hears_nothing(query: Query, url: str) -> None:
    listener = BackupListener(query.checkpoint, url)
    assert listener.close(LONG_S)
    assert listener.close(LONG_S)
    query.commit(0, listener=listener)
    query.end(listener)
    assert listener.wait(LONG_S)
    assert listener.backups == 0
    assert not listener.wait(0.01, batch=0)


def test_a_store_that_hangs_does_not_hold_a_close_for_ever(query: Query, store: SlowStore) -> None:
    store.may_go_on.clear()
    listener = BackupListener(query.checkpoint, store)
    query.commit(0, listener=listener)
    assert store.is_asked.wait(LONG_S)
    assert not listener.close(0.01)
    store.may_go_on.set()
    assert listener.close(LONG_S)
    assert listener.backups == 1


def test_every_is_at_least_one(query: Query, url: str) -> None:
    with pytest.raises(UsageError, match="every 0"):
        BackupListener(query.checkpoint, url, every=0)


@pytest.mark.spark
def test_a_query_goes_on_while_a_backup_is_slow(
    spark: SparkSession, tmp_path: Path, url: str, store: SlowStore
) -> None:
    show = Show(spark, AGGREGATION, tmp_path / "show", {FORMAT: "2"}, batches=4)
    store.may_go_on.clear()
    with BackupListener(show.checkpoint, store, BackupChoice(job="show")) as listener:
        running = show.start("sink", listener=listener)
        try:
            assert store.is_asked.wait(LONG_S)
            # The backup that began after the first batch cannot end before this.
            show.wait_for(show.batches - 1, running)
            assert listener.backups == 0
            store.may_go_on.set()
            assert listener.wait(LONG_S, batch=show.batches - 1)
        finally:
            store.may_go_on.set()
            running.stop()
    wait_until(lambda: listener.last_backup is not None)
    assert listener.last_error is None
    assert batches_of(url)[-1] == show.batches - 1
    assert len(batches_of(url)) <= 3
