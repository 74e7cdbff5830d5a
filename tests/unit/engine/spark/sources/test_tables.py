"""Keys and values of column families in every form that Spark writes, and what none of it can be."""

import datetime as dt
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from engine.errors import DamagedError
from engine.spark.sources.tables import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Table, decode_keys, decode_values, split_typed
from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, Field, KeyForm, MapType, StructType
from tests.unit.engine.arrow.test_unsafe_rows import DECIMALS, LONG, TEXT, atom, plain, row_of
from tests.unit.engine.arrow.unsafe_row_writer import encode_row

KEY, VALUE = row_of(LONG, TEXT), row_of(TEXT, LONG)
SIGN = 1 << 63


def named(**types: DataType) -> StructType:
    return StructType(tuple(Field(name, of, nullable=True) for name, of in types.items()))


def sized(data: bytes) -> bytes:
    return struct.pack("<i", len(data)) + data


def ranged(number: int | None) -> bytes:
    """A number that sorts as bytes: its sign, or that it is null, and the number big-endian."""
    return b"\2" + bytes(8) if number is None else struct.pack(">bq", number >= 0, number)


def time(number: int) -> bytes:
    return struct.pack(">Q", number % (1 << 64) ^ SIGN)


def avro(of: DataType, value: Any, *, in_union: bool = True) -> bytes:
    """A value as Spark's Avro has it, in the plainest way."""
    if of == AtomType("void"):
        return b""
    if value is None:
        return b"\0"
    return b"\2" * in_union + _avro(of, value)


def _avro(of: DataType, value: Any) -> bytes:  # noqa: PLR0911  # one for each kind of type
    match of:
        case StructType(fields=fields):
            return b"".join(avro(field.type, each) for field, each in zip(fields, value, strict=True))
        case ArrayType(element=element):
            nested = isinstance(element, StructType | ArrayType | MapType)
            items = [avro(element, each, in_union=nested) for each in value]
            # Two blocks, the second with its size.
            first, second = items[:1], items[1:]
            blocks = varint(len(first)) + b"".join(first) if first else b""
            if second:
                blocks += varint(-len(second)) + varint(len(b"".join(second))) + b"".join(second)
            return blocks + b"\0"
        case MapType(value=inner):
            nested = isinstance(inner, StructType | ArrayType | MapType)
            items = [_avro(TEXT, key) + avro(inner, each, in_union=nested) for key, each in value.items()]
            return (varint(len(items)) + b"".join(items) if items else b"") + b"\0"
        case DecimalType(precision=precision, scale=scale):
            size = next(size for size in range(1, 17) if 2 ** (8 * size - 1) >= 10**precision)
            sign, digits, exponent = value.as_tuple()
            number = int("".join(map(str, digits)))
            assert exponent == -scale
            return (-number if sign else number).to_bytes(size, "big", signed=True)
        case AtomType("string" | "binary"):
            data = value.encode() if isinstance(value, str) else value
            return varint(len(data)) + data
        case AtomType("boolean" | "float" | "double" as name):
            return struct.pack({"boolean": "?", "float": "<f", "double": "<d"}[name], value)
    return varint(value)


def varint(number: int) -> bytes:
    coded, out = (number << 1) ^ (number >> 63), b""
    while coded > 0x7F:
        out, coded = out + bytes([coded & 0x7F | 0x80]), coded >> 7
    return out + bytes([coded])


def record(of: StructType, value: Sequence[Any], schema: int = 0) -> bytes:
    return b"\0" + struct.pack("<h", schema) + _avro(of, value)


@pytest.mark.parametrize(
    "form, encode",
    [
        (KeyForm(), lambda n, text: encode_row(KEY, (n, text))),
        (
            KeyForm("prefix", (0,)),
            lambda n, text: sized(encode_row(row_of(LONG), (n,))) + encode_row(row_of(TEXT), (text,)),
        ),
        (
            KeyForm("range", (0,)),
            lambda n, text: sized(encode_row(row_of(atom("binary")), (ranged(n),))) + encode_row(row_of(TEXT), (text,)),
        ),
        (KeyForm("time_first", (0,)), lambda n, text: time(n) + encode_row(row_of(TEXT), (text,))),
        (KeyForm("time_last", (0,)), lambda n, text: encode_row(row_of(TEXT), (text,)) + time(n)),
    ],
    ids=lambda of: of.form if isinstance(of, KeyForm) else "",
)
def test_a_key_is_read_however_it_is_encoded(form: KeyForm, encode: Any) -> None:
    keys = [(-(2**63), "least"), (-1, ""), (0, "none"), (7, "seven"), (2**63 - 1, "most")]
    (found,) = decode_keys(Table(key=KEY, value=VALUE, key_form=form), [encode(*key) for key in keys], subject="x")
    assert found.to_pylist() == [plain(KEY, key) for key in keys]


def test_fields_that_lead_need_not_be_the_first() -> None:
    of = row_of(TEXT, LONG, TEXT, LONG)
    leads = encode_row(row_of(atom("binary"), atom("binary")), (ranged(None), ranged(-3)))
    key = sized(leads) + encode_row(row_of(TEXT, TEXT), ("a", None))
    (found,) = decode_keys(Table(key=of, value=VALUE, key_form=KeyForm("range", (3, 1))), [key], subject="x")
    assert found.to_pylist() == [plain(of, ("a", -3, None, None))]


@pytest.mark.parametrize("delimiter", [b"", b","])
def test_a_list_is_a_row_for_each_element_and_in_a_difference_an_array(delimiter: bytes) -> None:
    rows: list[list[tuple[str, int | None]]] = [[("a", 1), ("b", None)], [], [("c", 3)]]
    stored = [delimiter.join(sized(encode_row(VALUE, each)) for each in row) for row in rows]
    table = Table(key=row_of(LONG), value=VALUE, kind="list", delimiter=delimiter)
    ((keys, elements),) = split_typed(
        table, [(encode_row(row_of(LONG), (n,)), value) for n, value in enumerate(stored)], subject="x"
    )
    assert [(k["f0"], tuple(e.values())) for k, e in zip(keys.to_pylist(), elements.to_pylist(), strict=True)] == [
        (n, each) for n, row in enumerate(rows) for each in row
    ]
    assert decode_values(table, [None], subject="x").to_pylist() == [None]
    assert not [*split_typed(table, [], subject="x")]
    whole = decode_values(table, [stored[0], None, stored[2]], subject="x")
    assert whole.to_pylist() == [[plain(VALUE, each) for each in row] if row else None for row in rows]
    for broken in (
        stored[0][:-1],
        stored[0] + b"x",
        stored[0] + (delimiter or b"x"),
        delimiter or b"x",
        stored[0] + b"\xff" * 4,
        stored[0].replace(delimiter or b"a", b"") + b"?",
    ):
        with pytest.raises(DamagedError):
            decode_values(table, [broken], subject="x")


@pytest.mark.parametrize("key_bytes, batch_rows", [(8, BATCH_ROWS_MAX), (4096, 510), (24_000, 88)])
def test_a_long_list_is_read_in_batches_however_long_its_key_is(key_bytes: int, batch_rows: int) -> None:
    key_type, element_type = row_of(TEXT), row_of(LONG)
    keys = [encode_row(key_type, (letter * key_bytes,)) for letter in "kl"]
    lists = [list(range(70_000)), list(range(3))]
    stored = [b"".join(sized(encode_row(element_type, (n,))) for n in each) for each in lists]
    table = Table(key=key_type, value=element_type, kind="list")
    found: list[tuple[str, int]] = []
    sizes: list[int] = []
    for batch in split_typed(table, [*zip(keys, stored, strict=True)], subject="x"):
        key, element = batch
        found += zip((k[:1] for k in key.flatten()[0].to_pylist()), element.flatten()[0].to_pylist(), strict=True)
        sizes.append(len(key))
        assert key.nbytes < BATCH_BYTES_MAX + 2 * key_bytes + 4 * batch_rows
    assert set(sizes[:-1]) == {batch_rows} >= {max(sizes)}
    assert found == [(letter, n) for letter, each in zip("kl", lists, strict=True) for n in each]


def test_a_map_and_a_timer_have_the_columns_of_sparks_reader() -> None:
    of = row_of(row_of(TEXT), row_of(LONG))
    key = sized(encode_row(row_of(row_of(TEXT)), (("k",),))) + encode_row(row_of(row_of(LONG)), ((5,),))
    table = Table(key=of, value=VALUE, key_form=KeyForm("prefix", (0,)), kind="map")
    assert [name for name, *_ in (*table.key_columns(), *table.value_columns())] == [
        "key",
        "user_map_key",
        "user_map_value",
    ]
    (found,) = split_typed(table, [(key, encode_row(VALUE, ("v", 1)))], subject="x")
    assert [column.to_pylist() for column in found] == [[{"f0": "k"}], [{"f0": 5}], [plain(VALUE, ("v", 1))]]
    timer = Table(key=row_of(row_of(TEXT), LONG), value=VALUE, key_form=KeyForm("prefix", (0,)), kind="timer")
    assert [name for name, *_ in (*timer.key_columns(), *timer.value_columns("before"))] == [
        "key",
        "expiration_timestamp_ms",
    ]
    assert not Table(key=KEY, value=VALUE, kind="map", key_form=KeyForm("range", (1,))).is_known
    assert not Table(key=row_of(LONG), value=VALUE, kind="map").is_known


# What Spark can write: an array has no element that is null, but for a nested one.
AVRO: dict[DataType, list[Any]] = {
    **{atom(name): [-1, 0, 63, 64, 127, -128] for name in ("byte", "short", "integer", "long")},
    LONG: [-(2**63), 2**63 - 1, 2**31],
    atom("float"): [0.5, -float("inf")],
    atom("double"): [0.1, -1e308],
    atom("boolean"): [True, False],
    atom("void"): [None],
    TEXT: ["", "text", "日本" * 40],
    atom("binary"): [b"", bytes(range(256))],
    **{of: [Decimal((sign, (9,) * of.precision, -of.scale)) for sign in (0, 1)] for of in DECIMALS},
    ArrayType(LONG, contains_null=False): [[], [1], [1, -2, 3]],
    ArrayType(ArrayType(TEXT, contains_null=False), contains_null=True): [[["a"], None, []]],
    MapType(TEXT, LONG, value_contains_null=False): [{}, {"a": 1, "b": -1}],
    MapType(TEXT, row_of(LONG, TEXT), value_contains_null=True): [{"a": (1, None), "b": None}],
    row_of(): [()],
    row_of(atom("void"), row_of(TEXT)): [(None, ("x",)), (None, None)],
}


@pytest.mark.parametrize("of", AVRO, ids=str)
def test_records_of_avro_are_read_as_they_were_written(of: DataType) -> None:
    known = row_of(of, TEXT, of)
    rows = [(value, "between", value) for value in [*AVRO[of], None]]
    table = Table(key=known, value=known, avro=((0, known),))
    assert table.is_known
    found = decode_values(table, [record(known, row) for row in rows], subject="x")
    found.validate(full=True)
    assert found.to_pylist() == [plain(known, row) for row in rows]
    (keys,) = decode_keys(table, [record(known, row) for row in rows], subject="x")
    assert keys.to_pylist() == found.to_pylist()


def test_times_in_avro_are_numbers() -> None:
    of = row_of(atom("timestamp"), atom("timestamp_ntz"), atom("date"))
    micros = 1_700_000_000_123_456
    found = decode_values(Table(key=of, value=of, avro=((0, of),)), [record(of, (micros, -micros, -3))], subject="x")
    (row,) = found.to_pylist()
    epoch, at = dt.datetime.fromtimestamp(0, dt.UTC), dt.timedelta(microseconds=micros)
    assert row == {"f0": epoch + at, "f1": (epoch - at).replace(tzinfo=None), "f2": dt.date(1969, 12, 29)}


def test_a_value_is_read_by_the_schema_it_was_written_with() -> None:
    old, new = named(a=atom("integer"), gone=TEXT, same=TEXT), named(same=TEXT, a=LONG, added=row_of(LONG))
    table = Table(key=KEY, value=new, avro=((0, old), (1, new)))
    rows = [record(old, (7, "x", "s")), record(new, ("t", 2**40, (1,)), schema=1), record(old, (None, None, None))]
    assert decode_values(table, rows, subject="x").to_pylist() == [
        {"same": "s", "a": 7, "added": None},
        {"same": "t", "a": 2**40, "added": {"f0": 1}},
        {"same": None, "a": None, "added": None},
    ]
    third_branch = rows[0].replace(b"\2\2s", b"\4\2s")
    for broken in (
        third_branch,
        record(old, (7, "x", "s"), schema=2),
        b"\1" + rows[0][1:],
        rows[0] + b"\0",
        rows[1][:-1],
        rows[0][:2],
    ):
        with pytest.raises(DamagedError, match="a row"):
            decode_values(table, [broken], subject="x")


@pytest.mark.parametrize(
    "name, exact, rounded",
    [
        ("float", 2**24 + 1, 2.0**24),
        # As a double it is halfway between two floats.
        ("float", -(2**60 + 2**36 + 1), -(2.0**60 + 2.0**37)),
        ("double", 2**53 + 1, 2.0**53),
        ("double", 2**63 - 1, 2.0**63),
    ],
)
def test_a_whole_number_that_became_a_fraction_is_rounded_as_avro_does(name: str, exact: int, rounded: float) -> None:
    def value(of: DataType) -> StructType:
        return named(
            a=of, list=ArrayType(row_of(of), contains_null=True), map=MapType(TEXT, of, value_contains_null=True)
        )

    old, new = value(LONG), value(atom(name))
    table = Table(key=KEY, value=new, avro=((0, old), (1, new)))
    (found,) = decode_values(table, [record(old, (exact, [(exact,), None], {"k": exact}))], subject="x").to_pylist()
    assert found == {"a": rounded, "list": [{"f0": rounded}, None], "map": [("k", rounded)]}


@pytest.mark.parametrize("scale, shown", [(2, "11.25"), (4, "0.1125")])
def test_a_decimal_of_another_scale_keeps_its_digits_as_spark_has_it(scale: int, shown: str) -> None:
    old, new = named(a=DecimalType(10, 3)), named(a=DecimalType(10, scale))
    table = Table(key=KEY, value=new, avro=((0, old), (1, new)))
    (found,) = decode_values(table, [record(old, (Decimal("1.125"),))], subject="x").to_pylist()
    assert found == {"a": Decimal(shown)}


@pytest.mark.parametrize("form", ["prefix", "range"])
def test_keys_of_two_parts_in_avro_name_their_schema_in_the_second(form: Any) -> None:
    first = _avro(row_of(LONG), (-9,)) if form == "prefix" else b"\2\2\0\2\x10" + struct.pack(">q", -9)
    key = sized(b"\0" + first) + record(row_of(TEXT), ("text",))
    table = Table(key=KEY, value=VALUE, key_form=KeyForm(form, (0,)), avro=((0, VALUE),))
    (found,) = decode_keys(table, [key], subject="x")
    assert found.to_pylist() == [{"f0": -9, "f1": "text"}]


def test_no_byte_makes_a_record_that_breaks_the_reader() -> None:
    of = row_of(TEXT, ArrayType(TEXT, contains_null=True), MapType(TEXT, LONG, value_contains_null=True), DECIMALS[3])
    row = record(of, ("text", ["a", "ccc"], {"k": 1, "l": 2}, Decimal("-12345678901234567890.500000000000000000")))
    table, refused = Table(key=of, value=of, avro=((0, of),)), 0
    for at in range(len(row)):
        for flipped in (0x01, 0x80, 0xFF):
            damaged = bytearray(row)
            damaged[at] ^= flipped
            try:
                decode_values(table, [row, bytes(damaged)], subject="x").validate(full=True)
            except DamagedError:
                refused += 1
    assert refused > len(row)


@pytest.mark.parametrize("of", [atom("interval day to second"), MapType(LONG, LONG, value_contains_null=True)])
def test_what_spark_writes_no_avro_of_is_not_known(of: DataType) -> None:
    known = row_of(of)
    assert Table(key=known, value=known).is_known
    assert not Table(key=known, value=known, avro=((0, known),)).is_known


# A length that counts from the end of the key: up to there is a row, and all of the key is one with nulls.
LEADS_FROM_THE_END = struct.pack("<i", -256) + encode_row(row_of(LONG), (5,)) + bytes(252 - 25)


@pytest.mark.parametrize(
    "form, key",
    [
        ("range", sized(encode_row(row_of(atom("binary")), (b"\0" + bytes(8),)))),
        ("range", sized(encode_row(row_of(atom("binary")), (b"\3" + bytes(8),)))),
        ("range", sized(encode_row(row_of(atom("binary")), (bytes(8),)))),
        ("range", sized(encode_row(row_of(atom("binary")), (None,)))),
        ("time_first", b""),
        ("time_last", b""),
        ("prefix", sized(b"")),
        ("prefix", struct.pack("<i", -5)),
        ("prefix", LEADS_FROM_THE_END),
    ],
)
def test_what_is_no_key_of_the_form_is_damage(form: Any, key: bytes) -> None:
    row = encode_row(row_of(TEXT), ("x",))
    key = {"time_first": b"\0" * 7, "time_last": row[:-10]}.get(form, key + row)
    with pytest.raises(DamagedError, match="a row"):
        decode_keys(Table(key=KEY, value=VALUE, key_form=KeyForm(form, (0,))), [key], subject="x")
