"""The verbs `rewind` and `fork`."""

import click
import msgspec

from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import committed_line
from engine.cli.session import Session, choose_scope, verb
from index.display import printable
from index.plan.commits import Commit
from index.snapshot.model import Scope


class CommittedView(msgspec.Struct, frozen=True, kw_only=True):
    """`rewind` and `fork`."""

    commit: Commit
    source_number: int


@verb("rewind", "Make an older commit the newest again.", prints=(CommittedView,))
@click.argument("commit", type=cli.COMMIT)
@cli.scope_options(task=True)
def rewind(session: Session, *, commit: CommitChoice, scope: Scope) -> None:
    """Make an older commit the newest again, as a new commit.

    COMMIT is a number, v8, 8_<uid>, @TIME or a name. No bytes are copied and nothing is lost: the commits in between
    stay until retention takes them.

    Example: tidemark rewind -r file:///backups --job flights v7
    """
    with session.open() as repository:
        target = session.find(scope, commit)
        made = repository.rewind(target)
    _show(session, made, target)


@verb("fork", "Begin a new job with the stores of a commit.", prints=(CommittedView,))
@click.argument("commit", type=cli.COMMIT)
@click.argument("new_job")
@cli.scope_options(task=True)
@click.option("--new-task", metavar="TASK", help="With --commit-per-task: the task to begin.  [default: the same]")
def fork(session: Session, *, commit: CommitChoice, new_job: str, scope: Scope, new_task: str | None) -> None:
    """Begin a new job with the stores of a commit. No bytes are copied.

    COMMIT is latest, a number, v8, 8_<uid>, @TIME or a name; NEW_JOB must have no commits yet.

    Example: tidemark fork -r file:///backups --job flights v7 flights-replay
    """
    new_scope = choose_scope(new_job, commit_per_task=scope.task is not None, task=new_task or scope.task)
    with session.open() as repository:
        source = session.find(scope, commit)
        made = repository.fork(source, new_scope)
    _show(session, made, source, f" of {printable(str(scope))}")


def _show(session: Session, made: Commit, source: Commit, of: str = "") -> None:
    number = source.pointer.number
    line = f"{committed_line(made)}; the same as commit {number}{of}"
    session.show(CommittedView(commit=made, source_number=number), [line])
