"""The verbs `verify`, `discard`, and `repair`: what is damaged, and what can be done about it (design 0006, M3)."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from engine.backup.backup import BackupOptions
from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import Column, committed_line, lines_if, tabulate
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.errors import UsageError
from engine.inspect.discard import Discarded
from engine.inspect.repair import DamagedCommit, DamagedStore, drop_commits, find_damaged
from engine.inspect.verify import Level, Problem, ProblemKind, VerifyReport
from index.display import count, human_bytes, iso_time, printable
from index.plan.collect import is_upload_key
from index.plan.commits import NOTHING_VOUCHES, Commit
from index.snapshot.model import Scope

LEVELS: Final = click.Choice([level.value for level in Level])


@verb("verify", "Check that what is committed is there and whole.", VerifyReport)
@click.argument("commits", type=cli.COMMIT, nargs=-1, metavar="[COMMIT]...")
@cli.scope_options(job_required=False, task=True)
@cli.option(
    "--level",
    "existence: sizes from a listing; content: read files and check their hashes.",
    LEVELS,
    default="existence",
)
@cli.option("--sample", "With content: the share of files read.", cli.SHARE, default="100%")
@cli.option("--seed", "With --sample: which files.  [default: others on each run]", int)
@cli.option("--heal", "Remove TTLs that are still set on what commits need.")
@cli.figures_option
def verify(
    session: Session,
    *,
    commits: tuple[CommitChoice, ...],
    scope: Scope | None,
    level: str,
    sample: float,
    seed: int | None,
    heal: bool,
) -> ExitCode:
    """Check that what is committed is there, whole, and safe from expiry.

    Checks the given commits of a job, all of a job, or without --job all of the repository, names included. Ends with
    4 if something is missing or altered, with 3 if only a TTL is left to remove.

    Example: tidemark verify -r file:///backups --level content --sample 10%
    """
    if commits and scope is None:
        raise session.refusal("commits are numbered by job", "say --job")
    with session.open() as repository:
        chosen = [session.find(scope, c) for c in commits] if scope is not None else []
        # A fixed seed would read the same sample for ever and never the rest.
        seed = seed if seed is not None else int(session.runtime.session()[:8], 16)
        with session.progress("verify") as progress:
            report = repository.verify(
                chosen or None, scope=scope, level=Level(level), sample=sample, seed=seed, heal=heal, progress=progress
            )
        if scope is not None and not (report.commits_count or report.late):
            session.find(scope, CommitChoice())
    session.record.note(report)
    session.show(report, _verify_lines(report))
    if report.damaged:
        return ExitCode.DAMAGED
    return ExitCode.PARTIAL if any(not p.healed for p in report.problems) else ExitCode.OK


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """Return a table of problems for people; nothing without any."""
    columns: dict[str, Column] = {
        "problem": lambda p: f"{p.kind.value} (healed)" if p.healed else p.kind.value,
        "job": "scope",
        ">commit": lambda p: str(p.number or ""),
        "store": lambda p: f"{p.task}/{p.store}" if p.store else "",
        "key": "key",
        "file": "path",
    }
    return tabulate(problems, columns) if problems else []


def _verify_lines(report: VerifyReport) -> list[str]:
    lines = problem_lines(report.problems)
    lines += [f"{key} is {NOTHING_VOUCHES}, so it is not a commit" for key in report.late]
    seen = [
        count(report.commits_count, "commit"),
        count(report.indexes_count, "index", "indexes"),
        count(report.blobs_count, "blob"),
    ]
    if report.level is Level.CONTENT:
        seen.append(f"{count(report.files_read, 'file')} read ({human_bytes(report.bytes_read)})")
    damage = sum(p.kind.is_damage for p in report.problems)
    left = sum(not p.healed for p in report.problems) - damage
    verdict = f"{count(damage, 'problem')} of damage" if damage else report.verdict
    if left:
        verdict += f", {count(left, 'TTL')} left to remove: run with --heal"
    lines.append(f"{', '.join(seen)}: {verdict}")
    if any(p.kind.is_damage and is_upload_key(p.key) for p in report.problems):
        lines.append("`tidemark repair --job JOB`, on any machine, says which commits need it, and what can be done")
    return [*lines, *discard_lines(report.problems)]


def discard_lines(problems: Sequence[Problem]) -> list[str]:
    """Say what can be done about records, names and pins that cannot be read, and about a job none of whose count."""
    lines = [
        f"`tidemark discard {p.key}` gives it up, and with -n says first what that means"
        for p in problems
        if p.kind is ProblemKind.UNREADABLE
    ]
    if lines:
        lines.append("or put an older version of the object back, where the bucket keeps versions")
    return lines + [
        f"the next commit of {p.scope} counts; `tidemark forget` gives up what is there"
        for p in problems
        if p.kind is ProblemKind.ADRIFT
    ]


@verb("discard", "Remove one damaged record, boundary, name or pin.", Discarded)
@click.argument("key")
@cli.option("-n --dry-run", "Remove nothing; say what it means.")
@cli.option("-y --yes", "Do not ask; without a terminal it is needed.")
def discard(session: Session, *, key: str, dry_run: bool, yes: bool) -> None:
    """Remove one object that cannot be read, so that collections go on in its job.

    KEY is a commit record, a boundary, a name or a pin, as `tidemark verify` names it. What can be read stays, as do
    blobs and indexes. Put an older version of the object back instead where there is one.

    Example: tidemark discard -r file:///backups pins/a54cd5a54de1e4d0b1f7 --dry-run
    """
    with session.open() as repository:
        done = repository.discard(key, dry_run=True)
        lines = [f"to discard: {done.key}: {done.meaning}"]
        refused = session.refusal(f"this is for ever, and was not confirmed: {done.meaning}", "say --yes to do it", key)
        if not dry_run:
            if not yes and not session.confirm("discard it for ever?", lines=lines, refused=refused):
                return
            done = repository.discard(key)
    session.show(done, [f"{'would discard' if dry_run else 'discarded'} {done.key}: {done.meaning}"])


UNREADABLE: Final = frozenset({ProblemKind.UNREADABLE, ProblemKind.ADRIFT})


class RepairView(msgspec.Struct, frozen=True, kw_only=True):
    """`repair`."""

    scope: Scope
    level: Level
    problems: tuple[Problem, ...]
    # As it was found.
    damaged: tuple[DamagedCommit, ...]
    # The newest commit of which nothing that was looked at is damaged.
    newest_whole: int | None
    # What was made, by `--from` or `--rewind`.
    commit: Commit | None
    dropped: tuple[int, ...]
    # What is left of `damaged`, and of later commits.
    left: tuple[int, ...]


class RepairArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at, and what to do about it."""

    scope: Scope
    task: str
    store: str
    level: str
    source: Path | None
    offsets: str | None
    shrink_max: float
    rewind: bool
    drop: bool
    yes: bool


@verb("repair", "Say what is damaged and what can be done, and do it.", RepairView)
@cli.scope_options()
@cli.store_options(default=True)
@cli.option("--level", "Read every file, or look for what is missing only.", LEVELS, default=Level.CONTENT.value)
@cli.option("--from DIR", "Send again what DIR still has, and commit.", cli.DIRECTORY_THERE, to="source")
@cli.option("--offsets TEXT", "With --from: the position that DIR is at.  [default: that of the newest commit]")
@cli.shrink_max_option
@cli.option("--rewind", "Make the newest whole commit the newest again.")
@cli.option("--drop", "Close damaged commits, except the newest; nobody can restore them then.")
@cli.option("-y --yes", "With --drop: do not ask; without a terminal it is needed.")
@cli.transfer_options
def repair(session: Session, options: RepairArguments) -> ExitCode:
    """Say which commits of a job need something missing or altered, and what can be done; with options, do it.

    Nothing is changed without one of --from, --rewind and --drop. DIR is a directory as for `tidemark backup`, with the
    state of --task and --store. Ends with 4 if the newest commit is damaged, with 3 if only older ones are.

    Example: tidemark repair -r file:///backups --job flights --from /state/checkpoint
    """
    scope = options.scope
    _check(session, options)
    with session.open() as repository:
        with session.progress("verify") as progress:
            report = repository.verify(scope=scope, level=Level(options.level), progress=progress)
        problems = tuple(p for p in report.problems if p.kind.is_damage)
        # After the verification, so that what landed meanwhile is looked at, too.
        commits = repository.commits(scope, with_named=True)
        if not (commits or problems):
            session.find(scope, CommitChoice())

        def look(at: Sequence[Commit] | None = None) -> tuple[DamagedCommit, ...]:
            there = repository.commits(scope, with_named=True) if at is None else at
            return repository.loop.run(find_damaged(repository.asynchronous.store, there, problems))

        before = left = look(commits)
        _check_confirmed(session, options, _numbers(before))
        whole = next((c for c in commits if c.name is None and c.pointer.number not in _numbers(before)), None)
        made: Commit | None = None
        if before and options.source is not None:
            made = _send_again(session, options, options.source, commits[0], before, problems)
        elif options.rewind and whole is not None and commits[0] != whole:
            made = repository.rewind(whole)
        newest = made or next((c for c in commits if c.name is None), None)
        left = look() if made is not None else left
        dropped: tuple[int, ...] = ()
        if options.drop and left:
            older = sorted(_numbers(left) - {newest.pointer.number if newest is not None else 0})
            dropped = _drop(session, scope, older, yes=options.yes)
        # A name may still hold one of them.
        left = look() if dropped else left
    view = RepairView(
        scope=scope,
        level=Level(options.level),
        problems=problems,
        damaged=before,
        newest_whole=whole.pointer.number if whole is not None else None,
        commit=made,
        dropped=dropped,
        left=tuple(one.number for one in left),
    )
    session.show(view, _repair_lines(view, whole, commits, left if made is not None or dropped else None))
    if any(p.kind in UNREADABLE for p in problems):
        return ExitCode.DAMAGED
    if not left:
        return ExitCode.OK
    return ExitCode.DAMAGED if newest is None or newest.pointer.number in _numbers(left) else ExitCode.PARTIAL


def _check(session: Session, options: RepairArguments) -> None:
    if options.source is not None and options.rewind:
        raise session.refusal("--from and --rewind exclude each other", "choose one of the two")
    if options.offsets is not None and options.source is None:
        raise session.refusal("--offsets goes with --from", "say which directory is at this position")


def _check_confirmed(session: Session, options: RepairArguments, damaged: Collection[int]) -> None:
    """Refuse to drop what was not confirmed before anything else is done: the refusal would not say that it was."""
    does_more = options.source is not None or options.rewind
    if damaged and options.drop and does_more and not (options.yes or session.can_ask()):
        raise _unconfirmed(session, options.scope, sorted(damaged))


def _send_again(
    session: Session,
    options: RepairArguments,
    source: Path,
    newest: Commit,
    damaged: Collection[DamagedCommit],
    problems: Collection[Problem],
) -> Commit:
    """Back up a directory in the place of a damaged store of the newest commit, and commit it on top of that one."""
    repository, scope, task, store = session.repository, options.scope, options.task, options.store
    places = [
        (s.task, s.store) for one in damaged if one.number == newest.pointer.number and not one.name for s in one.stores
    ]
    if (task, store) not in places:
        there = ", ".join(f"--task {other_task} --store {other}" for other_task, other in places)
        message = f"store {store} of task {task} is not damaged in the newest commit"
        hint = f"say which store: {there}" if there else "nothing of that commit is: see --drop"
        raise session.refusal(message, printable(hint), printable(str(scope)))
    how = BackupOptions(missing=frozenset(p.key for p in problems), shrink_max=options.shrink_max)
    changes = repository.plan_backup(scope, source, task=task, store=store, options=how).changes
    # The offsets of the newest commit are right for its own state alone.
    same = not (changes.files_added or changes.files_removed)
    if options.offsets is None and newest.record.offsets and not same:
        message = f"the directory does not hold the state of commit {newest.pointer.number}, or nobody can say so"
        hint = "say with --offsets which position in the input its state is at; nothing was uploaded"
        raise session.refusal(message, hint, printable(newest.record.offsets))
    with session.progress("repair") as progress:
        sent = repository.backup(scope, source, task=task, store=store, options=how, progress=progress)
    offsets = newest.record.offsets if options.offsets is None else options.offsets
    # On no other: a commit that came meanwhile has other offsets.
    return session.commit(scope, [sent], offsets=offsets, parent=newest.pointer)


def _numbers(damaged: Collection[DamagedCommit]) -> frozenset[int]:
    return frozenset(one.number for one in damaged if one.name is None)


def _drop(session: Session, scope: Scope, numbers: Sequence[int], *, yes: bool) -> tuple[int, ...]:
    if not numbers:
        return ()
    lines, refused = [f"to drop: {_list(numbers)} of {scope}"], _unconfirmed(session, scope, numbers)
    if not yes and not session.confirm("drop them for ever?", lines=lines, refused=refused):
        return ()
    session.repository.loop.run(drop_commits(session.repository.asynchronous.store, scope, numbers))
    return tuple(numbers)


def _unconfirmed(session: Session, scope: Scope, numbers: Sequence[int]) -> UsageError:
    message = f"this is for ever, and was not confirmed: drop {_list(numbers)}"
    return session.refusal(message, "say --yes to do it", str(scope))


def _repair_lines(
    view: RepairView, whole: Commit | None, commits: Sequence[Commit], left: Sequence[DamagedCommit] | None
) -> list[str]:
    """Return the result for people; `left` is None where nothing was done."""
    read = "" if view.level is Level.CONTENT else "; contents were not read (--level content)"
    hints = discard_lines(view.problems)
    if not view.damaged:
        nothing = f"{count(len(commits), 'commit')}: nothing that a commit needs is damaged{read}"
        return [*problem_lines(view.problems), nothing, *hints]
    columns: dict[str, Column] = {
        ">commit": lambda pair: str(pair[0].number) if pair[0].name is None else f"name {pair[0].name}",
        ">version": lambda pair: str(pair[0].version),
        "time (UTC)": lambda pair: iso_time(pair[0].committed_at_ms),
        "store": lambda pair: f"{pair[1].task}/{pair[1].store}",
        "damaged": lambda pair: "index" if pair[1].index_damaged else " ".join(pair[1].files[:3]),
        ">files": lambda pair: pair[1].files_count,
        ">size": lambda pair: human_bytes(pair[1].size_bytes),
    }
    damaged = [(one, store) for one in view.damaged for store in one.stores]
    lines = [*problem_lines(view.problems), "", *tabulate(damaged, columns)]
    total = count(len(commits), "commit")
    lines.append(f"{len(view.damaged)} of {total} {'is' if len(view.damaged) == 1 else 'are'} damaged{read}")
    if view.commit is not None:
        lines.append(f"repaired: {committed_line(view.commit)}")
    if view.dropped:
        lines.append(f"dropped {_list(view.dropped)}: `tidemark collect` takes what only they needed")
    if left is not None:
        still = ", ".join(f"commit {one.number}" if one.name is None else f"name {one.name}" for one in left)
        if still or not hints:
            lines.append(f"still damaged: {still}" if still else "nothing is left to repair")
        return [*lines, *_unname_lines(left), *hints]
    return [*lines, "", "what can be done:", *_remedies(view, whole, commits), *hints, "nothing was changed"]


def _remedies(view: RepairView, whole: Commit | None, commits: Sequence[Commit]) -> list[str]:
    newest = commits[0].pointer.number
    damaged_newest = next((one for one in view.damaged if one.number == newest and one.name is None), None)
    lines = [
        f"  --from DIR{_of(store)}: sends at most {human_bytes(store.size_bytes)} of a local directory again"
        for store in (damaged_newest.stores if damaged_newest is not None else ())
    ]
    rewind = "  no commit is whole: without a local directory only undamaged files can be had (restore --files)"
    if whole is not None:
        back = f"commit {whole.pointer.number} (version {whole.record.version}, {iso_time(whole.committed_at_ms)})"
        rewind = f"  --rewind: makes {back} the newest again; sends nothing, and loses what came after it"
    here = "on this machine that sends what is damaged, on another one only after `tidemark repair` there"
    older = sorted(_numbers(view.damaged) - {newest})
    lines += lines_if(
        (damaged_newest, rewind),
        (older, f"  --drop: closes {_list(older)} for ever, so that nobody restores them by mistake"),
        (damaged_newest, f"  or let the job back up again: {here}"),
    )
    lines += _unname_lines(view.damaged)
    return [*lines, "  or put an older version of the object back, where the bucket keeps versions"]


def _unname_lines(damaged: Sequence[DamagedCommit]) -> list[str]:
    return [
        f"  `tidemark unname {one.name}`: releases what only this name holds" for one in damaged if one.name is not None
    ]


def _of(store: DamagedStore) -> str:
    return "" if (store.task, store.store) == ("0", "default") else f" --task {store.task} --store {store.store}"


def _list(numbers: Sequence[int]) -> str:
    return f"{'commit' if len(numbers) == 1 else 'commits'} {', '.join(map(str, numbers))}"
