"""The page of a report, made of figures that no repository needs to have."""

import re
from html.parser import HTMLParser
from typing import Any

import msgspec
from typing_extensions import override

from engine.checkpoint.explain import StateExplained
from engine.drill.drill import DrillHistory
from engine.inspect.history import History, HistoryEntry, State
from engine.inspect.verify import Level, Problem, ProblemKind, VerifyReport
from engine.report.report import JobFacts, ReportFacts, ReportRequest, make_page
from index.errors import FormatError
from index.plan.collect import DeleteReason, ReasonTotal
from index.plan.commits import Commit, RetentionPolicy
from index.plan.plan_format import AuditRecord
from index.snapshot.contents import SnapshotShare
from index.snapshot.keys import make_run_id
from index.snapshot.model import (
    BlobKey,
    CommitPointer,
    CommitRecord,
    IndexReference,
    Scope,
    StoreReference,
    UniqueId,
    WriteId,
)
from index.spark.state_figures import Advice, StoreFigures, sum_up
from tests.unit.engine.drill.builders import drill, failed

HOSTILE = "</h2></td></title><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\"'&<!--"
RUN = make_run_id(1_700_000_000_000, "0" * 20)
MIB = 1024 * 1024


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()
        assert self.open == []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _commit(number: int, *, scope: Scope, name: str = "", size_bytes: int = MIB, **changes: Any) -> Commit:
    store = StoreReference(
        task=name or "0",
        store=name or "default",
        version=number,
        unique_id=UniqueId(name or f"id{number}"),
        index=IndexReference(key=BlobKey("indexes/x"), sha256=b"", size_bytes=1),
        number=number,
        files_count=3,
        size_bytes=size_bytes,
    )
    record = CommitRecord(
        scope=scope,
        number=number,
        write_id=WriteId(f"w{number}"),
        version=number,
        offsets=name,
        stores=(store,) * 5,
        valid_until_ms=2**62,
        predecessor=CommitPointer(number - 1, WriteId(f"w{number - 1}")) if number > 1 else None,
    )
    at_ms = 1_700_000_000_000 + number * 86_400_000
    record = msgspec.structs.replace(record, **changes)
    return Commit(record=record, created_at_ms=at_ms, committed_at_ms=at_ms)


def _entry(number: int, *, scope: Scope, name: str = "", **changes: Any) -> HistoryEntry:
    share = SnapshotShare(files_new=1, bytes_new=MIB, files_retained=2, bytes_retained=2 * MIB, bytes_uploaded=MIB)
    return HistoryEntry(
        number=number,
        state=changes.pop("state", State.OPEN),
        commit=_commit(number, scope=scope, name=name, **changes),
        share=share,
        names=(name,) if name else (),
        rewound_by=number + 1 if name else None,
        pins_count=1 if name else 0,
    )


def _job(name: str, *entries: HistoryEntry, **changes: Any) -> JobFacts:
    scope = Scope(name)
    return JobFacts(scope=scope, history=History(scope=scope, entries=entries, older_count=0, **changes))


def _facts(*jobs: JobFacts, **changes: Any) -> ReportFacts:
    request = ReportRequest(location="file:///backups")
    facts = ReportFacts(request=request, repository_id="id", release="0.1.0", made_at_ms=1_700_000_000_000, jobs=jobs)
    return msgspec.structs.replace(facts, **changes)


def _audit(**changes: Any) -> AuditRecord:
    audit = AuditRecord(
        run=RUN,
        release="0.1.0",
        began_at_ms=1_700_000_000_000,
        listed_at_ms=0,
        seconds=1.0,
        outcome="done",
        error="",
        retention=RetentionPolicy(rules=()),
        delete_share_max=0.2,
        scopes_count=0,
        scopes=(),
        names_count=0,
        pins_count=0,
        boundaries_count=0,
        boundaries=(),
        listed_count=0,
        listed_bytes=0,
        live_count=0,
        live_bytes=3 * MIB,
        waiting_count=0,
        waiting_bytes=0,
        excluded_count=0,
        planned=(),
        deleted=(ReasonTotal(reason=DeleteReason.UNREACHABLE_UPLOAD, count=7, size_bytes=5 * MIB),),
        failed_count=0,
        failed=(),
    )
    return msgspec.structs.replace(audit, **changes)


def _verified(*problems: Problem) -> VerifyReport:
    return VerifyReport(
        level=Level.EXISTENCE,
        sample=1,
        commits_count=1,
        indexes_count=1,
        blobs_count=2,
        files_read=0,
        bytes_read=0,
        problems=problems,
    )


def _problem(kind: ProblemKind, text: str = "blobs/x", job: str = "") -> Problem:
    return Problem(kind=kind, scope=job or text, number=1, task=text, store=text, key=text, path=text)


def test_names_of_others_are_nothing_but_text() -> None:
    scope = Scope(HOSTILE)
    entries = (
        _entry(2, scope=scope, name=HOSTILE, kind="fork", source=CommitPointer(1, WriteId("w1")), source_scope=scope),
        _entry(1, scope=scope, name=HOSTILE),
        HistoryEntry(number=3, state=State.DAMAGED, commit=None, problem=HOSTILE),
    )
    job = msgspec.structs.replace(
        _job(HOSTILE, *entries, problems=(HOSTILE,)),
        drills=(drill(job=HOSTILE), failed(error=HOSTILE, message=HOSTILE)),
    )
    page = make_page(
        _facts(
            job,
            _job(HOSTILE),
            request=ReportRequest(
                location=HOSTILE,
                drills=DrillHistory(broken=(FormatError(HOSTILE, subject=HOSTILE),)),
                drills_from=HOSTILE,
            ),
            release=HOSTILE,
            repository_id=HOSTILE,
            audits=(_audit(outcome="failed", error=HOSTILE),),
            audits_broken=(HOSTILE,),
            verified=_verified(_problem(ProblemKind.BLOB_MISSING, HOSTILE)),
            requests={HOSTILE: 1},
        )
    )
    tags = _Tags(page)
    assert tags.seen.isdisjoint({"script", "img", "link", "iframe", "object", "use", "image"})
    assert not {name for name in tags.attributes if name.startswith("on") or name == "src"}
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page
    assert "script" not in _Tags(make_page(_facts(verify_missing=HOSTILE))).seen


def test_the_state_of_a_query_is_a_section_with_a_plot_of_its_partitions() -> None:
    assert 'id="state"' not in make_page(_facts())
    stores = [
        StoreFigures(operator=0, partition=n, store=HOSTILE, rows=n, rows_by="snapshot", stored_bytes=n * MIB)
        for n in range(3)
    ]
    state = StateExplained(
        location=HOSTILE,
        query_id=HOSTILE,
        batch=7,
        watermark_ms=None,
        is_full=False,
        operators=(sum_up(0, HOSTILE, stores),),
        stores=tuple(stores),
        cost=None,
        cost_unknown=HOSTILE,
        advice=(Advice(setting=HOSTILE, reason=HOSTILE),),
        problems=(HOSTILE,),
        requests=0,
        seconds=0.0,
    )
    page = make_page(_facts(request=ReportRequest(location="here", state=state)))
    tags = _Tags(page)
    assert tags.seen.isdisjoint({"script", "img"})
    assert "<svg" in page.partition('id="state"')[2]
    assert "partition 2: 2.0 MiB" in page
    # What is not known is not 0.
    assert ">unknown</td>" in page


def test_a_name_is_never_taken_for_a_place_of_the_template() -> None:
    page = make_page(_facts(request=ReportRequest(location="$risks ${jobs} $$ $nothing")))
    assert "<p>$risks ${jobs} $$ $nothing</p>" in page


def test_every_kind_of_risk_says_what_helps() -> None:
    verified = _verified(*(_problem(kind, job="job") for kind in ProblemKind))
    by_job = {"job": verified.problems}
    job, sound = (_job(name, _entry(1, scope=Scope(name))) for name in ("job", "sound"))
    page = make_page(_facts(job, sound, verified=verified, problems_by_job=by_job))
    risks = f"{len(ProblemKind) - 1} keys missing or damaged: its newest commit too; 1 key with a TTL"
    verdict = page.partition('bad verdict">')[2].partition("</p>")[0]
    assert verdict == f'1 of 2 jobs at risk: <a href="#job-0">job</a> ({risks})'
    assert page.count(risks) == 3
    assert page.count("<details class=job open>") == 1
    for hint in ("--check-retained", "--or-newest-complete", "verify --heal"):
        assert hint in page


def test_a_sound_repository_says_so() -> None:
    job = _job("job", *(_entry(n, scope=Scope("job")) for n in (3, 2, 1)))
    page = make_page(_facts(job, verified=_verified(), made_at_ms=1_700_000_000_000 + 4 * 86_400_000 + 7_200_000))
    assert '<p class="good verdict">1 job can be restored.</p>' in page
    card = page.partition("<ul class=cards>")[2].partition("</ul>")[0]
    for text in (
        "commit 3, version 3",
        "1d ago, 5.0 MiB",
        "never drilled",
        "<span class=good>whole</span>",
        "<polyline",
    ):
        assert text in card, card
    assert "There is no job yet." in make_page(_facts(verified=_verified()))
    some = make_page(_facts(job, _job("new"), verified=_verified(), jobs_left_out=3))
    assert '<p class="verdict">1 job can be restored, 1 job without a commit; 3 more jobs not looked at.</p>' in some
    assert "<span class=note>nothing to restore</span>" in some
    unknown = make_page(_facts(job, verify_missing="UnsafeStoreError: it changed"))
    assert "It is unknown what is missing: UnsafeStoreError: it changed" in unknown
    assert "<span class=bad>unknown</span>" in unknown


def test_whatever_keeps_a_job_from_being_restored_is_in_the_verdict() -> None:
    scope = Scope("job")
    late = _job("job", HistoryEntry(number=1, state=State.VOID, commit=None))
    odd = _job("job", _entry(1, scope=scope), problems=("names/x cannot be read",))
    undrilled = msgspec.structs.replace(_job("job", _entry(1, scope=scope)), drills=(failed(),))
    for job, why in ((late, "they are late"), (odd, "1 name, pin or boundary unreadable"), (undrilled, "drill failed")):
        page = make_page(_facts(job, verified=_verified()))
        assert why in page.partition('<p class="bad verdict">')[2].partition("</p>")[0]
        assert "<span class=good>" not in page


def test_a_card_shows_the_last_drill_and_whether_it_met_its_slo() -> None:
    job = _job("job", _entry(1, scope=Scope("job")))
    for last, shown in ((drill(slo_ms=1), "SLO 1 ms: MISSED"), (failed(), "failed")):
        page = make_page(_facts(msgspec.structs.replace(job, drills=(last,)), verified=_verified()))
        assert f"ago, {shown}</span>" in page.partition("<ul class=cards>")[2]


def test_collections_are_shown_with_what_they_freed_and_how_they_ended() -> None:
    audits = (_audit(), _audit(outcome="refused", error="too much", deleted=()))
    page = make_page(_facts(audits=audits, audits_count=70))
    assert "The newest 2 of 70 audit records." in page
    assert "refused: too much" in page
    assert "unreachable, and older than the TTL: 7" in page
    # The one that was refused is a cross, and no bar.
    assert len(re.findall(r"<text class=.bad.[^>]*>✗</text>", page)) == 1


def test_a_repository_with_nothing_in_it_makes_a_page() -> None:
    page = make_page(_facts(_job("job")))
    _Tags(page)
    for text in ("nobody has collected", "It has no commits.", "No restore drill: run one"):
        assert text in page


def test_extreme_numbers_make_a_page_too() -> None:
    scope = Scope("job")
    huge = _entry(2, scope=scope, size_bytes=2**62)
    late = Commit(record=_commit(1, scope=scope).record, created_at_ms=2**62, committed_at_ms=2**62)
    odd = msgspec.structs.replace(_entry(1, scope=scope), commit=late, share=SnapshotShare())
    _Tags(make_page(_facts(_job("job", huge, odd))))
    _Tags(make_page(_facts(_job("job", odd))))


def test_commits_say_where_they_are_from_and_what_became_of_them() -> None:
    flights, replay = Scope("flights"), Scope("replay")
    source = CommitPointer(2, WriteId("w2"))
    forked = _entry(1, scope=replay, kind="fork", source=source, source_scope=flights)
    entries = (_entry(4, scope=flights, kind="rewind", source=source), _entry(3, scope=flights, name="left"))
    page = make_page(_facts(_job("flights", *entries), _job("replay", forked), jobs_left_out=3))
    for text in (
        "rewind to 2<",
        "fork from 2 of flights<",
        "left behind by 4, being read (1 pin)<",
        "3 more jobs: see one with --job.",
    ):
        assert text in page
    assert page.count("<svg class=plot ") == 2


def test_long_tables_are_folded_and_risks_never() -> None:
    scope = Scope("job")
    problems = [_problem(ProblemKind.BLOB_MISSING, f"blobs/{n}", "job") for n in range(30)]
    verified = _verified(*problems)
    job = _job("job", *(_entry(n, scope=scope) for n in range(30, 0, -1)))
    page = make_page(_facts(job, verified=verified, problems_by_job={"job": verified.problems}))
    _Tags(page)
    assert "<summary>Commits of job: 30 rows</summary>" in page
    assert page.count("<details>") == 1
    assert page.index("blobs/29") < page.index("<details>")
