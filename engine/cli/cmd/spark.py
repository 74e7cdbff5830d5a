"""The verbs of the group `spark`: back up, restore, convert, rescale and check a checkpoint (designs 0005 and 0010)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from blobstore.opening import StoreSettings
from engine.blocking import run_in_loop
from engine.checkpoint import backup, convert, rescale, restore
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.errors import QueryMovedOnError
from engine.checkpoint.findings import CheckLevel, CheckReport
from engine.checkpoint.groups import RescaleFigures
from engine.checkpoint.processes import Processes
from engine.checkpoint.rescale_stores import Here
from engine.cli import options as cli
from engine.cli.output import format_state, format_took, lines_if
from engine.cli.run import ExitCode
from engine.cli.session import Session, spark_session, verb
from engine.errors import CommitDamagedError, CommitUnknownError, ConflictError, NotFoundError, UsageError
from engine.repository.repository import SyncRepository
from engine.restore.write import cores_count
from engine.state.checkpoint_dir import opened_checkpoint
from engine.state.compression import CODECS
from engine.state.key_rules import Partitioner, partitions_of
from engine.text import Moment, table
from index.display import count, human_bytes, human_duration, iso_time, printable
from index.snapshot.keys import REPOSITORY
from index.spark.checkpoint import StoredBackup
from tidemark.errors import TidemarkError

# What is another thing the next time: the store, another writer, or the query itself.
PASSING: Final = (
    StoreUnavailableError,
    ConflictError,
    CommitUnknownError,
    CommitDamagedError,  # the next one sends again what is gone
    QueryMovedOnError,
    *backup.MOVED,
)


_TEMPORARY: Final = "[default: this machine's place for temporary files]"


@verb("spark backup", "Back up a checkpoint while its query runs.", backup.CheckpointBackupResult, backup.BackupPreview)
@cli.checkpoint_and_repository
@cli.setting("--job -j JOB", "Job of the backups.  [default: spark-<query id>]")
@cli.option("--watch TIME", "Look again after each TIME, until interrupted.", cli.DURATION)
@cli.option("--scratch DIR", f"Where files are fetched to.  {_TEMPORARY}", cli.DIRECTORY_THERE)
@cli.check_retained_option
@cli.shrink_max_option
@cli.option("--moved", "Go on with a job whose last backup is of another place and a later batch.")
@cli.option(
    "--keep-batches N",
    "Take what the N batches before the newest need too, so that they can be restored.",
    cli.NATURAL,
    default=0,
)
@cli.option("--despite-damage", "Take over what is damaged; the commit says so.")
@cli.on_spark_option
@cli.option("-n --dry-run", "Write nothing; show what would be uploaded.")
@cli.figures_option
@cli.transfer_options
def spark_backup(
    session: Session, checkpoint: str, options: backup.BackupChoice, *, watch: int | None, on_spark: bool, dry_run: bool
) -> None:
    """Back up CHECKPOINT, a directory or s3://bucket/prefix, at its newest committed batch.

    The query may go on meanwhile. What is new is checked before it is taken over, and what the last backup has is not
    sent again. From an object store, what is new is fetched to a directory of this machine (--scratch) first.

    Example: tidemark spark backup /checkpoints/flights file:///backups
    """
    if dry_run and watch is not None:
        raise session.refusal("--dry-run and --watch", "give one of them")
    options = msgspec.structs.replace(options, checkpoint_settings=session.store_settings())
    with _open(session, checkpoint, "CHECKPOINT REPO") as repository, contextlib.ExitStack() as open_for_all:
        if dry_run:
            found = repository.loop.run(backup.preview_backup(repository.asynchronous, checkpoint, options))
            session.show(found, _preview_lines(found))
            return
        spark = open_for_all.enter_context(spark_session()) if on_spark else None

        def back_up() -> backup.CheckpointBackupResult:
            if spark is not None:
                from engine.spark.checkpoint import backup_checkpoint as backup_on_spark  # noqa: PLC0415

                url, how = session.common.repository, session.spark_options()
                return backup_on_spark(spark, url, checkpoint, options, options=how)
            with session.progress("backup") as progress:
                work = backup.backup_checkpoint(repository.asynchronous, checkpoint, options, progress=progress)
                return repository.loop.run(work)

        if watch is None:
            _show_backup(session, back_up())
        else:
            _watch(session, back_up, watch)


def _watch(session: Session, back_up: Callable[[], backup.CheckpointBackupResult], watch_ms: int) -> None:
    """Back up until interrupted, or until an error that does not pass by itself."""
    every, is_first = human_duration(watch_ms), True

    def step() -> None:
        nonlocal is_first
        done = back_up()
        if done.is_new or is_first:
            _show_backup(session, done)
        is_first = False

    session.say(f"backing up every {every}; end it with Ctrl-C")
    again = f"trying again in {every}"
    session.repeat(step, watch_ms, staying=lambda text: text, last=again, passing=PASSING)


def _preview_lines(found: backup.BackupPreview) -> list[str]:
    lines = [f"batch {found.batch} of query {found.query_id}, as job {found.job}"]
    if found.is_taken:
        return [*lines, "is backed up already"]
    held = format_state(found.stores, found.files, found.size_bytes)
    new = f"{count(found.files_new, 'file')}, {human_bytes(found.bytes_new)}"
    return [*lines, f"state: {held}", f"at most {new} would be uploaded; the query's own files are few"]


def _show_backup(session: Session, done: backup.CheckpointBackupResult) -> None:
    session.record.note(done)
    session.record.commit_skipped = not done.is_new
    session.show(done, _backup_lines(done))
    for name in done.unchecked:
        session.warn(f"could not be checked: {name}")
    for found in done.findings:
        taken = "taken over despite damage: " if found.kind == "damage" else ""
        session.warn(f"{taken}{found.path}: {found.message}")


def _backup_lines(done: backup.CheckpointBackupResult) -> list[str]:
    commit = f"commit {done.commit.pointer.number} of {done.commit.scope.job}"
    first = f"batch {done.backup.batch} of query {done.backup.query_id}"
    if not done.is_new:
        return [f"{first}: is {commit} already, nothing to do"]
    state, query = done.state, done.query
    files = f"{count(state.files + query.files, 'file')}, {human_bytes(state.size_bytes + query.size_bytes)}"
    uploaded = human_bytes(state.bytes_uploaded + query.bytes_uploaded)
    requests = count(state.requests + query.requests, "request")
    asked = state.source_requests + query.source_requests
    also = f" and {count(asked, 'request')} of the checkpoint's blob store" if asked else ""
    again = f", after {done.attempts} attempts" if done.attempts > 1 else ""
    oldest, newest = done.backup.oldest_batch, done.backup.batch
    batches = f"batches {oldest} to {newest}" if oldest < newest else f"batch {newest}"
    damaged = f", despite damage to {count(done.backup.damaged, 'file')}" if done.backup.damaged else ""
    return [
        f"{first}: {commit}{again}{damaged}",
        f"{count(state.stores, 'store')}, {files}; new {count(state.files_added + query.files_added, 'file')}",
        f"uploaded {uploaded} with {requests}{also} in {format_took(done.seconds)}",
        f"{batches} can be restored from it",
    ]


class RestoreArguments(restore.RestoreChoice, frozen=True, kw_only=True):
    """What is restored, and by which of the verb's ways."""

    at: Moment | None = None
    map_path: tuple[str, ...] = ()
    on_spark: bool = False
    dry_run: bool = False


_MOVE_ASIDE = "Rename what is at CHECKPOINT; it is never deleted. Stop the query first: its executors write by path."


@verb(
    "spark restore",
    "Restore a checkpoint as one of its batches left it.",
    restore.RestoredCheckpoint,
    restore.CheckpointRestorePlan,
)
@cli.repository_and_checkpoint
@cli.setting("--job -j JOB", "Job name.  [default: the only job with checkpoints]")
@cli.option("--batch N", "As batch N left it.  [default: the newest]", cli.NATURAL)
@cli.option("--at TIME", "The newest then: 2026-05-01, 36h, 'yesterday 18:00' (UTC).", cli.MOMENT)
@cli.option("--replayed", "Apply changelogs here: the query then starts at once.")
@cli.option("--move-aside", _MOVE_ASIDE)
@cli.option("--with-job JOB", "Take a job beside the query (for_each_batch) back to the batch, too.")
@cli.option("--map-path OLD=NEW", "Where input files are now.", multiple=True)
@cli.option("--partitions M", "Of state, as by `rescale`; with --replayed.", cli.POSITIVE)
@cli.or_newest_complete_option
@cli.on_spark_option
@cli.option("-n --dry-run", "Write nothing; show what would be restored.")
@cli.figures_option
@cli.transfer_options
def spark_restore(session: Session, checkpoint: str, options: RestoreArguments) -> None:
    """Restore a checkpoint to CHECKPOINT, a directory or s3://bucket/prefix, whole or not at all.

    A query that is started there goes on after the batch. On an object store an older batch needs a new prefix.

    Example: tidemark spark restore file:///backups /checkpoints/new --batch 41
    """
    if options.batch is not None and options.at is not None:
        raise session.refusal("--batch and --at", "each chooses a backup alone")
    _restore(session, checkpoint, msgspec.structs.replace(options, map_paths=_mappings(options.map_path)))


def _restore(session: Session, checkpoint: str, options: RestoreArguments) -> None:
    options = msgspec.structs.replace(options, target_settings=session.store_settings())
    restored: restore.RestoredCheckpoint | None = None
    with _open(session, checkpoint, "REPO CHECKPOINT") as repository:
        stored = repository.asynchronous
        if options.at is not None:
            options = msgspec.structs.replace(options, at_ms=session.choose_ms(options.at))
        # What is restored if it is whole.
        chosen: StoredBackup | None = None
        if options.or_newest_complete:
            finding = restore.find_checkpoint_backup(stored, options.job, batch=options.batch, at_ms=options.at_ms)
            chosen = repository.loop.run(finding)
        if options.dry_run:
            with Processes(cores_count()) as processes:
                planned = restore.plan_checkpoint_restore(
                    stored, checkpoint, options, partitioner=partitioner(), processes=processes
                )
                plan = repository.loop.run(planned)
            session.show(plan, _restore_lines(plan))
            _warn_of_another(session, chosen, plan)
            return
        if not options.on_spark:
            with session.progress("restore") as progress, Processes(cores_count()) as processes:
                work = restore.restore_checkpoint(
                    stored, checkpoint, options, partitioner=partitioner(), processes=processes, progress=progress
                )
                restored = repository.loop.run(work)
    if restored is None:
        with spark_session() as spark:
            from engine.spark.checkpoint import restore_checkpoint as restore_on_spark  # noqa: PLC0415

            how = session.spark_options()
            restored = restore_on_spark(spark, session.common.repository, checkpoint, options, options=how)
    session.record.note(restored)
    session.show(restored, _restore_lines(restored))
    _warn_of_another(session, chosen, restored)
    if damage := restored.backup.describe_damage():
        session.warn(f"the backup was taken despite damage to {damage}")
    session.warn_of_restore(pinned=restored.pinned, leftovers=restored.leftovers)


def _warn_of_another(session: Session, chosen: StoredBackup | None, found: restore.CheckpointRestorePlan) -> None:
    if chosen is not None and chosen[0].pointer != found.commit.pointer:
        batch = chosen[1].batch
        session.warn(f"it is not the backup that was chosen, of batch {batch}: something of that one is missing")


def _mappings(given: Sequence[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for text in given:
        old, _, new = text.partition("=")
        if not (path := old.rstrip("/")) or not new.rstrip("/"):
            message = f"{text!r} does not map a path"
            raise UsageError(message, operation="read", subject="--map-path", hint="use OLD=NEW")
        if path in found:
            hint = "give each OLD once"
            raise UsageError(f"{path!r} is mapped twice", operation="read", subject="--map-path", hint=hint)
        found[path] = new
    return found


def _replayed(done: restore.RestoredCheckpoint | convert.ConvertedCheckpoint | rescale.RescaledCheckpoint) -> str:
    return f"replayed {count(done.changelogs, 'changelog')}, {done.records:,} records"


def _restore_lines(found: restore.CheckpointRestorePlan) -> list[str]:
    restored = found if isinstance(found, restore.RestoredCheckpoint) else None
    batch = f"{'' if restored else 'would be '}batch {found.batch} of query {found.backup.query_id}"
    commit = f"commit {found.commit.pointer.number} of {found.job}"
    held = format_state(found.stores, found.files, found.size_bytes)
    lines = [f"{found.location}: {batch}", f"from {commit}, {iso_time(found.commit.committed_at_ms)}"]
    if found.with_job:
        taken = "is" if restored else "would be"
        lines.append(f"job {found.with_job} {taken} taken back to it, as in its commit {found.job_commit}")
    rescaled = [] if found.rescaled is None else _rescaled_lines(found.rescaled)
    if restored is None:
        held = held if found.rescaled is None else f"of {count(found.files, 'file')}, {human_bytes(found.size_bytes)}"
        lines.append(f"{held}; {count(found.changelogs, 'changelog')} to apply")
        return [*lines, *rescaled, "nothing was written"]
    fetched = f"fetched {human_bytes(restored.bytes_fetched)} with {count(restored.requests, 'request')}"
    lines.append(f"{held}; {fetched} in {format_took(restored.seconds)}")
    lines += [*([_replayed(restored)] if restored.changelogs else []), *rescaled]
    if restored.moved_aside:
        lines.append(f"the former content is at {restored.moved_aside}")
    return lines


@verb(
    "spark convert",
    "Make another checkpoint with another format or codec.",
    convert.ConvertedCheckpoint,
    convert.ConversionPlan,
    needs_repository=False,
)
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@cli.option("--batch N", "As batch N left it.  [default: the newest]", cli.NATURAL)
@cli.option(
    "--to",
    "State store provider of TARGET, for state that is HDFS-backed.  [default: that of SOURCE]",
    click.Choice(["rocksdb"]),
    to="provider",
)
@cli.option(
    "--format 1|2",
    "checkpointFormatVersion of TARGET: 2 gives each version a unique id.  [default: that of SOURCE]",
    click.IntRange(1, 2),
    to="format_version",
)
@cli.option("--codec", "Of changelogs to come.  [default: that of SOURCE]", click.Choice(CODECS))
@cli.on_spark_option
@cli.option("-n --dry-run", "Write nothing; show what would be made.")
def spark_convert(
    session: Session, source: str, target: str, options: convert.ConvertChoice, *, on_spark: bool, dry_run: bool
) -> None:
    """Make a checkpoint at TARGET, a new directory or s3://bucket/prefix, of one batch of that at SOURCE.

    Stop the query first, and let only one of the two go on. SOURCE is only read. Each store becomes one snapshot with
    its changelogs applied, and nothing of older batches is taken.

    Example: tidemark spark convert /checkpoints/flights /checkpoints/flights-2 --format 2
    """
    options = msgspec.structs.replace(options, store_settings=session.store_settings())
    if dry_run:
        plan = run_in_loop(convert.plan_conversion(source, target, options))
        session.show(plan, _conversion_lines(plan))
        return
    if on_spark:
        from engine.spark.checkpoint import convert_checkpoint as convert_on_spark  # noqa: PLC0415

        with spark_session() as spark:
            done = convert_on_spark(spark, source, target, options)
    else:
        with session.progress("convert") as progress:
            done = run_in_loop(convert.convert_checkpoint(source, target, options, progress=progress))
    session.show(done, _conversion_lines(done))
    session.warn_of_restore(pinned=True, leftovers=done.leftovers)


def _conversion_lines(found: convert.ConversionPlan) -> list[str]:
    done = found if isinstance(found, convert.ConvertedCheckpoint) else None
    batch = f"{'' if done else 'would be '}batch {found.batch} of query {found.query_id}"
    provider = _change(found.provider_before, found.provider)
    formats, codecs = _change(found.format_before, found.format_version), _change(found.codec_before, found.codec)
    source = f"from {found.source}; provider {provider}, format {formats}, codec {codecs}"
    lines = [f"{found.location}: {batch}", source]
    if done is None:
        return [*lines, f"{count(found.stores, 'store')}; nothing was written"]
    held = format_state(found.stores, done.files, done.size_bytes)
    lines.append(f"{held}; {_replayed(done)} in {format_took(done.seconds)}")
    if found.has_ids and found.format_before != found.format_version:
        lines.append("Spark before 4.3 needs the setting spark.sql.streaming.stateStore.checkpointFormatVersion=2")
    return lines


@verb(
    "spark rescale",
    "Make another checkpoint with another number of partitions.",
    rescale.RescaledCheckpoint,
    rescale.RescalePlan,
    restore.RestoredCheckpoint,
    restore.CheckpointRestorePlan,
    needs_repository=False,
)
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@cli.option(
    "--partitions M",
    "Number of state partitions of TARGET: the spark.sql.shuffle.partitions with which its query goes on.",
    cli.POSITIVE,
    required=True,
)
@cli.option("--batch N", "As batch N left it.  [default: the newest]", cli.NATURAL)
@cli.option("--job -j JOB", "Of a repository.  [default: the only job with checkpoints]")
@cli.on_spark_option
@cli.option("-n --dry-run", "Hash every key, but make nothing; show what would be made.")
def spark_rescale(
    session: Session,
    source: str,
    target: str,
    options: rescale.RescaleChoice,
    *,
    job: str | None,
    on_spark: bool,
    dry_run: bool,
) -> None:
    """Make a checkpoint with M partitions at TARGET, a new directory or s3://bucket/prefix, of one batch of SOURCE.

    SOURCE is a checkpoint, or a repository with backups of one: then this is `spark restore --partitions M`. Stop the
    query first, and let only one of the two go on. SOURCE is only read. If M divides the present number, files of state
    are taken as they are; else rows are written again, without a shuffle. Every key is hashed before, and has to be in
    the partition where Spark would have it, or nothing is made.

    Example: tidemark spark rescale /checkpoints/old /checkpoints/new --partitions 50
    """
    options = msgspec.structs.replace(options, store_settings=session.store_settings())
    if run_in_loop(is_repository(source, options.store_settings)):
        session.common = msgspec.structs.replace(session.common, repository=source)
        of, partitions = options.batch, options.partitions
        choice = RestoreArguments(job=job, batch=of, partitions=partitions, on_spark=on_spark, dry_run=dry_run)
        _restore(session, target, choice)
        return
    if job is not None:
        hint = "give it of a repository, or leave it out"
        raise session.refusal("is not the job of a checkpoint", hint, f"--job {job}")
    found: rescale.RescalePlan
    if on_spark and not dry_run:
        from engine.spark.checkpoint import rescale_checkpoint as rescale_on_spark  # noqa: PLC0415

        with spark_session() as spark:
            found = rescale_on_spark(spark, source, target, options)
    else:
        work = rescale.plan_rescale if dry_run else rescale.rescale_checkpoint
        with session.progress("rescale") as progress, Processes(cores_count()) as processes:
            how = Here(partitioner=partitioner(), processes=processes, progress=progress)
            found = run_in_loop(work(source, target, options, how))
    session.show(found, _rescale_lines(found))
    if isinstance(found, rescale.RescaledCheckpoint):
        session.warn_of_restore(pinned=True, leftovers=found.leftovers)


@contextlib.contextmanager
def _open(session: Session, checkpoint: str, order: str) -> Iterator[SyncRepository]:
    """Open the repository; `UsageError` if it is the other one of the two places, with the `order` of the verb."""
    with contextlib.ExitStack() as stack:
        try:
            repository = stack.enter_context(session.open())
        except NotFoundError:
            is_other = False
            with contextlib.suppress(TidemarkError):  # of the second look; the first error is raised
                is_other = run_in_loop(is_repository(checkpoint, session.store_settings()))
            if not is_other:
                raise
            hint = f"exchange the two: tidemark {session.verb} {order}"
            raise session.refusal("is a repository, where a checkpoint is expected", hint, checkpoint) from None
        yield repository


async def is_repository(location: str, settings: StoreSettings | None) -> bool:
    """Return whether there is a repository at a place that may have a checkpoint."""
    async with opened_checkpoint(location, settings) as root:
        with contextlib.suppress(BlobNotFoundError):
            await root.read(REPOSITORY)
            return True
    return False


def partitioner() -> Partitioner:
    """Return the hash over arrays, where its libraries are: they come with the extra `spark`."""
    try:
        from engine.arrow import key_hashes  # noqa: PLC0415
    except ImportError:
        return partitions_of
    return key_hashes.partitions_of


def _rescale_lines(found: rescale.RescalePlan) -> list[str]:
    done = found if isinstance(found, rescale.RescaledCheckpoint) else None
    batch = f"{'' if done else 'would be '}batch {found.batch} of query {found.query_id}"
    lines = [f"{found.location}: {batch}, of {found.source}", *_rescaled_lines(found)]
    if done is not None:
        held = f"{count(done.files, 'file')}, {human_bytes(done.size_bytes)}"
        return [*lines, f"{held}; {_replayed(done)} in {format_took(done.seconds)}"]
    if found.bytes_rewritten and found.partitions_by_reference:
        numbers = ", ".join(map(str, found.partitions_by_reference))
        lines.append(f"no row would be written again for a number of partitions of {numbers}")
    return [*lines, "nothing was written"]


def _rescaled_lines(found: RescaleFigures) -> list[str]:
    is_proof = found.partitions_before > 1
    proof = "each in its partition" if is_proof else "which in one partition shows nothing of the rule"
    counts = f"partitions {found.partitions_before} → {found.partitions}; stores {found.stores_before} → {found.stores}"
    linked = f"{count(found.files_linked, 'SST')} taken over as they are, {human_bytes(found.bytes_linked)}"
    return lines_if(
        (True, counts),
        (True, f"{count(found.keys_checked, 'key')} checked, {proof}"),
        (found.files_linked, linked),
        (found.bytes_rewritten, f"rows of {human_bytes(found.bytes_rewritten)} written again"),
    )


def _change(before: object, after: object) -> str:
    return f"{before} → {after}" if before != after else str(before)


# Findings of each kind that are printed; JSON has all of them.
FINDINGS_SHOWN_MAX: Final = 50


@verb("spark check", "Check that all committed state is there and whole.", CheckReport, needs_repository=False)
@click.argument("checkpoint", metavar="CHECKPOINT")
@cli.option(
    "--level",
    "quick: logs, zips and changelogs; full: every block of every SST, too, and the newest version is loaded.",
    click.Choice(["quick", "full"]),
    default="full",
)
@cli.option("--strict", "End with 3 if there are warnings.")
@cli.option("--scratch DIR", f"Where stores are loaded.  {_TEMPORARY}", cli.DIRECTORY_THERE)
@cli.on_spark_option
def spark_check(
    session: Session, *, checkpoint: str, level: CheckLevel, strict: bool, scratch: Path | None, on_spark: bool
) -> ExitCode:
    """Check CHECKPOINT, a directory or s3://bucket/prefix, without changing it; its query may run.

    Every committed batch has to be there whole, block by block. Ends with 4 if something is damaged. Warnings are
    shown, and count with --strict only.

    Example: tidemark spark check /checkpoints/flights --json
    """
    settings = session.store_settings()
    if on_spark:
        from engine.spark.checkpoint import check_checkpoint as check_on_spark  # noqa: PLC0415

        with spark_session() as spark:
            report = check_on_spark(spark, checkpoint, level=level, scratch=scratch, store_settings=settings)
    else:
        with session.progress("check") as progress:
            report = run_in_loop(
                check_checkpoint(checkpoint, level=level, scratch=scratch, store_settings=settings, progress=progress)
            )
    session.show(report, list(_check_lines(report)))
    if not report.is_sound:
        return ExitCode.DAMAGED
    return ExitCode.PARTIAL if strict and report.warnings else ExitCode.OK


def _check_lines(report: CheckReport) -> Iterator[str]:
    rows: list[tuple[str, str, str]] = []
    hints: list[str] = []
    for kind in ("damage", "warning"):
        found = report.of_kind(kind)
        for f in found[:FINDINGS_SHOWN_MAX]:
            rows.append((f.kind, printable(f.path), printable(f.message)))
            hints.append(f.hint)
        if len(found) > FINDINGS_SHOWN_MAX:
            rows.append((kind, f"and {len(found) - FINDINGS_SHOWN_MAX} more", ""))
            hints.append(hints[-1])
    if rows:
        header, *lines = table(("finding", "file", "what is wrong"), rows)
        yield header
        for line, hint, following in zip(lines, hints, [*hints[1:], ""], strict=True):
            yield line
            if hint != following:
                # What to do about the lines above, back to the last such sentence.
                yield f"         {hint}"
    verdict = [
        "sound" if report.is_sound else f"DAMAGED: {count(report.damaged, 'finding')}",
        "SSTs not read" if report.level == "quick" else "",
        count(report.warnings, "warning") if report.warnings else "",
    ]
    held = f"{count(report.stores, 'store')}, {count(report.versions, 'version')}"
    read = f"{human_bytes(report.size_bytes)}, {count(report.blocks, 'block')} of SSTs read"
    yield (
        f"{', '.join(filter(None, verdict))}: {count(report.batches, 'batch', 'batches')}, {held}; "
        f"{count(report.files, 'file')}, {read} in {format_took(report.seconds)}"
    )
