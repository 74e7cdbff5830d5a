"""The group `bench`, with the verb `bench restore`: the restore drill (design 0009)."""

import os
import tempfile
from pathlib import Path
from typing import cast

import click
import msgspec

from blobstore.errors import StoreError
from blobstore.release import installed_release
from engine.cli.choice import choose_commit, commit_options
from engine.cli.config import CommitChoice, state_path
from engine.cli.exit_codes import ExitCode
from engine.cli.options import DURATION, Setting, Verb, common_options, figures_option, scope_options, transfer_options
from engine.cli.session import Session, choose_scope, with_session
from engine.clock import SystemRuntime
from engine.drill.drill import rehearse
from engine.drill.forecast import EXECUTORS, Forecast, forecast
from engine.drill.history import HISTORY_NAME, append
from engine.drill.model import MESSAGE_LENGTH_MAX, Entry, FailedRehearsal, Rehearsal
from engine.drill.telling import (
    ASSUMPTIONS,
    forecast_rows,
    headline,
    phases,
    seconds,
    slo_line,
    summary_line,
)
from engine.errors import EngineError, NotFoundError, UsageError
from engine.repository.sync import SyncRepository
from engine.settings import STORES_AT_ONCE
from engine.text import Moment, table
from index.errors import FormatError
from index.snapshot.model import Scope
from index.text import count, human_bytes, printable, shortened


class RehearsalView(msgspec.Struct, frozen=True, kw_only=True):
    """`bench restore`."""

    total_s: float
    # None: no --slo.
    slo_met: bool | None
    forecast: tuple[Forecast, ...]
    rehearsal: Rehearsal
    # A path; empty if nothing was written.
    history: str


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to rehearse, and where to."""

    scope: Scope
    choice: CommitChoice
    # None: to nowhere.
    scratch: Path | None
    keep: bool
    at_once: int
    slo_ms: int | None


@click.group(
    "bench",
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGS]...",
    short_help="Time a restore drill of a job.",
)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure with a job's own state and this machine.

    Run `tidemark bench VERB --help` for the options of a verb.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command(
    "restore",
    cls=Verb,
    group="bench",
    short_help="Restore a job for a drill: time of each phase, and a forecast.",
    prints=(RehearsalView,),
    example="tidemark bench restore file:///backups -j flights --to /var/state --slo 5m",
)
@click.argument("url", required=False)
@scope_options()
@click.option("--task", cls=Setting, metavar="TASK", help="With --commit-per-task, the task.  [default: 0]")
@commit_options
@click.option(
    "--to",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Restore to a fresh directory in DIR, which is there; removed at the end.  [default: $TMPDIR, else /tmp]",
)
@click.option("--to-nowhere", is_flag=True, help="Read and hash everything; write and open nothing.")
@click.option("--keep", is_flag=True, help="Leave the fresh directory; RocksDB was open in it.")
@click.option(
    "--at-once",
    type=click.IntRange(1, 1024),
    default=STORES_AT_ONCE,
    show_default=True,
    metavar="N",
    help="Stores at once, as on an executor of Spark; 1 is as `restore --all`.",
)
@click.option("--slo", type=DURATION, metavar="TIME", help="End with 11 if it takes longer, such as 5m.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the history of drills, rehearsals.jsonl.  [default: $XDG_STATE_HOME/tidemark/rehearsals]",
)
@click.option("--no-report", is_flag=True, help="Write no history.")
@click.option("--one-line", is_flag=True, help="No progress, and the result in one line: for cron.")
@figures_option
@transfer_options
@common_options
@with_session
def bench_restore(
    session: Session,
    *,
    job: str,
    commit_per_task: bool,
    task: str | None,
    number: int | None,
    version: CommitChoice | None,
    at: Moment | None,
    name: str | None,
    to: Path | None,
    to_nowhere: bool,
    keep: bool,
    at_once: int,
    slo: int | None,
    report: Path | None,
    no_report: bool,
    one_line: bool,
) -> ExitCode:
    """Restore all stores of a job's commit for a drill: how long it takes, and would take elsewhere.

    Everything is fetched, verified, synced and, where it is RocksDB, opened; then it is removed. Each drill is a line
    of the history rehearsals.jsonl, which `tidemark report` shows. Ends with 11 if it took longer than --slo: the time
    of finding the commit, restoring and opening.
    """
    if to_nowhere and (to is not None or keep):
        raise UsageError(
            "--to-nowhere with --to or --keep", operation="bench restore", hint="to nowhere, nothing is written"
        )
    request = _Request(
        scope=choose_scope(job, commit_per_task=commit_per_task, task=task),
        choice=choose_commit(number=number, version=version, at=at, name=name),
        scratch=None if to_nowhere else to or Path(tempfile.gettempdir()),
        keep=keep,
        at_once=at_once,
        slo_ms=slo,
    )
    report_dir = None if no_report else _choose_report_dir(session, report)
    with session.open() as repository:
        rehearsal = _rehearse(session, repository, request, report_dir, wanted=not one_line)
    if not rehearsal.pinned:
        session.warn("no pin could be written: a collection at the same time could have taken the commit")
    if rehearsal.kept_at and not keep:
        session.warn(f"could not be removed: {rehearsal.kept_at}")
    is_written = _append(session, report_dir, rehearsal)
    history = report_dir / HISTORY_NAME if report_dir is not None and is_written else None
    forecasts = forecast(rehearsal)
    view = RehearsalView(
        total_s=rehearsal.total_s,
        slo_met=not rehearsal.is_slow if rehearsal.slo_ms is not None else None,
        forecast=forecasts,
        rehearsal=rehearsal,
        history=str(history or ""),
    )
    session.note_value("rehearsal_seconds", rehearsal.total_s)
    if rehearsal.slo_ms is not None:
        session.note_value("rehearsal_slo_seconds", rehearsal.slo_ms / 1000)
    session.show(view, [summary_line(rehearsal)] if one_line else _lines(rehearsal, forecasts, history))
    if rehearsal.is_slow:
        return ExitCode.SLOW
    return ExitCode.OK if is_written else ExitCode.PARTIAL


bench.add_command(cast("click.Command", bench_restore))


def _choose_report_dir(session: Session, report: Path | None) -> Path | None:
    if report is not None:
        return report
    state = state_path(os.environ)
    if state is None:
        session.warn("there is no home directory for the history: say --report DIR, or --no-report")
    return state / "rehearsals" if state is not None else None


def _rehearse(
    session: Session, repository: SyncRepository, request: _Request, report_dir: Path | None, *, wanted: bool
) -> Rehearsal:
    """Rehearse; an error goes down in the history, unless there was nothing to rehearse.

    Raises:
        Exception: As `engine.drill.drill.rehearse`.
    """
    runtime = SystemRuntime()
    began_at_ms = runtime.local_now_ms()
    try:
        with (
            session.explaining(repository, request.scope),
            session.progress("rehearse", wanted=wanted) as progress,
        ):
            return repository.loop.run(
                rehearse(
                    repository.asynchronous,
                    request.scope,
                    scratch=request.scratch,
                    keep=request.keep,
                    stores_at_once=request.at_once,
                    slo_ms=request.slo_ms,
                    runtime=runtime,
                    progress=progress,
                    **session.choose(repository, request.choice),
                )
            )
    except (NotFoundError, UsageError):
        raise
    except (StoreError, EngineError, FormatError, OSError) as error:
        failed = FailedRehearsal(
            began_at_ms=began_at_ms,
            release=installed_release(),
            repository_id=repository.record.id,
            job=request.scope.job,
            task=request.scope.task,
            error=type(error).__name__,
            message=shortened(str(error), MESSAGE_LENGTH_MAX),
        )
        _append(session, report_dir, failed)
        raise


def _append(session: Session, report_dir: Path | None, entry: Entry) -> bool:
    """Add to the history; return whether that is done, or was not asked for."""
    if report_dir is None:
        return True
    try:
        append(report_dir / HISTORY_NAME, entry)
    except OSError as error:
        session.warn(f"this drill is not in the history: {error}")
        return False
    return True


def _lines(rehearsal: Rehearsal, forecasts: tuple[Forecast, ...], history: Path | None) -> list[str]:
    slo, measured = slo_line(rehearsal), rehearsal.measured
    steps = [*phases(rehearsal), ("total", rehearsal.total_s)]
    lines = [
        headline(rehearsal),
        f"fetched {human_bytes(measured.bytes_fetched)} in {count(measured.requests_count, 'request')}",
        "",
        *table(("phase", "time"), [(name, seconds(s)) for name, s in steps], right=("time",)),
        *([slo] if slo else []),
        "",
        *table(("forecast", *(count(n, "executor") for n in EXECUTORS)), forecast_rows(rehearsal, forecasts)),
        ASSUMPTIONS,
    ]
    if rehearsal.kept_at:
        lines.append(f"kept: {printable(rehearsal.kept_at)}")
    if history is not None:
        lines.append(f"history: {printable(str(history))}")
    return lines
