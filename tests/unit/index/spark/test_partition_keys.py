"""Murmur3 as Spark has it, and the rule of each operator's keys (design 0010)."""

import math
import struct
from decimal import Decimal
from typing import Any

import pytest

from index.errors import PartitionKeyError
from index.spark.partition_keys import KeyRule, choose_key_rule, cut_keys, hash_values, partition_of, stored_type
from index.spark.schema import (
    ArrayType,
    AtomType,
    DataType,
    DecimalType,
    Field,
    KeyForm,
    MapType,
    StateSchema,
    StructType,
)

INT, LONG, TEXT, FLOAT, DOUBLE = map(AtomType, ("integer", "long", "string", "float", "double"))


def row(**fields: DataType) -> StructType:
    return StructType(tuple(Field(name, of, nullable=True) for name, of in fields.items()))


KEY = row(k=TEXT)
TWO = row(a=LONG, b=LONG)


def signed(hashed: int) -> int:
    return hashed - ((hashed & 1 << 31) << 1)


# What `SELECT hash(...)` of Spark 4.3 answers.
@pytest.mark.parametrize(
    "of, value, expected",
    [
        (INT, 1, -559580957),
        (INT, -1, -1604776387),
        (AtomType("boolean"), True, -559580957),
        (AtomType("byte"), -1, -1604776387),
        (LONG, 1, -1712319331),
        (LONG, -(2**63), -853646085),
        (TEXT, b"Spark", 228093765),
        (TEXT, b"", 142593372),
        (TEXT, "日本€".encode(), 1841824415),
        (AtomType("binary"), b"\xff\x80\x01", -1586349443),
        (DOUBLE, 1.5, 1290763749),
        (DOUBLE, math.nan, -1281358385),
        (DOUBLE, -0.0, -1670924195),
        (FLOAT, 1.5, -221251528),
        (FLOAT, math.nan, -349261430),
        (FLOAT, -0.0, 933211791),
        (DecimalType(3, 2), 150, -2056712946),
        (DecimalType(30, 3), -12345, 265069572),
        (DecimalType(38, 0), 1, -386724586),
        (AtomType("date"), 19723, -456589419),
        (AtomType("timestamp"), 1_704_067_200_000_000, 1545358984),
        (AtomType("timestamp_ntz"), 1_704_067_200_000_000, 1545358984),
        (AtomType("interval day"), 259_200_000_000, 2038746747),
        (AtomType("interval month"), 14, 335551368),
        (AtomType("time(6)"), 43_994_000_000_000, 1201013845),
        (ArrayType(INT, contains_null=True), [1, None, 2], -222940379),
        (row(a=INT, b=TEXT), (1, b"a"), -936062819),
        (LONG, None, 42),
    ],
)
def test_a_value_has_sparks_hash(of: DataType, value: Any, expected: int) -> None:
    assert signed(hash_values([stored_type(of)], [value])) == expected


@pytest.mark.parametrize("name", ["float", "double"])
def test_negative_zero_is_zero_and_every_nan_is_one(name: str) -> None:
    of = [AtomType(name)]
    odd = struct.unpack("<d", (0xFFF8_0000_0000_0123).to_bytes(8, "little"))[0]
    assert hash_values(of, [-0.0]) == hash_values(of, [0.0])
    assert hash_values(of, [math.nan]) == hash_values(of, [odd])


def test_a_null_leaves_the_seed_and_columns_follow_each_other() -> None:
    assert hash_values([LONG, INT, LONG], [5, None, 7]) == hash_values([LONG], [7], hash_values([LONG], [5]))
    nested = row(a=LONG, b=row(c=LONG))
    assert hash_values([nested], [(5, (7,))]) == hash_values([LONG, LONG], [5, 7])


def test_decimals_are_hashed_by_their_digits() -> None:
    assert hash_values([DecimalType(18, 2)], [150]) == hash_values([LONG], [150])
    assert hash_values([DecimalType(19, 2)], [150]) == hash_values([AtomType("binary")], [b"\0\x96"])
    assert hash_values([DecimalType(19, 2)], [-128]) == hash_values([AtomType("binary")], [b"\x80"])
    assert hash_values([DecimalType(19, 2)], [Decimal("1.50")]) == hash_values([DecimalType(19, 2)], [150])


def test_a_partition_is_never_negative() -> None:
    assert {partition_of(hashed, 3) for hashed in range(2**32 - 10, 2**32)} == {0, 1, 2}
    assert partition_of(2**32 - 1, 200) == 199


@pytest.mark.parametrize(
    "name, stored",
    [
        ("date", "integer"),
        ("timestamp", "long"),
        ("timestamp_ntz", "long"),
        ("interval day to second", "long"),
        ("interval hour", "long"),
        ("interval year to month", "integer"),
        ("interval month", "integer"),
        ("time(6)", "long"),
        ("string", "binary"),
        ("interval", "interval"),
    ],
)
def test_types_are_stored_as_others(name: str, stored: str) -> None:
    within = MapType(AtomType(name), ArrayType(row(x=AtomType(name)), contains_null=True), value_contains_null=True)
    expected = MapType(
        AtomType(stored), ArrayType(row(x=AtomType(stored)), contains_null=True), value_contains_null=True
    )
    assert stored_type(within) == expected


def rule_of(
    operator: str, key: StructType, form: KeyForm | None = None, *, store: str = "default", family: str = "default"
) -> KeyRule:
    schema = StateSchema(family=family, key=key, value=KEY)
    kinds = {"value": "ValueState", "list": "ListState", "map": "MapState"}
    return choose_key_rule(3, operator, store, schema, form or KeyForm(), variables=kinds)


GROUPED = row(key=row(k=TEXT), other=row(v=LONG))
TIMED = row(at=LONG, key=row(k=TEXT))
EXPIRING = row(at=LONG, elementKey=row(key=row(k=TEXT), userKey=row(v=LONG)))
LEADS, FOLLOWS = KeyForm("prefix", (0,)), KeyForm("range", (0,))
TRANSFORM = "transformWithStateExec"


@pytest.mark.parametrize(
    "operator, table, key, form, names",
    [
        ("stateStoreSave", "", TWO, None, "ab"),
        ("dedupe", "", TWO, None, "ab"),
        ("dedupeWithinWatermark", "", TWO, None, "ab"),
        ("flatMapGroupsWithState", "", TWO, None, "ab"),
        ("applyInPandasWithState", "", TWO, None, "ab"),
        ("sessionWindowStateStoreSaveExec", "", TWO, LEADS, "a"),
        ("sessionWindowStateStoreSaveExec", "", TWO, None, "a"),
        ("symmetricHashJoin", "left-keyToNumValues", TWO, None, "ab"),
        ("symmetricHashJoin", "right-keyWithIndexToValue", TWO, None, "a"),
        ("symmetricHashJoin", "left-keyWithTsToValues", TWO, KeyForm("time_last", (1,)), "a"),
        ("symmetricHashJoin", "right-tsWithKey", TWO, KeyForm("time_first", (1,)), "a"),
        (TRANSFORM, "value", KEY, None, "k"),
        (TRANSFORM, "list", KEY, None, "k"),
        (TRANSFORM, "$rowCounter_list", KEY, None, "k"),
        (TRANSFORM, "$min_list", KEY, None, "k"),
        (TRANSFORM, "$count_list", KEY, None, "k"),
        (TRANSFORM, "map", GROUPED, LEADS, ["key"]),
        (TRANSFORM, "$ttl_value", TIMED, FOLLOWS, ["key"]),
        (TRANSFORM, "$ttl_map", EXPIRING, FOLLOWS, ["key"]),
        (TRANSFORM, "$eventTimers_keyToTimestamp", GROUPED, LEADS, ["key"]),
        (TRANSFORM, "$procTimers_timestampToKey", TIMED, FOLLOWS, ["key"]),
    ],
)
def test_each_operator_has_its_columns(
    operator: str, table: str, key: StructType, form: KeyForm | None, names: Any
) -> None:
    found = rule_of(operator, key, form, family=table or "default")
    assert [field.name for field in found.fields] == [*names]
    if operator == "symmetricHashJoin":
        assert rule_of(operator, key, form, store=table).fields == found.fields


@pytest.mark.parametrize(
    "operator, family, key, form, reason",
    [
        ("mapReduce", "default", KEY, None, "partition key is not known"),
        ("symmetricHashJoin", "left-other", KEY, None, "partition key is not known"),
        (TRANSFORM, "other", KEY, None, "partition key is not known"),
        (TRANSFORM, "map", KEY, KeyForm("range", (0,)), "the first field of the key is not a part"),
        (TRANSFORM, "$ttl_map", row(), None, "is not a part"),
        (TRANSFORM, "$ttl_map", TIMED, LEADS, "is not a part"),
        (TRANSFORM, "$ttl_map", row(at=LONG, key=LONG), FOLLOWS, "is not a part"),
        ("stateStoreSave", "default", TWO, LEADS, "the whole key is not a part"),
        ("sessionWindowStateStoreSaveExec", "default", KEY, None, "is not a part"),
        ("dedupe", "default", row(k=AtomType("interval")), None, "the type interval, whose hash"),
        ("dedupe", "default", row(k=ArrayType(AtomType("variant"), contains_null=True)), None, "the type variant"),
        ("dedupe", "default", StructType((Field("k", TEXT, nullable=True, is_collated=True),)), None, "a collation"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    operator: str, family: str, key: StructType, form: KeyForm | None, reason: str
) -> None:
    with pytest.raises(PartitionKeyError, match=rf"operator 3 \({operator}\), store default.*{reason}"):
        rule_of(operator, key, form, family=family)


def test_keys_in_a_form_that_is_not_known_are_refused() -> None:
    with pytest.raises(PartitionKeyError, match="in a form that is not known"):
        choose_key_rule(0, "dedupe", "default", StateSchema(key=KEY, value=KEY), None, variables={})


def unsafe(number: int) -> bytes:
    return bytes(9) + number.to_bytes(8, "little", signed=True)


ONE = row(a=LONG)


def test_a_key_is_hashed_in_every_form() -> None:
    expected = partition_of(hash_values([LONG], [7]), 200)
    first, last = unsafe(7), unsafe(9)
    prefixed = len(first).to_bytes(4, "little") + first + last
    two = bytes(9) + (7).to_bytes(8, "little") + (9).to_bytes(8, "little")
    assert rule_of("dedupe", ONE).partition_of(first, 200) == expected
    assert rule_of("sessionWindowStateStoreSaveExec", TWO, LEADS).partition_of(prefixed, 200) == expected
    assert rule_of("sessionWindowStateStoreSaveExec", TWO).partition_of(two, 200) == expected
    for form, key in (("time_first", bytes(8) + first), ("time_last", first + bytes(8))):
        of = rule_of("symmetricHashJoin", TWO, KeyForm(form, (1,)), family="left-tsWithKey")  # type: ignore[arg-type]
        assert of.partition_of(key, 200) == expected


def test_a_key_in_avro_is_hashed_by_its_columns() -> None:
    of = choose_key_rule(
        0,
        TRANSFORM,
        "default",
        StateSchema(family="value", key=KEY, value=KEY),
        KeyForm(),
        variables={"value": "ValueState"},
        is_avro=True,
    )
    assert of.partition_of(b"\0\0\0\2\4ab", 200) == partition_of(hash_values([AtomType("binary")], [b"ab"]), 200)
    with pytest.raises(PartitionKeyError, match="does not fit its schema"):
        of.partition_of(b"\0\0\0\2\4abc", 200)


@pytest.mark.parametrize("key", [b"", b"\0", b"\1" + bytes(16), bytes(16), unsafe(7)[:-8], bytes(18)])
def test_a_key_that_cannot_be_is_refused(key: bytes) -> None:
    with pytest.raises(PartitionKeyError, match=r"operator 3 \(dedupe\), store default: has a key that does not fit"):
        rule_of("dedupe", ONE).partition_of(key, 5)


@pytest.mark.parametrize("key", [b"", b"\5\0\0\0abcd", b"\xff\xff\xff\xffabcd"])
def test_a_first_part_longer_than_its_key_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="does not fit into it"):
        cut_keys(LEADS, [key])
