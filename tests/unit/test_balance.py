"""The order in which the workers of `make test` get their work."""

from pathlib import Path

import pytest

from tests.balance import (
    LONGEST_FIRST,
    QUICK_ON_SPARK,
    SLOW,
    THIN_OUT,
    THINNED_OUT,
    slow_ones,
    sort_longest_first,
    unit_of,
)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = "tests/docs/test_documents.py::test_each_command_does_what_the_document_says"


@pytest.mark.parametrize("unit", LONGEST_FIRST)
def test_what_comes_first_exists(unit: str) -> None:
    file, _, document = unit.partition("[")
    assert (ROOT / file.split("::")[0]).exists()
    assert not document or (ROOT / document.removesuffix("]")).exists()


@pytest.mark.parametrize("begin", [*SLOW, *QUICK_ON_SPARK])
def test_what_is_slow_or_quick_exists(begin: str) -> None:
    file, _, name = begin.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not name or any(f"{kind} {name.partition('[')[0]}" in text for kind in ("def", "class"))


def test_a_document_is_slow_but_for_a_few() -> None:
    slow = f"{DOCUMENT}[docs/how-to/s3.md]"
    quick = f"{DOCUMENT}[README.md]", "tests/docs/test_documents.py::test_no_command_escapes[docs/how-to/s3.md]"
    assert slow_ones([slow, *quick]) == {slow}


@pytest.mark.parametrize("cases", range(1, 8))
def test_of_many_cases_some_are_quick_and_of_few_one(cases: int) -> None:
    for place in THINNED_OUT:
        names = [f"{place}/test_a.py::test_{name}[{case}]" for name in "abc" for case in range(cases)]
        quick = sorted(set(names) - slow_ones(names))
        assert len({name.partition("[")[0] for name in quick}) == 3
        assert len(quick) <= 3 * -(-cases // THIN_OUT)


def test_cases_are_counted_test_by_test_and_elsewhere_all_are_quick() -> None:
    names = [f"tests/unit/index/test_a.py::test_a[{case}]" for case in range(9)]
    assert slow_ones(names) == set()
    alone = [f"tests/unit/engine/test_a.py::test_{name}" for name in "abc"]
    assert slow_ones(alone) == set()


@pytest.mark.parametrize(
    "nodeid, unit",
    [
        ("tests/unit/test_a.py::TestA::test_b[x::y]", "tests/unit/test_a.py"),
        ("tests/spark/test_parallel.py::test_b", "tests/spark"),
        ("tests/spark/state/test_queries.py::test_b", "tests/spark/state"),
        ("tests/spark/test_canary.py::test_b", "tests/spark/test_canary.py"),
        ("tests/sparkling/test_a.py::test_b", "tests/sparkling/test_a.py"),
        ("tests/docs/test_documents.py::TestBlocks::test_b", "tests/docs/test_documents.py"),
        (f"{DOCUMENT}[docs/how-to/s3.md]", f"{DOCUMENT}[docs/how-to/s3.md]"),
    ],
)
def test_files_that_share_a_jvm_are_one_unit_and_every_other_file_or_document_is_its_own(
    nodeid: str, unit: str
) -> None:
    assert unit_of(nodeid) == unit


def test_the_long_ones_come_first_and_the_rest_stays_in_order() -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    names = [
        "tests/a.py::1",
        f"{LONGEST_FIRST[-1]}::1",
        "tests/a.py::2",
        f"{LONGEST_FIRST[-1]}::2",
        "tests/spark/b.py::1",
    ]
    items = [Item(name) for name in names]
    sort_longest_first(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [names[4], names[1], names[3], names[0], names[2]]
