"""The verb `follow`: keep a directory at the newest commit of a job, and claim it for a writer (design 0011)."""

import contextlib
from pathlib import Path

import click
import msgspec

from engine.cli import options as cli
from engine.cli.output import extend, view_commit
from engine.cli.session import EVERY_S_MIN, Session, refuse_given, verb
from engine.errors import TargetError, UsageError
from engine.follow.follow import FollowStatus, FollowStep
from engine.restore.restore import RestoreResult
from index.display import format_files, human_duration
from index.snapshot.model import Scope
from tidemark.errors import TidemarkError


class FollowView(FollowStatus, frozen=True, kw_only=True):
    """`follow`; of one that went on until it was ended, as it was last."""

    directory: Path
    # Of the last step; null if nothing had changed.
    restored: RestoreResult | None = None


class FollowArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to follow, where to, and which of its ways."""

    scope: Scope
    directory: Path
    task: str | None = None
    store: str | None = None
    every: int
    once: bool
    status: bool
    promote: bool
    catch_up: bool

    @property
    def stores(self) -> dict[str, str | None]:
        return {"task": self.task, "store": self.store}


@verb("follow", "Keep a directory at the newest commit.", FollowView)
@click.argument("job")
@click.argument("directory", type=cli.DIRECTORY, metavar="DIR")
@cli.setting("--commit-per-task", "Each task commits by itself; --task says which.")
@cli.store_options(default=False)
@cli.option("--every TIME", "Time between two looks.", cli.DURATION, default="10s")
@cli.option("--once", "Bring DIR to the newest commit, and end.")
@cli.option("--status", "Change nothing; show the commit of DIR and the lag.")
@cli.option("--promote", "Claim DIR for a writer: no follower touches it then.")
@cli.option("--catch-up/--no-catch-up", "With --promote: first bring DIR to the newest commit.", default=True)
@cli.figures_option
@cli.transfer_options
def follow(session: Session, options: FollowArguments) -> None:
    """Keep DIR at the newest commit of JOB, so that a writer can go on there without a restore.

    Only new files are fetched; DIR is always a whole directory of one commit. With --task and --store it is that store;
    else it has TASK/STORE for each. Ends with 6 once a writer has claimed DIR, and with 0 when it is interrupted.

    Example: tidemark follow flights /state/standby -r file:///backups
    """
    if options.once + options.status + options.promote > 1:
        raise session.refusal("--once, --status and --promote exclude each other", "give one of them")
    if not options.promote:
        refuse_given("catch_up", "and --no-catch-up go with --promote", "leave it out")
    with session.open() as repository:
        if not (options.once or options.status or options.promote):
            _follow(session, options)
            return
        scope, directory = options.scope, options.directory
        with session.explaining(scope):
            if options.once:
                _show(session, directory, *_take_step(session, options))
                return
            if options.status:
                _show(session, directory, repository.follow_status(scope, directory, **options.stores))
                return
            with session.progress("promote") as progress:
                status = repository.promote(
                    scope, directory, catch_up=options.catch_up, progress=progress, **options.stores
                )
    _show(session, directory, status)
    if status.newest is None:
        session.warn("the blob store did not say how far it is behind the newest commit")
    elif status.lag_commits:
        session.warn(f"it is not the newest commit: it lags by {status.lag}; `tidemark rewind` goes back to it")


def _take_step(session: Session, options: FollowArguments) -> tuple[FollowStatus, FollowStep]:
    scope, directory, repository = options.scope, options.directory, session.repository
    with session.progress("follow") as progress:
        step = repository.follow(scope, directory, progress=progress, **options.stores)
    session.warn_of_restore(pinned=step.pinned, leftovers=step.result.leftovers if step.result else ())
    status = repository.follow_status(scope, directory, **options.stores)
    for result in filter(None, (step.result, status)):
        session.record.note(result)
    return status, step


def _follow(session: Session, options: FollowArguments) -> None:
    scope, directory = options.scope, options.directory
    every = human_duration(max(int(EVERY_S_MIN * 1000), options.every))
    session.say(f"following {scope} every {every}; end it with Ctrl-C")

    def step() -> tuple[FollowStatus, FollowStep]:
        taken = _take_step(session, options)
        if taken[1].result is not None:
            session.say("; ".join(_lines(*taken)))
        return taken

    def stay(last: tuple[FollowStatus, FollowStep]) -> str:
        with contextlib.suppress(TidemarkError):
            session.record.note(session.repository.follow_status(scope, directory, **options.stores))
        return f"stays at commit {last[0].commit_number}"

    last = session.repeat(step, options.every, staying=stay, final=(TargetError, UsageError))
    if last is not None:
        _show(session, directory, *last)


def _show(session: Session, directory: Path, status: FollowStatus, step: FollowStep | None = None) -> None:
    session.record.note(status)
    view = extend(FollowView, status, directory=directory, restored=step.result if step is not None else None)
    session.show(view, _lines(status, step))


def _lines(status: FollowStatus, step: FollowStep | None = None) -> list[str]:
    if status.commit is None:
        return [f"no follower has put anything there; lag {status.lag}"]
    commit = view_commit(status.commit)
    lines = [f"{commit.line}, write id {commit.write_id}"]
    if step is not None and (result := step.result) is not None:
        fetched = format_files(result.files_fetched, result.bytes_fetched)
        lines.append(f"fetched {fetched}; reused {format_files(result.files_reused, result.bytes_reused)}")
    lines.append("a writer has claimed it" if status.promoted else f"lag {status.lag}")
    return lines
