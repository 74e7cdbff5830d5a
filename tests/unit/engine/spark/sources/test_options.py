"""Options and filters of the readers of state, without Spark."""

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from engine.errors import UsageError
from engine.spark.sources.plan import SourceOptions
from engine.spark.sources.sources import can_filter, diff_pairs, filter_holds
from index.spark.checkpoint import StoreId


def parse(**options: str) -> SourceOptions:
    return SourceOptions.parse(options, "tidemark_state")


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "has to be given"),
        ({"checkpoint": "/a", "repository": "/b"}, "not both"),
        ({"checkpoint": "/a", "path": "/a"}, "and a path too"),
        ({"checkpoint": "/a", "bacth": "1"}, "is not an option"),
        ({"checkpoint": "/a", "from_batch": "1"}, "is not an option"),
        ({"checkpoint": "/a", "stateVarName": "count"}, "option of Spark's reader; here: family"),
        ({"checkpoint": "/a", "readChangeFeed": "true"}, "Spark's reader; here: the source tidemark_state_diff"),
        ({"checkpoint": "/a", "batch": "-1"}, "has to be a number"),
        ({"checkpoint": "/a", "partition": "1,x"}, "has to be a number"),
        ({"checkpoint": "/a", "rows": "text"}, "typed, bytes"),
        ({"checkpoint": "/a", "job": "j"}, "goes with a repository"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(**options)


def test_options_say_what_is_read() -> None:
    options = parse(Path="s3a://bucket/query", BATCH="7", operator="1", partition="0, 5", store="default", rows="bytes")
    assert options.checkpoint == "s3://bucket/query"
    assert (options.batch, options.rows) == (7, "bytes")
    assert options.chooses(StoreId(1, 5))
    assert not any(map(options.chooses, (StoreId(0, 5), StoreId(1, 1), StoreId(1, 0, "other"))))
    assert all(map(parse(repository="file:///r", job="j").chooses, (StoreId(0, 0), StoreId(9, 9, "other"))))


def test_options_say_how_a_store_is_reached() -> None:
    shown = {"checkpoint": "s3://b/q", "s3.endpoint_url": "http://127.0.0.1:1", "s3.path_style": "true"}
    options = SourceOptions.parse(shown, "tidemark_state")
    assert (options.s3.endpoint_url, options.s3.path_style) == ("http://127.0.0.1:1", True)
    for name, value in (("s3.secret", "x"), ("s3.path_style", "perhaps"), ("s3.endpoint_url", "https://a:b@c")):
        with pytest.raises(UsageError, match=r"s3\."):
            SourceOptions.parse(shown | {name: value}, "tidemark_state")


ROW = {"operator": 1, "partition": 3, "store": "left-x", "version": 7}


@pytest.mark.parametrize(
    "of, fits",
    [
        (EqualTo(("operator",), 1), True),
        (EqualTo(("operator",), 2), False),
        (In(("partition",), (2, 3)), True),
        (In(("partition",), ()), False),
        (GreaterThan(("partition",), 3), False),
        (GreaterThanOrEqual(("partition",), 3), True),
        (LessThan(("partition",), 3), False),
        (LessThanOrEqual(("partition",), 3), True),
        (StringStartsWith(("store",), "left"), True),
        (StringEndsWith(("store",), "left"), False),
        (StringContains(("store",), "ft-"), True),
        (EqualNullSafe(("version",), None), False),
        (EqualNullSafe(("version",), 7), True),
    ],
)
def test_a_filter_holds_as_in_sql(of: Filter, fits: bool) -> None:
    assert can_filter(of, tuple(ROW))
    assert filter_holds(of, ROW) is fits


def test_filters_on_anything_else_are_left_to_spark() -> None:
    others: list[Filter] = [EqualTo(("key",), 1), EqualTo(("operator", "deeper"), 1), Not(EqualTo(("operator",), 1))]
    assert not any(can_filter(of, ("operator",)) for of in others)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (100, 1), (7, 100)])
def test_a_difference_does_not_depend_on_how_rows_are_cut(sizes: tuple[int, int]) -> None:
    def rows(numbers: range, step: int) -> list[tuple[bytes, bytes]]:
        return [(b"%03d" % n, b"%d" % (n % step)) for n in numbers]

    before, after = rows(range(0, 60, 2), 5), rows(range(20, 90, 3), 7)
    cut = [
        [side[n : n + size] for n in range(0, len(side), size)]
        for side, size in zip((before, after), sizes, strict=True)
    ]
    old, new = dict(before), dict(after)
    expected = [(k, old.get(k), new.get(k)) for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    found = [change for changes in diff_pairs(iter(cut[0]), iter(cut[1])) for change in changes]
    assert found == expected
    assert list(diff_pairs(iter(cut[0]), iter([list(part) for part in cut[0]]))) == []
