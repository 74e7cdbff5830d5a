"""A plan as files, both directions, and what is refused (design 0006, P1)."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import FormatError, PlanFileError, UnknownFormatError
from index.plan.collect import DeleteReason, PlannedUpload, ReasonTotal
from index.plan.commits import KeepReason, Retention, as_policy
from index.plan.plan_format import (
    LINE_BYTES_MAX,
    PlanHeader,
    PlanSummary,
    RootCommit,
    RootName,
    RootPin,
    decode_line,
    decode_lines,
    decode_plan_header,
    decode_plan_summary,
    encode_indented,
    encode_line,
)
from index.snapshot.keys import BLOBS, INDEXES, make_run_id, upload_key
from index.snapshot.model import Scope

RUN = make_run_id(1_700_000_000_000, "0a" * 10)
JOB = Scope("jöb", "1")
HEADER = PlanHeader(
    run=RUN,
    repository_id="r",
    release="0.1.0",
    ttl_ms=1000,
    now_ms=1_700_000_000_000,
    listed_at_ms=1_699_999_999_000,
    retention=as_policy(Retention(keep_last=3)),
    commits=(
        RootCommit(scope=JOB, number=1, version=7, committed_at_ms=5, kept=None),
        RootCommit(scope=JOB, number=2, version=8, committed_at_ms=6, kept=KeepReason.NEWEST),
    ),
    names=(RootName(scope=JOB, name="before", number=1, is_live=False),),
    pins=(RootPin(id="0" * 20, scope=JOB, number=2, is_live=True),),
)
SUMMARY = PlanSummary(
    run=RUN,
    lines_count=1,
    size_bytes=10,
    totals=(ReasonTotal(reason=DeleteReason.UNREACHABLE_UPLOAD, count=1, size_bytes=10),),
    listed_count=5,
    listed_bytes=50,
    waiting_count=1,
    waiting_bytes=2,
)
KEY = upload_key(BLOBS, JOB, "0" * 20, 7)


def test_header_and_summary_come_back() -> None:
    assert decode_plan_header(encode_indented(HEADER), subject="plan.json") == HEADER
    assert decode_plan_summary(encode_indented(SUMMARY), subject="summary.json") == SUMMARY


@given(
    prefix=st.sampled_from([BLOBS, INDEXES]),
    counter=st.integers(0, 2**40),
    size=st.integers(0, 2**62),
    created=st.integers(0, 2**62),
)
def test_every_line_comes_back(prefix: str, counter: int, size: int, created: int) -> None:
    key = upload_key(prefix, JOB, "f" * 20, counter)
    planned = PlannedUpload(key, DeleteReason.UNREACHABLE_UPLOAD, size, created_at_ms=created)
    line = encode_line(planned)
    assert list(decode_lines(line * 2, subject="x.jsonl")) == [planned, planned]


def line(**changes: Any) -> bytes:
    good = {"key": KEY, "reason": "unreachable_upload", "size_bytes": 1, "created_at_ms": 2}
    return json.dumps({k: v for k, v in {**good, **changes}.items() if v != "absent"}).encode()


@pytest.mark.parametrize(
    "data",
    [
        line(key="log/job/00000000000000000001.commit"),
        line(key="blobs/00/job/x"),
        line(key="../../etc/passwd"),
        line(reason="closed_commit"),
        line(reason="because"),
        line(size_bytes=-1),
        line(size_bytes="1"),
        line(created_at_ms=2**63),
        line(created_at_ms="absent"),
        line(key="absent"),
        b"",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"key": "' + b"a" * LINE_BYTES_MAX + b'"}',
    ],
)
def test_a_line_that_no_plan_has_is_refused(data: bytes) -> None:
    with pytest.raises(PlanFileError):
        decode_line(data, subject="x.jsonl, line 1")


def test_a_file_that_is_cut_short_is_refused() -> None:
    with pytest.raises(PlanFileError, match="cut short"):
        list(decode_lines(line() + b"\n" + line()[:-1], subject="x.jsonl"))
    with pytest.raises(PlanFileError, match="line 2"):
        list(decode_lines(line() + b"\n{}\n", subject="x.jsonl"))


@pytest.mark.parametrize(
    "changes", [{"run": "x"}, {"ttl_ms": -1}, {"listed_at_ms": HEADER.now_ms + 1}, {"commits": 3}, {"retention": None}]
)
def test_a_header_that_no_plan_has_is_refused(changes: dict[str, Any]) -> None:
    fields = {**msgspec.to_builtins(HEADER), **changes}
    with pytest.raises(PlanFileError):
        decode_plan_header(json.dumps(fields).encode(), subject="plan.json")


def test_a_plan_of_a_newer_tidemark_is_refused_as_such() -> None:
    with pytest.raises(UnknownFormatError):
        decode_plan_header(b'{"schema": 2, "surprise": []}', subject="plan.json")


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_decode_or_be_refused(data: bytes) -> None:
    for decode in (decode_plan_header, decode_plan_summary, decode_line):
        with contextlib.suppress(FormatError):
            decode(data, subject="x")


def test_a_line_with_another_reason_is_refused() -> None:
    with pytest.raises(PlanFileError, match="not a line of a plan"):
        decode_line(line(reason="closed_upload"), subject="x.jsonl, line 1")
