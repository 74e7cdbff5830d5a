"""The verb `collect`, the only one that deletes, and the verbs below it (design 0006)."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from blobstore.base import BlobStore
from engine.cli import options as cli
from engine.cli.output import extend, lines_if, tabulate
from engine.cli.run import ExitCode
from engine.cli.session import Session, resolve_rules, some, spark_session, verb
from engine.collect.backend import DELETE_SHARE_MAX
from engine.collect.check import PlanCheck
from engine.collect.policy import PolicyFile
from engine.collect.report import CollectReport, format_shrinking
from engine.errors import TooMuchToDeleteError, UsageError, restated
from engine.inspect.explain import Explanation, Fate, KeyPath, RootKind
from engine.text import Prose
from index.display import count, human_bytes, human_duration, iso_time
from index.errors import UnsafeNameError
from index.plan.collect import PlannedDelete, ReasonTotal
from index.plan.commits import RetentionPolicy
from index.snapshot.keys import RunId, audit_key, check_run_id, make_run_id

# Keys of one kind that people are shown; the JSON has more.
SHOWN_MAX: Final = 20


@verb("collect explain", "Say what leads to a key, and what collect would do with it.", Explanation)
@click.argument("key")
@cli.retention_options
def explain(session: Session, *, key: str, rules: PolicyFile | None) -> ExitCode:
    """Say of one KEY of the repository whether it is there, what leads to it, and what collect would do with it.

    What collect would keep is said as there; if nothing is said, everything is kept that nobody has closed. Ends with 4
    if the key is missing and needed, or if an index cannot be read that may lead to it.

    Example: tidemark collect explain -r file:///backups --keep-last 30 KEY
    """
    with session.open() as repository:
        retention = resolve_rules(repository, rules) if rules is not None else RetentionPolicy(rules=())
        found = repository.explain(key, retention)
    session.show(found, _explanation_lines(found))
    is_missing = found.fate is Fate.ABSENT and any(path.keeps for path in found.paths)
    return ExitCode.DAMAGED if is_missing or found.unreadable else ExitCode.OK


def _explanation_lines(found: Explanation) -> list[str]:
    lines = [f"{found.key}: {found.kind.value}"]
    if found.created_at_ms is not None and found.size_bytes is not None:
        lines.append(f"{human_bytes(found.size_bytes)}, created {iso_time(found.created_at_ms)}, {_ttl(found)}")
    for path in found.paths:
        lines += _path_lines(path)
    if found.paths_count > len(found.paths):
        lines.append(f"and {count(found.paths_count - len(found.paths), 'path')} more")
    if found.unreadable:
        some = f"{count(len(found.unreadable), 'index', 'indexes')}, such as {found.unreadable[0]}"
        lines.append(f"NOT looked into, because missing or altered: {some}")
    because = f"{found.rule}: {found.reason.value}" if found.reason is not None else found.rule
    until = f", {iso_time(found.collectable_at_ms)}" if found.fate is Fate.WAITING and found.collectable_at_ms else ""
    return [*lines, f"collect: it {found.fate.value}{until}; {because}"]


def _ttl(found: Explanation) -> str:
    if found.expires_at_ms is None:
        return "no TTL"
    left_ms = found.expires_at_ms - found.now_ms
    return f"its TTL ends in {human_duration(left_ms)}" if left_ms > 0 else "its TTL is over"


def _path_lines(path: KeyPath) -> list[str]:
    if path.root is RootKind.COMMIT:
        fate = f"stays: {path.kept.value}" if path.kept is not None else "is to be closed"
        root = f"commit {path.number} of {path.scope} ({fate})"
    else:
        root = f"{path.root.value} {path.name} on commit {path.number} of {path.scope}"
    lines = [f"  {root}", f"    store {path.task}/{path.store}"]
    lines += [f"    {'index' if n == 0 else 'a delta on'} {key}" for n, key in enumerate(path.indexes)]
    return [*lines, *([f"    {', '.join(path.files)}"] if path.files else [])]


@verb("collect verify-plan", "Check the plan of a dry run by deriving it another way.", PlanCheck)
@click.argument("plan", type=cli.DIRECTORY_THERE)
@cli.retention_options
def verify_plan(session: Session, *, plan: Path, rules: PolicyFile | None) -> ExitCode:
    """Check the PLAN that `tidemark collect -n --plan PLAN` wrote, by code that shares nothing with it but the format.

    Say what is to be kept, as for collect, to have it compared with what the plan says of it. Ends with 9 if a key is
    planned that something needs or that was younger than the TTL, or if the plan contradicts itself, the blob store's
    clock or what is to be kept; with 3 if the plan lacks keys that could go, or if all that it has is gone. What came
    later, and what is gone, makes no plan wrong.

    Example: tidemark collect verify-plan -r file:///backups plan/
    """
    with session.open() as repository, session.opened_store(str(plan.absolute())) as place:
        check = repository.verify_plan(place, meant=rules.resolve if rules is not None else None)
    session.show(check, _check_lines(check))
    if not check.is_right:
        return ExitCode.UNSAFE
    return ExitCode.OK if check.is_complete and not check.is_over else ExitCode.PARTIAL


def _check_lines(check: PlanCheck) -> list[str]:
    lines: list[str] = []
    if check.wrong:
        wrong = tabulate(check.wrong[:SHOWN_MAX], {"planned, and WRONG": "key", "because": "kind"})
        lines += [*wrong, *_more(check.wrong_count), ""]
    if check.missed:
        lines += [*(f"missed: {key}" for key in check.missed[:SHOWN_MAX]), *_more(check.missed_count), ""]
    lines += [f"WRONG: {text}" for text in check.contradictions[:SHOWN_MAX]]
    lines += _more(len(check.contradictions))
    if check.changed and check.missed_count:
        gone = f"{count(len(check.changed), 'root')}, such as {check.changed[0]}"
        lines.append(f"gone since the plan was made: {gone}; what only they kept looks missed: plan again")
    others = lines_if(
        (check.later_count, f"{check.later_count:,} came later"),
        (check.gone_count, f"{check.gone_count:,} planned and gone"),
        (check.rescued_count, f"{check.rescued_count:,} planned, and kept by what came later"),
        (check.waiting_count, f"{check.waiting_count:,} younger than the TTL"),
    )
    compare = "kept is what the plan says; give --policy or --keep-... to have that compared too"
    lines += lines_if((others, f"beside that: {', '.join(others)}"), (not check.retention_compared, compare))
    planned = f"{count(check.planned_count, 'upload')} planned ({human_bytes(check.planned_bytes)})"
    against = f"{check.listed_count:,} listed and {count(check.indexes_count, 'index', 'indexes')}"
    return [*lines, f"{planned}, compared with {against}: {_verdict(check)}"]


def _verdict(check: PlanCheck) -> str:
    faults = lines_if(
        (check.wrong_count, f"{check.wrong_count:,} WRONG"),
        (check.contradictions, count(len(check.contradictions), "contradiction")),
        (check.missed_count, f"{check.missed_count:,} missed ({human_bytes(check.missed_bytes)})"),
    )
    if faults:
        return ", ".join(faults)
    if check.is_over:
        return "nothing left to compare, all that was planned is gone"
    return "right and complete" if not check.gone_count else "right and complete as far as it is still there"


def _more(total: int) -> list[str]:
    return [f"and {total - SHOWN_MAX:,} more"] if total > SHOWN_MAX else []


# Of those that nobody gave a place to, the newest stay.
PLANS_KEPT_MAX: Final = 10


class CollectView(CollectReport, frozen=True, kw_only=True):
    """`collect`."""

    # The last line for people.
    summary: str
    # Where the plan is, and the key of the audit record; empty if there is none.
    plan: str
    audit: str


class CollectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to keep, how much may go, and how to report it."""

    rules: PolicyFile | None
    delete_at_most: float
    dry_run: bool
    plan: Path | None
    verbose: bool
    one_line: bool
    on_spark: bool


@verb(
    "collect",
    "Delete what no commit, name or reader needs.",
    CollectView,
    cls=cli.VerbGroup,
    commands={"explain": explain, "verify-plan": verify_plan},
    invoke_without_command=True,
    subcommand_metavar="[VERB [ARGS]...]",
)
@cli.retention_options
@cli.option(
    "--delete-at-most SHARE",
    "Refuse to delete more of all bytes, or to shrink a job by more (and by more than 50%).",
    cli.SHARE,
    default=f"{DELETE_SHARE_MAX:.0%}",
)
@cli.option("-n --dry-run", "Delete nothing; say what would go, and why.")
@cli.option("--plan DIR", "Write down what goes, key by key. [default with -n: below the cache]", cli.PATH)
@cli.option("-v --verbose", "Each key with its reason, and each commit kept.")
@cli.option("--one-line", "No progress, and the result in one line: for cron.")
@cli.on_spark_option
@cli.figures_option
def collect(session: Session, options: CollectOptions) -> ExitCode:
    """Delete what no kept commit, name or reader needs. The only verb that deletes.

    At least one of --keep-... and --policy is needed; a commit stays if a count, a time or a period keeps it. The
    newest commit of a job always stays, and what a name holds can always be restored. Ends with 3 if some keys could
    not be deleted or there is no audit record, with 10 if more than --delete-at-most would go: then nothing is deleted.

    Example: tidemark collect -r file:///backups --keep-last 30 --keep-since 7d -n
    """
    if options.rules is None:
        hint = "say --keep-last N, --keep-since TIME, --keep-daily N, or several of them; or --policy FILE"
        raise session.refusal("this would keep nothing but the newest commits", hint)
    new_id = make_run_id(session.runtime.local_now_ms(), session.runtime.session())
    plan_dir = choose_plan_dir(options.plan, session.cache_dir(), new_id, dry_run=options.dry_run)
    with session.open() as repository:
        retention = resolve_rules(repository, options.rules, dry_run=options.dry_run)
        try:
            with contextlib.ExitStack() as stack:
                plan_to = stack.enter_context(session.opened_store(str(plan_dir))) if plan_dir is not None else None
                report = _collect(session, retention, options, plan_to)
        except TooMuchToDeleteError as error:
            hint = "look at the plan with -n; if it is right, say --delete-at-most 100%"
            raise restated(error, subject=error.subject, hint=hint) from None
    if plan_dir is not None and options.plan is None:
        # The run was not known before; a plan that cannot be renamed is whole where it is.
        with contextlib.suppress(OSError):
            plan_dir = plan_dir.rename(plan_dir.with_name(report.run))
    unused = retention.unused({kept.scope.job for kept in report.kept})
    for warning in lines_if(
        *((True, f"--policy: the rule for {pattern!r} matches no job") for pattern in unused),
        (report.audit_missing, f"there is no audit record of this run: {report.audit_missing}"),
        (report.unruled, f"--policy: all is kept of {some(report.unruled)}: no rule matches"),
        (report.run_left, f"working objects of this run are left to a later collection: {report.run_left}"),
    ):
        session.warn(warning)
    session.record.note(report)
    view = view_collect(report, plan_dir)
    session.show(view, [view.summary] if options.one_line else collect_lines(view, verbose=options.verbose))
    if report.refused:
        return ExitCode.TOO_MUCH
    if report.damaged:
        return ExitCode.DAMAGED
    return ExitCode.PARTIAL if report.failed_count or report.audit_missing else ExitCode.OK


def _collect(
    session: Session, retention: RetentionPolicy, options: CollectOptions, plan_to: BlobStore | None
) -> CollectReport:
    how: dict[str, Any] = {"dry_run": options.dry_run, "delete_share_max": options.delete_at_most, "plan_to": plan_to}
    if not options.on_spark:
        with session.progress("collect", wanted=not options.one_line) as progress:
            return session.repository.collect(retention, progress=progress, **how)
    from engine.spark import collect as collect_with_spark  # noqa: PLC0415

    how["options"] = session.spark_options()
    with spark_session() as spark:
        return collect_with_spark(spark, session.common.repository, retention, **how)


def view_collect(report: CollectReport, plan: Path | None = None) -> CollectView:
    """Return the report for programs."""
    audit = "" if report.dry_run or report.audit_missing else audit_key(report.run)
    return extend(CollectView, report, summary=summary_line(report), plan=str(plan or ""), audit=audit)


def collect_lines(report: CollectView, *, verbose: bool = False) -> list[str]:
    """Format the report for people; the last line says it all."""
    lines = _details(report) if verbose else []
    if report.totals:
        lines += [*tabulate(report.totals, {"because": "reason", ">keys": "count", ">size": _size}), ""]
    waiting = f"{count(report.waiting_count, 'upload')} ({human_bytes(report.waiting_bytes)})"
    until = iso_time(report.waiting_until_ms)
    waiting = f"unreachable, and younger than the TTL: {waiting}; a collection after {until} deletes the last of them"
    unreadable = _some(len(report.unreadable), [": ".join(one) for one in report.unreadable])
    failed = _some(report.failed_count, report.failed).rstrip(",")
    lines += lines_if(
        (report.resumed, "resumed the listing of an earlier run"),
        (report.waiting_count, waiting),
        (report.unfinished_count, f"not finished, and perhaps under way: {count(report.unfinished_count, 'upload')}"),
        (report.unfinished_hidden, f"NOT looked for, uploads that were never finished: {report.unfinished_hidden}"),
        (report.protected, f"nothing of {', '.join(report.protected)} goes, because of {unreadable}"),
        (report.foreign_count, f"left alone: {_some(report.foreign_count, report.foreign)} that tidemark never wrote"),
        (report.failed_count, f"NOT deleted: {failed}; run collect again"),
        (report.plan, f"the plan: {report.plan}"),
        *((True, f"{job.job} would shrink from {format_shrinking(job)}") for job in report.shrunk),
    )
    return [*lines, Prose(report.summary)]


def _details(report: CollectReport) -> list[str]:
    lines: list[str] = []
    if report.kept:
        columns = {"job": "scope", ">commit kept": "number", ">version": "version", "because": "reason"}
        lines += [*tabulate(report.kept, columns), ""]
    if report.deletes:
        lines += [*tabulate(report.deletes, {"key deleted": "key", ">size": _size, "because": "reason"}), ""]
    more = report.deletes_count - len(report.deletes)
    return [*lines, f"and {count(more, 'key')} more: a plan has them all", ""] if report.deletes and more else lines


def _some(number: int, keys: Sequence[str]) -> str:
    return f"{count(number, 'key')}, such as {keys[0]}," if keys else count(number, "key")


def summary_line(report: CollectReport) -> str:
    """Say in one line what happened."""
    did = "would delete" if report.dry_run else "deleted"
    live = f"{count(report.live_count, 'object')} ({human_bytes(report.live_bytes)})"
    waiting = f"{count(report.waiting_count, 'upload')} waiting until {iso_time(report.waiting_until_ms)}"
    ahead = f"the blob store's clock is {human_duration(report.clock_ahead_ms)} ahead of this machine's"
    parts = lines_if(
        (True, f"{did} {count(report.deletes_count, 'key')} ({human_bytes(report.freed_bytes)})"),
        (True, f"{'would keep' if report.dry_run else 'kept'} {count(len(report.kept), 'commit')}, {live}"),
        (report.waiting_count, waiting),
        (report.clock_ahead_ms, f"NOTHING deleted for its age: {ahead}"),
        (report.failed_count, f"{report.failed_count:,} NOT deleted"),
        (report.audit_missing, "NO audit record"),
        (report.damaged, f"{count(len(report.unreadable), 'object')} CANNOT BE READ"),
        (report.refused, "WOULD BE REFUSED: more than --delete-at-most"),
    )
    return "; ".join([*parts, f"run {report.run}"])


def _size(of: ReasonTotal | PlannedDelete) -> str:
    return human_bytes(of.size_bytes) if of.size_bytes else ""


def choose_plan_dir(chosen: Path | None, cache_dir: Path | None, plan_id: RunId, *, dry_run: bool) -> Path | None:
    """Choose where the plan goes: as given, or for a dry run below the cache, where the oldest plans are removed.

    The directory need not be there yet; None: no plan is to be written. `UsageError` if it is a file.
    """
    if chosen is not None:
        if chosen.exists() and not chosen.is_dir():
            raise UsageError("not a directory", operation="collect", subject="--plan", hint="name one that is absent")
        return chosen.absolute()
    if not dry_run or cache_dir is None:
        return None
    plans, old = cache_dir / "plans", []
    with contextlib.suppress(OSError):
        for path in plans.iterdir():
            with contextlib.suppress(UnsafeNameError):
                check_run_id(path.name)
                old.append(path)
    for path in sorted(old)[: -(PLANS_KEPT_MAX - 1)]:
        # What cannot be removed is in nobody's way.
        shutil.rmtree(path, ignore_errors=True)
    return plans / plan_id
