"""How results show themselves at a prompt and in a notebook."""

from enum import StrEnum
from html.parser import HTMLParser

import msgspec
import pytest

from index.display import DisplayMixin, format_seconds, format_value
from index.plan.commits import commit_of
from index.snapshot.delta import ComparedFile, IndexDifference
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

HOSTILE = "</td><script>alert(1)</script>\x1b[31m\"'&"


class _Colour(StrEnum):
    RED = "red"


class _Inner(DisplayMixin, msgspec.Struct, frozen=True):
    size_bytes: int


class _Result(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    name: str
    files: int = 0
    size_bytes: int = 0
    made_at_ms: int = 0
    seconds: float = 0.0
    keys: tuple[str, ...] = ()
    colour: _Colour = _Colour.RED
    inner: _Inner | None = None
    done: bool = False


def test_a_line_has_units_and_leaves_out_what_says_nothing() -> None:
    result = _Result(name="a", files=1234, size_bytes=2048, keys=("x", "y"), done=True)
    assert repr(result) == (
        "<_Result name a, files 1,234, size 2.0 KiB, made at 1970-01-01T00:00:00.000Z, seconds 0 ms, keys x, y,"
        " colour red, …>"
    )
    assert "done yes" not in repr(result)
    assert result.figures()["done"] == "yes"
    assert "inner" not in result.figures()


def test_a_result_inside_another_is_reported_in_its_line() -> None:
    assert _Result(name="a", inner=_Inner(1024)).figures()["inner"] == "size 1.0 KiB"


def test_a_table_is_whole_html_and_everything_in_it_is_text() -> None:
    html = _Result(name=HOSTILE, keys=(HOSTILE,))._repr_html_()
    tags: list[str] = []
    seen: set[str] = set()

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # type: ignore[explicit-override]
            tags.append(tag)
            seen.add(tag)

        def handle_endtag(self, tag: str) -> None:  # type: ignore[explicit-override]
            assert tags.pop() == tag

    parser = Parser()
    parser.feed(html)
    parser.close()
    assert tags == []
    assert seen == {"table", "caption", "tbody", "tr", "th", "td"}
    assert "\x1b" not in html
    assert "&lt;script&gt;" in html


def test_a_line_cannot_steer_a_terminal_and_is_short() -> None:
    assert "\x1b" not in repr(_Result(name=HOSTILE))
    assert len(repr(_Result(name="x" * 10_000, keys=("y" * 10_000,) * 100))) < 800


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("bytes_fetched", 1536, "1.5 KiB"),
        ("ttl_ms", 90_000, "1m 30s"),
        ("open_s", 0.25, "250 ms"),
        ("share", 0.5, "0.5"),
        ("problems", (1, 2), "2"),
        ("keys", ("a", "b", "c", "d"), "a, b, c and 1 more"),
        ("nothing", None, ""),
        ("none", (), ""),
        ("scope", Scope("job", "3"), "job/3"),
    ],
)
def test_fields_are_reported_by_the_units_in_their_names(name: str, value: object, text: str) -> None:
    assert format_value(name, value) == text


def test_times_are_reported_with_the_digits_that_matter() -> None:
    assert [format_seconds(s) for s in (0.0004, 0.25, 1.25, 99.9, 100, 5400)] == [
        "0 ms",
        "250 ms",
        "1.2 s",
        "99.9 s",
        "1m 40s",
        "1h 30m",
    ]


def test_a_commit_says_which_it_is_and_how_much_it_holds() -> None:
    reference = IndexReference(key=BlobKey("indexes/x"), sha256=b"", size_bytes=1)
    stores = tuple(
        StoreReference(
            task=task,
            store="s",
            version=8,
            unique_id=UniqueId("u"),
            index=reference,
            number=3,
            files_count=2,
            size_bytes=1024,
        )
        for task in ("0", "1")
    )
    record = CommitRecord(
        scope=Scope("flights"),
        number=3,
        write_id=WriteId("w"),
        version=8,
        offsets="2013-08",
        stores=stores,
        valid_until_ms=10,
        source=CommitPointer(1, WriteId("v")),
        kind="rewind",
    )
    assert repr(commit_of(record, 5)) == (
        "<Commit number 3, of flights, version 8, at 1970-01-01T00:00:00.005Z, kind rewind, stores 2,"
        " files 4 (2.0 KiB), …>"
    )


def test_a_difference_says_how_many_files_and_how_large() -> None:
    added = ComparedFile(path=("a",), after_bytes=2048)
    removed = ComparedFile(path=("b",), before_bytes=1024)
    difference = IndexDifference(added=(added,), removed=(removed,), dirs_removed=(("d",),))
    assert repr(difference) == (
        "<IndexDifference added 1 (2.0 KiB), removed 1 (1.0 KiB), changed 0 (0 B), unchanged 0 (0 B),"
        " directories removed 1>"
    )
