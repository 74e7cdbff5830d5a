"""The verb `report`: one page on a repository."""

from pathlib import Path
from typing import Final

import click
import msgspec

from engine.cli.cmd.bench_restore import drills_directory
from engine.cli.exit_codes import ExitCode
from engine.cli.options import Setting, Verb, common_options, scope_options
from engine.cli.retention_options import choose_rules, resolve_rules, retention_options
from engine.cli.session import Session, choose_scope, with_session
from engine.drill.record import DrillHistory, history_path, read_history
from engine.errors import NotFoundError, TargetError
from engine.local.atomic_file import write_whole
from engine.report.gather import ENTRIES_MAX, gather_report
from engine.report.model import ReportFacts
from engine.report.page import make_report_page
from engine.text import Moment
from index.text import count, human_bytes, printable

PAGE_NAME: Final = "report.html"


class ReportView(msgspec.Struct, frozen=True, kw_only=True):
    """`report`."""

    # Where the page stands, and its size.
    page: str
    size_bytes: int
    jobs_count: int
    commits_count: int
    rehearsals_count: int
    collections_count: int
    # Null: it was not said what is kept, or a collection would refuse.
    would_free_bytes: int | None
    # Keys that are missing, damaged or have a TTL; null: nobody knows.
    risks_count: int | None
    requests_count: int


@click.command(
    "report",
    cls=Verb,
    short_help="Write one page on jobs, commits, bytes and risks.",
    prints=(ReportView,),
    example="tidemark report -r file:///backups --keep-last 30 -o report.html",
)
@scope_options(job_required=False)
@click.option("--task", cls=Setting, metavar="TASK", help="With --commit-per-task: whose commits.  [default: 0]")
@click.option("--jobs", is_flag=True, help="All jobs, even if a job is set.")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PAGE_NAME,
    show_default=True,
    metavar="FILE",
    help="Where the page is written.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=ENTRIES_MAX,
    show_default=True,
    metavar="N",
    help="So many records of each job, the newest.",
)
@click.option(
    "--rehearsals",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where `bench restore` keeps its history.  [default: as there]",
)
@retention_options
@common_options
@with_session
def report(
    session: Session,
    *,
    job: str | None,
    commit_per_task: bool,
    task: str | None,
    jobs: bool,
    output: Path,
    limit: int,
    rehearsals: Path | None,
    keep_last: int | None,
    keep_since: Moment | None,
    keep_named: bool,
    policy: Path | None,
) -> ExitCode:
    """Write one page of HTML on the 20 jobs that committed last, or on one: it stands alone and loads nothing.

    Commits over time, new against retained bytes, rehearsals with their forecast, lineage, what collections freed
    and, if it is said what is kept, would free, and blobs at risk. The repository is only looked at: that costs a
    listing, the records, and each index of the commits told. Ends with 0 whatever the page says.
    """
    rules = choose_rules(keep_last, keep_since, policy, keep_named=keep_named)
    is_one = job is not None and not jobs
    scopes = [choose_scope(job or "", commit_per_task=commit_per_task, task=task)] if is_one else []
    if not output.absolute().parent.is_dir():
        raise TargetError("there is no such directory", operation="report", subject=str(output.parent), hint="make it")
    history, history_path = _read_rehearsals(session, rehearsals)
    with session.open() as repository:
        with session.progress("report") as progress:
            facts = repository.loop.run(
                gather_report(
                    repository.asynchronous,
                    location=session.common.repository,
                    scopes=scopes,
                    retention=resolve_rules(repository, rules) if rules is not None else None,
                    rehearsals=history,
                    rehearsals_from=history_path,
                    entries_max=limit,
                    progress=progress,
                )
            )
        if scopes and not facts.jobs[0].history.entries:
            with session.explaining(repository, scopes[0]):
                raise NotFoundError("has no commits", operation="report", subject=str(scopes[0]))
    page = make_report_page(facts).encode()
    write_whole(output, page)
    view = _view(facts, output, len(page))
    session.show(view, [_line(view)])
    return ExitCode.OK


def _read_rehearsals(session: Session, rehearsals: Path | None) -> tuple[DrillHistory | None, str]:
    """The history of rehearsals and where it was looked for; it belongs to this machine, and need not be there."""
    directory = drills_directory(rehearsals)
    if directory is None:
        return None, ""
    try:
        return read_history(history_path(directory)), str(directory)
    except OSError as error:
        session.warn(f"the history of rehearsals is left out: {error}")
        return None, ""


def _view(facts: ReportFacts, output: Path, size_bytes: int) -> ReportView:
    return ReportView(
        page=str(output),
        size_bytes=size_bytes,
        jobs_count=len(facts.jobs) + facts.jobs_left_out,
        commits_count=sum(len(job.history.entries) for job in facts.jobs),
        rehearsals_count=sum(len(job.rehearsals) for job in facts.jobs),
        collections_count=facts.audits_count,
        would_free_bytes=facts.plan.freed_bytes if facts.plan is not None else None,
        risks_count=facts.risks_count if facts.verified is not None else None,
        requests_count=sum(facts.requests.values()),
    )


def _line(view: ReportView) -> str:
    parts = [
        count(view.jobs_count, "job"),
        count(view.commits_count, "record"),
        count(view.rehearsals_count, "rehearsal"),
        count(view.collections_count, "collection"),
        "not known what is at risk" if view.risks_count is None else f"{view.risks_count:,} at risk",
        count(view.requests_count, "request"),
    ]
    return f"{printable(view.page)} ({human_bytes(view.size_bytes)}): {', '.join(parts)}"
