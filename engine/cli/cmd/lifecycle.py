"""`lifecycle`: the rules of a bucket that delete what nobody collects."""

import json
import shlex
from typing import TYPE_CHECKING

import click
import msgspec

from blobstore.base import read_blob
from blobstore.errors import BlobNotFoundError
from blobstore.s3 import bucket_rules
from blobstore.s3.settings import PROFILE_BYTES_MAX, PROFILE_KEY, decode_profile
from engine.blocking import LoopThread
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.errors import ConflictError, NotFoundError, UnsafeStoreError, UsageError
from engine.inspect.verify import ProblemKind
from index.display import printable

if TYPE_CHECKING:
    from blobstore.s3.store import S3Store


class LifecycleView(bucket_rules.LifecyclePlan, frozen=True, kw_only=True):
    """`lifecycle`. If one of our rules changes, both are in `removed` as they were and in `added` as they will be."""

    # Whether it was done, and not only shown.
    done: bool
    # After how many days uploads may go; null: there is no repository that says so.
    days: int | None
    # Rules that take away what the repository needs, anybody's: a sentence for each.
    threats: tuple[str, ...]


@verb("lifecycle", "Show or install the lifecycle rules of a bucket.", prints=(LifecycleView,))
@click.argument("url", required=False)
@click.option("--install", is_flag=True, help="Install the two rules, or bring them up to date.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
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
        lines = _lines(store, plan)
        if install and (others := bucket_rules.cut_short(before, store.prefix, days=days or bucket_rules.DAYS_MIN)):
            theirs = printable(str(others[0].get("ID", "(no id)")))
            message = f"our rule would delete uploads of another repository after {days} days, too early: {theirs}"
            hint = "give one of the two repositories a place outside of the other, or both the same TTL"
            raise UnsafeStoreError(message, operation="lifecycle", subject=store.bucket, hint=hint)
        done = install and bool(plan.added)
        if done:
            refused = UsageError("nobody can be asked here", operation="lifecycle", hint="look first, then say --yes")
            if not yes and not session.confirm("change the rules of the bucket so?", lines=lines, refused=refused):
                return ExitCode.OK
            loop.run(_write(store, before, after))
    finally:
        loop.run(store.close())
        loop.stop()
    outcome = "nothing was changed: --install adds what is missing" if plan.added else "nothing to change"
    if done:
        outcome = "the rules were installed and read back"
    elif ttls_stay:
        outcome = "nothing was changed: TTLs cannot be removed on this store, so --install is refused"
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
    refused = "TTLs cannot be removed on this store: the rule would delete what is committed"
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
        raise UsageError(refused, operation="lifecycle", hint=hint)
    with session.progress("verify") as progress:
        problems = repository.verify(progress=progress).problems
    if at_risk := [problem.key for problem in problems if problem.kind is ProblemKind.AT_RISK]:
        message = f"{len(at_risk)} uploads of commits still carry a TTL: the rule would delete them"
        hint = "run `tidemark verify --heal`, then install the rules"
        raise UnsafeStoreError(message, operation="lifecycle", subject=at_risk[0], hint=hint)


async def _write(store: "S3Store", before: tuple[bucket_rules.Rule, ...], after: tuple[bucket_rules.Rule, ...]) -> None:
    """Write the rules, and read them just before and just after: S3 has no condition for this write."""
    written = "nothing was"
    if bucket_rules.same_rules(await store.read_lifecycle(), before):
        await store.write_lifecycle(after)
        if bucket_rules.same_rules(await store.read_lifecycle(), after):
            return
        written = "ours were"
    message, hint = "somebody else changed the rules meanwhile", "run `tidemark lifecycle` to see what is there now"
    raise ConflictError(f"{message}; {written} written", operation="lifecycle", hint=hint)


def _lines(store: "S3Store", plan: bucket_rules.LifecyclePlan) -> list[str]:
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
