"""Schema files of every version, and types as Spark's JSON has them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from index.errors import BatchLogError, UnknownFormatError
from index.java_text import encode_utf
from index.spark.schema import (
    ArrayType,
    AtomType,
    DecimalType,
    Field,
    KeyForm,
    MapType,
    StateSchema,
    StructType,
    decode_key_form,
    decode_state_schema,
    decode_type,
    unique_names,
    with_unique_names,
)

GOLDEN = Path(__file__).parents[3] / "golden/spark"


def row_json(**fields: Any) -> str:
    listed = [{"name": n, "type": of, "nullable": True, "metadata": {}} for n, of in fields.items()]
    return json.dumps({"type": "struct", "fields": listed})


def row(**fields: Any) -> StructType:
    return StructType(tuple(Field(name, of, nullable=True) for name, of in fields.items()))


def chunks(*texts: str) -> bytes:
    return struct.pack(">i", len(texts)) + b"".join(map(encode_utf, texts))


def deep(arrays: int) -> str:
    return row_json(deep="@").replace(
        '"@"', '{"type":"array","containsNull":true,"elementType":' * arrays + '"long"' + "}" * arrays
    )


LONG, TEXT = AtomType("long"), AtomType("string")
KEY, VALUE = row_json(k="string"), row_json(n="long")
V1 = b"".join(map(encode_utf, ("v1", KEY, VALUE)))
V2 = encode_utf("v2") + chunks(KEY[:10], KEY[10:]) + chunks(VALUE)
SPEC = '{"keyStateEncoderType":"NoPrefixKeyStateEncoderSpec"}'
FAMILY = struct.pack(">h", 0) + chunks(KEY) + struct.pack(">h", 0) + chunks(VALUE) + chunks(SPEC) + chunks("{    }")
V3 = encode_utf("v3") + struct.pack(">i", 2) + encode_utf("count") + FAMILY + encode_utf("items") + FAMILY


@pytest.mark.parametrize("data", [V1, V2])
def test_a_table_is_read_from_either_version(data: bytes) -> None:
    assert decode_state_schema(data) == (StateSchema(key=row(k=TEXT), value=row(n=LONG)),)


def test_column_families_are_read_by_name() -> None:
    found = decode_state_schema(V3)
    assert [(schema.family, schema.key_encoder) for schema in found] == [("count", SPEC), ("items", SPEC)]
    assert {(schema.key, schema.value) for schema in found} == {(row(k=TEXT), row(n=LONG))}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/state/*/*/_metadata/schema")), ids=lambda path: path.parts[-6])
def test_what_spark_wrote_is_read(path: Path) -> None:
    (schema,) = decode_state_schema(path.read_bytes())
    assert schema.key == row(k=TEXT)
    assert schema.value == row(count=LONG, sum=LONG, max=TEXT)


@pytest.mark.parametrize(
    "of, metadata, is_collated",
    [
        ("string", {}, False),
        ("string collate UTF8_BINARY", {}, False),
        ("string collate UTF8_BINARY_RTRIM", {}, True),
        ("string collate UNICODE", {}, True),
        ({"type": "array", "elementType": "string collate UTF8_LCASE", "containsNull": True}, {}, True),
        ("string", {"__COLLATIONS": {"k": "icu.UNICODE_CI"}}, True),
    ],
)
def test_a_field_says_whether_its_texts_have_a_collation(of: Any, metadata: dict[str, Any], is_collated: bool) -> None:
    field = {"name": "k", "type": of, "nullable": True, "metadata": metadata}
    found = decode_type(json.dumps({"type": "struct", "fields": [field]}))
    assert isinstance(found, StructType)
    assert found.fields[0].is_collated == is_collated


def test_every_form_of_a_type_is_known() -> None:
    of = row_json(
        a={"type": "array", "elementType": "decimal(20,3)", "containsNull": False},
        b={
            "type": "map",
            "keyType": "string",
            "valueType": json.loads(row_json(c="decimal")),
            "valueContainsNull": True,
        },
        d="varchar(7)",
        e="interval day to second",
        f={"type": "udt", "class": "x", "sqlType": "long"},
    )
    assert decode_type(of) == row(
        a=ArrayType(DecimalType(20, 3), contains_null=False),
        b=MapType(TEXT, row(c=DecimalType(10, 0)), value_contains_null=True),
        d=TEXT,
        e=AtomType("interval day to second"),
        f=AtomType("udt"),
    )


def test_a_type_may_be_as_deep_as_a_person_would_write_one() -> None:
    assert with_unique_names(decode_type(deep(98))) == decode_type(deep(98))
    with pytest.raises(BatchLogError, match="deeper than 100"):
        decode_type(deep(99))


@pytest.mark.parametrize("data", [V1, V2, V3])
def test_a_file_that_is_cut_short_or_goes_on_is_refused(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises(BatchLogError):
            decode_state_schema(data[:size])
    with pytest.raises(BatchLogError, match="after its end"):
        decode_state_schema(data + b"\0")


@pytest.mark.parametrize(
    "data, error",
    [
        (encode_utf("v4"), UnknownFormatError),
        (encode_utf("x"), BatchLogError),
        (encode_utf("v2") + struct.pack(">i", -1), BatchLogError),
        (encode_utf("v2") + struct.pack(">i", 2**31 - 1), BatchLogError),
        (encode_utf("v2") + chunks('"long"') + chunks(VALUE), BatchLogError),
        (encode_utf("v2") + chunks("{") + chunks(VALUE), BatchLogError),
        (encode_utf("v2") + chunks('{"type":"struct","fields":[{"name":1}]}') + chunks(VALUE), BatchLogError),
        (encode_utf("v2") + chunks('{"type":["struct"]}') + chunks(VALUE), BatchLogError),
        (encode_utf("v2") + chunks("[" * 60_000) + chunks(VALUE), BatchLogError),
        (encode_utf("v2") + chunks(deep(100)) + chunks(VALUE), BatchLogError),
        (encode_utf("v2") + chunks(deep(900)) + chunks(VALUE), BatchLogError),
    ],
)
def test_what_spark_never_writes_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_state_schema(data)


def test_fields_of_one_name_are_numbered() -> None:
    inner = StructType((Field("x", LONG, nullable=True), Field("x", TEXT, nullable=False)))
    fields = [Field(name, of, nullable=True) for name, of in (("sum", LONG), ("sum_0", LONG), ("sum", inner))]
    named = with_unique_names(ArrayType(StructType(tuple(fields)), contains_null=True))
    assert isinstance(named, ArrayType)
    assert isinstance(named.element, StructType)
    assert [field.name for field in named.element.fields] == ["sum_1", "sum_0", "sum_2"]
    inner_named = named.element.fields[2].type
    assert isinstance(inner_named, StructType)
    assert [field.name for field in inner_named.fields] == ["x_0", "x_1"]
    assert with_unique_names(row(a=LONG, b=TEXT)) == row(a=LONG, b=TEXT)


def test_many_fields_of_one_name_take_no_time() -> None:
    """A schema file may have a hundred thousand."""
    assert unique_names(["x"] * 50_000)[-1] == "x_49999"


def schema_with(encoder: str, fields: int = 2) -> StateSchema:
    key = row(**{f"f{n}": LONG for n in range(fields)})
    return StateSchema(key=key, value=row(n=LONG), key_encoder=encoder)


@pytest.mark.parametrize(
    "encoder, form",
    [
        (SPEC, KeyForm()),
        ('{"keyStateEncoderType":"PrefixKeyScanStateEncoderSpec","numColsPrefixKey":1}', KeyForm("prefix", (0,))),
        ('{"keyStateEncoderType":"RangeKeyScanStateEncoderSpec","orderingOrdinals":[1]}', KeyForm("range", (1,))),
        ('{"keyStateEncoderType":"TimestampAsPrefixKeyStateEncoderSpec"}', KeyForm("time_first", (1,))),
        ('{"keyStateEncoderType":"TimestampAsPostfixKeyStateEncoderSpec"}', KeyForm("time_last", (1,))),
        ('{"keyStateEncoderType":"OfANewerSparkStateEncoderSpec"}', None),
        ('{"keyStateEncoderType":"RangeKeyScanStateEncoderSpec","orderingOrdinals":[1,0]}', None),
    ],
)
def test_the_encoder_of_a_key_says_its_form(encoder: str, form: KeyForm | None) -> None:
    assert decode_key_form(schema_with(encoder)) == form


@pytest.mark.parametrize(
    "encoder",
    [
        "",
        "{}",
        SPEC[:-1] + ',"x":' + "[" * 60_000,
        SPEC[:-1] + ',"x":' + "[" * 60_000 + "]" * 60_000 + "}",
        '{"keyStateEncoderType":"PrefixKeyScanStateEncoderSpec","numColsPrefixKey":2}',
        '{"keyStateEncoderType":"PrefixKeyScanStateEncoderSpec","numColsPrefixKey":99999999999}',
        '{"keyStateEncoderType":"PrefixKeyScanStateEncoderSpec","numColsPrefixKey":-1}',
        '{"keyStateEncoderType":"PrefixKeyScanStateEncoderSpec"}',
        '{"keyStateEncoderType":"RangeKeyScanStateEncoderSpec","orderingOrdinals":[2]}',
        '{"keyStateEncoderType":"RangeKeyScanStateEncoderSpec","orderingOrdinals":[-1]}',
        '{"keyStateEncoderType":"RangeKeyScanStateEncoderSpec","orderingOrdinals":[0,0]}',
        '{"keyStateEncoderType":"RangeKeyScanStateEncoderSpec","orderingOrdinals":[0,1,1]}',
    ],
)
def test_an_encoder_that_no_key_can_have_is_refused(encoder: str) -> None:
    with pytest.raises(BatchLogError):
        decode_key_form(schema_with(encoder))


def test_a_key_of_one_field_has_no_part_that_leads() -> None:
    with pytest.raises(BatchLogError, match="1 fields"):
        decode_key_form(schema_with('{"keyStateEncoderType":"TimestampAsPrefixKeyStateEncoderSpec"}', fields=1))
