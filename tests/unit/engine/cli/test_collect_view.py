"""What `collect` shows people and programs."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cli.cmd.collect import PLANS_KEPT_MAX, choose_plan_dir, collect_lines, summary_line, view_collect
from engine.cli.output import to_json
from engine.cli.session import choose_rules
from engine.collect.report import CollectReport
from engine.errors import UsageError
from engine.text import Moment
from index.plan.collect import DeleteReason, PlannedDelete, ReasonTotal
from index.snapshot.keys import RunId, make_run_id

RUN = make_run_id(1_700_000_000_000, "a" * 20)
REPORT = CollectReport(
    run=RUN,
    dry_run=False,
    kept=(),
    boundaries=(),
    totals=(ReasonTotal(reason=DeleteReason.UNFINISHED_UPLOAD, count=1, size_bytes=0),),
    deletes=(PlannedDelete("blobs/00/job/x", DeleteReason.UNFINISHED_UPLOAD),),
    listed_count=0,
    listed_bytes=0,
    waiting_count=0,
    waiting_bytes=0,
    live_count=0,
    live_bytes=0,
    unfinished_count=2,
    unfinished_hidden="list_unfinished blobs/: denied (grant it)",
)


def test_unfinished_uploads_are_reported_by_reason_and_number() -> None:
    lines = "\n".join(collect_lines(view_collect(REPORT), verbose=True))
    assert "blobs/00/job/x" in lines
    assert "begun longer ago than the TTL, and never finished" in lines
    assert "perhaps under way: 2 uploads" in lines
    assert "NOT looked for, uploads that were never finished: list_unfinished blobs/: denied" in lines


def test_the_json_form_says_the_same() -> None:
    view = to_json(view_collect(REPORT))
    assert [deleted["reason"] for deleted in view["deleted"]] == ["unfinished_upload"]
    assert (view["unfinished_count"], view["unfinished_hidden"]) == (2, REPORT.unfinished_hidden)
    assert (view["audit"], view["plan"], view["summary"]) == (f"audit/{RUN}", "", summary_line(REPORT))
    assert (view["deleted_count"], "boundaries" in view) == (1, False)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, f"deleted 1 key (0 B); kept 0 commits, 0 objects (0 B); run {RUN}"),
        ({"dry_run": True, "refused": True}, "WOULD BE REFUSED: more than --delete-at-most"),
        ({"dry_run": True}, "would delete 1 key (0 B); would keep 0 commits"),
        ({"failed_count": 1200, "failed": ("k",)}, "1,200 NOT deleted"),
        ({"waiting_count": 3}, "3 uploads waiting"),
        ({"audit_missing": "denied"}, "NO audit record"),
    ],
)
def test_the_last_line_says_it_all(changes: dict[str, Any], expected: str) -> None:
    report = msgspec.structs.replace(REPORT, **changes)
    assert collect_lines(view_collect(report))[-1] == summary_line(report)
    assert expected in summary_line(report)


def test_keys_beyond_those_that_are_listed_are_counted() -> None:
    many = ReasonTotal(reason=DeleteReason.UNREACHABLE_UPLOAD, count=5000, size_bytes=10**9)
    lines = collect_lines(view_collect(msgspec.structs.replace(REPORT, totals=(*REPORT.totals, many))), verbose=True)
    assert "and 5,000 keys more: a plan has them all" in lines


def test_programs_learn_why_something_is_missing() -> None:
    changes = {"audit_missing": "denied", "run_left": "no answer", "excluded_count": 2, "unruled": ("ledger",)}
    view = view_collect(msgspec.structs.replace(REPORT, **changes))
    assert (view.audit, view.audit_missing, view.run_left) == ("", "denied", "no answer")
    assert (view.excluded_count, view.unruled) == (2, ("ledger",))


@pytest.mark.parametrize("at_ms, refused", [(-1, True), (0, False)])
def test_a_time_before_all_times_is_a_mistake_of_the_command_line(at_ms: int, refused: bool) -> None:
    with pytest.raises(UsageError) if refused else contextlib.nullcontext():
        choose_rules(keep_since=Moment(at_ms=at_ms), keep_named=True, policy=None)


def run_id(number: int) -> RunId:
    return make_run_id(number, "a" * 20)


def test_a_dry_run_s_plan_stands_below_the_cache_and_the_oldest_ones_go(tmp_path: Path) -> None:
    (tmp_path / "plans" / "mine").mkdir(parents=True)
    for number in range(PLANS_KEPT_MAX + 5):
        chosen = choose_plan_dir(None, tmp_path, run_id(number), dry_run=True)
        assert chosen == tmp_path / "plans" / run_id(number)
        chosen.mkdir()
    assert sorted(path.name for path in (tmp_path / "plans").iterdir()) == [
        *(run_id(number) for number in range(5, PLANS_KEPT_MAX + 5)),
        "mine",
    ]


def test_a_plan_goes_where_it_is_asked_for_and_otherwise_only_a_dry_run_s_is_kept(tmp_path: Path) -> None:
    assert choose_plan_dir(None, tmp_path, run_id(1), dry_run=False) is None
    assert choose_plan_dir(None, None, run_id(1), dry_run=True) is None
    assert choose_plan_dir(tmp_path / "here", tmp_path, run_id(1), dry_run=False) == tmp_path / "here"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        choose_plan_dir(tmp_path / "file", tmp_path, run_id(1), dry_run=False)
