"""The verbs on a store itself: `doctor`, which also prints the rights of each role, and `lifecycle`."""

import functools
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from blobstore import installed_release
from blobstore.base import BlobStore, read_blob
from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings, local_path_of, open_s3, open_store
from blobstore.s3 import bucket_rules
from blobstore.s3.bucket_rules import ROLES, Role, partition_of, role_policy
from blobstore.s3.settings import PROFILE_BYTES_MAX, PROFILE_KEY, PUT_BYTES_MAX, decode_profile
from blobstore.wrappers.retry import RetrySettings
from engine.blocking import LoopThread, run_in_loop
from engine.cli import options as cli
from engine.cli.output import lines_if
from engine.cli.run import ExitCode, choose_exit_code
from engine.cli.session import Session, verb
from engine.doctor.doctor import CLIENTS_COUNT, Check, DoctorReport, Verdict, describe_profile, examine_store
from engine.errors import ConflictError, NotFoundError, UnsafeStoreError
from engine.inspect.verify import ProblemKind
from engine.text import table
from index.display import count, printable, shortened

if TYPE_CHECKING:
    from blobstore.s3.store import S3Store


TEXT_SHOWN_MAX: Final = 400
WIDTH_MIN: Final = 80
WIDTH_MAX: Final = 120

_CODES: Final = {
    Verdict.OK: ExitCode.OK,
    Verdict.UNSAFE: ExitCode.UNSAFE,
    Verdict.DENIED: ExitCode.DENIED,
    Verdict.UNKNOWN: ExitCode.UNAVAILABLE,
}
_CONCLUSIONS: Final = {
    Verdict.OK: "this blob store is SAFE for tidemark",
    Verdict.UNSAFE: "this blob store is NOT SAFE for tidemark",
    Verdict.DENIED: "UNKNOWN whether this blob store is safe: these credentials may not find out (--policy owner may)",
    Verdict.UNKNOWN: "UNKNOWN whether this blob store is safe: run it again",
}


class RolePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`doctor --policy`."""

    role: str
    policy: dict[str, Any]


@verb("doctor", "Find out whether a blob store is safe, and what it can do.", DoctorReport, RolePolicy)
@click.argument("url", required=False)
@cli.option("--no-save --dry-run", "Do not write the profile.", to="dry_run")
@cli.option(
    "--policy",
    "Print the least IAM policy of a role, and ask the blob store nothing.",
    click.Choice([role.value for role in Role]),
)
def doctor(session: Session, *, dry_run: bool, policy: str | None) -> ExitCode:
    """Find out whether a blob store is safe and what it can do, in less than a minute.

    16 clients race, read, list, tag and delete below a prefix of their own, doctor/<random>/, which is deleted at the
    end. What was found is written to `profile`, which binds everybody who opens the blob store from then on. Ends with
    0 if it is safe, 9 if it is not, 8 if the credentials may not find out, and 5 if it did not answer well enough.

    \b
    --policy writer      backup, commit, rewind, fork, name, unname; never deletes
             restorer    restore, list, show, diff, verify; writes pins only
             collector   collect; the only one that deletes
             owner       init, doctor, lifecycle

    Example: tidemark doctor s3://bucket/prefix
    """  # noqa: D301  (click's own mark: the lines below are not wrapped)
    if policy is not None:
        _show_policy(session, Role(policy))
        return ExitCode.OK
    report = _examine(session, save=not dry_run)
    session.show(report, _lines(report, dry_run=dry_run))
    if report.verdict is Verdict.OK and report.error is not None:
        return choose_exit_code(report.error)
    return _CODES[report.verdict]


def _examine(session: Session, *, save: bool) -> DoctorReport:
    url, settings = session.common.repository, session.store_settings()
    open_client: Callable[[], BlobStore]
    if url.lower().startswith("s3:"):
        # Few connections each: together they have as many as one client has otherwise.
        settings = msgspec.structs.replace(settings, s3=msgspec.structs.replace(settings.s3, connections_max=4))
        open_client = functools.partial(open_s3, url, settings, bound_by_profile=False)
    else:
        with session.checked_url():
            path = local_path_of(url)
        if path is not None and not path.exists():  # looking at it would make it
            hint = "check it, or make the directory"
            raise NotFoundError("there is nothing at this path", operation="doctor", subject=str(path), hint=hint)
        settings = StoreSettings(retry=RetrySettings(attempts_max=1), in_flight_max=CLIENTS_COUNT)
        open_client = functools.partial(open_store, url, settings)

    shows = sys.stderr.isatty() and not (session.common.quiet or session.common.json or session.logs_json)

    def show_check(check: Check, number: int, total: int) -> None:
        if shows:
            click.echo(f"\r\x1b[Kdoctor: {check.value} ({number} of {total})", nl=False, err=True)

    def open_checked() -> BlobStore:
        with session.checked_url():
            return open_client()

    runtime, release = session.runtime, installed_release()
    work = examine_store(open_checked, runtime=runtime, release=release, save=save, on_check=show_check)
    try:
        return run_in_loop(work)
    finally:
        if shows:
            click.echo("\r\x1b[K", nl=False, err=True)


def _lines(report: DoctorReport, *, dry_run: bool) -> list[str]:
    lines = [*_table(report), "", f"{_CONCLUSIONS[report.verdict]} ({report.took_s:.0f} s)"]
    if report.profile is not None:
        why = report.profile_error or ("asked not to" if dry_run else "")
        said = f": {why}" if why else "; it binds everybody who opens the blob store"
        lines.append(f"profile {'written to' if report.profile_written else 'NOT written to'} `profile`{said}")
        lines += [f"  {line}" for line in describe_profile(report.profile, blob_bytes_max=PUT_BYTES_MAX)]
    elif report.verdict in {Verdict.UNKNOWN, Verdict.DENIED}:
        lines.append("no profile was written: too little is known")
    left = count(len(report.left), "object") if report.left else "unfinished uploads"
    return lines + lines_if(
        (report.hiccups_count, f"{count(report.hiccups_count, 'request')} had to be repeated"),
        (report.left or report.left_reason, f"NOT deleted: {left} below {report.root}: {report.left_reason}"),
    )


def _table(report: DoctorReport) -> list[str]:
    """Format verdict, check, and what it means with what was seen, as wide as the terminal."""
    begins = table(("verdict", "check"), [(row.verdict.value, row.check.value) for row in report.checks])
    indent = max(map(len, begins)) + 2
    width = min(WIDTH_MAX, max(WIDTH_MIN, shutil.get_terminal_size().columns - 1))
    lines = [f"{begins[0]:<{indent}}what it means (what was seen)"]
    for begin, row in zip(begins[1:], report.checks, strict=True):
        seen = f" ({row.figure})" if row.figure else ""
        text = begin.ljust(indent) + printable(shortened(row.meaning + seen, TEXT_SHOWN_MAX))
        lines += textwrap.wrap(text, width, subsequent_indent=" " * indent, drop_whitespace=True)
    return lines


def _show_policy(session: Session, role: Role) -> None:
    store, s3 = session.bucket(), session.common.s3
    region = s3.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    partition = partition_of(region)
    made = role_policy(role, bucket=store.bucket, prefix=store.prefix, kms_key_id=s3.kms_key_id, partition=partition)
    lines = msgspec.json.format(msgspec.json.encode(made), indent=2).decode().splitlines()
    session.show(RolePolicy(role=role.value, policy=made), lines)
    if not (session.common.json or session.common.quiet):
        click.echo(f"{role.value}: {ROLES[role]}", err=True)


class LifecycleView(bucket_rules.LifecyclePlan, frozen=True, kw_only=True):
    """`lifecycle`. If one of our rules changes, both are in `removed` as they were and in `added` as they will be."""

    # Whether it was done, and not only shown.
    done: bool
    # After how many days uploads may go; null: there is no repository that says so.
    days: int | None
    # Rules that take away what the repository needs, anybody's: a sentence for each.
    threats: tuple[str, ...]


@verb("lifecycle", "Show or install the lifecycle rules of a bucket.", LifecycleView)
@click.argument("url", required=False)
@cli.option("--install", "Install the two rules, or bring them up to date.")
@cli.option("-y --yes", "Do not ask.")
def lifecycle(session: Session, *, install: bool, yes: bool) -> ExitCode:
    """Show the lifecycle rules of a bucket as JSON, and what would change; change them only if asked to.

    They are a backstop for where nobody collects: one rule deletes uploads that no commit has taken over, one aborts
    multipart uploads that nobody finished, both three collection periods after the TTL, and at least after 7 days.
    Rules of others are never touched; a warning names those that take away what the repository needs. What is printed
    can be installed with other tools, too, and the command that removes our rules is printed.

    Example: tidemark lifecycle s3://bucket/prefix --install
    """
    store = session.bucket()
    loop = LoopThread()
    try:
        days, ttls_stay = _read_needs(session, install=install)
        before = loop.run(store.read_lifecycle())
        wanted = None if days is None or ttls_stay else bucket_rules.backstop_rules(store.prefix, days=days)
        plan = bucket_rules.plan_lifecycle(before, wanted, prefix=store.prefix)
        after = (*plan.others, *plan.kept, *plan.added)
        found = bucket_rules.threats(
            after if install else before, store.prefix, days_min=days or bucket_rules.DAYS_MIN, ttls_stay=ttls_stay
        )
        for text in found:
            session.warn(text)
        lines = _rule_lines(store, plan)
        if install and (others := bucket_rules.cut_short(before, store.prefix, days=days or bucket_rules.DAYS_MIN)):
            theirs = printable(str(others[0].get("ID", "(no id)")))
            message = f"our rule would delete uploads of another repository after {days} days, too early: {theirs}"
            hint = "give one of the two repositories a place outside of the other, or both the same TTL"
            raise UnsafeStoreError(message, operation="lifecycle", subject=store.bucket, hint=hint)
        done = install and bool(plan.added)
        if done:
            refused = session.refusal("nobody can be asked here", "look first, then say --yes")
            if not yes and not session.confirm("change the rules of the bucket so?", lines=lines, refused=refused):
                return ExitCode.OK
            loop.run(_write_rules(store, before, after))
    finally:
        loop.run(store.close())
        loop.stop()
    outcome = "nothing was changed: --install adds what is missing" if plan.added else "nothing to change"
    if done:
        outcome = "the rules were installed and read back"
    elif ttls_stay:
        outcome = "nothing was changed: TTLs cannot be removed on this blob store, so --install is refused"
    elif days is None:
        outcome = "nothing to change: after how many days a rule may delete is known once there is a repository"
    view = LifecycleView(done=done, days=days, threats=found, **msgspec.structs.asdict(plan))
    session.show(view, [*([] if done and not yes else lines), outcome])
    return ExitCode.OK


def _read_needs(session: Session, *, install: bool) -> tuple[int | None, bool]:
    """Return after how many days uploads may go, None without a repository, and whether TTLs cannot be removed."""
    try:
        with session.open() as repository:
            record = repository.record
            ttls_stay = not repository.asynchronous.store.capabilities.removes_ttl
            if install:
                _check_harmless(session, ttls_stay=ttls_stay)
    except NotFoundError:
        if install:
            raise
        return None, False
    ttl_ms, margin_ms, period_ms = record.ttl_ms, record.margin_ms, record.collection_period_ms
    days = bucket_rules.backstop_days(ttl_ms=ttl_ms, margin_ms=margin_ms, collection_period_ms=period_ms)
    return days, ttls_stay


def _check_harmless(session: Session, *, ttls_stay: bool) -> None:
    """Refuse rules that would delete what is committed (design 0002, T2; 0003, L4)."""
    refused = "TTLs cannot be removed on this blob store: the rule would delete what is committed"
    hint = "`tidemark doctor` found that it has no tags; see what it says now"
    repository = session.repository
    try:
        store = repository.asynchronous.store
        profile = repository.loop.run(read_blob(store, PROFILE_KEY, size_bytes_max=PROFILE_BYTES_MAX))
        works = decode_profile(profile).tags and not ttls_stay
    except BlobNotFoundError:
        works, refused = False, "nobody has found out whether the rule would delete what is committed"
        hint = "run `tidemark doctor` first"
    if not works:
        raise session.refusal(refused, hint)
    with session.progress("verify") as progress:
        problems = repository.verify(progress=progress).problems
    if at_risk := [problem.key for problem in problems if problem.kind is ProblemKind.AT_RISK]:
        message = f"{len(at_risk)} uploads of commits still carry a TTL: the rule would delete them"
        hint = "run `tidemark verify --heal`, then install the rules"
        raise UnsafeStoreError(message, operation="lifecycle", subject=at_risk[0], hint=hint)


async def _write_rules(
    store: "S3Store", before: tuple[bucket_rules.Rule, ...], after: tuple[bucket_rules.Rule, ...]
) -> None:
    """Write the rules, and read them just before and just after: S3 has no condition for this write."""
    written = "nothing was"
    if bucket_rules.same_rules(await store.read_lifecycle(), before):
        await store.write_lifecycle(after)
        if bucket_rules.same_rules(await store.read_lifecycle(), after):
            return
        written = "ours were"
    message, hint = "somebody else changed the rules meanwhile", "run `tidemark lifecycle` to see what is there now"
    raise ConflictError(f"{message}; {written} written", operation="lifecycle", hint=hint)


def _rule_lines(store: "S3Store", plan: bucket_rules.LifecyclePlan) -> list[str]:
    groups = (("others'", plan.others), ("ours", plan.kept), ("- remove", plan.removed), ("+ add", plan.added))
    # Others may have written rules: they are printed in ASCII.
    lines = [f"  {sign:8}  {json.dumps(msgspec.to_builtins(rule))}" for sign, rules in groups for rule in rules]
    if plan.kept or plan.removed:
        command = ["aws", "s3api", "delete-bucket-lifecycle", "--bucket", store.bucket]
        if plan.others:
            rules = json.dumps(msgspec.to_builtins({"Rules": plan.others}))
            command[2:3] = ["put-bucket-lifecycle-configuration", "--lifecycle-configuration", rules]
        lines.append(f"to remove ours: {shlex.join(command)}")
    return [f"lifecycle rules of the bucket {store.bucket}:", *(lines or ["  none"])]
