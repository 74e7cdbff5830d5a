"""Changelogs of all four versions: bytes that Spark wrote, and bytes that nobody would (design 0004, L1 to L5)."""

import struct

import pytest
from typing_extensions import override

from index.errors import (
    DamagedChangelogError,
    LineageError,
    UnknownFormatError,
    UnsafeNameError,
    UnsupportedRecordError,
)
from index.java_text import encode_utf
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import (
    DELETE,
    DELETE_RANGE,
    FIELD_BYTES_MAX,
    MERGE,
    PUT,
    ChangelogDecoder,
    ChangelogHeader,
    ChangelogVersion,
    Record,
    changelog_version,
    decode_header,
    encode_end,
    encode_header,
    encode_record,
)

VERSIONS: tuple[ChangelogVersion, ...] = (1, 2, 3, 4)
LINEAGE = (
    LineageItem(3, UniqueId("f10aed9c-63f0-487b-b598-8011971eae1b")),
    LineageItem(4, UniqueId("0a2b7c11-5d0e-4a5c-9d27-5a1a3f0b9a01")),
)
# Written by the StateStoreChangelogWriterV1 to V4 of Spark 4.3.0, decompressed: put(apple, red), put("", ""),
# delete(pear), and in versions 2 and 4 merge(apple, green), deleteRange(b, d).
_LINEAGE_HEX = (
    "00955b7b2276657273696f6e223a332c22636865636b706f696e74556e697175654964223a2266313061656439632d363366302d343837622d"
    "623539382d383031313937316561653162227d2c7b2276657273696f6e223a342c22636865636b706f696e74556e697175654964223a223061"
    "3262376331312d356430652d346135632d396432372d356131613366306239613031227d5d"
)
_PLAIN_HEX = "000000056170706c650000000372656400000000000000000000000470656172ffffffff"
_TYPED_HEX = (
    "01000000056170706c6500000003726564010000000000000000100000000470656172ffffffff11000000056170706c6500000005677265"
    "656e200000000162000000016400"
)
_SPARK_HEADERS = {
    1: b"",
    2: bytes.fromhex("00027632"),
    3: bytes.fromhex("00027633" + _LINEAGE_HEX),
    4: bytes.fromhex("00027634" + _LINEAGE_HEX),
}
_SPARK_BODIES = {1: bytes.fromhex(_PLAIN_HEX + "ffffffff"), 2: bytes.fromhex(_TYPED_HEX)}
_SPARK_ENDS = {1: b"\xff\xff\xff\xff", 2: b"\0"}
PLAIN_RECORDS: tuple[Record, ...] = ((PUT, b"apple", b"red"), (PUT, b"", b""), (DELETE, b"pear", b""))
TYPED_RECORDS: tuple[Record, ...] = (*PLAIN_RECORDS, (MERGE, b"apple", b"green"), (DELETE_RANGE, b"b", b"d"))


def records_of(version: ChangelogVersion) -> tuple[Record, ...]:
    return TYPED_RECORDS if version in {2, 4} else PLAIN_RECORDS


def lineage_of(version: ChangelogVersion) -> tuple[LineageItem, ...]:
    return LINEAGE if version >= 3 else ()


def spark_bytes(version: ChangelogVersion, *, empty: bool = False) -> bytes:
    form = 1 if version in {1, 3} else 2
    return _SPARK_HEADERS[version] + (_SPARK_ENDS if empty else _SPARK_BODIES)[form]


def decode(data: bytes, chunk_bytes: int = 1 << 20, **settings: int) -> tuple[ChangelogHeader | None, list[Record]]:
    decoder = ChangelogDecoder("7.changelog", **settings)
    records: list[Record] = []
    for at in range(0, len(data), chunk_bytes):
        records += decoder.feed(data[at : at + chunk_bytes])
    decoder.finish()
    return decoder.header, records


def encode(version: ChangelogVersion, records: tuple[Record, ...] = ()) -> bytes:
    body = b"".join(encode_record(version, record) for record in records)
    return encode_header(version, lineage_of(version)) + body + encode_end(version)


@pytest.mark.spark_case(12)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_spark_wrote_is_read_in_chunks_of_any_size(version: ChangelogVersion, chunk_bytes: int) -> None:
    data = spark_bytes(version)
    header, records = decode(data, chunk_bytes)
    assert header == ChangelogHeader(version, lineage_of(version), len(_SPARK_HEADERS[version]))
    assert tuple(records) == records_of(version)


@pytest.mark.spark_case(12)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_we_write_is_what_spark_writes(version: ChangelogVersion) -> None:
    assert encode(version, records_of(version)) == spark_bytes(version)
    assert encode(version) == spark_bytes(version, empty=True)


@pytest.mark.spark_case(12)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_empty_changelog_of_spark_has_its_version_and_its_lineage(version: ChangelogVersion) -> None:
    header, records = decode(spark_bytes(version, empty=True))
    assert header is not None
    assert (header.version, header.lineage, records) == (version, lineage_of(version), [])


def test_the_version_follows_from_column_families_and_unique_ids() -> None:
    assert [changelog_version(column_families=f, unique_ids=u) for u in (False, True) for f in (False, True)] == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("version", [3, 4])
def test_a_first_version_has_an_empty_lineage(version: ChangelogVersion) -> None:
    header, _ = decode(encode_header(version) + encode_end(version))
    assert header == ChangelogHeader(version, (), 8)


# --- which version it is ----------------------------------------------------------------------------------------------


@pytest.mark.spark_case(14)
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(b"\xff" * 70_000, id="SPARK-51922: 0x0001 1170, a text of one byte that is none"),
        pytest.param(b"\xff" * 0x3FF_FFF, id="SPARK-51922: a text of 63 bytes that is none"),
        pytest.param(b"a" * 0x20_000, id="a text of two zero bytes"),
        pytest.param(b"", id="an empty key"),
        pytest.param(b"v3", id="a key that reads like a version"),
    ],
)
def test_a_first_key_of_any_length_is_no_version(key: bytes) -> None:
    data = encode_record(1, (PUT, key, b"x")) + encode_end(1)
    header, records = decode(data, 4096)
    assert header == ChangelogHeader(1, (), 0)
    assert records == [(PUT, key, b"x")]


@pytest.mark.spark_case(14)
@pytest.mark.parametrize(
    "length", [0x0002_7629, 0x0002_7676, 0x0002_5632, 0x0002_7631, 0x0003_762B, 0x0003_762D, 0x0001_7676, 0x0002_7620]
)
def test_a_first_length_that_reads_as_a_text_and_is_no_version_is_a_length(length: int) -> None:
    """SPARK-52553: the first reads as `v)`; the others as `vv`, `V2`, `v1`, `v+`, `v-`, `v`, `v `."""
    key = b"2" * length
    header, records = decode(encode_record(1, (PUT, key, b"")) + encode_end(1), 1 << 16)
    assert header == ChangelogHeader(1, (), 0)
    assert records == [(PUT, key, b"")]


@pytest.mark.spark_case(13)
@pytest.mark.parametrize("text", ["v5", "v101", "v32767", "v0", "v02"])
def test_a_later_version_is_an_error_that_says_to_upgrade(text: str) -> None:
    with pytest.raises(UnknownFormatError, match=r"^7\.changelog: is a changelog of version") as error:
        decode(encode_utf(text) + b"\0" * 20)
    assert "upgrade" in error.value.hint


@pytest.mark.parametrize(
    "start,complete,expected",
    [
        (b"", False, None),
        (b"\0", False, None),
        (b"\0\2", False, None),
        (b"\0\2v", False, None),
        (b"\0\2v3", False, None),
        (b"\0\2v3\0", False, None),
        (b"\0\2v3\0\2[", False, None),
        (b"\0\2v3\0\2[]", False, ChangelogHeader(3, (), 8)),
        (b"\0\2v2", False, ChangelogHeader(2, (), 4)),
        (b"\0\7", False, ChangelogHeader(1)),
        (b"\xff\xff", False, ChangelogHeader(1)),
        (b"\0\6v32768", False, ChangelogHeader(1)),
        (b"", True, ChangelogHeader(1)),
        (b"\0\2v", True, ChangelogHeader(1)),
        (b"\0\6v4", True, ChangelogHeader(1)),
    ],
)
def test_a_header_is_recognised_by_as_few_bytes_as_it_takes(
    start: bytes, complete: bool, expected: ChangelogHeader | None
) -> None:
    assert decode_header(start, complete=complete) == expected


@pytest.mark.parametrize(
    "lineage",
    [b"", b"\0", b"\0\5[]", encode_utf("x"), encode_utf('[{"version":0,"checkpointUniqueId":"a"}]'), b"\0\2\xff\xff"],
)
def test_a_header_with_no_lineage_that_can_be_read_is_damaged(lineage: bytes) -> None:
    with pytest.raises(DamagedChangelogError) as error:
        decode_header(b"\0\2v4" + lineage, complete=True, subject="7.changelog")
    assert error.value.subject == "7.changelog"


def test_an_id_in_a_header_that_leads_to_another_file_is_refused() -> None:
    with pytest.raises(UnsafeNameError):
        decode(b"\0\2v3" + encode_utf('[{"version":3,"checkpointUniqueId":"../../3"}]'))


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_changelog_that_is_cut_anywhere_is_damaged(version: ChangelogVersion) -> None:
    data = spark_bytes(version)
    for length in range(len(data)):
        with pytest.raises(DamagedChangelogError, match=r"7\.changelog"):
            decode(data[:length], 5)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
@pytest.mark.parametrize("extra", [b"\0", b"\xff" * 4, b"more"])
def test_bytes_after_the_end_mark_are_damage(version: ChangelogVersion, chunk_bytes: int, extra: bytes) -> None:
    with pytest.raises(DamagedChangelogError, match="after its end mark"):
        decode(spark_bytes(version) + extra, chunk_bytes)


def integer(number: int) -> bytes:
    return struct.pack(">i", number)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    "version,body,at",
    [
        pytest.param(1, integer(-2) + b"x" * 99, 0, id="a key of length -2"),
        pytest.param(1, integer(1) + b"k" + integer(-2) + b"x" * 99, 5, id="a value of length -2"),
        pytest.param(1, integer(9) + b"k" * 9, 0, id="a key above the cap"),
        pytest.param(1, integer(1) + b"k" + integer(9) + b"x" * 99, 5, id="a value above the cap"),
        pytest.param(1, integer(2**31 - 1), 0, id="a key as long as Java can have"),
        pytest.param(2, b"\1" + integer(-1) + b"x" * 99, 4, id="a typed key of length -1"),
        pytest.param(2, b"\x10" + integer(9) + b"x" * 99, 4, id="a typed key above the cap"),
        pytest.param(2, b"\1" + integer(1) + b"k" + integer(-1), 10, id="a PUT without a value"),
        pytest.param(2, b"\x11" + integer(1) + b"k" + integer(9) + b"x" * 99, 10, id="a MERGE above the cap"),
        pytest.param(2, b"\x10" + integer(1) + b"k" + integer(0), 10, id="a DELETE with a value"),
        pytest.param(2, b"\x20" + integer(1) + b"k" + integer(-1), 10, id="a DELETE_RANGE without an end"),
        pytest.param(2, b"\x02", 4, id="an unknown type"),
        pytest.param(2, b"\1" + integer(0) + integer(0) + b"\xff" + b"x" * 99, 13, id="an unknown type later on"),
    ],
)
def test_damage_is_found_as_soon_as_it_is_there_and_its_place_is_named(
    version: ChangelogVersion, body: bytes, at: int, chunk_bytes: int
) -> None:
    with pytest.raises(DamagedChangelogError, match=rf"\(at byte {at} of") as error:
        decode(encode_header(version) + body, chunk_bytes, field_bytes_max=8)
    assert error.value.hint


def test_a_length_at_the_cap_is_read() -> None:
    _, records = decode(encode(2, ((PUT, b"k" * 8, b"v" * 8),)), 3, field_bytes_max=8)
    assert records == [(PUT, b"k" * 8, b"v" * 8)]


def test_a_decoder_holds_one_record_at_most() -> None:
    small = (PUT, b"k", b"v" * 10)
    large = (PUT, b"k", b"v" * 10_000)
    data = encode(4, (small, large, small, large))
    decoder = ChangelogDecoder()
    held: list[int] = []
    for at in range(0, len(data), 100):
        decoder.feed(data[at : at + 100])
        held.append(decoder.buffered_bytes)
    decoder.finish()
    assert max(held) < len(encode_record(4, large))
    assert held[-1] == 0


@pytest.mark.timeout(30)
def test_a_long_record_in_many_chunks_is_not_copied_with_each_of_them() -> None:
    """Copied with each, these 65,536 chunks would be half a terabyte."""
    record = (PUT, b"k", bytes(1 << 24))
    header, records = decode(encode(4, (record,)), 256)
    assert header is not None
    assert records == [record]


def test_empty_chunks_change_nothing() -> None:
    decoder = ChangelogDecoder()
    assert decoder.feed(b"") == []
    assert decoder.header is None
    assert decoder.feed(spark_bytes(2)) == list(TYPED_RECORDS)
    assert decoder.feed(b"") == []
    decoder.finish()
    decoder.finish()


# --- what cannot be written -------------------------------------------------------------------------------------------


@pytest.mark.spark_case(13)
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("kind", [MERGE, DELETE_RANGE])
def test_plain_changelogs_take_no_merge_and_no_range(kind: int, version: ChangelogVersion) -> None:
    with pytest.raises(UnsupportedRecordError, match=f"changelog version {version}: cannot hold a") as error:
        encode_record(version, (kind, b"a", b"b"))
    assert error.value.hint


@pytest.mark.spark_case(13)
@pytest.mark.parametrize("version", [1, 2])
def test_changelogs_without_ids_take_no_lineage(version: ChangelogVersion) -> None:
    with pytest.raises(UnsupportedRecordError, match="cannot hold a lineage"):
        encode_header(version, LINEAGE)


def test_a_lineage_that_java_cannot_write_is_refused_with_the_way_out() -> None:
    with pytest.raises(LineageError, match="880 versions is too long") as error:
        encode_header(3, [LineageItem(n, LINEAGE[0].unique_id) for n in range(1, 881)])
    assert "snapshot" in error.value.hint


class Sized(bytes):
    """Bytes that say to be longer than they are."""

    @override
    def __len__(self) -> int:
        return FIELD_BYTES_MAX + 1


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_reader_would_refuse_is_not_written(version: ChangelogVersion) -> None:
    for record in ((PUT, b"", Sized()), (PUT, Sized(), b""), (DELETE, Sized(), b"")):
        with pytest.raises(UnsupportedRecordError, match="bytes"):
            encode_record(version, record)


def test_an_unknown_kind_is_not_written() -> None:
    with pytest.raises(UnsupportedRecordError, match="record type 2"):
        encode_record(2, (2, b"", b""))
