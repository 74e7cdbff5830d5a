"""How `collect` tells what it did: one JSON object, lines for people, and one line for whoever reads a log."""

from collections.abc import Sequence
from pathlib import Path

from engine.cli.output import extend
from engine.collect.report import CollectReport
from engine.text import table
from index.snapshot.keys import audit_key
from index.text import count, human_bytes, human_duration, iso_time, printable


class CollectView(CollectReport, frozen=True, kw_only=True):
    """`collect`."""

    # The last line for people.
    summary: str
    # Where the plan is, and the key of the audit record; empty if there is none.
    plan: str
    audit: str


def view_collect(report: CollectReport, plan: Path | None = None) -> CollectView:
    """Return the report for programs."""
    return extend(
        CollectView,
        report,
        summary=summary_line(report),
        plan=str(plan or ""),
        audit="" if report.dry_run or report.audit_missing else audit_key(report.run),
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


def _size(size_bytes: int) -> str:
    return human_bytes(size_bytes) if size_bytes else "-"
