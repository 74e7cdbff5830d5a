"""The verb `doctor`: find out whether a store is safe and what it can do, and print the rights of each role."""

import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import click
import msgspec

from blobstore import installed_release
from blobstore.base import BlobStore
from blobstore.opening import StoreSettings, open_s3, open_store
from blobstore.s3.bucket_rules import ROLES, Role, partition_of, role_policy
from blobstore.s3.settings import PUT_BYTES_MAX
from blobstore.wrappers.retry import RetrySettings
from engine.blocking import LoopThread
from engine.cli.run import ExitCode, choose_exit_code
from engine.cli.session import Session, verb
from engine.doctor.doctor import CLIENTS_COUNT, Check, DoctorReport, Verdict, describe_profile, examine_store
from engine.errors import NotFoundError
from engine.text import table
from index.display import count, printable, shortened

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
    Verdict.OK: "this store is SAFE for tidemark",
    Verdict.UNSAFE: "this store is NOT SAFE for tidemark",
    Verdict.DENIED: "UNKNOWN whether this store is safe: these credentials may not find out (--policy owner may)",
    Verdict.UNKNOWN: "UNKNOWN whether this store is safe: run it again",
}


class RolePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`doctor --policy`."""

    role: str
    policy: dict[str, Any]


@verb("doctor", "Find out whether a store is safe, and what it can do.", prints=(DoctorReport, RolePolicy))
@click.argument("url", required=False)
@click.option("--no-save", "--dry-run", "dry_run", is_flag=True, help="Do not write the profile.")
@click.option(
    "--policy",
    type=click.Choice([role.value for role in Role]),
    help="Print the least IAM policy of a role, and ask the store nothing.",
)
def doctor(session: Session, *, dry_run: bool, policy: str | None) -> ExitCode:
    """Find out whether a store is safe and what it can do, in less than a minute.

    16 clients race, read, list, tag and delete below a prefix of their own, doctor/<random>/, which is deleted at the
    end. What was found is written to `profile`, which binds everybody who opens the store from then on. Ends with 0 if
    the store is safe, 9 if it is not, 8 if the credentials may not find out, and 5 if it did not answer well enough.

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
        s3 = msgspec.structs.replace(settings.s3, connections_max=4)
        settings = msgspec.structs.replace(settings, s3=s3)
        open_client = functools.partial(open_s3, url, settings, bound_by_profile=False)
    else:
        _check_there(url)
        settings = StoreSettings(retry=RetrySettings(attempts_max=1), in_flight_max=CLIENTS_COUNT)
        open_client = functools.partial(open_store, url, settings)

    shows = sys.stderr.isatty() and not (session.common.quiet or session.common.json or session.logs_json)

    def show_check(check: Check, number: int, total: int) -> None:
        if shows:
            click.echo(f"\r\x1b[Kdoctor: {check.value} ({number} of {total})", nl=False, err=True)

    def open_checked() -> BlobStore:
        with session.checked_url():
            return open_client()

    loop = LoopThread()
    try:
        return loop.run(
            examine_store(
                open_checked, runtime=session.runtime, release=installed_release(), save=save, on_check=show_check
            )
        )
    finally:
        if shows:
            click.echo("\r\x1b[K", nl=False, err=True)
        loop.stop()


def _check_there(url: str) -> None:
    """Refuse an absent path: looking at it would make it."""
    is_url = url.lower().startswith("file:")
    if not is_url and "://" in url:
        return
    try:
        path = Path(unquote(urlsplit(url).path) if is_url else url)
        is_there = path.exists()
    except ValueError:
        return  # opening it says what is wrong with it
    if not is_there:
        hint = "check it, or make the directory"
        raise NotFoundError("there is nothing at this path", operation="doctor", subject=str(path), hint=hint)


def _lines(report: DoctorReport, *, dry_run: bool) -> list[str]:
    lines = [*_table(report), "", f"{_CONCLUSIONS[report.verdict]} ({report.took_s:.0f} s)"]
    if report.profile is not None:
        why = report.profile_error or ("asked not to" if dry_run else "")
        said = f": {printable(why)}" if why else "; it binds everybody who opens the store"
        lines.append(f"profile {'written to' if report.profile_written else 'NOT written to'} `profile`{said}")
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
