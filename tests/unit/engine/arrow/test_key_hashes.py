"""The rule over Arrow arrays is the rule in plain Python, for every type and every form of a key (0010, H10)."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.arrow.block_keys import KeyColumn
from engine.arrow.key_hashes import partitions_of
from engine.errors import DamagedError
from engine.state import key_rules
from index.errors import PartitionKeyError
from index.spark.partition_keys import KeyRule, choose_key_rule
from index.spark.schema import ArrayType, DataType, DecimalType, KeyForm, MapType, StateSchema, StructType
from tests.unit.engine.arrow.test_unsafe_rows import LONG, TEXT, atom, decimals, row_of, types, values
from tests.unit.engine.arrow.unsafe_row_writer import encode_row

COUNTS = (1, 3, 5, 200)
DOUBLES = st.sampled_from([0.0, -0.0, math.nan, math.inf, -1.5])


def rule_of(key: StructType, operator: str = "dedupe", form: KeyForm | None = None, family: str = "default") -> KeyRule:
    schema = StateSchema(family=family, key=key, value=key)
    return choose_key_rule(0, operator, "default", schema, form or KeyForm(), variables={"m": "MapState"})


def column_of(keys: list[bytes]) -> KeyColumn:
    """Keys as a matrix, and behind each what means nothing."""
    sizes = np.array([len(key) for key in keys])
    octets = np.full((len(keys), max(sizes) + 3), 0xEE, np.uint8)
    for row, key in zip(octets, keys, strict=True):
        row[: len(key)] = list(key)
    return KeyColumn(octets, sizes)


def check_equal(rule: KeyRule, keys: list[bytes]) -> None:
    for count in COUNTS:
        expected = key_rules.partitions_of(rule, keys, count)
        assert partitions_of(rule, keys, count) == expected
        assert not keys or partitions_of(rule, column_of(keys), count) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_keys_of_every_type_get_the_same_partition(data: st.DataObject) -> None:
    of = row_of(*data.draw(st.lists(types(), min_size=1, max_size=4)))
    rows = st.tuples(*(values(field.type) for field in of.fields))
    # As many as numpy hashes at once, and some more.
    keys = [encode_row(of, row) for row in data.draw(st.lists(rows, max_size=5))]
    check_equal(rule_of(of), keys * data.draw(st.sampled_from([1, 20])))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(DOUBLES, DOUBLES, st.binary(max_size=9)), min_size=1, max_size=40))
def test_odd_numbers_and_texts_of_every_length_get_the_same_partition(rows: list[tuple[float, float, bytes]]) -> None:
    of = row_of(atom("float"), atom("double"), atom("binary"))
    check_equal(rule_of(of), [encode_row(of, row) for row in rows])


@settings(max_examples=25, deadline=None)
@given(st.lists(decimals(DecimalType(38, 0)), min_size=1, max_size=40))
def test_wide_decimals_of_every_size_get_the_same_partition(numbers: list[Any]) -> None:
    of = row_of(DecimalType(38, 0))
    check_equal(rule_of(of), [encode_row(of, (number,)) for number in numbers])


def test_a_few_long_texts_and_lists_among_many_short_ones_get_the_same_partition() -> None:
    of = row_of(TEXT, ArrayType(row_of(LONG, TEXT), contains_null=True), MapType(TEXT, LONG, value_contains_null=True))
    rng = random.Random(7)
    rows = []
    for n in range(300):
        size = 200 if n % 90 == 0 else n % 7
        items = [None if rng.random() < 0.2 else (m, "x" * (m % 9)) for m in range(size)]
        rows.append(("y" * (size * 11 + n % 5), items, {f"k{m}": m for m in range(size // 2)}))
    check_equal(rule_of(of), [encode_row(of, row) for row in rows])


def two_parts(first: bytes, rest: bytes) -> bytes:
    return len(first).to_bytes(4, "little") + first + rest


KEY = row_of(TEXT, LONG)
GROUPED = row_of(KEY, row_of(LONG))
EXPIRING = row_of(LONG, GROUPED)
TIMED = row_of(*(field.type for field in KEY.fields), LONG)
TRANSFORM, JOIN = "transformWithStateExec", "symmetricHashJoin"


@pytest.mark.parametrize("n", [1, 40])
def test_keys_in_every_form_get_the_partition_of_their_columns(n: int) -> None:
    rows = [(f"key-{m}", m * m - 50) for m in range(n)]
    expected = {count: partitions_of(rule_of(KEY), [encode_row(KEY, row) for row in rows], count) for count in COUNTS}
    time = bytes(range(8))
    forms: dict[KeyRule, list[bytes]] = {
        rule_of(TIMED, "sessionWindowStateStoreSaveExec", KeyForm("prefix", (0, 1))): [
            two_parts(encode_row(KEY, row), encode_row(row_of(LONG), (9,))) for row in rows
        ],
        rule_of(TIMED, JOIN, family="left-keyWithIndexToValue"): [encode_row(TIMED, (*row, 9)) for row in rows],
        rule_of(TIMED, JOIN, KeyForm("time_first", (2,)), "left-tsWithKey"): [
            time + encode_row(KEY, row) for row in rows
        ],
        rule_of(TIMED, JOIN, KeyForm("time_last", (2,)), "left-keyWithTsToValues"): [
            encode_row(KEY, row) + time for row in rows
        ],
        rule_of(GROUPED, TRANSFORM, KeyForm("prefix", (0,)), "m"): [
            two_parts(encode_row(row_of(KEY), (row,)), encode_row(row_of(row_of(LONG)), ((9,),))) for row in rows
        ],
        rule_of(EXPIRING, TRANSFORM, KeyForm("range", (0,)), "$ttl_m"): [
            two_parts(b"\0" * 9, encode_row(row_of(GROUPED), ((row, (9,)),))) for row in rows
        ],
    }
    for rule, keys in forms.items():
        check_equal(rule, keys)
        for count in COUNTS:
            assert partitions_of(rule, keys, count) == expected[count], rule.rule


def damaged_keys() -> list[tuple[KeyRule, bytes]]:
    one: DataType = LONG
    whole, parts = rule_of(row_of(one)), rule_of(GROUPED, TRANSFORM, KeyForm("prefix", (0,)), "m")
    within = rule_of(EXPIRING, TRANSFORM, KeyForm("range", (0,)), "$ttl_m")
    return [
        (whole, b""),
        (whole, bytes(9)),
        (whole, b"\1" + bytes(16)),
        (rule_of(row_of(TEXT)), bytes(9) + b"\x08\0\0\0\x20\0\0\0"),
        (parts, b"\xff\0\0\0"),
        (within, two_parts(b"", encode_row(row_of(GROUPED), (None,)))),
    ]


@pytest.mark.parametrize("rule, key", damaged_keys())
def test_keys_that_do_not_fit_their_schema_are_refused_by_both(rule: KeyRule, key: bytes) -> None:
    for keys in ([key], column_of([key])):
        with pytest.raises(DamagedError, match="operator 0"):
            partitions_of(rule, keys, 5)
    with pytest.raises(PartitionKeyError, match="operator 0"):
        rule.partition_of(key, 5)
