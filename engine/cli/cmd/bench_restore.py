"""The group `bench`, with the verb `bench restore`: the restore drill (design 0009)."""

import os
import tempfile
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from blobstore.errors import StoreError
from blobstore.release import installed_release
from engine.cli.choices import choose_commit, commit_options
from engine.cli.config import CommitChoice, state_path
from engine.cli.exit_codes import ExitCode
from engine.cli.options import DURATION, Setting, Verb, common_options, figures_option, scope_options, transfer_options
from engine.cli.session import Session, choose_scope, with_session
from engine.clock import SystemRuntime
from engine.drill.drill import DrillOptions, run_restore_drill
from engine.drill.record import MESSAGE_LENGTH_MAX, Entry, FailedDrill, RestoreDrill, append, history_path
from engine.drill.summary import summary_line, summary_lines
from engine.errors import EngineError, NotFoundError, UsageError
from engine.repository.sync import SyncRepository
from engine.settings import STORES_AT_ONCE
from index.errors import FormatError
from index.snapshot.model import Scope
from index.text import printable, shortened


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    scope: Scope
    choice: CommitChoice
    options: DrillOptions
    # None: nothing is written.
    history: Path | None


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
    prints=(RestoreDrill,),
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
    help="Restore to a fresh directory in DIR, which must exist; removed at the end.  [default: $TMPDIR, else /tmp]",
)
@click.option("--to-nowhere", is_flag=True, help="Read and hash everything; write and open nothing.")
@click.option("--keep", is_flag=True, help="Leave the fresh directory; RocksDB was open in it.")
@click.option(
    "--at-once",
    type=click.IntRange(1, 1024),
    default=STORES_AT_ONCE,
    show_default=True,
    metavar="N",
    help="Number of stores at once, as on an executor of Spark; 1 is as `restore --all`.",
)
@click.option("--slo", type=DURATION, metavar="TIME", help="End with 11 if it takes longer, such as 5m.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the history, restore-drills.jsonl.  [default: $XDG_STATE_HOME/tidemark/drills]",
)
@click.option("--no-report", is_flag=True, help="Write no history.")
@click.option("--one-line", is_flag=True, help="No progress, and the result in one line: for cron.")
@figures_option
@transfer_options
@common_options
@with_session
def bench_restore(session: Session, **values: Any) -> ExitCode:  # noqa: ANN401  (each option has its type)
    """Restore all stores of a job's commit as a drill: how long it takes, and would take elsewhere.

    Everything is fetched, verified, synced and, where it is RocksDB, opened; then it is removed. Each drill is a line
    of the history, which `tidemark report` shows. Ends with 11 if it took longer than --slo: the time of finding the
    commit, restoring and opening.
    """
    request = _request(session, values)
    with session.open() as repository:
        drill = _run(session, repository, request, wanted=not values["one_line"])
    if not drill.pinned:
        session.warn("no pin could be written: a collection at the same time could have taken the commit")
    if drill.kept_at and not request.options.keep:
        session.warn(f"could not be removed: {drill.kept_at}")
    is_written = _append(session, request.history, drill)
    lines = [summary_line(drill)] if values["one_line"] else summary_lines(drill)
    if not values["one_line"] and drill.kept_at:
        lines.append(f"kept: {printable(drill.kept_at)}")
    if not values["one_line"] and request.history is not None and is_written:
        lines.append(f"history: {printable(str(request.history))}")
    session.record.note_value("restore_drill_seconds", drill.total_s)
    if drill.slo_ms is not None:
        session.record.note_value("restore_drill_slo_seconds", drill.slo_ms / 1000)
    session.show(drill, lines)
    if drill.is_slow:
        return ExitCode.SLOW
    return ExitCode.OK if is_written else ExitCode.PARTIAL


bench.add_command(cast("click.Command", bench_restore))


def drills_directory(given: Path | None) -> Path | None:
    """Return where the history of drills is: the directory given, else one of this user; None without a home."""
    state = state_path(os.environ)
    return given or (state / "drills" if state is not None else None)


def _request(session: Session, values: dict[str, Any]) -> _Request:
    to, to_nowhere, keep = values["to"], values["to_nowhere"], values["keep"]
    if to_nowhere and (to is not None or keep):
        raise UsageError(
            "--to-nowhere with --to or --keep", operation="bench restore", hint="to nowhere, nothing is written"
        )
    directory = None if values["no_report"] else drills_directory(values["report"])
    if directory is None and not values["no_report"]:
        session.warn("there is no home directory for the history: say --report DIR, or --no-report")
    return _Request(
        scope=choose_scope(values["job"], commit_per_task=values["commit_per_task"], task=values["task"]),
        choice=choose_commit(**{name: values[name] for name in ("number", "version", "at", "name")}),
        options=DrillOptions(
            scratch=None if to_nowhere else to or Path(tempfile.gettempdir()),
            keep=keep,
            stores_at_once=values["at_once"],
            slo_ms=values["slo"],
        ),
        history=history_path(directory) if directory is not None else None,
    )


def _run(session: Session, repository: SyncRepository, request: _Request, *, wanted: bool) -> RestoreDrill:
    """Run the drill; an error is noted in the history, unless there was nothing to restore."""
    runtime = SystemRuntime()
    began_at_ms = runtime.local_now_ms()
    try:
        with (
            session.explaining(repository, request.scope),
            session.progress("restore drill", wanted=wanted) as progress,
        ):
            return repository.loop.run(
                run_restore_drill(
                    repository.asynchronous,
                    request.scope,
                    request.options,
                    runtime=runtime,
                    progress=progress,
                    **session.choose(repository, request.choice),
                )
            )
    except (NotFoundError, UsageError):
        raise
    except (StoreError, EngineError, FormatError, OSError) as error:
        failed = FailedDrill(
            began_at_ms=began_at_ms,
            release=installed_release(),
            repository_id=repository.record.id,
            job=request.scope.job,
            task=request.scope.task,
            error=type(error).__name__,
            message=shortened(str(error), MESSAGE_LENGTH_MAX),
        )
        _append(session, request.history, failed)
        raise


def _append(session: Session, history: Path | None, entry: Entry) -> bool:
    """Add to the history; return whether that is done, or was not asked for."""
    try:
        if history is not None:
            append(history, entry)
    except OSError as error:
        session.warn(f"this drill is not in the history: {error}")
        return False
    return True
