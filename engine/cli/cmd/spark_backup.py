"""`tidemark spark backup`: a backup of a streaming checkpoint whose query may run (design 0005, section 2)."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from blobstore.errors import StoreUnavailableError
from engine.checkpoint.backup import (
    MOVED,
    BackupChoice,
    BackupPreview,
    CheckpointBackupResult,
    backup_checkpoint,
    preview_backup,
)
from engine.checkpoint.errors import QueryMovedOnError
from engine.cli.errors import describe
from engine.cli.exit_codes import ExitCode
from engine.cli.options import (
    CHECK_RETAINED_HELP,
    DIRECTORY_THERE,
    DURATION,
    Setting,
    checkpoint_and_repository,
    figures_option,
    on_spark_option,
    transfer_options,
)
from engine.cli.output import extend
from engine.cli.session import Session, spark_session, verb
from engine.errors import CommitDamagedError, CommitUnknownError, ConflictError, UsageError
from engine.repository.sync import SyncRepository
from index.text import count, human_bytes, human_duration, printable

if TYPE_CHECKING:
    from engine.spark.session import SparkSession


# What is another thing the next time: the store, another writer, or the query itself.
PASSING: Final = (
    StoreUnavailableError,
    ConflictError,
    CommitUnknownError,
    CommitDamagedError,  # the next one sends again what is gone
    QueryMovedOnError,
    *MOVED,
)


class SparkBackupPlanView(BackupPreview, frozen=True, kw_only=True):
    """`spark backup --dry-run`."""

    dry_run: bool = True


class SparkBackupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint, and how."""

    checkpoint: str
    job: str | None
    watch: int | None
    scratch: Path | None
    check_retained: bool
    moved: bool
    on_spark: bool
    dry_run: bool


@verb(
    "backup",
    group="spark",
    short_help="Back up a checkpoint while its query runs.",
    prints=(CheckpointBackupResult, SparkBackupPlanView),
    example="tidemark spark backup /checkpoints/flights file:///backups",
)
@checkpoint_and_repository
@click.option("--job", "-j", cls=Setting, metavar="JOB", help="Job of the backups.  [default: spark-<query id>]")
@click.option("--watch", type=DURATION, metavar="TIME", help="Look again after each TIME, until interrupted.")
@click.option(
    "--scratch",
    type=DIRECTORY_THERE,
    metavar="DIR",
    help="Where files are fetched to.  [default: this machine's place for temporary files]",
)
@click.option("--check-retained", is_flag=True, help=CHECK_RETAINED_HELP)
@click.option("--moved", is_flag=True, help="Go on with a job whose last backup is of another place and a later batch.")
@on_spark_option
@click.option("-n", "--dry-run", is_flag=True, help="Write nothing; show what would be uploaded.")
@figures_option
@transfer_options
def spark_backup(session: Session, options: SparkBackupOptions) -> None:
    """Back up CHECKPOINT, a directory or s3://bucket/prefix, at its newest committed batch.

    The query may go on meanwhile. What is new is checked before it is taken over, and what the last backup has is not
    sent again. From an object store, what is new is fetched to a directory of this machine (--scratch) first.
    """
    if options.dry_run and options.watch is not None:
        raise UsageError("--dry-run and --watch", operation="spark backup", hint="give one of them")
    choice = BackupChoice(
        job=options.job,
        check_retained=options.check_retained,
        moved=options.moved,
        scratch=options.scratch,
        checkpoint_settings=session.store_settings(),
    )
    with session.open() as repository, contextlib.ExitStack() as open_for_all:
        if options.dry_run:
            found = repository.loop.run(preview_backup(repository.asynchronous, options.checkpoint, choice))
            session.show(extend(SparkBackupPlanView, found), _plan_lines(found))
            return
        spark = open_for_all.enter_context(spark_session()) if options.on_spark else None

        def back_up() -> CheckpointBackupResult:
            return _back_up(session, repository, spark, options.checkpoint, choice)

        if options.watch is None:
            _show(session, back_up())
        else:
            _watch(session, repository, back_up, options.watch)


def _watch(
    session: Session, repository: SyncRepository, back_up: Callable[[], CheckpointBackupResult], watch_ms: int
) -> None:
    """Back up until interrupted, or until an error that does not pass by itself."""
    is_first = True
    while True:
        try:
            done = back_up()
        except PASSING as error:
            session.write_figures(describe(error, session.verb).code, error)
            session.warn(f"trying again in {human_duration(watch_ms)}: {error}")
        else:
            if done.is_new or is_first:
                _show(session, done)
            is_first = False
            session.write_figures(ExitCode.OK)
        repository.loop.run(asyncio.sleep(watch_ms / 1000))


def _back_up(
    session: Session, repository: SyncRepository, spark: "SparkSession | None", checkpoint: str, choice: BackupChoice
) -> CheckpointBackupResult:
    if spark is None:
        with session.progress("backup") as progress:
            work = backup_checkpoint(repository.asynchronous, checkpoint, choice, progress=progress)
            return repository.loop.run(work)
    # With PySpark and a JVM, for those who asked for them.
    from engine.spark.checkpoint import backup  # noqa: PLC0415

    url, options = session.common.repository, session.spark_options()
    return backup.backup_checkpoint(spark, url, checkpoint, choice, options=options)


def _plan_lines(found: BackupPreview) -> list[str]:
    lines = [f"batch {found.batch} of query {printable(found.query_id)}, as job {printable(found.job)}"]
    if found.is_taken:
        return [*lines, "is backed up already"]
    held = f"{count(found.stores, 'store')}, {count(found.files, 'file')}, {human_bytes(found.size_bytes)}"
    new = f"{count(found.files_new, 'file')}, {human_bytes(found.bytes_new)}"
    return [*lines, f"state: {held}", f"at most {new} would be uploaded; the query's own files are few"]


def _show(session: Session, done: CheckpointBackupResult) -> None:
    session.record.note(done)
    session.record.commit_skipped = not done.is_new
    session.show(done, _lines(done))
    for name in done.unchecked:
        session.warn(f"could not be checked: {name}")


def _lines(done: CheckpointBackupResult) -> list[str]:
    commit = f"commit {done.commit.pointer.number} of {printable(done.commit.scope.job)}"
    first = f"batch {done.backup.batch} of query {printable(done.backup.query_id)}"
    if not done.is_new:
        return [f"{first}: is {commit} already, nothing to do"]
    state, query = done.state, done.query
    files = f"{count(state.files + query.files, 'file')}, {human_bytes(state.size_bytes + query.size_bytes)}"
    uploaded = human_bytes(state.bytes_uploaded + query.bytes_uploaded)
    requests = count(state.requests + query.requests, "request")
    asked = state.source_requests + query.source_requests
    also = f" and {count(asked, 'request')} of the checkpoint's store" if asked else ""
    again = f", after {done.attempts} attempts" if done.attempts > 1 else ""
    return [
        f"{first}: {commit}{again}",
        f"{count(state.stores, 'store')}, {files}; new {count(state.files_added + query.files_added, 'file')}",
        f"uploaded {uploaded} with {requests}{also} in {human_duration(int(done.seconds * 1000))}",
        f"batches {done.backup.oldest_batch} to {done.backup.batch} can be restored from it",
    ]
