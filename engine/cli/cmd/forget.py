"""The verb `forget`: the end of a job (design 0006, F1 and F2)."""

from collections.abc import Sequence

import click
import msgspec

from engine.cli import options as cli
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.commit.forget import ForgetReport
from engine.errors import NotFoundError, UsageError
from index.display import count, printable
from index.snapshot.model import Scope


class ForgetView(msgspec.Struct, frozen=True, kw_only=True):
    """`forget`."""

    dry_run: bool
    scopes: tuple[ForgetReport, ...]


@verb("forget", "Give up a job: close all its commits for ever.", prints=(ForgetView,))
@click.argument("job")
@click.option(
    "--commit-per-task", cls=cli.Setting, is_flag=True, help="Each task commits by itself; --task says which."
)
@click.option("--task", metavar="TASK", help="With --commit-per-task: which task.  [default: all of them]")
@click.option("--with-names", is_flag=True, help="Release the names of its commits too.")
@click.option("-n", "--dry-run", is_flag=True, help="Write nothing; say what would be forgotten.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; without a terminal it is needed.")
def forget(session: Session, *, scope: Scope, task: str | None, with_names: bool, dry_run: bool, yes: bool) -> ExitCode:
    """Give up a job: close all its commits for ever.

    Nothing is deleted by this: the next `tidemark collect` takes what only JOB needed. What names hold stays until they
    are released. A writer that is still at work is refused, and begins again if it goes on; stop it first. Ends with 8
    if the job is forgotten and its names could not be released, for want of the permission.

    Example: tidemark forget flights -r file:///backups --yes
    """
    with session.open() as repository:
        scopes = _choose_scopes(session, scope, task)
        planned = [repository.forget(s, with_names=with_names, dry_run=True) for s in scopes]
        texts = [_what(report) for report in planned]
        message = f"this is for ever, and was not confirmed: {'; '.join(texts)}"
        hint = "say --yes to do it, or -n to see it in full"
        refused = UsageError(message, operation="forget", subject=scope.job, hint=hint)
        lines = [f"to forget: {printable(text)}" for text in texts]
        if not (dry_run or yes or session.confirm("forget this for ever?", lines=lines, refused=refused)):
            return ExitCode.OK
        done = planned if dry_run else [repository.forget(s, with_names=with_names) for s in scopes]
    session.show(ForgetView(dry_run=dry_run, scopes=tuple(done)), [line for report in done for line in _lines(report)])
    return ExitCode.DENIED if any(report.denied for report in done) else ExitCode.OK


def _choose_scopes(session: Session, scope: Scope, task: str | None) -> Sequence[Scope]:
    """Return the scopes to forget, each of which has, or had, commits: of a job by tasks all if no task is named."""
    if task is not None and scope.task is None:
        hint = "to leave out one store of a job, use `tidemark commit --drop-store TASK/STORE`"
        raise UsageError("--task goes with --commit-per-task", operation="forget", hint=hint)
    every_task = scope.task is not None and task is None
    there = session.repository.scopes()
    chosen = [s for s in there if s == scope or (every_task and s.job == scope.job and s.task is not None)]
    if not chosen:
        with session.explaining(scope):
            raise NotFoundError("never had a commit", operation="forget", subject=str(scope))
    return chosen


def _what(report: ForgetReport) -> str:
    what = f"{report.scope}, which has no commits any more"
    if (newest := report.newest) is not None:
        what = f"{report.scope}, {count(report.records_count, 'record')}, newest commit {newest.pointer.number}"
        what += f" of version {newest.record.version}"
    return f"{what}, and {count(len(report.released), 'name')}" if report.released else what


def _lines(report: ForgetReport) -> list[str]:
    would = report.dry_run
    scope, newest = printable(str(report.scope)), report.newest
    if report.boundary is None:
        lines = [f"{scope} was forgotten before"]
    else:
        was = f"the newest was {newest.pointer.number}, version {newest.record.version}; " if newest else ""
        closed = f"{count(report.records_count, 'record')} {'would be ' if would else ''}closed"
        lines = [f"{scope} {'would be' if would else 'is'} forgotten: {was}{closed}"]
    if report.names:
        held = ", ".join(printable(name) for name in report.names)
        release = "release with --with-names or `tidemark unname`"
        if report.denied:
            release = f"they could not be released: {printable(report.denied)}; a writer does it with `tidemark unname`"
        lines.append(f"NOT forgotten, because names hold it: {held}; {release}")
    if report.released:
        lines.append(f"{'would release' if would else 'released'}: {', '.join(map(printable, report.released))}")
    if not would:
        lines.append("`tidemark collect` takes what nothing else needs, once it is a TTL old")
    return lines
