"""The verbs `verify`, and `discard`: one damaged object less."""

from collections.abc import Sequence
from typing import Final

import click

from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import Column, tabulate
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.inspect.discard import Discarded
from engine.inspect.verify import Level, Problem, ProblemKind, VerifyReport
from index.display import count, human_bytes
from index.plan.collect import is_upload_key
from index.plan.commits import NOTHING_VOUCHES
from index.snapshot.model import Scope

LEVELS: Final = click.Choice([level.value for level in Level])


@verb("verify", "Check that what is committed is there and whole.", prints=(VerifyReport,))
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
        with session.progress("verify") as progress:
            report = repository.verify(
                chosen or None,
                scope=scope,
                level=Level(level),
                sample=sample,
                # A fixed seed would read the same sample for ever and never the rest.
                seed=seed if seed is not None else int(session.runtime.session()[:8], 16),
                heal=heal,
                progress=progress,
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


@verb("discard", "Remove one damaged record, boundary, name or pin.", prints=(Discarded,))
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
        message = f"this is for ever, and was not confirmed: {done.meaning}"
        refused = session.refusal(message, "say --yes to do it", key)
        if not dry_run:
            if not yes and not session.confirm("discard it for ever?", lines=lines, refused=refused):
                return
            done = repository.discard(key)
    session.show(done, [f"{'would discard' if dry_run else 'discarded'} {done.key}: {done.meaning}"])
