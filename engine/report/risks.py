"""The sections of a report that are about blobs: what collections freed and would free, and what is at risk."""

from collections.abc import Iterator
from typing import Final

from engine.collect.report import CollectReport
from engine.inspect.verify import Problem, ProblemKind, VerifyReport
from engine.report.html import items, paragraph, table, tell
from engine.report.model import ReportFacts, Suspects
from engine.report.plots import plot_freed, short_time
from index.plan.collect import ReasonTotal
from index.plan.plan_format import AuditRecord
from index.text import count, human_bytes

# Of keys that would go, and of problems, so many are told one by one.
DELETES_TOLD_MAX: Final = 20
PROBLEMS_TOLD_MAX: Final = 200

_AGAIN: Final = "while the files are on a disk: tidemark backup --check-retained; else restore --or-newest-complete"
_HINTS: Final = {
    ProblemKind.INDEX_DAMAGED: _AGAIN,
    ProblemKind.BLOB_MISSING: _AGAIN,
    ProblemKind.BLOB_SHORT: _AGAIN,
    ProblemKind.CONTENT_WRONG: "tidemark restore --or-newest-complete",
    ProblemKind.UNREADABLE: "put an older version of the object back, or see tidemark discard",
    ProblemKind.ADRIFT: "bring back the records that were there beside it; docs/how-to/move-a-repository.md",
    ProblemKind.AT_RISK: "tidemark verify --heal removes the TTL, before the store does what it says",
}
_RECORD_HINT: Final = "bring the record back from a copy or an older version of the object, or see tidemark discard"


def tell_collections(facts: ReportFacts) -> Iterator[str]:
    """What collections freed, by their audit records, and what one would free now."""
    yield "<h3>Freed</h3>"
    if facts.audits_broken:
        yield paragraph("Audit records that cannot be read:", "bad") + items(facts.audits_broken)
    if facts.audits:
        yield plot_freed(facts.audits)
        if facts.audits_count > len(facts.audits):
            yield paragraph(f"The newest {len(facts.audits)} of {facts.audits_count:,} audit records.", "note")
        yield table(
            ("began (UTC)", "outcome", "freed", "keys", "kept", "live", "why"),
            [_audit_row(audit) for audit in reversed(facts.audits)],
            label="Collections",
            numbers={"freed", "keys", "kept", "live"},
        )
    else:
        yield paragraph("There is no audit record: nobody has collected.", "note")
    yield "<h3>Will be freed</h3>"
    if facts.plan is None:
        yield paragraph(f"Not known: {facts.plan_missing}.", "note")
    else:
        yield from _tell_plan(facts.plan)


def _audit_row(audit: AuditRecord) -> tuple[str, ...]:
    deleted = audit.deleted
    kept = sum(scope.kept_count for scope in audit.scopes)
    return (
        short_time(audit.began_at_ms),
        f"{audit.outcome}: {audit.error}" if audit.error else audit.outcome,
        human_bytes(sum(total.size_bytes for total in deleted)),
        f"{sum(total.count for total in deleted):,}",
        f"{kept:,}",
        human_bytes(audit.live_bytes),
        _reasons(deleted),
    )


def _reasons(totals: tuple[ReasonTotal, ...]) -> str:
    return "; ".join(f"{total.reason.value}: {total.count:,}" for total in totals)


def _tell_plan(plan: CollectReport) -> Iterator[str]:
    freed = f"A collection now would delete {count(plan.deletes_count, 'key')} with {human_bytes(plan.freed_bytes)}"
    yield paragraph(
        f"{freed}, keep {count(len(plan.kept), 'commit')} with {human_bytes(plan.live_bytes)}, and leave "
        f"{human_bytes(plan.waiting_bytes)} to wait until they are a TTL old."
    )
    if plan.refused:
        yield paragraph("It would be refused: that is a larger share than it may delete (exit code 10).", "bad")
    if plan.protected:
        jobs = ", ".join(plan.protected)
        yield paragraph(f"It would leave {jobs} alone, because something cannot be read (exit code 4).", "bad")
    if plan.totals:
        yield table(
            ("why", "keys", "bytes"),
            [(total.reason.value, f"{total.count:,}", human_bytes(total.size_bytes)) for total in plan.totals],
            label="What a collection would delete, by reason",
            numbers={"keys", "bytes"},
        )
    shown = sorted(plan.deletes, key=lambda d: -d.size_bytes)[:DELETES_TOLD_MAX]
    if shown:
        yield table(
            ("key", "bytes", "why"),
            [(d.key, human_bytes(d.size_bytes), d.reason.value) for d in shown],
            label="The largest keys that a collection would delete",
            numbers={"bytes"},
        )
    if len(plan.deletes) > len(shown):
        yield paragraph(f"The largest {len(shown)}; `tidemark collect --dry-run --plan DIR` has all.", "note")


# ---------------------------------------------------------------------- at risk


def tell_risks(facts: ReportFacts) -> Iterator[str]:
    """What is retained and missing, or still has a TTL; what a damaged record may be all that names."""
    if facts.verified is None:
        yield paragraph(f"Not known: {facts.verify_missing}", "bad")
    else:
        yield from _tell_verified(facts.verified)
    for suspects in facts.suspects:
        yield from _tell_suspects(suspects)


def _tell_verified(verified: VerifyReport) -> Iterator[str]:
    seen = f"{count(verified.commits_count, 'commit')}, {count(verified.indexes_count, 'index', 'indexes')} and "
    seen += f"{count(verified.blobs_count, 'blob')} were looked at: by name and size, no file was read."
    if not verified.problems:
        yield paragraph("Nothing that these commits need is missing, and nothing of it has a TTL.", "good")
        yield paragraph(seen, "note")
        return
    damage = sum(p.kind is not ProblemKind.AT_RISK for p in verified.problems)
    left = len(verified.problems) - damage
    yield paragraph(f"{count(damage, 'key')} missing or damaged, {count(left, 'key')} with a TTL.", "bad")
    yield paragraph(seen, "note")
    yield table(
        ("what", "job", "commit", "store", "key", "file", "what helps"),
        [_problem_row(p) for p in verified.problems[:PROBLEMS_TOLD_MAX]],
        label="Blobs at risk",
        numbers={"commit"},
        folds=False,
    )
    if len(verified.problems) > PROBLEMS_TOLD_MAX:
        yield paragraph(f"The first {PROBLEMS_TOLD_MAX}; `tidemark verify` tells all.", "note")


def _problem_row(problem: Problem) -> tuple[str, ...]:
    return (
        problem.kind.value,
        problem.scope,
        str(problem.number),
        f"{problem.task}/{problem.store}",
        problem.key,
        problem.path,
        _HINTS[problem.kind],
    )


def _tell_suspects(suspects: Suspects) -> Iterator[str]:
    yield f"<h3>Damaged records of {tell(str(suspects.scope))}</h3>"
    yield table(
        ("key", "why", "what helps"),
        [(key, why, _RECORD_HINT) for key, why in suspects.records],
        label="Damaged records",
    )
    if suspects.hidden:
        yield paragraph(f"What only they name is not known for certain: {suspects.hidden}", "bad")
    if suspects.count:
        size = human_bytes(suspects.size_bytes)
        yield paragraph(
            f"{count(suspects.count, 'blob')} of this job ({size}): no record that can be read leads there, and a "
            "damaged one may.",
            "bad",
        )
        yield table(("key",), [(key,) for key in suspects.keys], label="Blobs that a damaged record may name")
