"""What a collection reports: to its caller, in its audit record, and in the header and summary of its plan."""

from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec
from typing_extensions import override

from blobstore import installed_release
from blobstore.base import BlobStore, BytesBody, Created
from blobstore.errors import StoreError
from engine.collect.backend import KEYS_LISTED_MAX, Deletion, Kept, Rules, SweepResult
from engine.records.log import ScopeLog
from engine.records.roots import Roots
from index.display import DisplayMixin, count, format_value, human_bytes, printable, shortened
from index.plan.collect import PlannedDelete, ReasonTotal, ShrunkJob, find_shrunk_jobs
from index.plan.commits import SHRINK_MAX, KeepReason
from index.plan.plan_format import (
    AuditedBoundary,
    AuditedScope,
    AuditRecord,
    Outcome,
    PlanHeader,
    PlanSummary,
    RootCommit,
    RootName,
    RootPin,
    encode_indented,
)
from index.snapshot.keys import RunId, audit_key, parse_name_key
from index.snapshot.model import Boundary, Scope
from tidemark.errors import TidemarkError

# For other programs; audit records and plans are written by a collection alone.
__all__ = ["CollectReport", "KeptCommit"]

# The most scopes, boundaries and failures in an audit record.
SCOPES_LISTED_MAX: Final = 1000
FAILED_LISTED_MAX: Final = 100
# Of a boundary's records the newest.
POINTERS_LISTED_MAX: Final = 30
ERROR_LENGTH_MAX: Final = 1000
# In the message of a refusal; the report of a dry run has all.
SHRUNK_NAMED_MAX: Final = 5


class KeptCommit(msgspec.Struct, frozen=True, kw_only=True):
    """One commit that stays, and why."""

    scope: Scope
    number: int
    version: int
    reason: KeepReason


class CollectReport(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did, or with `dry_run` would do."""

    json_properties: ClassVar = {"deleted_count": "deletes_count", "freed_bytes": "freed_bytes"}
    json_omitted: ClassVar = ("boundaries",)

    run: RunId
    dry_run: bool
    # The listing of an earlier run was used (design 0006, R3).
    resumed: bool = False
    # Only of a dry run: what is not one would end here, because the plan has too large a share of all bytes (P4), or of
    # the state of these jobs (P9).
    refused: bool = False
    shrunk: tuple[ShrunkJob, ...] = ()
    kept: tuple[KeptCommit, ...]
    boundaries: tuple[Boundary, ...]
    # Everything that went, by reason.
    totals: tuple[ReasonTotal, ...]
    # Key by key: the first KEYS_LISTED_MAX of the log, of the uploads, and of what was never finished.
    deletes: tuple[PlannedDelete, ...] = msgspec.field(name="deleted")
    # Blobs and indexes.
    listed_count: int
    listed_bytes: int
    # Unreachable uploads that stay because they are younger than the TTL, and when the youngest of them no longer is,
    # by the blob store's clock; 0: there are none.
    waiting_count: int
    waiting_bytes: int
    waiting_until_ms: int = 0
    live_count: int
    live_bytes: int
    # Of the live ones, those that were to be deleted until the second reading of the roots led to them.
    excluded_count: int = msgspec.field(default=0, name="spared_count")
    excluded_bytes: int = msgspec.field(default=0, name="spared_bytes")
    # Keys below its prefixes that this project never wrote, finished or not; they are left alone.
    foreign_count: int = 0
    foreign: tuple[str, ...] = ()
    # Puts that nobody has finished, and that stay because they may be under way; the older ones are among `deletes`.
    unfinished_count: int = 0
    unfinished_bytes: int = 0
    # Why unfinished puts could not be looked for; empty if they were.
    unfinished_hidden: str = ""
    # Keys that are still there though they were to go; the next collection tries again.
    failed_count: int = 0
    failed: tuple[str, ...] = ()
    # Only of a dry run: what is not one would end with an error, because something cannot be read.
    damaged: bool = False
    # What cannot be read, or has nothing that vouches for it, and why, by key.
    unreadable: tuple[tuple[str, str], ...] = ()
    # Nothing was deleted of these scopes, to which it may refer; `*` where they are not known.
    protected: tuple[str, ...] = ()
    # Why there is no audit record; empty if there is one, or should be none.
    audit_missing: str = ""
    # Why the run's own working objects are still there; a later collection removes them.
    run_left: str = ""
    # How far the blob store's clock is ahead of this machine's and of the newest upload, where that is more than a
    # margin: then nothing was deleted for its age.
    clock_ahead_ms: int = 0
    # Jobs that no rule matches: everything of them is kept (P5).
    unruled: tuple[str, ...] = ()

    @override
    def _figures(self) -> dict[str, str]:
        gone = "would delete" if self.dry_run else "deleted"
        return {
            "run": self.run,
            gone: _format_keys(self.deletes_count, self.freed_bytes),
            "kept": count(len(self.kept), "commit"),
            "live": _format_keys(self.live_count, self.live_bytes),
            "younger than the TTL": _format_keys(self.waiting_count, self.waiting_bytes),
            "failed": f"{self.failed_count:,}" if self.failed_count else "",
            "refused": "yes" if self.refused else "",
            "blob store's clock ahead": format_value("clock_ahead_ms", self.clock_ahead_ms)
            if self.clock_ahead_ms
            else "",
            "no audit record": format_value("audit_missing", self.audit_missing),
            **{total.reason.value: _format_keys(total.count, total.size_bytes) for total in self.totals},
        }

    @property
    def deletes_count(self) -> int:
        """The number of keys deleted."""
        return sum(total.count for total in self.totals)

    @property
    def freed_bytes(self) -> int:
        """The bytes of the blobs and indexes deleted."""
        return sum(total.size_bytes for total in self.totals)


def _format_keys(number: int, size_bytes: int) -> str:
    return f"{count(number, 'key')} ({human_bytes(size_bytes)})"


def make_report(rules: Rules, deletion: Deletion, *, audit_missing: str = "", run_left: str = "") -> CollectReport:
    """Report a run that came to its end."""
    kept, sweep_result, unfinished = deletion.kept, deletion.sweep_result, deletion.leftovers.unfinished
    foreign = {*rules.listing.foreign, *unfinished.foreign, *kept.roots.foreign}
    return CollectReport(
        run=rules.run,
        dry_run=rules.options.dry_run,
        resumed=rules.listing.resumed_from is not None,
        refused=bool(describe_excess(rules, kept, sweep_result)),
        shrunk=_find_shrunk(rules, kept),
        kept=tuple(
            KeptCommit(scope=plan.scope, number=c.pointer.number, version=c.record.version, reason=reason)
            for plan in kept.scopes
            for c, reason in plan.kept
        ),
        boundaries=deletion.boundaries,
        totals=deletion.totals(),
        deletes=deletion.first_keys(),
        listed_count=rules.listing.count,
        listed_bytes=rules.listing.size_bytes,
        waiting_count=sweep_result.waiting_count,
        waiting_bytes=sweep_result.waiting_bytes,
        waiting_until_ms=sweep_result.waiting_until_ms,
        live_count=sweep_result.live_count,
        live_bytes=sweep_result.live_bytes,
        excluded_count=sweep_result.excluded_count,
        excluded_bytes=sweep_result.excluded_bytes,
        foreign_count=rules.listing.foreign_count + len(foreign - {*rules.listing.foreign}),
        foreign=tuple(sorted(foreign)[:KEYS_LISTED_MAX]),
        unfinished_count=len(unfinished.young),
        unfinished_bytes=sum(put.size_bytes for put in unfinished.young),
        unfinished_hidden=deletion.leftovers.unfinished_hidden,
        damaged=bool(kept.damage.errors),
        unreadable=kept.damage.reasons,
        protected=kept.damage.protected.scope_names(),
        failed_count=deletion.failed_count(),
        failed=deletion.failed(),
        audit_missing=audit_missing,
        run_left=run_left,
        clock_ahead_ms=rules.clock_ahead_ms,
        unruled=rules.policy.unruled(plan.scope.job for plan in kept.scopes if plan.kept),
    )


def describe_excess(rules: Rules, kept: Kept, sweep_result: SweepResult) -> str:
    """Say what is too much in a plan, of all bytes (design 0006, P4) or of the state of jobs (P9); empty: nothing."""
    share_max, total_bytes = rules.options.delete_share_max, rules.listing.size_bytes
    parts: list[str] = []
    if sweep_result.planned_bytes > share_max * total_bytes:
        share = sweep_result.planned_bytes / total_bytes
        parts.append(f"would delete {share:.1%} of all bytes, and may delete {share_max:.1%}")
    if shrunk := _find_shrunk(rules, kept):
        jobs = [f"{printable(job.job)} from {format_shrinking(job)}" for job in shrunk[:SHRUNK_NAMED_MAX]]
        more = [count(len(shrunk) - len(jobs), "other job")] if len(shrunk) > len(jobs) else []
        parts.append(f"would shrink {', '.join([*jobs, *more])}, and may shrink a job by {_job_share_max(rules):.1%}")
    return "; ".join(parts)


def format_shrinking(job: ShrunkJob) -> str:
    """Format how much a job would shrink."""
    lost = 1 - job.after_bytes / job.before_bytes
    return f"{human_bytes(job.before_bytes)} to {human_bytes(job.after_bytes)} ({lost:.1%})"


def _find_shrunk(rules: Rules, kept: Kept) -> tuple[ShrunkJob, ...]:
    return find_shrunk_jobs(kept.scopes, _job_share_max(rules))


def _job_share_max(rules: Rules) -> float:
    return max(rules.options.delete_share_max, SHRINK_MAX)


class Audit(msgspec.Struct, kw_only=True):
    """What the audit record of a run says; each step adds what it knows, and reads nothing of it.

    So it can be written however the run ends (A1).
    """

    rules: Rules
    # The newest reading of the roots.
    kept: Kept | None = None
    sweep_result: SweepResult = SweepResult()
    # That were written.
    boundaries: tuple[Boundary, ...] = ()
    # The deletes as soon as they begin: the record says how far they came.
    deletion: Deletion | None = None


def make_audit(audit: Audit, outcome: Outcome, *, seconds: float, error: TidemarkError | None = None) -> AuditRecord:
    """Return the record of a run that has come so far; what it did not come to is 0 or empty."""
    rules, listing, sweep_result, deletion = audit.rules, audit.rules.listing, audit.sweep_result, audit.deletion
    roots = audit.kept.roots if audit.kept is not None else Roots(logs=(), names=(), pins=())
    kept = {plan.scope: len(plan.kept) for plan in audit.kept.scopes} if audit.kept is not None else {}
    return AuditRecord(
        run=rules.run,
        release=installed_release(),
        began_at_ms=rules.now_ms,
        listed_at_ms=listing.listed_at_ms,
        resumed_from=listing.resumed_from,
        seconds=round(seconds, 3),
        outcome=outcome,
        error="" if error is None else _describe(error),
        retention=rules.policy,
        delete_share_max=rules.options.delete_share_max,
        scopes_count=len(roots.logs),
        scopes=tuple(_audit_scope(log, kept) for log in roots.logs[:SCOPES_LISTED_MAX]),
        names_count=sum(bool(name.stores) for name in roots.names),
        pins_count=sum(bool(pin.stores) for pin in roots.pins),
        boundaries_count=len(audit.boundaries),
        boundaries=tuple(
            AuditedBoundary(scope=b.scope, number=b.number, kept_count=len(b.kept), kept=b.kept[-POINTERS_LISTED_MAX:])
            for b in audit.boundaries[:SCOPES_LISTED_MAX]
        ),
        listed_count=listing.count,
        listed_bytes=listing.size_bytes,
        live_count=sweep_result.live_count,
        live_bytes=sweep_result.live_bytes,
        waiting_count=sweep_result.waiting_count,
        waiting_bytes=sweep_result.waiting_bytes,
        excluded_count=sweep_result.excluded_count,
        planned=sweep_result.totals,
        deleted=deletion.totals() if deletion is not None else (),
        failed_count=deletion.failed_count() if deletion is not None else 0,
        failed=deletion.failed()[:FAILED_LISTED_MAX] if deletion is not None else (),
        unknown_count=deletion.unknown_count() if deletion is not None else 0,
        clock_ahead_ms=rules.clock_ahead_ms,
    )


def _audit_scope(log: ScopeLog, kept: Mapping[Scope, int]) -> AuditedScope:
    scope, commits = log.listing.scope, log.commits
    newest = commits[-1].pointer.number if commits else 0
    return AuditedScope(scope=scope, newest=newest, open_count=len(commits), kept_count=kept.get(scope, 0))


async def write_audit(store: BlobStore, record: AuditRecord) -> str:
    """Write an audit record; return why it is not there, or may not be. What the run did is done either way."""
    key = audit_key(record.run)
    try:
        answer = await store.put_if_absent(key, BytesBody(encode_indented(record)))
    except StoreError as denied:
        return f"{denied} ({denied.hint})"
    return "" if isinstance(answer, Created) else f"no answer for {key}: {answer}"


def _describe(error: TidemarkError) -> str:
    """Describe an error for a record that stays for years and that others read: of a store's, only what was asked.

    What a server or a library says of a request may repeat parts of it, such as the address or the account.
    """
    text = f"{error.operation} {error.key}".rstrip() if isinstance(error, StoreError) else str(error)
    return printable(shortened(f"{type(error).__name__}: {text}", ERROR_LENGTH_MAX))


def make_header(rules: Rules, kept: Kept) -> PlanHeader:
    """Return what a plan is made of: every root that was examined (design 0006, P1)."""
    reasons = {(plan.scope, c.pointer): reason for plan in kept.scopes for c, reason in plan.kept}
    return PlanHeader(
        run=rules.run,
        repository_id=rules.repository.id,
        release=installed_release(),
        ttl_ms=rules.repository.ttl_ms,
        now_ms=rules.now_ms,
        listed_at_ms=rules.listing.listed_at_ms,
        retention=rules.policy,
        commits=tuple(
            RootCommit(
                scope=log.listing.scope,
                number=commit.pointer.number,
                version=commit.record.version,
                committed_at_ms=commit.committed_at_ms,
                kept=reasons.get((log.listing.scope, commit.pointer)),
            )
            for log in kept.roots.logs
            for commit in log.commits
        ),
        names=tuple(
            RootName(scope=n.scope, name=parse_name_key(n.key)[1], number=n.source.number, is_live=bool(n.stores))
            for n in kept.roots.names
        ),
        pins=tuple(
            RootPin(id=pin.key.rpartition("/")[2], scope=pin.scope, number=pin.source.number, is_live=bool(pin.stores))
            for pin in kept.roots.pins
        ),
    )


def make_summary(rules: Rules, sweep_result: SweepResult) -> PlanSummary:
    return PlanSummary(
        run=rules.run,
        lines_count=sweep_result.planned_count,
        size_bytes=sweep_result.planned_bytes,
        totals=sweep_result.totals,
        listed_count=rules.listing.count,
        listed_bytes=rules.listing.size_bytes,
        waiting_count=sweep_result.waiting_count,
        waiting_bytes=sweep_result.waiting_bytes,
    )
