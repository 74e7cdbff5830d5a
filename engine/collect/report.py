"""What a collection did: the report for whoever called it, and the audit record, however it ended (design 0006, A1)."""

from typing import ClassVar, Final

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Created
from blobstore.errors import StoreError
from blobstore.release import installed_release
from engine.collect.backend import KEYS_TOLD_MAX
from engine.collect.state import Facts
from engine.errors import EngineError
from index.display import DisplayMixin, format_value
from index.errors import FormatError
from index.plan.collect import PlannedDelete, ReasonTotal
from index.plan.commits import Commit
from index.plan.plan_format import AuditedBoundary, AuditedScope, AuditRecord, Outcome, encode_audit
from index.plan.retention import KeepReason
from index.snapshot.keys import RunId, audit_key
from index.snapshot.model import Scope
from index.snapshot.records import Boundary
from index.text import count, human_bytes, printable, shortened

# What other programs may use; audit records are written by a collection alone.
__all__ = ["CollectReport", "KeptCommit", "make_report"]

# Of many scopes, boundaries and failures these are told one by one.
SCOPES_TOLD_MAX: Final = 1000
FAILED_TOLD_MAX: Final = 100
# Of a boundary's records the newest.
POINTERS_TOLD_MAX: Final = 30
ERROR_LENGTH_MAX: Final = 1000


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
    # The listing of an earlier run was taken up (design 0006, R3).
    resumed: bool = False
    # Only of a dry run: what is not one would end here, because the plan has too large a share of all bytes (P4).
    refused: bool = False
    kept: tuple[KeptCommit, ...]
    boundaries: tuple[Boundary, ...]
    # Everything that went, by reason.
    totals: tuple[ReasonTotal, ...]
    # Key by key: the first KEYS_TOLD_MAX of the log, of the uploads, and of what was never finished.
    deletes: tuple[PlannedDelete, ...] = msgspec.field(name="deleted")
    # Blobs and indexes.
    listed_count: int
    listed_bytes: int
    # Unreachable uploads that stay because they are younger than the TTL, and when the youngest of them is no more,
    # by the store's clock; 0: there are none.
    waiting_count: int
    waiting_bytes: int
    waiting_until_ms: int = 0
    live_count: int
    live_bytes: int
    # Of the live ones, those that were to be deleted until the second reading of the roots led to them.
    spared_count: int = 0
    spared_bytes: int = 0
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
    # Nothing was deleted of these scopes, to which it may refer; `*` where nothing tells them.
    protected: tuple[str, ...] = ()
    # Why there is no audit record; empty if there is one, or should be none.
    audit_missing: str = ""
    # Why the run's own working objects are still there; a later collection removes them.
    run_left: str = ""
    # How far the store's clock is ahead of this machine's and of the newest upload, where that is more than a margin:
    # then nothing was deleted for its age.
    clock_ahead_ms: int = 0
    # Jobs that no rule matches: everything of them is kept (P5).
    unruled: tuple[str, ...] = ()

    @override
    def figures(self) -> dict[str, str]:
        """What went, or with a dry run would go, and what stays."""
        gone = "would delete" if self.dry_run else "deleted"
        told = {
            "run": self.run,
            gone: _tell_keys(self.deletes_count, self.freed_bytes),
            "kept": count(len(self.kept), "commit"),
            "live": _tell_keys(self.live_count, self.live_bytes),
            "younger than the TTL": _tell_keys(self.waiting_count, self.waiting_bytes),
            "failed": f"{self.failed_count:,}" if self.failed_count else "",
            "refused": "yes" if self.refused else "",
            "store's clock ahead": format_value("clock_ahead_ms", self.clock_ahead_ms) if self.clock_ahead_ms else "",
            "no audit record": format_value("audit_missing", self.audit_missing),
            **{total.reason.value: _tell_keys(total.count, total.size_bytes) for total in self.totals},
        }
        return {name: text for name, text in told.items() if text}

    @property
    def deletes_count(self) -> int:
        """Keys deleted."""
        return sum(total.count for total in self.totals)

    @property
    def freed_bytes(self) -> int:
        """Bytes of the blobs and indexes deleted."""
        return sum(total.size_bytes for total in self.totals)


def _tell_keys(number: int, size_bytes: int) -> str:
    return f"{count(number, 'key')} ({human_bytes(size_bytes)})"


def make_report(facts: Facts, *, audit_missing: str = "", run_left: str = "") -> CollectReport:
    """The report of a run that came to its end."""
    swept = facts.swept
    foreign = {*facts.listing.foreign, *facts.unfinished.foreign, *facts.roots.foreign}
    return CollectReport(
        run=facts.run,
        dry_run=facts.dry_run,
        resumed=facts.listing.taken_up is not None,
        refused=facts.refused,
        kept=tuple(
            KeptCommit(scope=plan.scope, number=c.pointer.number, version=c.record.version, reason=reason)
            for plan in facts.plans
            for c, reason in plan.kept
        ),
        boundaries=facts.boundaries,
        totals=facts.totals(),
        deletes=facts.told(),
        listed_count=facts.listing.count,
        listed_bytes=facts.listing.size_bytes,
        waiting_count=swept.waiting_count,
        waiting_bytes=swept.waiting_bytes,
        waiting_until_ms=swept.waiting_until_ms,
        live_count=swept.live_count,
        live_bytes=swept.live_bytes,
        spared_count=swept.spared_count,
        spared_bytes=swept.spared_bytes,
        foreign_count=facts.listing.foreign_count + len(foreign - {*facts.listing.foreign}),
        foreign=tuple(sorted(foreign)[:KEYS_TOLD_MAX]),
        unfinished_count=len(facts.unfinished.young),
        unfinished_bytes=sum(put.size_bytes for put in facts.unfinished.young),
        unfinished_hidden=facts.unfinished_hidden,
        damaged=bool(facts.damage.errors),
        unreadable=facts.damage.reasons,
        protected=facts.damage.protected.told(),
        failed_count=facts.failed_count(),
        failed=facts.failed(),
        audit_missing=audit_missing,
        run_left=run_left,
        clock_ahead_ms=facts.clock_ahead_ms,
        unruled=facts.policy.unruled(plan.scope.job for plan in facts.plans if plan.kept),
    )


def make_audit(facts: Facts, *, seconds: float, outcome: Outcome, error: str = "") -> AuditRecord:
    """The record of a run, as far as it came."""
    kept = {plan.scope: plan.kept for plan in facts.plans}
    scopes = [_scope(log.listing.scope, log.commits, kept.get(log.listing.scope, ())) for log in facts.roots.logs]
    swept = facts.swept
    return AuditRecord(
        run=facts.run,
        release=installed_release(),
        began_at_ms=facts.now_ms,
        listed_at_ms=facts.listing.listed_at_ms,
        clock_ahead_ms=facts.clock_ahead_ms,
        taken_up=facts.listing.taken_up,
        seconds=round(seconds, 3),
        outcome=outcome,
        error=error,
        retention=facts.policy,
        delete_share_max=facts.delete_share_max,
        scopes_count=len(scopes),
        scopes=tuple(scopes[:SCOPES_TOLD_MAX]),
        names_count=sum(bool(name.stores) for name in facts.roots.names),
        pins_count=sum(bool(pin.stores) for pin in facts.roots.pins),
        boundaries_count=len(facts.boundaries),
        boundaries=tuple(
            AuditedBoundary(scope=b.scope, number=b.number, kept_count=len(b.kept), kept=b.kept[-POINTERS_TOLD_MAX:])
            for b in facts.boundaries[:SCOPES_TOLD_MAX]
        ),
        listed_count=facts.listing.count,
        listed_bytes=facts.listing.size_bytes,
        live_count=swept.live_count,
        live_bytes=swept.live_bytes,
        waiting_count=swept.waiting_count,
        waiting_bytes=swept.waiting_bytes,
        spared_count=swept.spared_count,
        planned=swept.totals,
        deleted=facts.totals(),
        failed_count=facts.failed_count(),
        unknown_count=facts.unknown_count(),
        failed=facts.failed()[:FAILED_TOLD_MAX],
    )


def _scope(scope: Scope, commits: tuple[Commit, ...], kept: tuple[tuple[Commit, KeepReason], ...]) -> AuditedScope:
    newest = commits[-1].pointer.number if commits else 0
    return AuditedScope(scope=scope, newest=newest, open_count=len(commits), kept_count=len(kept))


def tell_error(error: EngineError | FormatError | StoreError) -> str:
    """An error for a record that stays for years and that others read: of a store's only what was asked of it.

    What a server or a library says of a request may repeat parts of it, such as the address or the account.
    """
    kind = type(error).__name__
    told = f"{error.operation} {error.key}".rstrip() if isinstance(error, StoreError) else str(error)
    return printable(shortened(f"{kind}: {told}", ERROR_LENGTH_MAX))


async def write_audit(store: BlobStore, record: AuditRecord) -> str:
    """Write a record.

    Returns:
        Why it is not there, or may not be; empty if it is. What the run did is done either way.
    """
    try:
        match await store.put_if_absent(audit_key(record.run), BytesBody(encode_audit(record))):
            case Created():
                return ""
            case answer:
                return f"no answer for {audit_key(record.run)}: {answer}"
    except StoreError as error:
        return f"{error} ({error.hint})"
