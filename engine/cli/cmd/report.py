"""The verb `report`: one page on a repository."""

from pathlib import Path
from typing import Final

import click

from engine.cli import options as cli
from engine.cli.cmd.bench_restore import drills_directory
from engine.cli.session import Session, verb
from engine.drill.drill import DrillHistory, history_path, read_history
from engine.errors import NotFoundError, TargetError
from engine.report.report import ENTRIES_MAX, ReportRequest, ReportResult, gather_report, write_report
from index.display import count, human_bytes, printable
from index.snapshot.model import Scope

PAGE_NAME: Final = "report.html"


@verb("report", "Write one page on jobs, commits, bytes and risks.", prints=(ReportResult,))
@cli.scope_options(job_required=False, task=True)
@click.option("--jobs", is_flag=True, help="All jobs, even if a job is set.")
@click.option("--output", "-o", type=cli.FILE, default=PAGE_NAME, metavar="FILE", help="File to write the page to.")
@cli.limit_option(ENTRIES_MAX, 1000, text="Newest N records of each job.")
@cli.directory_option("--drills", "Directory of the history of `bench restore`.  [default: as there]")
def report(session: Session, *, scope: Scope | None, jobs: bool, output: Path, limit: int, drills: Path | None) -> None:
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
    request = ReportRequest(location=url, scopes=scopes, drills=history, drills_from=drills_from, entries_max=limit)
    with session.open() as repository:
        with session.progress("report") as progress:
            facts = repository.loop.run(gather_report(repository.asynchronous, request, progress=progress))
        if scopes and not facts.jobs[0].history.entries:
            with session.explaining(scopes[0]):
                raise NotFoundError("has no commits", operation="report", subject=str(scopes[0]))
    result = write_report(facts, output)
    parts = [
        count(result.jobs_count, "job"),
        count(result.commits_count, "record"),
        count(result.drills_count, "restore drill"),
        count(result.collections_count, "collection"),
        "unknown what is at risk" if result.risks_count is None else f"{result.risks_count:,} at risk",
        count(result.requests_count, "request"),
    ]
    session.show(result, [f"{printable(result.page)} ({human_bytes(result.size_bytes)}): {', '.join(parts)}"])


def _read_drills(session: Session, given: Path | None) -> tuple[DrillHistory, str]:
    """Read the history of drills; it belongs to this machine, and need not exist."""
    if (directory := drills_directory(given)) is not None:
        try:
            return read_history(history_path(directory)), str(directory)
        except OSError as error:
            session.warn(f"the history of restore drills is left out: {error}")
    return DrillHistory(), ""
