"""The report: facts of a repository, gathered within bounds and past what is damaged, as one page of HTML.

The page has no script, no image, no font, no address; it asks nobody for anything. Names in it may be anybody's: all
text passes `_text`, which escapes it, and the policy in the head of `page.html` lets nothing else in.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final

import msgspec

from blobstore import installed_release
from blobstore.base import BlobStore, list_blobs, read_blob
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from blobstore.local.files import write_whole
from blobstore.wrappers.forwarding import MeteredStore
from engine.drill.drill import DrillHistory, Entry, RestoreDrill, format_slo
from engine.errors import EngineError
from engine.inspect.history import (
    History,
    HistoryEntry,
    State,
    damaged_keys,
    describe_entry,
    format_offsets,
    read_history,
)
from engine.inspect.verify import Problem, ProblemKind, VerifyReport, verify
from engine.records.log import list_all_logs
from engine.repository.repository import Repository
from engine.runtime import NO_PROGRESS, Progress, read_now_ms
from index.display import count, format_seconds, human_bytes, human_duration, iso_time, printable, shortened
from index.errors import FormatError
from index.plan.commits import Commit
from index.plan.plan_format import AuditRecord, decode_audit
from index.snapshot.keys import AUDIT, parse_audit_key
from index.snapshot.model import Scope

if TYPE_CHECKING:
    from engine.checkpoint.explain import StateExplained
    from index.spark.state_figures import OperatorFigures

JOBS_MAX: Final = 20
# Records of each job.
ENTRIES_MAX: Final = 60
AUDITS_MAX: Final = 60
AUDIT_BYTES_MAX: Final = 4 * 1024 * 1024
READS_IN_FLIGHT_MAX: Final = 8

TEXT_LENGTH_MAX: Final = 400
# A cell that is not longer stays on one line.
SHORT_LENGTH_MAX: Final = 24
# A table with more rows is folded.
ROWS_SHOWN_MAX: Final = 12
OFFSETS_SHOWN_MAX: Final = 40
DRILLS_SHOWN_MAX: Final = 60
BROKEN_SHOWN_MAX: Final = 20
PROBLEMS_SHOWN_MAX: Final = 200

_NUMBER: Final = re.compile(r"[\d,.]+( ([KMGTPE]i)?B)?|")
_AGAIN: Final = "while the files are on a disk: tidemark backup --check-retained; else restore --or-newest-complete"
_HINTS: Final = {
    ProblemKind.INDEX_DAMAGED: _AGAIN,
    ProblemKind.BLOB_MISSING: _AGAIN,
    ProblemKind.BLOB_SHORT: _AGAIN,
    ProblemKind.CONTENT_WRONG: "tidemark restore --or-newest-complete",
    ProblemKind.UNREADABLE: "put an older version of the object back, or see tidemark discard",
    ProblemKind.ADRIFT: "bring back the records that were there beside it; docs/how-to/move-a-repository.md",
    ProblemKind.AT_RISK: "tidemark verify --heal removes the TTL, before the blob store does what it says",
}
_RECORD_HINT: Final = "bring the record back from a copy or an older version of the object, or see tidemark discard"


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a report is asked for."""

    # The URL of the repository, for the reader.
    location: str
    # Whose commits; none: of the `JOBS_MAX` jobs that committed last.
    scopes: Sequence[Scope] = ()
    drills: DrillHistory = DrillHistory()
    # Where the drills are from, for the reader; empty: nowhere.
    drills_from: str = ""
    # Records of each job.
    entries_max: int = ENTRIES_MAX
    # Of a query, explained beside the repository.
    state: "StateExplained | None" = None


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one job, or of one task that commits by itself."""

    scope: Scope
    history: History
    # Its restore drills in this repository, the oldest first.
    drills: tuple[Entry, ...] = ()

    @property
    def damaged(self) -> tuple[tuple[str, str], ...]:
        reasons = (entry.problem for entry in self.history.entries if entry.state is State.DAMAGED)
        return tuple(zip(damaged_keys(self.history), reasons, strict=True))


class ReportFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of the page."""

    request: ReportRequest
    repository_id: str
    release: str
    # By the store's clock.
    made_at_ms: int
    jobs: tuple[JobFacts, ...]
    # Jobs beside these.
    jobs_left_out: int = 0
    # The newest, the oldest of them first, and the number of all.
    audits: tuple[AuditRecord, ...] = ()
    audits_count: int = 0
    audits_broken: tuple[str, ...] = ()
    # None: `verify_missing` says why.
    verified: VerifyReport | None = None
    verify_missing: str = ""
    # What each job needs of it: several may need one key.
    problems_by_job: Mapping[str, tuple[Problem, ...]] = msgspec.field(default_factory=dict)
    # Requests that the report took, by operation.
    requests: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def risks_count(self) -> int | None:
        """Return the number of keys that are missing, damaged or have a TTL; None: it is unknown."""
        if self.verified is None:
            return None
        return len(self.verified.problems) + sum(len(job.damaged) for job in self.jobs)


async def gather_report(
    repository: Repository, request: ReportRequest, *, progress: Progress = NO_PROGRESS
) -> ReportFacts:
    """Look at a repository. Nothing in it changes.

    Requests: a LIST per 1,000 records; for each job those of `read_history`; a LIST of audit records and a GET for each
    of the newest `AUDITS_MAX`; those of `verify` for the commits reported.

    `progress` hears of the indexes, as files.

    Raises:
        UnsafeStoreError: A log kept changing, or had holes.
        StoreError: As the store says. Damage is reported, not raised.
    """
    store = MeteredStore(repository.store)
    read = partial(read_history, store, repository.record, entries_max=request.entries_max, progress=progress)
    chosen, left_out = tuple(request.scopes), 0
    if not chosen:
        logs = await list_all_logs(store)
        # Those whose newest record is youngest, by name.
        newest = sorted(logs, key=lambda log: -max((created for _, created in log.records), default=0))
        chosen = tuple(sorted((log.scope for log in newest[:JOBS_MAX]), key=str))
        left_out = len(logs) - len(chosen)
    histories = [await read(scope) for scope in chosen]
    verified, verify_missing, by_job = await _verify(store, histories, read)
    audits, audits_count, audits_broken = await _read_audits(store)
    own = [entry for entry in request.drills.entries if entry.repository_id == repository.record.id]
    return ReportFacts(
        request=request,
        repository_id=repository.record.id,
        release=installed_release(),
        made_at_ms=await read_now_ms(store),
        jobs=tuple(
            JobFacts(scope=h.scope, history=h, drills=tuple(e for e in own if Scope(e.job, e.task) == h.scope))
            for h in histories
        ),
        jobs_left_out=left_out,
        audits=audits,
        audits_count=audits_count,
        audits_broken=audits_broken,
        verified=verified,
        verify_missing=verify_missing,
        problems_by_job=by_job,
        requests=dict(sorted(store.meter.requests.items())),
    )


async def _verify(
    store: BlobStore, histories: Sequence[History], read: Callable[..., Awaitable[History]]
) -> tuple[VerifyReport | None, str, dict[str, tuple[Problem, ...]]]:
    """Find what is missing or still has a TTL, of all jobs and of each; or return why that is unknown."""
    commits = commits_of(histories)
    try:
        report = await verify(store, commits)
        if not report.problems:
            return report, "", {}
        # What a concurrent collection took since is fine: only commits that are still there count.
        now = [await read(history.scope, shares=False) for history in histories]
        there = {(commit.scope, commit.pointer) for commit in commits_of(now)}
        left = [commit for commit in commits if (commit.scope, commit.pointer) in there]
        if len(left) < len(commits):
            report = await verify(store, left)
        # A fork may need what another job has lost.
        own = {scope: [c for c in left if c.scope == scope] for scope in {c.scope for c in left}}
        several = len(own) > 1 and report.problems
        return report, "", {str(s): (await verify(store, c) if several else report).problems for s, c in own.items()}
    except (EngineError, FormatError) as error:
        return None, f"{type(error).__name__}: {error}", {}


async def _read_audits(store: BlobStore) -> tuple[tuple[AuditRecord, ...], int, tuple[str, ...]]:
    """Read the newest audit records, oldest first; also return the number of all, and what cannot be read."""
    keys = sorted([blob.key async for blob in list_blobs(store, AUDIT)])
    broken: list[str] = []

    async def read(key: str) -> AuditRecord | None:
        try:
            parse_audit_key(key)
            return decode_audit(await read_blob(store, key, size_bytes_max=AUDIT_BYTES_MAX), subject=key)
        except BlobNotFoundError:
            return None  # collected since it was listed
        except FormatError as error:
            broken.append(str(error))
            return None

    found = await map_bounded(read, keys[-AUDITS_MAX:], in_flight_max=READS_IN_FLIGHT_MAX)
    return tuple(record for record in found if record is not None), len(keys), tuple(broken)


def commits_of(histories: Sequence[History]) -> list[Commit]:
    """Return the commits of some histories that can be restored."""
    return [e.commit for history in histories for e in history.entries if e.commit is not None and e.restores]


# ---------------------------------------------------------------------- the page


class ReportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a page that was written, and what it says."""

    # The path of the page, and its size.
    page: str
    size_bytes: int
    jobs_count: int
    commits_count: int
    drills_count: int
    collections_count: int
    # Keys that are missing, damaged or have a TTL; null: it is unknown.
    risks_count: int | None
    requests_count: int


def write_report(facts: ReportFacts, path: Path) -> ReportResult:
    """Write the page.

    Raises:
        TargetError: It cannot be written.
    """
    page = make_page(facts).encode()
    write_whole(path, page)
    return ReportResult(
        page=str(path),
        size_bytes=len(page),
        jobs_count=len(facts.jobs) + facts.jobs_left_out,
        commits_count=sum(len(job.history.entries) for job in facts.jobs),
        drills_count=sum(len(job.drills) for job in facts.jobs),
        collections_count=facts.audits_count,
        risks_count=facts.risks_count,
        requests_count=sum(facts.requests.values()),
    )


def make_page(facts: ReportFacts) -> str:
    """Return the page as HTML."""
    about = f"repository {facts.repository_id}; {iso_time(facts.made_at_ms)} by the blob store's clock; "
    requests = ", ".join(f"{number:,} {name}" for name, number in facts.requests.items())
    made_with = f"Made with {count(sum(facts.requests.values()), 'request')} to the blob store: {requests}."
    return Template(files("engine.report").joinpath("page.html").read_text(encoding="utf-8")).substitute(
        about=_paragraph(facts.request.location) + _paragraph(f"{about}tidemark {facts.release}", "note"),
        verdict="".join(_verdict(facts)),
        cards="".join(_card(facts, job, place) for place, job in enumerate(facts.jobs)),
        jobs="".join(part for place, job in enumerate(facts.jobs) for part in _job(facts, job, place)),
        checked="".join(_checked(facts)),
        tiles="".join(_tiles(facts)),
        collections="".join(_collections(facts)),
        state="".join(_state(facts.request.state)),
        requests=_paragraph(made_with, "note"),
    )


def _trouble(facts: ReportFacts, job: JobFacts) -> tuple[str, ...]:
    """Say what keeps a job from being restored, or may; nothing if all is well, as far as it was looked at."""
    found = facts.problems_by_job.get(str(job.scope), ())
    damage = [problem for problem in found if problem.kind.is_damage]
    parts = []
    if damage:
        newest = max((e.number for e in job.history.entries if e.restores), default=0)
        last = max(problem.number for problem in damage)
        which = "its newest commit too" if last == newest else f"up to commit {last}, the newest is whole"
        parts.append(f"{count(len(damage), 'key')} missing or damaged: {which}")
    if len(found) > len(damage):
        parts.append(f"{count(len(found) - len(damage), 'key')} with a TTL")
    if job.damaged:
        parts.append(f"{count(len(job.damaged), 'record')} damaged")
    if job.history.problems:
        parts.append(
            f"{count(len(job.history.problems), 'name, pin or boundary', 'names, pins or boundaries')} unreadable"
        )
    if any(e.state is State.VOID for e in job.history.entries) and not _newest(job):
        parts.append("none of its records counts: they are late")
    if job.drills and not isinstance(job.drills[-1], RestoreDrill):
        parts.append("its last restore drill failed")
    return tuple(parts)


def _newest(job: JobFacts) -> Commit | None:
    return next((e.commit for e in job.history.entries if e.commit is not None and e.restores), None)


def _verdict(facts: ReportFacts) -> Iterator[str]:
    """Say in one line whether all can be restored, with links to what cannot."""
    if facts.verified is None:
        yield _paragraph(f"It is unknown what is missing: {facts.verify_missing}", "bad verdict")
        return
    left_out = f"; {count(facts.jobs_left_out, 'more job')} not looked at" if facts.jobs_left_out else ""
    troubles = [(place, job, found) for place, job in enumerate(facts.jobs) if (found := _trouble(facts, job))]
    if troubles:
        names = ", ".join(
            f'<a href="#job-{place}">{_text(str(job.scope))}</a> ({_text("; ".join(found))})'
            for place, job, found in troubles
        )
        total = count(len(facts.jobs), "job")
        yield f'<p class="bad verdict">{len(troubles)} of {total} at risk: {names}{left_out}</p>\n'
        return
    held = sum(_newest(job) is not None for job in facts.jobs)
    none = f", {count(len(facts.jobs) - held, 'job')} without a commit" if held < len(facts.jobs) else ""
    text = f"{count(held, 'job')} can be restored{none}{left_out}" if facts.jobs else "there is no job yet"
    yield _paragraph(f"{text[0].upper()}{text[1:]}.", "verdict" if none or left_out or not held else "good verdict")


def _card(facts: ReportFacts, job: JobFacts, place: int) -> str:
    """Show one job at a glance: its newest commit and its age, its size and how it went, its last drill."""
    found, newest = _trouble(facts, job), _newest(job)
    lines = ["no commit"]
    if newest is not None:
        record = newest.record
        age = _age(facts.made_at_ms, newest.committed_at_ms)
        lines = [f"commit {record.number}, version {record.version}", f"{age}, {human_bytes(record.state_bytes)}"]
    drill = job.drills[-1] if job.drills else None
    slo = format_slo(drill) if isinstance(drill, RestoreDrill) else "failed" if drill else ""
    drilled = (
        f"drill {_age(facts.made_at_ms, drill.began_at_ms)}{f', {slo}' if slo else ''}" if drill else "never drilled"
    )
    state, style = (
        ("; ".join(found), "bad") if found else ("whole", "good") if newest else ("nothing to restore", "note")
    )
    if facts.verified is None:
        state, style = "unknown", "bad"
    return (
        f'<li><a href="#job-{place}"><b>{_text(str(job.scope))}</b></a>{_sparkline(job)}'
        + "".join(f"<span>{_text(line)}</span>" for line in (*lines, drilled))
        + f"<span class={style}>{_text(state)}</span></li>\n"
    )


def _sparkline(job: JobFacts) -> str:
    sizes = [e.commit.record.state_bytes for e in reversed(job.history.entries) if e.commit is not None and e.restores]
    if len(sizes) < 2:  # noqa: PLR2004  (a line has two ends)
        return ""
    step, top = 120 / (len(sizes) - 1), max(*sizes, 1)
    points = " ".join(f"{step * n:.1f},{28 - 26 * size / top:.1f}" for n, size in enumerate(sizes))
    title = f"from {human_bytes(sizes[0])} to {human_bytes(sizes[-1])}"
    return (
        f'<svg class=spark viewBox="0 0 120 30" preserveAspectRatio="none" role="img"><title>{_text(title)}</title>'
        f'<polyline points="{points}"/></svg>'
    )


def _job(facts: ReportFacts, job: JobFacts, place: int) -> Iterator[str]:
    """Show all of one job: what is at risk, its commits and its drills. Several sound ones are folded."""
    trouble, found = _trouble(facts, job), facts.problems_by_job.get(str(job.scope), ())
    is_open = len(facts.jobs) == 1 or trouble
    yield f"<details class=job{' open' if is_open else ''}><summary><h2>{_text(str(job.scope))}</h2></summary>\n"
    # Inside, so that a link to it opens it.
    yield f'<div id="job-{place}">\n'
    if trouble:
        yield _paragraph(f"At risk: {'; '.join(trouble)}.", "bad")
    if found:
        yield from _problems(found, f"Blobs of {job.scope} at risk")
    if job.damaged:
        damaged = ((key, why, _RECORD_HINT) for key, why in job.damaged)
        yield _table(("key", "why", "what helps"), damaged, f"Damaged records of {job.scope}", folds=False)
    yield from _commits(facts, job)
    yield from _drills(facts, job)
    yield "</div></details>\n"


def _problems(found: Sequence[Problem], label: str) -> Iterator[str]:
    shown = found[:PROBLEMS_SHOWN_MAX]
    rows = ((p.kind.value, str(p.number), f"{p.task}/{p.store}", p.key, p.path, _HINTS[p.kind]) for p in shown)
    yield _table(("what", "commit", "store", "key", "file", "what helps"), rows, label, folds=False)
    if len(found) > PROBLEMS_SHOWN_MAX:
        yield _paragraph(f"The first {PROBLEMS_SHOWN_MAX}; `tidemark verify` lists all.", "note")


def _checked(facts: ReportFacts) -> Iterator[str]:
    """Say what was looked at, and what is at risk of no job that is shown."""
    shown = {str(job.scope) for job in facts.jobs}
    others = [p for p in (facts.verified.problems if facts.verified else ()) if p.scope not in shown]
    if others:
        yield from _problems(others, "Blobs of other jobs at risk")
    if facts.jobs_left_out:
        yield _paragraph(f"{count(facts.jobs_left_out, 'more job')}: see one with --job.", "note")
    if facts.verified is not None:
        indexes = count(facts.verified.indexes_count, "index", "indexes")
        looked_at = f"{count(facts.verified.commits_count, 'commit')}, {indexes}"
        blobs = count(facts.verified.blobs_count, "blob")
        yield _paragraph(f"Checked by name and size, without reading files: {looked_at} and {blobs}.", "note")
    if broken := facts.request.drills.broken:
        lines = count(len(broken), "line of the history", "lines of the history")
        yield _paragraph(f"Of restore drills left out, and still there: {lines}.", "bad")
        yield _list(map(str, broken[:BROKEN_SHOWN_MAX]))


def _age(now_ms: int, at_ms: int) -> str:
    # With one unit: it is to be taken in at a glance. What another clock says may be ahead.
    return f"{human_duration(max(0, now_ms - at_ms)).partition(' ')[0] if now_ms - at_ms >= 1000 else '0s'} ago"  # noqa: PLR2004


def _tiles(facts: ReportFacts) -> Iterator[str]:
    entries = [entry for job in facts.jobs for entry in job.history.entries]
    for figure, name in (
        (f"{len(facts.jobs) + facts.jobs_left_out:,}", "jobs in all"),
        (f"{len(entries):,}", "records shown"),
        (human_bytes(sum(e.share.bytes_uploaded for e in entries if e.share is not None)), "uploaded for them"),
        (human_bytes(sum(map(_freed_bytes, facts.audits))), "freed by collections"),
    ):
        yield f"<li><b class=figure>{_text(figure)}</b>{_text(name)}</li>"


def _commits(facts: ReportFacts, job: JobFacts) -> Iterator[str]:
    entries = job.history.entries
    if job.history.problems:
        yield _paragraph("What follows leaves out what cannot be read:", "bad") + _list(job.history.problems)
    if not entries:
        yield _paragraph("It has no commits.", "note")
        return
    bars = [
        (
            f"commit {e.number}: {human_bytes(e.share.bytes_new)} new, {human_bytes(e.share.bytes_retained)} retained",
            str(e.number),
            [(e.share.bytes_retained, "retained"), (e.share.bytes_new, "new")],
        )
        for e in reversed(entries)
        if e.share is not None
    ]
    yield _plot(bars, f"New and retained bytes of {job.scope}")
    sizes = ("size", "new", "retained", "files")
    headers = ("commit", "version", "time (UTC)", "age", *sizes, "offsets", "names", "what")
    rows = (_commit_row(entry, job.scope, facts.made_at_ms) for entry in entries)
    yield _table(headers, rows, f"Commits of {job.scope}")
    if job.history.older_count:
        yield _paragraph(f"{count(job.history.older_count, 'older record')} not shown here.", "note")


def _commit_row(entry: HistoryEntry, scope: Scope, now_ms: int) -> tuple[str, ...]:
    what = describe_entry(entry, scope)
    if entry.commit is None:
        return (str(entry.number), *[""] * 9, what)
    record, share = entry.commit.record, entry.share
    return (
        str(entry.number),
        str(record.version),
        _short_time(entry.commit.committed_at_ms),
        _age(now_ms, entry.commit.committed_at_ms).removesuffix(" ago"),
        human_bytes(record.state_bytes),
        human_bytes(share.bytes_new) if share is not None else "",
        human_bytes(share.bytes_retained) if share is not None else "",
        f"{sum(s.files_count for s in record.stores):,}",
        format_offsets(record.offsets, OFFSETS_SHOWN_MAX),
        ", ".join(entry.names),
        what,
    )


def _drills(facts: ReportFacts, job: JobFacts) -> Iterator[str]:
    if not job.drills:
        where = f" in the history in {facts.request.drills_from}" if facts.request.drills_from else ""
        yield _paragraph(f"No restore drill{where}: run one with `tidemark bench restore`.", "note")
        return
    headers = ("drill began (UTC)", "time", "find", "restore", "open", "size", "to", "SLO")
    yield _table(headers, map(_drill_row, job.drills[: -DRILLS_SHOWN_MAX - 1 : -1]), f"Restore drills of {job.scope}")


def _drill_row(entry: Entry) -> tuple[str, ...]:
    began = _short_time(entry.began_at_ms)
    if not isinstance(entry, RestoreDrill):
        return (began, "failed", f"{entry.error}: {entry.message}", "", "", "", "", "")
    times = (format_seconds(s) for s in (entry.total_s, entry.find_s, entry.restore_s, entry.open_s))
    to = "disk" if entry.to_disk else "nowhere"
    return (began, *times, human_bytes(entry.size_bytes), to, format_slo(entry).removeprefix("SLO "))


def _collections(facts: ReportFacts) -> Iterator[str]:
    if facts.audits_broken:
        yield _paragraph("Audit records that cannot be read:", "bad") + _list(facts.audits_broken)
    if facts.audits:
        bars = [
            (
                f"{_short_time(audit.began_at_ms)}: {human_bytes(_freed_bytes(audit))}, {audit.outcome}",
                "",
                [(_freed_bytes(audit), "freed")] if audit.outcome in {"done", "partly"} else [],
            )
            for audit in facts.audits
        ]
        yield _plot(bars, "Bytes that collections freed")
        if facts.audits_count > len(facts.audits):
            yield _paragraph(f"The newest {len(facts.audits)} of {facts.audits_count:,} audit records.", "note")
        headers = ("began (UTC)", "outcome", "freed", "keys", "kept commits", "live", "why")
        yield _table(headers, map(_audit_row, reversed(facts.audits)), "Collections")
    else:
        yield _paragraph("There is no audit record: nobody has collected.", "note")
    yield _paragraph("`tidemark collect --dry-run` shows what a collection would free now.", "note")


def _audit_row(audit: AuditRecord) -> tuple[str, ...]:
    return (
        _short_time(audit.began_at_ms),
        f"{audit.outcome}: {audit.error}" if audit.error else audit.outcome,
        human_bytes(_freed_bytes(audit)),
        f"{sum(total.count for total in audit.deleted):,}",
        f"{sum(scope.kept_count for scope in audit.scopes):,}",
        human_bytes(audit.live_bytes),
        "; ".join(f"{total.reason.value}: {total.count:,}" for total in audit.deleted),
    )


def _freed_bytes(audit: AuditRecord) -> int:
    return sum(total.size_bytes for total in audit.deleted)


def _state(found: "StateExplained | None") -> Iterator[str]:
    """Explain the state of a query, if that was asked for: a section of its own."""
    if found is None:
        return
    yield f'<section id="state"><h2>State of a query</h2>\n{_paragraph(f"{found.location}: batch {found.batch}")}'
    for problem in found.problems[:BROKEN_SHOWN_MAX]:
        yield _paragraph(problem, "bad")
    figures = ("rows", "by", "keys and values", "by", "SSTs")
    headers = ("operator", *figures, "tombstones", "skew", "Gini", "changelogs since")
    yield _table(headers, map(_operator_row, found.operators), "Operators")
    for of in found.operators:
        sizes: dict[int, int] = {}
        for store in (store for store in found.stores if store.operator == of.operator):
            size_bytes = store.stored_bytes if of.row_bytes is None else store.row_bytes or 0
            sizes[store.partition] = sizes.get(store.partition, 0) + size_bytes
        of_what = "Bytes of all files" if of.row_bytes is None else "Bytes of keys and values"
        bars = [
            (f"partition {n}: {human_bytes(size)}", str(n), [(size, "retained")]) for n, size in sorted(sizes.items())
        ]
        yield _plot(bars, f"{of_what} by partition, operator {of.operator}")
    if (cost := found.cost) is None:
        yield _paragraph(f"Requests a day are unknown: {found.cost_unknown}.", "note")
    else:
        usd = f"${cost.requests_usd_per_day:,.2f} a day, and ${cost.stored_usd_per_day:,.2f} for what is stored"
        written = f"{cost.puts_per_day:,.0f} PUTs and {cost.copies_per_day:,.0f} COPYs a day"
        yield _paragraph(f"By the times of its files {written}: {usd}. LISTs, GETs and HEADs are not seen.")
    advice = ((a.setting, "" if a.usd_per_day is None else f"${a.usd_per_day:,.2f}", a.reason) for a in found.advice)
    yield _table(("what would change it", "less a day", "why"), advice, "Settings", folds=False) + "</section>\n"


def _operator_row(of: "OperatorFigures") -> tuple[str, ...]:
    def known(figure: int | None, form: Callable[[int], str] = "{:,}".format) -> str:
        return "unknown" if figure is None else form(figure)

    skew = of.byte_skew
    return (
        f"{of.operator} {of.name}",
        known(of.rows),
        of.rows_by,
        known(of.row_bytes, human_bytes),
        of.row_bytes_by,
        known(of.sst_bytes, human_bytes),
        f"{known(of.tombstones)} of {known(of.entries)} ({of.entries_by})",
        "unknown" if skew is None else f"{skew.ratio:.2f}",
        "unknown" if skew is None else f"{skew.gini:.2f}",
        f"{of.changelogs_after:,}",
    )


# ---------------------------------------------------------------------- pieces of HTML


def _text(text: str) -> str:
    return escape(shortened(printable(text), TEXT_LENGTH_MAX))


def _short_time(at_ms: int) -> str:
    return iso_time(at_ms)[:16].replace("T", " ")


def _paragraph(text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f"<p{kind}>{_text(text)}</p>\n"


def _list(texts: Iterable[str]) -> str:
    return f"<ul class=note>{''.join(f'<li>{_text(text)}</li>' for text in texts)}</ul>\n"


def _framed(html: str, label: str) -> str:
    """Let what is wider than the screen scroll in a frame of its own, also by the keyboard."""
    return f'<div class=wide tabindex=0 role=group aria-label="{_text(label)}">{html}</div>\n'


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], label: str, *, folds: bool = True) -> str:
    cells = list(rows)
    numbers = [all(_NUMBER.fullmatch(row[column]) for row in cells) for column in range(len(headers))]

    def cell(tag: str, text: str, *, number: bool) -> str:
        style = " class=number" if number else " class=short" if len(text) <= SHORT_LENGTH_MAX else ""
        return f"<{tag}{style}>{_text(text)}</{tag}>"

    head, *body = (
        "".join(cell(tag, text, number=number) for text, number in zip(row, numbers, strict=True))
        for tag, row in (("th", headers), *(("td", row) for row in cells))
    )
    lines = "".join(f"<tr>{line}</tr>\n" for line in body)
    table = _framed(f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>", label)
    if not folds or len(cells) <= ROWS_SHOWN_MAX:
        return table
    return f"<details><summary>{_text(label)}: {len(cells):,} rows</summary>{table}</details>\n"


def _plot(bars: Sequence[tuple[str, str, Sequence[tuple[int, str]]]], label: str) -> str:
    """Draw stacked bars side by side, each with a title, a label and parts; without parts it is a red cross."""
    width, left, height, bottom = 720, 80, 200, 180
    step = (width - left) / max(1, len(bars))
    top = max((sum(size for size, _ in parts) for _, _, parts in bars), default=0) or 1
    # Labels are left out where they would run into each other.
    every = 1 + int(8 * max((len(name) for _, name, _ in bars), default=0) / step)
    drawn = []
    for tick in (0, 1, 2, 3, 4):
        y = bottom - tick * 40
        drawn.append(f'<line x1="{left}" y1="{y}" x2="{width}" y2="{y}"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{human_bytes(top * tick // 4)}</text>')
    for number, (title, name, parts) in enumerate(bars):
        x, base = left + step * (number + 0.5), float(bottom)
        drawn.append(f"<g><title>{_text(title)}</title>")
        for size, style in parts:
            tall = 160 * size / top
            base -= tall
            drawn.append(
                f'<rect class="{style}" x="{x - step * 0.35:.1f}" y="{base:.1f}" width="{step * 0.7:.1f}" '
                f'height="{tall:.1f}"/>'
            )
        if not parts:
            drawn.append(f'<text class="bad" x="{x:.1f}" y="{bottom - 4}" text-anchor="middle">✗</text>')
        if number % every == 0:
            drawn.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle">{_text(name)}</text>')
        drawn.append("</g>")
    box = f'class=plot viewBox="0 0 {width} {height}"'
    return _framed(f'<svg {box} role="img"><title>{_text(label)}</title>{"".join(drawn)}</svg>', label)
