"""`lifecycle`: the rules of a bucket that let go what nobody collects."""

from typing import TYPE_CHECKING, Any

import click
import msgspec

from blobstore.base import read_blob
from blobstore.errors import BlobNotFoundError
from blobstore.s3_lifecycle import (
    DAYS_MIN,
    LifecyclePlan,
    Rule,
    backstop_days,
    backstop_rules,
    cut_short,
    describe_rule,
    plan_lifecycle,
    rule_ids,
    same_rules,
    threats,
)
from blobstore.s3_profile import PROFILE_BYTES_MAX, PROFILE_KEY, decode_profile
from engine.cli.exit_codes import ExitCode
from engine.cli.options import Verb, common_options
from engine.cli.s3_places import open_bucket
from engine.cli.session import Session, with_session
from engine.errors import ConflictError, NotFoundError, UnsafeStoreError, UsageError
from engine.sync import LoopThread, SyncRepository
from engine.verify import ProblemKind
from engine.words import count, printable, table

if TYPE_CHECKING:
    from blobstore.s3 import S3Store


class LifecycleView(msgspec.Struct, frozen=True, kw_only=True):
    """`lifecycle`. A rule that changes stands in `removed` as it was and in `added` as it will be."""

    # Whether it was done, and not only shown.
    done: bool
    days: int | None
    others: tuple[dict[str, Any], ...]
    kept: tuple[dict[str, Any], ...]
    removed: tuple[dict[str, Any], ...]
    added: tuple[dict[str, Any], ...]
    # Rules that take away what the repository needs, anybody's: a sentence for each.
    threats: tuple[str, ...]


@click.command(
    "lifecycle",
    cls=Verb,
    short_help="Show, install or remove the lifecycle rules of a bucket.",
    prints=(LifecycleView,),
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
    multipart uploads that nobody finished, both three collection periods after the TTL, and at least after 7 days.
    Rules of others are never touched; those that take away what the repository needs are told.
    """
    if install and remove:
        raise UsageError("--install and --remove exclude each other", operation="lifecycle")
    store = open_bucket(session, session.store_settings())
    # Also where there is no repository (any more).
    needs = _Needs(days=None, ttls_stay=False) if remove else _read_needs(session, install=install)
    loop = LoopThread()
    try:
        before = loop.run(store.read_lifecycle())
        wanted = _wanted(needs, before, store.prefix, remove=remove)
        plan = plan_lifecycle(before, wanted, prefix=store.prefix)
        told = _warn(session, store, needs, plan.rules if install or remove else before)
        if install:
            _check_others(store, needs, before)
        done = False
        if (install or remove) and plan.changes:
            if not yes and not _confirmed(session, store, plan):
                return ExitCode.OK
            _carry_out(loop, store, before, plan)
            done = True
    finally:
        loop.run(store.close())
        loop.stop()
    view = LifecycleView(
        done=done,
        days=needs.days,
        threats=told,
        **{
            name: tuple(msgspec.to_builtins(rule, str_keys=True) for rule in getattr(plan, name))
            for name in ("others", "kept", "removed", "added")
        },
    )
    asked = yes or not (install or remove) or not plan.changes
    session.show(view, [*(_plan_lines(store, plan) if asked else []), _outcome(plan, needs, done=done, remove=remove)])
    return ExitCode.OK


class _Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a repository asks of the rules of its bucket."""

    # After how many days its uploads may go; None: there is no repository that says so.
    days: int | None
    # Commits cannot remove TTLs, so no rule may go by them.
    ttls_stay: bool


def _read_needs(session: Session, *, install: bool) -> _Needs:
    """What the repository needs, and, before rules are installed, whether they could do harm.

    Raises:
        NotFoundError: There is no repository, and rules were to be installed.
        UsageError: Nobody has found out whether the store has tags, or it has none.
        UnsafeStoreError: As `_check_settled`.
    """
    try:
        with session.open() as repository:
            record = repository.record
            ttls_stay = not repository.asynchronous.store.capabilities.removes_ttl
            if install:
                _check_tags(repository, ttls_stay=ttls_stay)
                _check_settled(repository, session)
    except NotFoundError:
        if install:
            raise
        return _Needs(days=None, ttls_stay=False)
    days = backstop_days(
        ttl_ms=record.ttl_ms, margin_ms=record.margin_ms, collection_period_ms=record.collection_period_ms
    )
    return _Needs(days=days, ttls_stay=ttls_stay)


def _check_tags(repository: SyncRepository, *, ttls_stay: bool) -> None:
    """Refuse unless somebody has seen that a commit can take the tag away which the rule goes by (design 0003, L4).

    Raises:
        UsageError: Nobody has, or it cannot.
    """
    try:
        store = repository.asynchronous.store
        profile = repository.loop.run(read_blob(store, PROFILE_KEY, size_bytes_max=PROFILE_BYTES_MAX))
    except BlobNotFoundError:
        raise UsageError(
            "nobody has found out whether TTLs can be removed on this store: if not, the rule would delete what is "
            "committed",
            operation="lifecycle",
            hint="run `tidemark doctor` first",
        ) from None
    if ttls_stay or not decode_profile(profile).tags:
        raise UsageError(
            "TTLs cannot be removed on this store: the rule would delete what is committed",
            operation="lifecycle",
            hint="`tidemark doctor` found that it has no tags; see what it says now",
        )


def _wanted(needs: _Needs, before: tuple[Rule, ...], prefix: str, *, remove: bool) -> tuple[Rule, ...]:
    """Our rules as they should be; as they are, where nothing can be said or installed."""
    if remove:
        return ()
    if needs.days is None or needs.ttls_stay:
        return tuple(rule for rule in before if rule.get("ID") in rule_ids(prefix))
    return backstop_rules(prefix, days=needs.days)


def _warn(session: Session, store: "S3Store", needs: _Needs, rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """Tell of the rules that take away what the repository needs."""
    found = threats(rules, store.prefix, days_min=needs.days or DAYS_MIN, ttls_stay=needs.ttls_stay)
    told = tuple(threat.text for threat in found)
    for text in told:
        session.warn(text)
    return told


def _check_others(store: "S3Store", needs: _Needs, before: tuple[Rule, ...]) -> None:
    """Refuse to delete uploads of a repository below ours earlier than it says itself.

    Raises:
        UnsafeStoreError: Our rule would.
    """
    others = cut_short(before, store.prefix, days=needs.days or DAYS_MIN)
    if others:
        raise UnsafeStoreError(
            f"our rule would delete uploads of another repository after {needs.days} days, too early: "
            f"{printable(str(others[0].get('ID', '(no id)')))} ({describe_rule(others[0])})",
            operation="lifecycle",
            subject=store.bucket,
            hint="give one of the two repositories a place outside of the other, or both the same TTL",
        )


def _check_settled(repository: SyncRepository, session: Session) -> None:
    """Refuse while a commit's upload still carries a TTL: the rule would delete it (design 0002, T2).

    Raises:
        UnsafeStoreError: One does.
    """
    with session.progress("verify") as progress:
        report = repository.verify(progress=progress)
    at_risk = [p for p in report.problems if p.kind is ProblemKind.AT_RISK]
    if at_risk:
        raise UnsafeStoreError(
            f"{len(at_risk)} uploads of commits still carry a TTL: the rule would delete them",
            operation="lifecycle",
            subject=at_risk[0].key,
            hint="run `tidemark verify --heal`, then install the rules",
        )


def _confirmed(session: Session, store: "S3Store", plan: LifecyclePlan) -> bool:
    answer = session.confirm("change the rules of the bucket so?", lines=_plan_lines(store, plan))
    if answer is None:
        raise UsageError("nobody can be asked here", operation="lifecycle", hint="look first, then say --yes")
    return answer


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


def _outcome(plan: LifecyclePlan, needs: _Needs, *, done: bool, remove: bool) -> str:
    if done:
        return f"{count(len(plan.added), 'rule')} added, {count(len(plan.removed), 'rule')} removed, read back"
    if needs.ttls_stay:
        return "nothing was changed: TTLs cannot be removed on this store, so --install is refused"
    if plan.changes:
        return "nothing was changed: --install adds what is missing, --remove takes ours away"
    if needs.days is None and not remove:
        return "nothing to change: after how many days a rule may delete is known once there is a repository"
    return "nothing to change"
