"""Which of Spark's own cases have a test here, by the marks on the tests (`spark_case`)."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# 49 and 50 are about Spark's own file managers, which are not ours.
REQUIRED = frozenset({*range(1, 49), *range(51, 56)})
# Cases that have no meaning here, each with the reason.
CANNOT_APPLY: dict[int, str] = {
    52: "our readers of checked files have no seek: a file is read from its start to its end, or not at all"
}


def marks_in(source: str) -> Iterator[int]:
    """The numbers of every `….spark_case(1, 2)` that is called anywhere in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "spark_case":
            for argument in node.args:
                assert isinstance(argument, ast.Constant), "write the numbers out, so that they can be collected"
                assert isinstance(argument.value, int)
                yield argument.value


@functools.cache
def cases_with_tests() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        # To parse all tests takes seconds; few of them have such a mark.
        for number in marks_in(source) if "spark_case" in source else ():
            found.setdefault(number, []).append(path.name)
    return found


def test_the_marks_of_a_module_are_found() -> None:
    source = "@pytest.mark.spark_case(3, 4)\ndef test_a(): ...\nparam(1, marks=[mark.spark_case(5)])\n"
    assert sorted(marks_in(source)) == [3, 4, 5]


def test_every_case_of_spark_has_a_test_or_a_reason_why_not() -> None:
    missing = REQUIRED - cases_with_tests().keys() - CANNOT_APPLY.keys()
    assert not missing, f"no test is marked with: {sorted(missing)}"


def test_no_case_has_both_a_test_and_a_reason_why_not() -> None:
    assert not cases_with_tests().keys() & CANNOT_APPLY.keys()
    assert all(CANNOT_APPLY.values())
