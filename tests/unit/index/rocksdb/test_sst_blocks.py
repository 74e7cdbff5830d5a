"""The shape of an SST by its bytes; whole files are read in tests/unit/engine/checkpoint/test_sst_check.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.rocksdb.sst import (
    CRC32C,
    FOOTER_BYTES,
    MAGIC,
    MAGIC_EXTENDED,
    MAGIC_LEGACY,
    XXH3,
    BlockHandle,
    IndexForm,
    checksum_modifier,
    decode_entries,
    decode_footer,
    decode_handle,
    decode_index,
    decode_index_form,
    decode_varint,
    is_filter_index,
    meta_block_kind,
)

FULL = IndexForm(delta=True)


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def handle(offset: int, size: int) -> bytes:
    return varint(offset) + varint(size)


def block(*entries: bytes) -> bytes:
    return b"".join(entries) + bytes(4) + (1).to_bytes(4, "little")


def footer(handles: bytes, version: int = 5, checksum: int = XXH3) -> bytes:
    return bytes([checksum]) + handles.ljust(40, b"\0") + version.to_bytes(4, "little") + MAGIC.to_bytes(8, "little")


def test_the_footer_leads_to_metaindex_and_index() -> None:
    found = decode_footer(footer(handle(900, 70) + handle(500, 300)), 1200)
    assert (found.metaindex, found.index) == (BlockHandle(900, 70), BlockHandle(500, 300))
    assert (found.offset, found.format_version, found.checksum) == (1200 - FOOTER_BYTES, 5, XXH3)


def test_the_oldest_footer_is_shorter_and_says_no_checksum() -> None:
    tail = (handle(900, 70) + handle(500, 300)).ljust(40, b"\0") + MAGIC_LEGACY.to_bytes(8, "little")
    found = decode_footer(tail, 1200)
    assert (found.format_version, found.checksum, found.index) == (0, CRC32C, BlockHandle(500, 300))
    assert found.offset == 1200 - 48


def test_a_footer_of_version_6_has_a_sum_and_the_metaindex_before_it() -> None:
    part = MAGIC_EXTENDED + b"SUM!" + b"BASE" + (70).to_bytes(4, "little")
    found = decode_footer(footer(part, version=6), 1200)
    assert found.metaindex == BlockHandle(1200 - 53 - 5 - 70, 70)
    assert (found.index, found.base_context_checksum) == (None, int.from_bytes(b"BASE", "little"))
    assert found.stored_sum == int.from_bytes(b"SUM!", "little")
    assert found.summed == footer(part.replace(b"SUM!", bytes(4)), version=6)


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"short",
        bytes(FOOTER_BYTES),
        footer(handle(1, 2))[1:],
        footer(handle(1, 2) + handle(3, 4) + b"\1"),
        footer(handle(1, 2) + b"\x83\0" + handle(4, 0)),
        footer(b"\xff" * 40),
        footer(b"\0" * 40, version=6),
        footer(MAGIC_EXTENDED + bytes(12) + b"\1", version=6),
    ],
)
def test_what_is_no_footer_is_refused(tail: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_footer(tail, 1200)


def test_sums_of_blocks_depend_on_their_place_from_version_6_on() -> None:
    assert checksum_modifier(0, 77) == 0
    assert checksum_modifier(0xF0F0F0F0, 0) == 0xF0F0F0F0
    assert checksum_modifier(0xF0F0F0F0, (3 << 32) + 5) == 0xF0F0F0F0 ^ 8


def test_entries_share_what_the_key_before_them_has() -> None:
    contents = block(b"\0\3\1keyA", b"\2\1\2yBC")
    assert list(decode_entries(contents)) == [(b"key", b"A"), (b"key"[:2] + b"y", b"BC")]


def test_names_that_grow_without_end_are_refused() -> None:
    grown = b"".join(varint(n) + b"\1\0a" for n in range(5000))
    with pytest.raises(ValueError, match="unlikely length"):
        list(decode_entries(block(grown)))
    many = b"".join(varint(min(n, 4000)) + b"\1\0a" for n in range(5000))
    with pytest.raises(ValueError, match="unlikely length"):
        list(decode_entries(block(many)))
    # Keys of an index may be long: nobody puts them together.
    long = b"".join(varint(n) + b"\1\2a\1\1" for n in range(20_000))
    assert sum(1 for _ in decode_index(block(long), IndexForm())) == 20_000


def test_an_index_has_its_handles_as_values() -> None:
    entries = [b"\0\1" + varint(len(h)) + b"k" + h for h in (handle(0, 400), handle(405, 300))]
    assert list(decode_index(block(*entries), IndexForm())) == [(0, 400), (405, 300)]


def test_a_delta_encoded_index_says_how_much_larger_a_block_is_than_that_before() -> None:
    contents = block(b"\0\1k" + handle(0, 400), b"\1\1l\x09", b"\1\1m\x04", b"\0\1n" + handle(2000, 7))
    assert list(decode_index(contents, FULL)) == [(0, 400), (405, 395), (805, 397), (2000, 7)]


def test_first_keys_stand_behind_their_handles() -> None:
    form = IndexForm(delta=True, first_keys=True)
    contents = block(b"\0\1k" + handle(0, 400) + b"\2aa", b"\1\1l\x02\1b")
    assert list(decode_index(contents, form)) == [(0, 400), (405, 401)]


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        bytes(8),
        block(b"\0\x7fk"),
        block(b"\0\1k" + handle(0, 400)[:-1]),
        block(b"\0\1k" + handle(0, 4), b"\1\1l\x7f"),
        b"\0\1k\0\4" + (9).to_bytes(4, "little"),
    ],
)
def test_an_index_that_is_none_is_refused(contents: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        list(decode_index(contents, FULL))


@given(st.binary(max_size=200))
def test_no_bytes_make_anything_else_happen(data: bytes) -> None:
    for read in (
        lambda: list(decode_index(data, FULL)),
        lambda: list(decode_index(data, IndexForm())),
        lambda: decode_index_form(dict(decode_entries(data))),
        lambda: decode_footer(data[-FOOTER_BYTES:], len(data)),
        lambda: decode_footer(footer(data[:40].ljust(40, b"\0"), version=6), 1200),
        lambda: decode_handle(data),
    ):
        try:
            read()
        except ValueError:
            continue


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_read_as_they_were_written(value: int) -> None:
    assert decode_varint(b"x" + varint(value) + b"y", 1) == (value, 1 + len(varint(value)))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\0", b"\x85\x80\0", b"\xff" * 10 + b"\1"])
def test_a_number_that_no_writer_writes_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="number"):
        decode_varint(data, 0)


def test_the_properties_say_what_index_it_is() -> None:
    index_type = b"rocksdb.block.based.table.index.type"
    found = decode_index_form({index_type: b"\2\0\0\0", b"rocksdb.num.data.blocks": b"\x85\1"})
    assert (found.two_levels, found.delta, found.data_blocks, found.entries) == (True, False, 133, None)
    with pytest.raises(ValueError, match="unknown type 9"):
        decode_index_form({index_type: b"\x09\0\0\0"})


def test_meta_blocks_are_called_what_they_are() -> None:
    assert meta_block_kind(b"rocksdb.range_del") == "range deletion"
    assert meta_block_kind(b"fullfilter.rocksdb.BuiltinBloomFilter") == "filter"
    assert meta_block_kind(b"rocksdb.of.a.later.day") == "meta"
    assert is_filter_index(b"partitionedfilter.rocksdb.BuiltinBloomFilter")
