"""What `collect` tells people of uploads that were never finished."""

from engine.cli.caring import _collect_lines, _view_collect
from engine.collect import CollectReport
from index.collect_plan import DeleteReason, PlannedDelete

REPORT = CollectReport(
    dry_run=False,
    kept=(),
    boundaries=(),
    deletes=(PlannedDelete("blobs/00/job/x", DeleteReason.UNFINISHED_UPLOAD),),
    waiting_count=0,
    waiting_bytes=0,
    live_count=0,
    live_bytes=0,
    foreign=(),
    unfinished_count=2,
    unfinished_hidden="list_unfinished blobs/: denied (grant\x1b it)",
)


def test_unfinished_uploads_are_told_by_reason_and_number() -> None:
    lines = "\n".join(_collect_lines(REPORT, verbose=True))
    assert "blobs/00/job/x" in lines
    assert "begun longer ago than the TTL, and never finished" in lines
    assert "perhaps under way: 2 uploads" in lines
    assert "NOT looked for, uploads that were never finished: list_unfinished blobs/: denied" in lines
    assert "\x1b" not in lines


def test_the_json_form_says_the_same() -> None:
    view = _view_collect(REPORT)
    assert [d.reason for d in view.deleted] == ["unfinished_upload"]
    assert (view.unfinished_count, view.unfinished_hidden) == (2, REPORT.unfinished_hidden)
