"""A query is backed up while it runs, its checkpoint is deleted, and a restored one brings it to the same results."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.repository.repository import SyncRepository
from engine.spark import backup_checkpoint as backup_on_spark
from engine.spark import restore_checkpoint as restore_on_spark
from engine.spark.listener import BackupListener
from tests.servers.s3_server import S3Server
from tests.spark.checkpoint.shows import Results, Show
from tests.spark.s3_storage import workers_sign_as
from tests.spark.state.queries import AGGREGATION, FORMAT, SESSION, TRANSFORM, Query, join

pytestmark = pytest.mark.spark

LONG_S: Final = 60.0


class Repo:
    """A repository, new."""

    def __init__(self, url: str) -> None:
        self.url = url
        SyncRepository.init(url).close()

    def backup(self, checkpoint: Path, **options: Any) -> Any:
        with SyncRepository.open(self.url) as repository:
            return repository.loop.run(backup_checkpoint(repository.asynchronous, checkpoint, BackupChoice(**options)))

    def restore(self, target: Path, **options: Any) -> Any:
        with SyncRepository.open(self.url) as repository:
            return repository.loop.run(restore_checkpoint(repository.asynchronous, target, RestoreChoice(**options)))


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.s3)])
def repo(request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession) -> Iterator[Repo]:
    """A repository in a directory and one on S3, which Spark's workers reach too."""
    if request.param == "directory":
        yield Repo(f"file://{tmp_path / 'repository'}")
        return
    server: S3Server = request.getfixturevalue("s3_server")
    new_bucket: Callable[[S3Server], str] = request.getfixturevalue("new_bucket")
    bucket = new_bucket(server)
    with workers_sign_as(spark, server, tmp_path):
        yield Repo(f"s3://{bucket}/state")


def interrupt(show: Show, repo: Repo, *, every: int, at_least: int) -> tuple[int, int]:
    """Run a query with a listener, until some batches are backed up; then lose its checkpoint.

    Returns:
        An older batch of which there is a backup, and the newest. On a busy machine a listener skips batches.
    """
    with BackupListener(show.checkpoint, repo.url, every=every, at_end=False) as listener:
        running = show.start("sink", listener=listener)
        try:
            assert listener.wait(LONG_S, batch=0), listener.last_error
            assert listener.last_backup is not None
            older: int = listener.last_backup.backup.batch
            assert listener.wait(LONG_S, batch=max(at_least, older + 1)), listener.last_error
        finally:
            running.stop()
    assert listener.last_error is None
    # A task that Spark has not yet cancelled may still write to it.
    while show.checkpoint.exists():
        shutil.rmtree(show.checkpoint, ignore_errors=True)
    return older, listener.last_backup.backup.batch


def assert_resumes(show: Show, checkpoint: Path, expected: Results, sink: str) -> None:
    """What had been written before the loss and what the restored query writes is what was expected."""
    show.copy_results("sink", sink)
    before = show.committed(checkpoint)
    assert before < show.batches - 1, "there is nothing left to do"
    assert show.run(sink, checkpoint) == expected
    assert show.committed(checkpoint) >= show.batches - 1


# By way of Spark, as test_checkpoint_backup does in `make test`; test_matrix resumes there.
@pytest.mark.soak
@pytest.mark.parametrize("query", [AGGREGATION, join(2), TRANSFORM], ids=lambda query: query.name)
def test_a_lost_query_goes_on_from_a_backup_taken_while_it_ran(
    spark: SparkSession, tmp_path: Path, url: str, query: Query
) -> None:
    show = Show(spark, query, tmp_path / "show", {FORMAT: "2"}, batches=4)
    expected = show.run("expected", tmp_path / "uninterrupted")
    batch = -1

    def back_up(number: int) -> None:
        nonlocal batch
        # Within batch 2: its offsets are written, its state is partly there, and it is not committed.
        if number == 2 and batch < 0:
            batch = backup_on_spark(spark, url, show.checkpoint).backup.batch

    running = show.start("sink", before=back_up)
    show.wait_for(2, running)
    running.stop()
    assert batch == 1
    shutil.rmtree(show.checkpoint)
    restored = restore_on_spark(spark, url, tmp_path / "elsewhere" / "plain")
    assert restored.batch == 1
    assert_resumes(show, tmp_path / "elsewhere" / "plain", expected, "plain")
    restore_on_spark(spark, url, tmp_path / "elsewhere" / "replayed", RestoreChoice(replayed=True))
    assert not list((tmp_path / "elsewhere" / "replayed").glob("state/**/*.changelog"))
    assert_resumes(show, tmp_path / "elsewhere" / "replayed", expected, "replayed")


@pytest.mark.soak
@pytest.mark.parametrize("state_format", ["1", "2"])
@pytest.mark.parametrize("query", [AGGREGATION, join(2), join(4), TRANSFORM, SESSION], ids=lambda query: query.name)
def test_a_lost_query_comes_to_the_results_of_one_that_was_not_lost(
    spark: SparkSession, tmp_path: Path, repo: Repo, query: Query, state_format: str
) -> None:
    show = Show(spark, query, tmp_path / "show", {FORMAT: state_format}, batches=9)
    expected = show.run("expected", tmp_path / "uninterrupted")
    older_batch, batch = interrupt(show, repo, every=2, at_least=3)
    for replayed in (False, True):
        name = "replayed" if replayed else "plain"
        target = tmp_path / "elsewhere" / name
        restored = repo.restore(target, replayed=replayed)
        assert restored.batch == batch
        assert_resumes(show, target, expected, name)
    # An older one, over what the resumed query has made of the first.
    older = repo.restore(tmp_path / "elsewhere" / "plain", batch=older_batch, move_aside=True)
    assert older.batch == older_batch
    assert older.moved_aside is not None
    assert_resumes(show, tmp_path / "elsewhere" / "plain", expected, "older")


@pytest.mark.soak
@pytest.mark.parametrize("batch", [0, 2, 9, 10])
def test_what_a_source_knows_of_later_batches_does_not_make_one_of_them(
    spark: SparkSession, tmp_path: Path, url: str, batch: int
) -> None:
    """The source's own log is read after the offsets, and the query may have gone on by many batches until then."""
    show = Show(spark, AGGREGATION, tmp_path / "show", {FORMAT: "2"}, batches=13)
    expected = show.run("sink")
    show.forget_commits(batch + 1)
    with SyncRepository.open(url) as repository:
        made = repository.loop.run(backup_checkpoint(repository.asynchronous, show.checkpoint))
        assert made.backup.batch == batch
        for replayed in (False, True):
            name = "replayed" if replayed else "plain"
            repository.loop.run(
                restore_checkpoint(repository.asynchronous, tmp_path / name, RestoreChoice(replayed=replayed))
            )
            assert_resumes(show, tmp_path / name, expected, name)


@pytest.mark.soak
@pytest.mark.parametrize("state_format", ["1", "2"])
def test_a_restored_query_is_backed_up_in_turn(
    spark: SparkSession, tmp_path: Path, url: str, state_format: str
) -> None:
    """Lost three times, and each time restored from a backup of the restored one."""
    show = Show(spark, AGGREGATION, tmp_path / "show", {FORMAT: state_format}, batches=12)
    expected = show.run("expected", tmp_path / "uninterrupted")
    checkpoint = show.checkpoint
    for turn in range(3):
        with BackupListener(checkpoint, url, at_end=False) as listener:
            running = show.start("sink", checkpoint, listener=listener)
            assert listener.wait(LONG_S, batch=2 + 3 * turn), listener.last_error
            running.stop()
        shutil.rmtree(checkpoint)
        checkpoint = tmp_path / f"turn-{turn}"
        with SyncRepository.open(url) as repository:
            repository.loop.run(
                restore_checkpoint(repository.asynchronous, checkpoint, RestoreChoice(replayed=turn == 1))
            )
    assert_resumes(show, checkpoint, expected, "last")
