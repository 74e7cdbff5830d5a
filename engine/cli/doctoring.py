"""The verbs about the store itself: `doctor` and `lifecycle`."""

import shutil
import sys
import textwrap
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from blobstore.base import BlobStore
from blobstore.errors import InvalidRequestError
from blobstore.opening import StoreSettings, open_s3, open_store
from blobstore.retrying import RetrySettings
from blobstore.s3_lifecycle import (
    LifecyclePlan,
    Rule,
    backstop_days,
    backstop_rules,
    describe_rule,
    plan_lifecycle,
    same_rules,
)
from blobstore.s3_policy import ROLES, Role, role_policy
from blobstore.s3_profile import StoreProfile
from blobstore.s3_settings import PUT_BYTES_MAX
from engine.cli.exit_codes import ExitCode
from engine.cli.options import Verb, common_options
from engine.cli.session import Session, with_session
from engine.clock import SystemAmbient
from engine.doctor import CLIENTS_COUNT, DoctorReport, examine_store
from engine.doctor_verdict import Check, Verdict, describe_profile
from engine.errors import ConflictError, UsageError
from engine.sync import LoopThread
from engine.words import count, printable, shortened, table

if TYPE_CHECKING:
    from blobstore.s3 import S3Store

TEXT_SHOWN_MAX: Final = 400
WIDTH_MIN: Final = 80
# Where the names of things do not begin with `arn:aws:`.
_PARTITIONS: Final = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}
WIDTH_MAX: Final = 120

_CODES: Final = {
    Verdict.OK: ExitCode.OK,
    Verdict.UNSAFE: ExitCode.UNSAFE,
    Verdict.DENIED: ExitCode.DENIED,
    Verdict.UNKNOWN: ExitCode.UNAVAILABLE,
}
_CONCLUSIONS: Final = {
    Verdict.OK: "this store is SAFE for tidemark",
    Verdict.UNSAFE: "this store is NOT SAFE for tidemark",
    Verdict.DENIED: "NOT KNOWN whether this store is safe: these credentials may not find out (--policy owner may)",
    Verdict.UNKNOWN: "NOT KNOWN whether this store is safe: run it again",
}


# ---------------------------------------------------------------------- doctor


class CheckView(msgspec.Struct, frozen=True, kw_only=True):
    """One check; `verdict` is ok, missing, warning, UNSAFE, denied, unknown or n/a."""

    # create, read, replace, ranges, lists, ttl, multipart, conditional_multipart, abort, delete, empty, lifecycle,
    # clock, latency or throughput.
    check: str
    verdict: str
    figure: str
    # Numbers with their unit at the end of the name.
    figures: dict[str, float]
    meaning: str


class DoctorView(msgspec.Struct, frozen=True, kw_only=True):
    """`doctor`."""

    safe: bool
    # ok, UNSAFE, denied or unknown.
    verdict: str
    checks: tuple[CheckView, ...]
    profile: StoreProfile | None
    profile_written: bool
    profile_error: str
    hiccups_count: int
    left: tuple[str, ...]
    left_reason: str
    took_s: float


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """`doctor --policy`."""

    role: str
    policy: dict[str, Any]


@click.command(
    "doctor",
    cls=Verb,
    short_help="Find out whether a store is safe, and what it can do.",
    example="tidemark doctor s3://bucket/prefix",
)
@click.argument("url", required=False)
@click.option("--no-save", "--dry-run", "dry_run", is_flag=True, help="Do not write the profile.")
@click.option(
    "--policy",
    type=click.Choice([role.value for role in Role]),
    help="Print the least IAM policy of a role, and ask the store nothing.",
)
@common_options
@with_session
def doctor(session: Session, *, dry_run: bool, policy: str | None) -> ExitCode:
    """Find out whether a store is safe, what it can do, and how fast it is; in less than a minute.

    16 clients race, read, list, tag and delete below a prefix of their own, doctor/<random>/, which is deleted at the
    end. What was found is written to `profile`, which binds everybody who opens the store from then on. Ends with 0 if
    the store is safe, 9 if it is not, 8 if the credentials may not find out, and 5 if it did not answer well enough.

    \b
    --policy writer      backup, commit, rewind, fork, name; never deletes
             restorer    restore, list, show, diff, verify; writes pins only
             collector   collect; the only one that deletes
             owner       init, doctor, lifecycle
    """  # noqa: D301  (click's own mark: the lines below are not wrapped)
    if policy is not None:
        _show_policy(session, Role(policy))
        return ExitCode.OK
    report = _examine(session, save=not dry_run)
    session.show(_view(report), _lines(report, dry_run=dry_run))
    if report.verdict is Verdict.OK and report.profile_error:
        return ExitCode.DENIED
    return _CODES[report.verdict]


def _examine(session: Session, *, save: bool) -> DoctorReport:
    settings = session.store_settings()
    if _is_s3(session):
        # Few connections each: together they have as many as one client has otherwise.
        s3 = msgspec.structs.replace(settings.s3, connections_max=4)
        settings = msgspec.structs.replace(settings, s3=s3)
    else:
        settings = StoreSettings(retry=RetrySettings(attempts_max=1), in_flight_max=CLIENTS_COUNT)

    def open_client() -> BlobStore:
        if _is_s3(session):
            return _open_s3(session, settings, bound_by_profile=False)
        try:
            return open_store(session.common.repository, settings)
        except InvalidRequestError as error:
            raise _usage(session, error) from None

    shows = sys.stderr.isatty() and not (session.common.quiet or session.common.json)

    def told(check: Check, number: int, total: int) -> None:
        if shows:
            click.echo(f"\r\x1b[Kdoctor: {check.value} ({number} of {total})", nl=False, err=True)

    loop = LoopThread()
    try:
        return loop.run(
            examine_store(open_client, ambient=SystemAmbient(), release=version("tidemark"), save=save, told=told)
        )
    finally:
        if shows:
            click.echo("\r\x1b[K", nl=False, err=True)
        loop.stop()


def _view(report: DoctorReport) -> DoctorView:
    return DoctorView(
        safe=report.verdict is Verdict.OK,
        verdict=report.verdict.value,
        checks=tuple(
            CheckView(
                check=row.check.name.lower(),
                verdict=row.verdict.value,
                figure=row.figure,
                figures=dict(row.figures),
                meaning=row.meaning,
            )
            for row in report.rows
        ),
        profile=report.profile,
        profile_written=report.profile_written,
        profile_error=report.profile_error,
        hiccups_count=report.hiccups_count,
        left=report.left,
        left_reason=report.left_reason,
        took_s=report.took_s,
    )


def _lines(report: DoctorReport, *, dry_run: bool) -> list[str]:
    lines = _table(report)
    lines += ["", f"{_CONCLUSIONS[report.verdict]} ({report.took_s:.0f} s)"]
    if report.profile is not None:
        written = "written to" if report.profile_written else "NOT written to"
        why = report.profile_error or ("asked not to" if dry_run else "")
        lines.append(f"profile {written} `profile`" + (f": {printable(why)}" if why else "; it binds whoever opens"))
        lines += [f"  {line}" for line in describe_profile(report.profile, blob_bytes_max=PUT_BYTES_MAX)]
    elif report.verdict in {Verdict.UNKNOWN, Verdict.DENIED}:
        lines.append("no profile was written: too little is known")
    if report.hiccups_count:
        lines.append(f"{count(report.hiccups_count, 'request')} had to be repeated")
    if report.left or report.left_reason:
        left = count(len(report.left), "object") if report.left else "unfinished uploads"
        lines.append(f"NOT deleted: {left} below {report.root}: {printable(report.left_reason)}")
    return lines


def _table(report: DoctorReport) -> list[str]:
    """Verdict, check, and what it means with what was seen, as wide as the terminal."""
    *lines, last = table(
        ("verdict", "check", "what it means (what was seen)"),
        [*((row.verdict.value, row.check.value, "") for row in report.rows), ("", "", "|")],
    )
    indent = last.index("|")
    width = min(WIDTH_MAX, max(WIDTH_MIN, shutil.get_terminal_size().columns - 1))
    told = [lines[0]]
    for begin, row in zip(lines[1:], report.rows, strict=True):
        seen = f" ({row.figure})" if row.figure else ""
        text = begin.ljust(indent) + printable(shortened(row.meaning + seen, TEXT_SHOWN_MAX))
        told += textwrap.wrap(text, width, subsequent_indent=" " * indent, drop_whitespace=True)
    return told


def _show_policy(session: Session, role: Role) -> None:
    store = _open_s3(session, session.store_settings())
    s3 = session.common.s3
    partition = next((name for begin, name in _PARTITIONS.items() if s3.region.startswith(begin)), "aws")
    made = role_policy(role, bucket=store.bucket, prefix=store.prefix, kms_key_id=s3.kms_key_id, partition=partition)
    if session.common.json:
        session.show(PolicyView(role=role.value, policy=made))
        return
    session.show({}, msgspec.json.format(msgspec.json.encode(made), indent=2).decode().splitlines())
    if not session.common.quiet:
        click.echo(f"{role.value}: {ROLES[role]}", err=True)


# ---------------------------------------------------------------------- lifecycle


class LifecycleView(msgspec.Struct, frozen=True, kw_only=True):
    """`lifecycle`. A rule that changes stands in `removed` as it was and in `added` as it will be."""

    # Whether it was done, and not only shown.
    done: bool
    days: int | None
    others: tuple[dict[str, Any], ...]
    kept: tuple[dict[str, Any], ...]
    removed: tuple[dict[str, Any], ...]
    added: tuple[dict[str, Any], ...]


@click.command(
    "lifecycle",
    cls=Verb,
    short_help="Show, install or remove the lifecycle rules of a bucket.",
    example="tidemark lifecycle s3://bucket/prefix --install",
)
@click.argument("url", required=False)
@click.option("--install", is_flag=True, help="Install the two rules, or bring them up to date.")
@click.option("--remove", is_flag=True, help="Remove the two rules.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@common_options
@with_session
def lifecycle(session: Session, *, install: bool, remove: bool, yes: bool) -> ExitCode:
    """Show the lifecycle rules of a bucket, and what would change; change them only if asked to.

    They are a backstop for where nobody collects: one rule deletes uploads that no commit has taken over, one aborts
    multipart uploads that nobody finished, both after the TTL and a day, at least 7 days and three collection periods.
    Rules of others are never touched.
    """
    if install and remove:
        raise UsageError("--install and --remove exclude each other", operation="lifecycle")
    store = _open_s3(session, session.store_settings())
    days: int | None = None
    wanted: tuple[Rule, ...] = ()
    if not remove:
        with session.open() as repository:
            record = repository.record
            if not repository.asynchronous.store.capabilities.removes_ttl and install:
                raise UsageError(
                    "TTLs cannot be removed on this store: the rule would delete what is committed",
                    operation="lifecycle",
                    hint="`tidemark doctor` found that it has no tags; see what it says now",
                )
        days = backstop_days(ttl_ms=record.ttl_ms, collection_period_ms=record.collection_period_ms)
        wanted = backstop_rules(store.prefix, days=days)
    loop = LoopThread()
    try:
        before = loop.run(store.read_lifecycle())
        plan = plan_lifecycle(before, wanted, prefix=store.prefix)
        done = False
        if (install or remove) and plan.changes:
            if not yes and not _confirmed(session, store, plan):
                click.echo("nothing was changed", err=True)
                return ExitCode.OK
            _carry_out(loop, store, before, plan)
            done = True
    finally:
        loop.run(store.close())
        loop.stop()
    view = LifecycleView(
        done=done,
        days=days,
        **{
            name: tuple(msgspec.to_builtins(rule, str_keys=True) for rule in getattr(plan, name))
            for name in ("others", "kept", "removed", "added")
        },
    )
    asked = yes or not (install or remove) or not plan.changes
    session.show(view, [*(_plan_lines(store, plan) if asked else []), _outcome(plan, done=done)])
    return ExitCode.OK


def _confirmed(session: Session, store: "S3Store", plan: LifecyclePlan) -> bool:
    if not _can_ask(session):
        raise UsageError("nobody can be asked here", operation="lifecycle", hint="look first, then say --yes")
    for line in _plan_lines(store, plan):
        click.echo(line)
    return click.confirm("change the rules of the bucket so?", err=True)


def _can_ask(session: Session) -> bool:
    return sys.stdin.isatty() and not (session.common.json or session.common.quiet)


def _carry_out(loop: LoopThread, store: "S3Store", before: tuple[Rule, ...], plan: LifecyclePlan) -> None:
    """Write the rules, with a look at what is there just before and just after: S3 has no condition for this write.

    Raises:
        ConflictError: Somebody else changed the rules meanwhile.
    """
    if not same_rules(loop.run(store.read_lifecycle()), before):
        raise ConflictError(
            "somebody else changed the rules meanwhile; nothing was written", operation="lifecycle", hint="run it again"
        )
    loop.run(store.write_lifecycle(plan.rules))
    after = loop.run(store.read_lifecycle())
    if not same_rules(after, plan.rules):
        raise ConflictError(
            "the rules are not those that were written: somebody else changed them at the same time, or the store "
            "keeps them in another way",
            operation="lifecycle",
            hint="run `tidemark lifecycle` to see what is there now",
        )


def _plan_lines(store: "S3Store", plan: LifecyclePlan) -> list[str]:
    rows = [
        (sign, str(rule.get("ID", "(no id)")), describe_rule(rule))
        for sign, rules in (
            ("others'", plan.others),
            ("ours", plan.kept),
            ("- remove", plan.removed),
            ("+ add", plan.added),
        )
        for rule in rules
    ]
    lines = [f"lifecycle rules of the bucket {store.bucket}:"]
    if not rows:
        return [*lines, "  none"]
    return lines + [f"  {line}" for line in table(("", "id", "what it does"), map(_printable_row, rows))]


def _printable_row(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(printable, row))


def _outcome(plan: LifecyclePlan, *, done: bool) -> str:
    if done:
        return f"{count(len(plan.added), 'rule')} added, {count(len(plan.removed), 'rule')} removed, read back"
    if not plan.changes:
        return "nothing to change"
    return "nothing was changed: --install adds what is missing, --remove takes ours away"


# ---------------------------------------------------------------------- stores


def _is_s3(session: Session) -> bool:
    return session.common.repository.lower().startswith("s3:")


def _open_s3(session: Session, settings: StoreSettings, *, bound_by_profile: bool = True) -> "S3Store":
    try:
        return open_s3(session.common.repository, settings, bound_by_profile=bound_by_profile)
    except InvalidRequestError as error:
        raise _usage(session, error) from None


def _usage(session: Session, error: InvalidRequestError) -> UsageError:
    return UsageError(str(error), operation=session.verb, subject="--repository", hint=error.hint)
