"""Writing down what a collection did, however it ended (design 0006, A1)."""

from typing import Final

from blobstore.base import BlobStore, BytesBody, Created
from blobstore.errors import StoreError
from engine.collect.state import Facts
from engine.errors import EngineError
from engine.release import installed_release
from index.errors import FormatError
from index.plan.commits import Commit
from index.plan.plan_format import AuditedBoundary, AuditedScope, AuditRecord, Outcome, encode_audit
from index.plan.retention import KeepReason
from index.snapshot.keys import audit_key
from index.snapshot.model import Scope
from index.text import printable, shortened

# Of many scopes, boundaries and failures these are told one by one.
SCOPES_TOLD_MAX: Final = 1000
FAILED_TOLD_MAX: Final = 100
# Of a boundary's records the newest.
POINTERS_TOLD_MAX: Final = 30
ERROR_LENGTH_MAX: Final = 1000


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
