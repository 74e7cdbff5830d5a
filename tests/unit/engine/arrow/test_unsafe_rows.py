"""Rows of every type and shape against a writer that puts them down one by one, and rows that cannot be."""

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.arrow.unsafe_rows import arrow_type, decode_pairs, decode_rows
from engine.errors import DamagedError
from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, Field, MapType, StructType
from tests.unit.engine.arrow.unsafe_row_writer import encode_row


def atom(name: str) -> AtomType:
    return AtomType(name)


def row_of(*types: DataType) -> StructType:
    return StructType(tuple(Field(f"f{n}", of, nullable=True) for n, of in enumerate(types)))


LONG, TEXT, BYTES = atom("long"), atom("string"), atom("binary")
EPOCH = dt.datetime.fromtimestamp(0, dt.UTC).replace(tzinfo=None)


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def decimals(of: DecimalType) -> st.SearchStrategy[Decimal]:
    bound = 10**of.precision - 1
    return st.integers(-bound, bound).map(lambda unscaled: Decimal((unscaled < 0, _digits(unscaled), -of.scale)))


def _digits(unscaled: int) -> tuple[int, ...]:
    return tuple(map(int, str(abs(unscaled))))


ATOMS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "byte": numbers(8),
    "short": numbers(16),
    "integer": numbers(32),
    "long": numbers(64),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(max_size=20),
    "binary": st.binary(max_size=20),
    "void": st.none(),
}
DECIMALS = [DecimalType(5, 2), DecimalType(18, 0), DecimalType(19, 4), DecimalType(38, 18)]


def types() -> st.SearchStrategy[DataType]:
    flat: st.SearchStrategy[DataType] = st.sampled_from([*map(atom, ATOMS), *DECIMALS])
    return st.recursive(
        flat,
        lambda inner: st.one_of(
            inner.map(lambda of: ArrayType(of, contains_null=True)),
            st.tuples(st.sampled_from([LONG, TEXT, atom("short")]), inner).map(
                lambda pair: MapType(*pair, value_contains_null=True)
            ),
            st.lists(inner, max_size=3).map(lambda inners: row_of(*inners)),
        ),
        max_leaves=5,
    )


def values(of: DataType) -> st.SearchStrategy[Any]:
    match of:
        case StructType(fields=fields):
            found: st.SearchStrategy[Any] = st.tuples(*(values(field.type) for field in fields))
        case ArrayType(element=element):
            found = st.lists(values(element), max_size=5)
        case MapType(key=AtomType(name=key), value=value):
            found = st.dictionaries(ATOMS[key], values(value), max_size=4)
        case DecimalType():
            found = decimals(of)
        case AtomType(name=name):
            found = ATOMS[name]
        case _:
            raise AssertionError(of)
    return st.none() | found


def plain(of: DataType, value: Any) -> Any:
    """A value as Arrow shows it."""
    if value is None:
        return None
    match of:
        case StructType(fields=fields):
            return {field.name: plain(field.type, each) for field, each in zip(fields, value, strict=True)}
        case ArrayType(element=element):
            return [plain(element, each) for each in value]
        case MapType(key=key, value=inner):
            return [(plain(key, k), plain(inner, v)) for k, v in value.items()]
        case _:
            return value


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whole_columns_say_what_row_by_row_was_written(data: st.DataObject) -> None:
    of = row_of(*data.draw(st.lists(types(), max_size=4)))
    rows = data.draw(st.lists(st.tuples(*(values(field.type) for field in of.fields)), max_size=6))
    found = decode_rows(of, [encode_row(of, row) for row in rows], subject="state")
    found.validate(full=True)
    assert found.type == arrow_type(of)
    assert found.to_pylist() == [plain(of, row) for row in rows]


def test_nulls_that_are_never_null_are_read() -> None:
    """So Spark types `array()` and `map()`: empty they are, but for a map in Arrow, whose keys are never null."""
    nulls = ArrayType(atom("void"), contains_null=False)
    of = StructType((Field("list", nulls, nullable=False), Field("map", MapType(TEXT, nulls.element, False), True)))
    rows: list[tuple[Any, ...]] = [([], {}), ([], None)]
    found = decode_rows(of, [encode_row(of, row) for row in rows], subject="state")
    found.validate(full=True)
    assert [tuple(row.values()) for row in found.to_pylist()] == [([], []), ([], None)]
    with pytest.raises(KeyError):
        arrow_type(row_of(MapType(nulls.element, nulls.element, value_contains_null=False)))


def test_more_fields_than_one_word_has_bits_for_nulls() -> None:
    of = row_of(*[LONG] * 130)
    rows = [tuple(None if (n + row) % 3 == 0 else n * row for n in range(130)) for row in range(4)]
    found = decode_rows(of, [encode_row(of, row) for row in rows], subject="state")
    assert [tuple(row.values()) for row in found.to_pylist()] == rows


def test_an_array_with_more_elements_than_one_word_has_bits_for_nulls() -> None:
    of = row_of(ArrayType(atom("byte"), contains_null=True))
    rows = [([None if n % 7 == 0 else n % 100 for n in range(200)],), ([],), (None,)]
    assert [
        row["f0"] for row in decode_rows(of, [encode_row(of, row) for row in rows], subject="state").to_pylist()
    ] == [row[0] for row in rows]


def test_times_are_reported_in_utc_and_as_they_are() -> None:
    of = row_of(atom("timestamp"), atom("timestamp_ntz"), atom("date"), atom("interval day to second"))
    micros = 1_700_000_000_123_456
    (row,) = decode_rows(of, [encode_row(of, (micros, -micros, -3, micros))], subject="state").to_pylist()
    at = dt.timedelta(microseconds=micros)
    assert row["f0"] == (EPOCH + at).replace(tzinfo=dt.UTC)
    assert (row["f1"], row["f2"], row["f3"]) == (EPOCH - at, dt.date(1969, 12, 29), at)


def test_keys_and_values_come_out_of_one_buffer() -> None:
    key, value = row_of(TEXT), row_of(LONG, BYTES)
    pairs = [((f"k{n}",), (n, bytes([n]) * n)) for n in range(5)]
    keys, decoded = decode_pairs(
        key, value, [(encode_row(key, k), encode_row(value, v)) for k, v in pairs], subject="state"
    )
    assert keys.to_pylist() == [plain(key, k) for k, _ in pairs]
    assert decoded.to_pylist() == [plain(value, v) for _, v in pairs]
    assert [len(each) for each in decode_pairs(key, value, [], subject="state")] == [0, 0]


NESTED = row_of(
    TEXT, ArrayType(TEXT, contains_null=True), MapType(TEXT, LONG, value_contains_null=True), row_of(LONG, DECIMALS[3])
)


def test_no_byte_makes_a_row_that_breaks_the_reader() -> None:
    """Whatever a byte holds, the answer is rows of the right shape or an error that says so."""
    row = encode_row(NESTED, ("text", ["a", None, "ccc"], {"k": 1, "l": None}, (7, Decimal("-12345678901234567890.5"))))
    refused = 0
    for at in range(len(row)):
        for flipped in (0x01, 0x80, 0xFF):
            damaged = bytearray(row)
            damaged[at] ^= flipped
            try:
                found = decode_rows(NESTED, [row, bytes(damaged), row], subject="state")
            except DamagedError:
                refused += 1
                continue
            found.validate()
            assert found[0] == found[2]
    assert refused > len(row)


@pytest.mark.parametrize("row", [b"", b"\0", b"\0" + bytes(8), b"\1" + bytes(16), b"\0" + bytes(15)])
def test_what_is_no_row_of_the_schema_is_damage(row: bytes) -> None:
    with pytest.raises(DamagedError, match="a row"):
        decode_rows(row_of(LONG), [encode_row(row_of(LONG), (1,)), row], subject="state").validate()


@pytest.mark.parametrize("order, shown", [((0, 1), ["hello", "world"]), ((1, 0), None), ((0, 0), None)])
def test_texts_stand_one_behind_the_other(order: tuple[int, int], shown: list[str] | None) -> None:
    """As in the array's own order, or two in one place: never a text of other bytes."""
    words = [word.encode().ljust(8, b"\0") for word in ("hello", "world")]
    head = 8 * 4
    places = b"".join(((head + 8 * place) << 32 | 5).to_bytes(8, "little") for place in order)
    array = (2).to_bytes(8, "little") + bytes(8) + places + b"".join(words)
    row = b"\0" + bytes(8) + (16 << 32 | len(array)).to_bytes(8, "little") + array
    of = row_of(ArrayType(TEXT, contains_null=True))
    if shown is None:
        with pytest.raises(DamagedError, match="one behind the other"):
            decode_rows(of, [row], subject="x")
    else:
        assert decode_rows(of, [row], subject="x").to_pylist() == [{"f0": shown}]


def test_types_that_arrow_or_spark_has_no_form_for_are_not_known() -> None:
    arrow_type(row_of(*map(atom, ATOMS), *DECIMALS, atom("interval hour to second"), atom("interval day")))
    for of in (atom("interval"), atom("interval year to month"), atom("variant"), DecimalType(4, -2)):
        for field in (row_of(LONG, of), ArrayType(of, contains_null=True), MapType(LONG, of, value_contains_null=True)):
            with pytest.raises(KeyError):
                arrow_type(field)


def test_large_columns_are_as_fast_as_they_are_meant_to_be() -> None:
    """A loop over rows would show here as seconds."""
    of = row_of(TEXT, LONG)
    rows = [encode_row(of, (f"key-{n % 100}", n)) for n in range(100)] * 1000
    found = decode_rows(of, rows, subject="state")
    assert int(np.sum(found.field(1).to_numpy())) == sum(range(100)) * 1000
