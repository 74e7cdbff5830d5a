"""The verb `bench restore`: the restore drill (design 0009)."""

import os
import tempfile
from pathlib import Path

import click
import msgspec

from blobstore import installed_release
from blobstore.errors import StoreError
from engine.cli import options as cli
from engine.cli.config import CommitChoice, user_dir
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.drill import drill as restore_drill
from engine.errors import EngineError, NotFoundError, UsageError
from engine.settings import STORES_AT_ONCE
from index.display import printable, shortened
from index.errors import FormatError
from index.snapshot.model import Scope


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which commit to restore, where to, and what is written of it."""

    scope: Scope
    choice: CommitChoice
    to: Path | None
    to_nowhere: bool
    keep: bool
    at_once: int
    slo: int | None
    report: Path | None
    no_report: bool
    one_line: bool


@verb(
    "restore",
    "Restore a job for a drill: time of each phase, and a forecast.",
    group="bench",
    prints=(restore_drill.RestoreDrill,),
)
@click.argument("url", required=False)
@cli.scope_options(task=True)
@cli.commit_options
@cli.directory_option(
    "--to", "Restore to a fresh directory in DIR, which must exist; removed at the end.  [default: $TMPDIR, else /tmp]"
)
@click.option("--to-nowhere", is_flag=True, help="Read and hash everything; write and open nothing.")
@click.option("--keep", is_flag=True, help="Leave the fresh directory; RocksDB was open in it.")
@click.option(
    "--at-once",
    type=click.IntRange(1, 1024),
    default=STORES_AT_ONCE,
    metavar="N",
    help="Number of stores at once, as on an executor of Spark; 1 is as `restore --all`.",
)
@click.option("--slo", type=cli.DURATION, metavar="TIME", help="End with 11 if it takes longer, such as 5m.")
@cli.directory_option(
    "--report", "Directory of the history, restore-drills.jsonl.  [default: $XDG_STATE_HOME/tidemark/drills]"
)
@click.option("--no-report", is_flag=True, help="Write no history.")
@click.option("--one-line", is_flag=True, help="No progress, and the result in one line: for cron.")
@cli.figures_option
@cli.transfer_options
def bench_restore(session: Session, options: BenchOptions) -> ExitCode:
    """Restore all stores of a job's commit as a drill: how long it takes, and would take elsewhere.

    Everything is fetched, verified, synced and, where it is RocksDB, opened; then it is removed. Each drill is a line
    of the history, which `tidemark report` shows. Ends with 11 if it took longer than --slo: the time of finding the
    commit, restoring and opening.

    Example: tidemark bench restore file:///backups -j flights --to /var/state --slo 5m
    """
    if options.to_nowhere and (options.to is not None or options.keep):
        hint = "to nowhere, nothing is written"
        raise UsageError("--to-nowhere with --to or --keep", operation="bench restore", hint=hint)
    directory = None if options.no_report else drills_directory(options.report)
    if directory is None and not options.no_report:
        session.warn("there is no home directory for the history: say --report DIR, or --no-report")
    history = restore_drill.history_path(directory) if directory is not None else None
    with session.open():
        drill = _run(session, options, history)
    leftovers = [drill.kept_at] if drill.kept_at and not options.keep else []
    session.warn_of_restore(pinned=drill.pinned, leftovers=leftovers)
    is_written = _append(session, history, drill)
    lines = [restore_drill.summary_line(drill)]
    if not options.one_line:
        lines = restore_drill.summary_lines(drill)
        lines += [f"kept: {printable(drill.kept_at)}"] if drill.kept_at else []
        lines += [f"history: {printable(str(history))}"] if history is not None and is_written else []
    session.record.note_value("restore_drill_seconds", drill.total_s)
    if drill.slo_ms is not None:
        session.record.note_value("restore_drill_slo_seconds", drill.slo_ms / 1000)
    session.show(drill, lines)
    if drill.is_slow:
        return ExitCode.SLOW
    return ExitCode.OK if is_written else ExitCode.PARTIAL


def drills_directory(given: Path | None) -> Path | None:
    """Return where the history of drills is: the directory given, else one of this user; None without a home."""
    state = user_dir(os.environ, "XDG_STATE_HOME", ".local/state")
    return given or (state / "drills" if state is not None else None)


def _run(session: Session, options: BenchOptions, history: Path | None) -> restore_drill.RestoreDrill:
    """Run the drill; an error is noted in the history, unless there was nothing to restore."""
    repository, began_at_ms = session.repository, session.runtime.local_now_ms()
    drill_options = restore_drill.DrillOptions(
        scratch=None if options.to_nowhere else options.to or Path(tempfile.gettempdir()),
        keep=options.keep,
        stores_at_once=options.at_once,
        slo_ms=options.slo,
    )
    try:
        with (
            session.explaining(options.scope),
            session.progress("restore drill", wanted=not options.one_line) as progress,
        ):
            work = restore_drill.run_restore_drill(
                repository.asynchronous,
                options.scope,
                drill_options,
                runtime=session.runtime,
                progress=progress,
                **session.choose(options.choice),
            )
            return repository.loop.run(work)
    except (NotFoundError, UsageError):
        raise
    except (StoreError, EngineError, FormatError, OSError) as error:
        failed = restore_drill.FailedDrill(
            began_at_ms=began_at_ms,
            release=installed_release(),
            repository_id=repository.record.id,
            job=options.scope.job,
            task=options.scope.task,
            error=type(error).__name__,
            message=shortened(str(error), restore_drill.MESSAGE_LENGTH_MAX),
        )
        _append(session, history, failed)
        raise


def _append(session: Session, history: Path | None, entry: restore_drill.Entry) -> bool:
    """Add to the history; return whether that is done, or was not asked for."""
    try:
        if history is not None:
            restore_drill.append(history, entry)
    except OSError as error:
        session.warn(f"this drill is not in the history: {error}")
        return False
    return True
