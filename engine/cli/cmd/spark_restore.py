"""`tidemark spark restore`: a streaming checkpoint, as one of its batches left it (design 0005, section 3)."""

from collections.abc import Mapping, Sequence

import click
import msgspec

from engine.checkpoint.restore import (
    CheckpointRestorePlan,
    RestoreChoice,
    RestoredCheckpoint,
    plan_checkpoint_restore,
    restore_checkpoint,
)
from engine.cli.options import (
    MOMENT,
    OR_NEWEST_COMPLETE_HELP,
    Setting,
    figures_option,
    on_spark_option,
    repository_and_checkpoint,
    transfer_options,
)
from engine.cli.output import extend
from engine.cli.session import Session, spark_session, verb
from engine.errors import UsageError
from engine.text import Moment
from index.text import count, human_bytes, human_duration, iso_time, printable

_MOVE_ASIDE = "Rename what is at CHECKPOINT; it is never deleted. Stop the query first: its executors write by path."


class SparkRestorePlanView(CheckpointRestorePlan, frozen=True, kw_only=True):
    """`spark restore --dry-run`."""

    dry_run: bool = True


class SparkRestoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to restore, where to, and how."""

    checkpoint: str
    job: str | None
    batch: int | None
    at: Moment | None
    replayed: bool
    move_aside: bool
    map_path: tuple[str, ...]
    spark_location: str | None
    or_newest_complete: bool
    on_spark: bool
    dry_run: bool


@verb(
    "restore",
    group="spark",
    short_help="Restore a checkpoint as one of its batches left it.",
    prints=(RestoredCheckpoint, SparkRestorePlanView),
    example="tidemark spark restore file:///backups /checkpoints/new --batch 41",
)
@repository_and_checkpoint
@click.option("--job", "-j", cls=Setting, metavar="JOB", help="Job name.  [default: the only job with checkpoints]")
@click.option("--batch", type=click.IntRange(min=0), metavar="N", help="As batch N left it.  [default: the newest]")
@click.option("--at", type=MOMENT, metavar="TIME", help="The newest then: 2026-05-01, 36h, 'yesterday 18:00' (UTC).")
@click.option("--replayed", is_flag=True, help="Apply changelogs here: the query then starts at once.")
@click.option("--move-aside", is_flag=True, help=_MOVE_ASIDE)
@click.option("--map-path", "map_path", multiple=True, metavar="OLD=NEW", help="Where input files are now.")
@click.option("--spark-location", metavar="URL", help="What Spark calls CHECKPOINT, if not file: or s3a:.")
@click.option("--or-newest-complete", is_flag=True, help=OR_NEWEST_COMPLETE_HELP)
@on_spark_option
@click.option("-n", "--dry-run", is_flag=True, help="Write nothing; show what would be restored.")
@figures_option
@transfer_options
def spark_restore(session: Session, options: SparkRestoreOptions) -> None:
    """Restore a checkpoint to CHECKPOINT, a directory or s3://bucket/prefix, whole or not at all.

    A query that is started there goes on after the batch. On an object store an older batch needs a new prefix.
    """
    if options.batch is not None and options.at is not None:
        raise UsageError("--batch and --at", operation="spark restore", hint="each chooses a backup alone")
    choice = RestoreChoice(
        job=options.job,
        batch=options.batch,
        replayed=options.replayed,
        move_aside=options.move_aside,
        map_paths=_mappings(options.map_path),
        spark_location=options.spark_location,
        or_newest_complete=options.or_newest_complete,
        target_settings=session.store_settings(),
    )
    checkpoint = options.checkpoint
    restored: RestoredCheckpoint | None = None
    with session.open() as repository:
        if options.at is not None:
            choice = msgspec.structs.replace(choice, at_ms=session.resolve_ms(repository, options.at))
        if options.dry_run:
            plan = repository.loop.run(plan_checkpoint_restore(repository.asynchronous, checkpoint, choice))
            session.show(extend(SparkRestorePlanView, plan), _plan_lines(plan))
            return
        if not options.on_spark:
            with session.progress("restore") as progress:
                work = restore_checkpoint(repository.asynchronous, checkpoint, choice, progress=progress)
                restored = repository.loop.run(work)
    restored = restored or _restore_on_spark(session, checkpoint, choice)
    session.record.note(restored)
    session.show(restored, _lines(restored))
    if not restored.pinned:
        session.warn("no pin could be written: a collection at the same time could have taken the commit")
    if restored.leftovers:
        session.warn(f"could not be removed: {', '.join(restored.leftovers)}")


def _mappings(given: Sequence[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for text in given:
        old, equals, new = text.partition("=")
        if not equals or not old.rstrip("/") or not new.rstrip("/"):
            message = f"{text!r} does not map a path"
            raise UsageError(message, operation="read", subject="--map-path", hint="use OLD=NEW")
        found[old] = new
    return found


def _restore_on_spark(session: Session, checkpoint: str, choice: RestoreChoice) -> RestoredCheckpoint:
    with spark_session() as spark:
        # With PySpark and a JVM, for those who asked for them.
        from engine.spark.checkpoint import restore  # noqa: PLC0415

        url, options = session.common.repository, session.spark_options()
        return restore.restore_checkpoint(spark, url, checkpoint, choice, options=options)


def _lines(restored: RestoredCheckpoint) -> list[str]:
    fetched = f"fetched {human_bytes(restored.bytes_fetched)} with {count(restored.requests, 'request')}"
    lines = [
        f"{printable(restored.location)}: batch {restored.batch} of query {printable(restored.backup.query_id)}",
        _origin(restored),
        f"{_sizes(restored)}; {fetched} in {human_duration(int(restored.seconds * 1000))}",
    ]
    if restored.changelogs:
        lines.append(f"replayed {count(restored.changelogs, 'changelog')}, {restored.records:,} records")
    if restored.moved_aside:
        lines.append(f"the former content is at {printable(restored.moved_aside)}")
    return lines


def _plan_lines(plan: CheckpointRestorePlan) -> list[str]:
    return [
        f"{printable(plan.location)}: would be batch {plan.batch} of query {printable(plan.backup.query_id)}",
        _origin(plan),
        f"{_sizes(plan)}; {count(plan.changelogs, 'changelog')} to apply",
        "nothing was written",
    ]


def _origin(found: RestoredCheckpoint | CheckpointRestorePlan) -> str:
    commit = found.commit
    return f"from commit {commit.pointer.number} of {printable(found.job)}, {iso_time(commit.committed_at_ms)}"


def _sizes(found: RestoredCheckpoint | CheckpointRestorePlan) -> str:
    return f"{count(found.stores, 'store')}, {count(found.files, 'file')}, {human_bytes(found.size_bytes)}"
