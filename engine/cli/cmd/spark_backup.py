"""`tidemark spark backup`: a backup of a streaming checkpoint whose query may run (design 0005, section 2)."""

import asyncio
import contextlib
import functools
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
    DURATION,
    Setting,
    Verb,
    checkpoint_and_repository,
    common_options,
    figures_option,
    on_spark_option,
    transfer_options,
)
from engine.cli.session import Session, spark_session, with_session
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


@click.command(
    "backup",
    cls=Verb,
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
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where files are fetched to.  [default: this machine's place for temporary files]",
)
@click.option("--check-retained", is_flag=True, help=CHECK_RETAINED_HELP)
@click.option("--moved", is_flag=True, help="Go on with a job whose last backup is of another place and a later batch.")
@on_spark_option
@click.option("-n", "--dry-run", is_flag=True, help="Write nothing; show what would be uploaded.")
@figures_option
@transfer_options
@common_options
@with_session
def spark_backup(session: Session, options: SparkBackupOptions) -> ExitCode:
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
            _preview(session, repository, options.checkpoint, choice)
            return ExitCode.OK
        back_up = functools.partial(_back_up, session, repository, options.checkpoint, choice)
        if options.on_spark:
            spark = open_for_all.enter_context(spark_session())
            back_up = functools.partial(_back_up_on_spark, session, spark, options.checkpoint, choice)
        if options.watch is None:
            _show(session, back_up())
        else:
            watch_s = options.watch / 1000
            _watch(session, back_up, options.watch, lambda: repository.loop.run(asyncio.sleep(watch_s)))
    return ExitCode.OK


def _watch(
    session: Session, back_up: Callable[[], CheckpointBackupResult], watch_ms: int, wait: Callable[[], None]
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
        wait()


def _back_up(
    session: Session, repository: SyncRepository, checkpoint: str, choice: BackupChoice
) -> CheckpointBackupResult:
    with session.progress("backup") as progress:
        return repository.loop.run(backup_checkpoint(repository.asynchronous, checkpoint, choice, progress=progress))


def _back_up_on_spark(
    session: Session, spark: "SparkSession", checkpoint: str, choice: BackupChoice
) -> CheckpointBackupResult:
    # With PySpark and a JVM, for those who asked for them.
    from engine.spark.access import SparkOptions  # noqa: PLC0415
    from engine.spark.checkpoint import backup as checkpoint_backup  # noqa: PLC0415

    options = SparkOptions(transfer=session.common.transfer, store=session.store_settings())
    return checkpoint_backup.backup_checkpoint(spark, session.common.repository, checkpoint, choice, options=options)


def _preview(session: Session, repository: SyncRepository, checkpoint: str, choice: BackupChoice) -> None:
    found = repository.loop.run(preview_backup(repository.asynchronous, checkpoint, choice))
    lines = [f"batch {found.batch} of query {printable(found.query_id)}, as job {printable(found.job)}"]
    if found.is_taken:
        lines.append("is backed up already")
    else:
        held = f"{count(found.stores, 'store')}, {count(found.files, 'file')}, {human_bytes(found.size_bytes)}"
        new = f"{count(found.files_new, 'file')}, {human_bytes(found.bytes_new)}"
        lines += [f"state: {held}", f"at most {new} would be uploaded; the query's own files are few"]
    session.show(SparkBackupPlanView(**msgspec.structs.asdict(found)), lines)


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
