"""How `collect` tells what it did: one JSON object, lines for people, and one line for whoever reads a log."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.collect.report import CollectReport
from engine.text import table
from index.plan.collect import ReasonTotal
from index.snapshot.keys import audit_key
from index.text import count, human_bytes, human_duration, iso_time, printable


class DeleteView(msgspec.Struct, frozen=True, kw_only=True):
    """One key that went, or with a dry run would go."""

    key: str
    # The name of a `DeleteReason` in lower case.
    reason: str
    size_bytes: int


class TotalView(msgspec.Struct, frozen=True, kw_only=True):
    """How much went for one reason."""

    reason: str
    count: int
    size_bytes: int


class KeptView(msgspec.Struct, frozen=True, kw_only=True):
    """One commit that stays."""

    job: str
    commit_task: str | None
    number: int
    version: int
    # newest, last, since, named or unruled.
    reason: str


class CollectView(msgspec.Struct, frozen=True, kw_only=True):
    """`collect`."""

    run: str
    dry_run: bool
    # The listing of an earlier run was taken up.
    resumed: bool
    # Only of a dry run: what is not one would be refused.
    refused: bool
    # The last line for people.
    summary: str
    # Where the plan stands, and the key of the audit record; empty if there is none.
    plan: str
    audit: str
    # Why there is none; empty of a dry run.
    audit_missing: str
    # Why working objects of the run are left to a later collection.
    run_left: str
    # How far the store's clock is ahead of this machine's and of the newest upload: then nothing was deleted for its
    # age. 0: by no more than a margin.
    clock_ahead_ms: int
    deleted_count: int
    freed_bytes: int
    totals: tuple[TotalView, ...]
    # The first thousand records and the first thousand uploads; the plan has all uploads.
    deleted: tuple[DeleteView, ...]
    failed_count: int
    failed: tuple[str, ...]
    kept: tuple[KeptView, ...]
    listed_count: int
    listed_bytes: int
    live_count: int
    live_bytes: int
    # Unreachable uploads that stay until they are a TTL old, and when the youngest of them is; 0: there are none.
    waiting_count: int
    waiting_bytes: int
    waiting_until_ms: int
    # Uploads that were to go, until the second reading of the roots led to them; they are among the live ones.
    spared_count: int
    spared_bytes: int
    # Jobs that no rule of the policy matches: everything of them is kept.
    unruled: tuple[str, ...]
    # Uploads that were begun, are not finished, and may be under way.
    unfinished_count: int
    unfinished_bytes: int
    # Why unfinished uploads could not be looked for; empty if they were.
    unfinished_hidden: str
    foreign_count: int
    foreign: tuple[str, ...]
    # Only of a dry run: what is not one would end with 4, because something cannot be read.
    damaged: bool
    # Key and reason of each object that cannot be read, or for which nothing vouches.
    unreadable: tuple[tuple[str, str], ...]
    # The jobs of which nothing is deleted because of them; `*` for all.
    protected: tuple[str, ...]


def view_collect(report: CollectReport, plan: Path | None = None) -> CollectView:
    """The report for programs."""
    return CollectView(
        run=report.run,
        dry_run=report.dry_run,
        resumed=report.resumed,
        refused=report.refused,
        summary=summary_line(report),
        plan=str(plan or ""),
        audit="" if report.dry_run or report.audit_missing else audit_key(report.run),
        audit_missing=report.audit_missing,
        run_left=report.run_left,
        clock_ahead_ms=report.clock_ahead_ms,
        deleted_count=report.deletes_count,
        freed_bytes=report.freed_bytes,
        totals=tuple(_view_total(total) for total in report.totals),
        deleted=tuple(
            DeleteView(key=d.key, reason=d.reason.name.lower(), size_bytes=d.size_bytes) for d in report.deletes
        ),
        failed_count=report.failed_count,
        failed=report.failed,
        kept=tuple(
            KeptView(
                job=k.scope.job,
                commit_task=k.scope.task,
                number=k.number,
                version=k.version,
                reason=k.reason.name.lower(),
            )
            for k in report.kept
        ),
        listed_count=report.listed_count,
        listed_bytes=report.listed_bytes,
        live_count=report.live_count,
        live_bytes=report.live_bytes,
        waiting_count=report.waiting_count,
        waiting_bytes=report.waiting_bytes,
        waiting_until_ms=report.waiting_until_ms,
        spared_count=report.spared_count,
        spared_bytes=report.spared_bytes,
        unruled=report.unruled,
        unfinished_count=report.unfinished_count,
        unfinished_bytes=report.unfinished_bytes,
        unfinished_hidden=report.unfinished_hidden,
        foreign_count=report.foreign_count,
        foreign=report.foreign,
        damaged=report.damaged,
        unreadable=report.unreadable,
        protected=report.protected,
    )


def collect_lines(report: CollectReport, plan: Path | None = None, *, verbose: bool = False) -> list[str]:
    """The report for people; the last line says it all."""
    lines = _details(report) if verbose else []
    if report.totals:
        rows = [(total.reason.value, f"{total.count:,}", _size(total.size_bytes)) for total in report.totals]
        lines += [*table(("because", "keys", "size"), rows, right=("keys", "size")), ""]
    waiting = f"{count(report.waiting_count, 'upload')} ({human_bytes(report.waiting_bytes)})"
    until = iso_time(report.waiting_until_ms)
    notes = {
        "took up the listing of an earlier run": report.resumed,
        f"unreachable, and younger than the TTL: {waiting}; a collection after {until} deletes the last of them": (
            report.waiting_count
        ),
        f"not finished, and perhaps under way: {count(report.unfinished_count, 'upload')}": report.unfinished_count,
        f"NOT looked for, uploads that were never finished: {printable(report.unfinished_hidden)}": (
            report.unfinished_hidden
        ),
        f"nothing of {printable(', '.join(report.protected))} goes, because of "
        f"{_some(len(report.unreadable), [': '.join(one) for one in report.unreadable])}": report.protected,
        f"left alone: {_some(report.foreign_count, report.foreign)} that tidemark never wrote": report.foreign_count,
        f"NOT deleted: {_some(report.failed_count, report.failed).rstrip(',')}; run collect again": report.failed_count,
        f"the plan: {printable(str(plan))}": plan,
    }
    return [*lines, *(note for note, is_so in notes.items() if is_so), summary_line(report)]


def _details(report: CollectReport) -> list[str]:
    lines: list[str] = []
    if report.kept:
        kept = [(printable(str(k.scope)), str(k.number), str(k.version), k.reason.value) for k in report.kept]
        lines += [*table(("job", "commit kept", "version", "because"), kept, right=("commit kept", "version")), ""]
    if report.deletes:
        keys = [(printable(d.key), _size(d.size_bytes), d.reason.value) for d in report.deletes]
        lines += [*table(("key deleted", "size", "because"), keys, right=("size",)), ""]
    more = report.deletes_count - len(report.deletes)
    return [*lines, f"and {count(more, 'key')} more: a plan has them all", ""] if report.deletes and more else lines


def _some(number: int, keys: Sequence[str]) -> str:
    return f"{count(number, 'key')}, such as {printable(keys[0])}," if keys else count(number, "key")


def summary_line(report: CollectReport) -> str:
    """What happened, in one line."""
    did = "would delete" if report.dry_run else "deleted"
    live = f"{count(report.live_count, 'object')} ({human_bytes(report.live_bytes)})"
    parts = [
        f"{did} {count(report.deletes_count, 'key')} ({human_bytes(report.freed_bytes)})",
        f"{'would keep' if report.dry_run else 'kept'} {count(len(report.kept), 'commit')}, {live}",
    ]
    if report.waiting_count:
        parts.append(f"{count(report.waiting_count, 'upload')} waiting until {iso_time(report.waiting_until_ms)}")
    if report.clock_ahead_ms:
        ahead = human_duration(report.clock_ahead_ms)
        parts.append(f"NOTHING deleted for its age: the store's clock is {ahead} ahead of this machine's")
    if report.failed_count:
        parts.append(f"{report.failed_count:,} NOT deleted")
    if report.audit_missing:
        parts.append("NO audit record")
    if report.damaged:
        parts.append(f"{count(len(report.unreadable), 'object')} CANNOT BE READ")
    if report.refused:
        parts.append("WOULD BE REFUSED: more than --delete-at-most")
    return "; ".join([*parts, f"run {report.run}"])


def _view_total(total: ReasonTotal) -> TotalView:
    return TotalView(reason=total.reason.name.lower(), count=total.count, size_bytes=total.size_bytes)


def _size(size_bytes: int) -> str:
    return human_bytes(size_bytes) if size_bytes else "-"
