"""Values have to be of the types that a job declares; that their hash is Spark's, a real Spark shows (0010, T2)."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest

from index.errors import PartitionKeyError
from index.snapshot.model import ScopeLayout
from index.spark.partition_keys import hash_values, partition_of
from index.spark.schema import AtomType
from index.spark.task_keys import TaskKeys


def keys(*columns: str) -> TaskKeys:
    return TaskKeys(ScopeLayout(tasks_count=4, key_hash="spark-hash-v1", key_columns=columns))


@pytest.mark.parametrize(
    "of, value",
    [
        ("boolean", 1),
        ("tinyint", 128),
        ("smallint", -32769),
        ("int", True),
        ("int", 2**31),
        ("bigint", 1.0),
        ("bigint", -(2**63) - 1),
        ("float", 0.1),
        ("float", 1e300),
        ("double", 1),
        ("string", 1),
        ("binary", "text"),
        ("date", datetime(2024, 1, 1, tzinfo=UTC)),
        ("timestamp", datetime(2024, 1, 1)),  # noqa: DTZ001 - it has none
        ("timestamp", date(2024, 1, 1)),
        ("timestamp_ntz", datetime(2024, 1, 1, tzinfo=UTC)),
        ("decimal(4,2)", Decimal("1.205")),
        ("decimal(4,2)", Decimal(100)),
        ("decimal(4,2)", Decimal("NaN")),
        ("decimal(4,2)", Decimal("1E+999999")),
        ("decimal(4,2)", 1),
    ],
)
def test_a_value_of_another_type_is_refused(of: str, value: object) -> None:
    with pytest.raises(PartitionKeyError, match=r"does not fit the key column k "):
        keys(f"k {of}").partition_of((value,), 4)


@pytest.mark.parametrize("values", ["ab", (), ("a",), ("a", 1, 2), None])
def test_there_is_a_value_for_each_column(values: object) -> None:
    with pytest.raises(PartitionKeyError, match="are not values of a string, b int"):
        keys("a string", "b int").partition_of(values, 4)  # type: ignore[arg-type]  # what a caller may return


@pytest.mark.parametrize(
    "column",
    [
        "k struct<a:int>",
        "k struct<a int:int>",
        "k array<int>",
        "k interval day",
        "k void",
        "int",
        "k string collate UNICODE",
    ],
)
def test_a_type_whose_hash_is_not_known_is_refused(column: str) -> None:
    with pytest.raises(PartitionKeyError, match="whose hash is not known"):
        keys(column)


def test_a_name_may_have_blanks_and_a_text_may_come_as_its_bytes() -> None:
    expected = partition_of(hash_values([AtomType("binary"), AtomType("integer")], ["Zoë".encode(), 3]), 1009)
    of = keys("the name int string", "n int")
    assert of.partition_of(["Zoë", 3], 1009) == of.partition_of(("Zoë".encode(), 3), 1009) == expected
    assert of.partition_of([None, 3], 1009) == partition_of(hash_values([AtomType("integer")], [3]), 1009)
