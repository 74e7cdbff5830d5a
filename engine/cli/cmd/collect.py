"""The verb `collect`, the only one that deletes, and the verbs below it (design 0006)."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypedDict, Unpack

import click

from blobstore.base import BlobStore
from blobstore.opening import open_store
from engine.cli.collect_view import CollectView, collect_lines, summary_line, view_collect
from engine.cli.exit_codes import ExitCode
from engine.cli.on_spark import spark_session
from engine.cli.options import SHARE, VerbGroup, common_options, figures_option, on_spark_option
from engine.cli.plan_places import choose_plan_dir, name_after_run
from engine.cli.retention_options import choose_rules, resolve_rules, retention_options
from engine.cli.session import Session, some, with_session
from engine.cli.verbs import Verbs
from engine.collect.collect import DELETE_SHARE_MAX
from engine.collect.report import CollectReport
from engine.errors import TooMuchToDeleteError, UsageError, restated
from engine.repository.sync import SyncRepository
from engine.text import Moment
from index.plan.retention import RetentionPolicy


class _Limits(TypedDict):
    """What a collection is told, whoever carries it out."""

    dry_run: bool
    delete_share_max: float
    plan_to: BlobStore | None


VERBS: Final = {
    "explain": "collect_explain:explain",
    "verify-plan": "collect_verify_plan:verify_plan",
}
_TOO_MUCH_HINT: Final = "look at the plan with -n; if it is right, say --delete-at-most 100%"


@click.command(
    "collect",
    cls=VerbGroup,
    commands=Verbs(VERBS),
    short_help="Delete what no commit, name or reader needs.",
    prints=(CollectView,),
    example="tidemark collect -r file:///backups --keep-last 30 --keep-since 7d -n",
)
@retention_options
@click.option(
    "--delete-at-most",
    type=SHARE,
    default=f"{DELETE_SHARE_MAX:.0%}",
    show_default=True,
    metavar="SHARE",
    help="Refuse to delete more than this share of all bytes.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Delete nothing; say what would go, and why.")
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write down what goes, key by key. [default with -n: below the cache directory]",
)
@click.option("-v", "--verbose", is_flag=True, help="Each key with its reason, and each commit kept.")
@click.option("--one-line", is_flag=True, help="No progress, and the result in one line: for cron.")
@functools.partial(on_spark_option, text="Spread the work over the executors of a Spark session.")
@figures_option
@common_options
@with_session
def collect(
    session: Session,
    *,
    keep_last: int | None,
    keep_since: Moment | None,
    keep_named: bool,
    policy: Path | None,
    delete_at_most: float,
    dry_run: bool,
    plan: Path | None,
    verbose: bool,
    one_line: bool,
    on_spark: bool,
) -> ExitCode:
    """Delete what no kept commit, name or reader needs. The only verb that deletes.

    At least one of --keep-last, --keep-since and --policy is needed; a commit stays if a count or a time keeps it. The
    newest commit of a job always stays, and what a name holds can always be restored. Ends with 3 if some keys could
    not be deleted or there is no audit record, with 10 if more than --delete-at-most would go: then nothing is deleted.
    """
    rules = choose_rules(keep_last, keep_since, policy, keep_named=keep_named)
    if rules is None:
        raise UsageError(
            "this would keep nothing but the newest commits",
            operation="collect",
            hint="say --keep-last N, --keep-since TIME, or both; or --policy FILE",
        )
    plan_dir = choose_plan_dir(plan, session.cache_dir(), session.new_id(), dry_run=dry_run)
    is_ours = plan is None
    with session.open() as repository:
        retention = resolve_rules(repository, rules, dry_run=dry_run)
        try:
            with _opened(plan_dir, repository) as plan_to:
                limits = _Limits(dry_run=dry_run, delete_share_max=delete_at_most, plan_to=plan_to)
                if on_spark:
                    report = _collect_on_spark(session, retention, **limits)
                else:
                    with session.progress("collect", wanted=not one_line) as progress:
                        report = repository.collect(retention, progress=progress, **limits)
        except TooMuchToDeleteError as error:
            raise restated(error, subject=error.subject, hint=_TOO_MUCH_HINT) from None
    if plan_dir is not None and is_ours:
        plan_dir = name_after_run(plan_dir, report.run)
    for pattern in retention.unused({kept.scope.job for kept in report.kept}):
        session.warn(f"--policy: the rule for {pattern!r} matches no job")
    if report.audit_missing:
        session.warn(f"there is no audit record of this run: {report.audit_missing}")
    if report.unruled:
        session.warn(f"--policy: all is kept of {some(report.unruled)}: no rule matches")
    if report.run_left:
        session.warn(f"working objects of this run are left to a later collection: {report.run_left}")
    lines = [summary_line(report)] if one_line else collect_lines(report, plan_dir, verbose=verbose)
    session.note(report)
    session.show(view_collect(report, plan_dir), lines)
    return _exit_code(report)


def _exit_code(report: CollectReport) -> ExitCode:
    if report.refused:
        return ExitCode.TOO_MUCH
    if report.damaged:
        return ExitCode.DAMAGED
    return ExitCode.PARTIAL if report.failed_count or report.audit_missing else ExitCode.OK


@contextmanager
def _opened(plan_dir: Path | None, repository: SyncRepository) -> Iterator[BlobStore | None]:
    if plan_dir is None:
        yield None
        return
    plan_to = open_store(str(plan_dir))
    try:
        yield plan_to
    finally:
        repository.loop.run(plan_to.close())


def _collect_on_spark(session: Session, retention: RetentionPolicy, **limits: Unpack[_Limits]) -> CollectReport:
    # PySpark takes a second to import, which a collection without it need not wait for.
    from engine.spark import collect as collect_with_spark  # noqa: PLC0415

    with spark_session() as spark:
        return collect_with_spark(
            spark,
            session.common.repository,
            retention,
            transfer=session.common.transfer,
            store_settings=session.store_settings(),
            **limits,
        )
