"""The verbs `bench restore`, the restore drill (design 0009), and `report`, one page on a repository."""

import asyncio
import os
import tempfile
from pathlib import Path

import click
import msgspec

from blobstore import installed_release
from engine.cli import options as cli
from engine.cli.config import CommitChoice, user_dir
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.drill import drill as restore_drill
from engine.errors import NotFoundError, TargetError, UsageError
from engine.report.report import ENTRIES_MAX, ReportRequest, ReportResult, gather_report, write_report
from engine.settings import STORES_AT_ONCE
from index.display import count, human_bytes, shortened
from index.snapshot.model import Scope
from tidemark.errors import TidemarkError


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


@verb("bench restore", "Restore a job for a drill: time of each phase, and a forecast.", restore_drill.RestoreDrill)
@click.argument("url", required=False)
@cli.scope_options(task=True)
@cli.commit_options
@cli.option(
    "--to DIR",
    "Restore to a fresh directory in DIR, which must exist; removed at the end.  [default: $TMPDIR, else /tmp]",
    cli.DIRECTORY,
)
@cli.option("--to-nowhere", "Read and hash everything; write and open nothing.")
@cli.option("--keep", "Leave the fresh directory; RocksDB was open in it.")
@cli.option(
    "--at-once N",
    "Number of stores at once, as on an executor of Spark; 1 is as `restore --all`.",
    click.IntRange(1, 1024),
    default=STORES_AT_ONCE,
)
@cli.option("--slo TIME", "End with 11 if it takes longer, such as 5m.", cli.DURATION)
@cli.option(
    "--report DIR",
    "Directory of the history, restore-drills.jsonl.  [default: $XDG_STATE_HOME/tidemark/drills]",
    cli.DIRECTORY,
)
@cli.option("--no-report", "Write no history.")
@cli.option("--one-line", "No progress, and the result in one line: for cron.")
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
        raise session.refusal("--to-nowhere with --to or --keep", "to nowhere, nothing is written")
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
        lines += [f"kept: {drill.kept_at}"] if drill.kept_at else []
        lines += [f"history: {history}"] if history is not None and is_written else []
    session.record.values["restore_drill_seconds"] = drill.total_s
    if drill.slo_ms is not None:
        session.record.values["restore_drill_slo_seconds"] = drill.slo_ms / 1000
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
    how = restore_drill.DrillOptions(
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
            asynchronous, scope, chosen = repository.asynchronous, options.scope, session.choose(options.choice)
            work = restore_drill.run_restore_drill(
                asynchronous, scope, how, runtime=session.runtime, progress=progress, **chosen
            )
            return repository.loop.run(work)
    except (NotFoundError, UsageError):
        raise
    except (TidemarkError, OSError) as error:
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


@verb("report", "Write one page on jobs, commits, bytes and risks.", ReportResult)
@cli.scope_options(job_required=False, task=True)
@cli.option("--jobs", "All jobs, even if a job is set.")
@cli.option("--output -o FILE", "File to write the page to.", cli.FILE, default="report.html")
@cli.option("--limit N", "Newest N records of each job.", click.IntRange(1, 1000), default=ENTRIES_MAX)
@cli.option("--drills DIR", "Directory of the history of `bench restore`.  [default: as there]", cli.DIRECTORY)
@cli.option("--state CHECKPOINT", "Also explain the state of a query (`spark explain`).")
def report(
    session: Session,
    *,
    scope: Scope | None,
    jobs: bool,
    output: Path,
    limit: int,
    drills: Path | None,
    state: str | None,
) -> None:
    """Write one page of HTML on the 20 jobs that committed last, or on one: it loads nothing from elsewhere.

    It shows what is at risk, commits with new and retained bytes, restore drills, and what collections freed. The
    repository is only read: that costs a listing, the records, and each index of the commits shown. Ends with 0
    whatever the page says.

    Example: tidemark report -r file:///backups -o report.html
    """
    scopes = () if scope is None or jobs else (scope,)
    if not output.absolute().parent.is_dir():
        raise TargetError("there is no such directory", operation="report", subject=str(output.parent), hint="make it")
    history, drills_from = _read_drills(session, drills)
    url = session.common.repository
    explained = None
    if state is not None:
        # It reads state, which the other reports need not load the modules for.
        from engine.checkpoint.explain import ExplainChoice, explain_checkpoint  # noqa: PLC0415

        explained = asyncio.run(explain_checkpoint(state, ExplainChoice(store_settings=session.store_settings())))
    request = ReportRequest(
        location=url, scopes=scopes, drills=history, drills_from=drills_from, entries_max=limit, state=explained
    )
    with session.open() as repository:
        with session.progress("report") as progress:
            facts = repository.loop.run(gather_report(repository.asynchronous, request, progress=progress))
        if scopes and not facts.jobs[0].history.entries:
            session.refuse_empty(scopes[0])
    result = write_report(facts, output)
    parts = [
        count(result.jobs_count, "job"),
        count(result.commits_count, "record"),
        count(result.drills_count, "restore drill"),
        count(result.collections_count, "collection"),
        "unknown what is at risk" if result.risks_count is None else f"{result.risks_count:,} at risk",
        count(result.requests_count, "request"),
    ]
    session.show(result, [f"{result.page} ({human_bytes(result.size_bytes)}): {', '.join(parts)}"])


def _read_drills(session: Session, given: Path | None) -> tuple[restore_drill.DrillHistory, str]:
    """Read the history of drills; it belongs to this machine, and need not exist."""
    if (directory := drills_directory(given)) is not None:
        try:
            return restore_drill.read_history(restore_drill.history_path(directory)), str(directory)
        except OSError as error:
            session.warn(f"the history of restore drills is left out: {error}")
    return restore_drill.DrillHistory(), ""
