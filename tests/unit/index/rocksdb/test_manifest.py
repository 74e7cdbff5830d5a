"""The form of a MANIFEST by its bytes (design 0010, M1 to M4); RocksDB's own are in tests/golden."""

import contextlib
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from index.errors import FormatError, ManifestError, UnknownFormatError
from index.rocksdb.manifest import (
    BLOCK_BYTES,
    BYTEWISE,
    FILE_NUMBER_MAX,
    LEVELS_MAX,
    SEQUENCE_MAX,
    ManifestFile,
    ManifestState,
    VersionEdit,
    apply_edits,
    decode_edit,
    decode_log,
    decode_manifest,
    encode_edit,
    encode_log,
    measure_log,
)

GOLDEN = (Path(__file__).parents[3] / "golden" / "rocksdb" / "MANIFEST").read_bytes()
BEGINNING = VersionEdit(comparator=BYTEWISE, next_file_number=100, last_sequence=9)

numbers = st.integers(0, 2**64 - 1)
levels = st.integers(0, LEVELS_MAX)
sequences = st.integers(0, SEQUENCE_MAX)
keys = st.binary(min_size=8, max_size=40)
files = st.builds(
    ManifestFile,
    number=st.integers(0, FILE_NUMBER_MAX),
    size_bytes=numbers,
    smallest=keys,
    largest=keys,
    smallest_sequence=sequences,
    largest_sequence=sequences,
    fields=st.lists(st.tuples(st.sampled_from([4, 5, 6, 7, 12, 15, 63, 128]), st.binary(max_size=9))).map(tuple),
)
maybe_numbers = st.none() | numbers
edits = st.builds(
    VersionEdit,
    db_id=st.none() | st.binary(max_size=40),
    comparator=st.none() | st.binary(max_size=40),
    log_number=maybe_numbers,
    previous_log_number=maybe_numbers,
    next_file_number=st.none() | st.integers(0, FILE_NUMBER_MAX),
    family_id_max=st.none() | st.integers(0, 2**32 - 1),
    log_number_min=maybe_numbers,
    last_sequence=st.none() | sequences,
    compact_cursors=st.lists(st.tuples(levels, keys), max_size=3).map(tuple),
    deleted=st.lists(st.tuples(levels, numbers), max_size=3).map(tuple),
    added=st.lists(st.tuples(levels, files), max_size=3).map(tuple),
    family=st.integers(0, 2**32 - 1),
    family_added=st.none() | st.binary(max_size=40),
    is_family_dropped=st.booleans(),
    group_left=st.none() | st.integers(0, 2**32 - 1),
    ignored=st.lists(st.tuples(st.sampled_from([8192, 8199, 8200, 9999]), st.binary(max_size=9))).map(tuple),
)


def file(number: int, **changed: object) -> ManifestFile:
    made = ManifestFile(
        number=number, size_bytes=1, smallest=b"a" * 9, largest=b"b" * 9, smallest_sequence=1, largest_sequence=2
    )
    return made if not changed else made.with_epoch(int(str(changed["epoch"])))


def apply(*after: VersionEdit) -> ManifestState:
    return apply_edits((BEGINNING, *after), subject="MANIFEST")


@given(edits)
def test_an_edit_comes_back_as_it_was(edit: VersionEdit) -> None:
    assert decode_edit(encode_edit(edit), subject="MANIFEST") == edit


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES) | st.integers(BLOCK_BYTES - 30, BLOCK_BYTES), max_size=5), st.data())
def test_records_come_back_as_they_were_and_a_live_log_ends_at_the_last_whole_one(
    sizes: list[int], data: st.DataObject
) -> None:
    records = [bytes((n + 1,)) * size for n, size in enumerate(sizes)]
    log = encode_log(records, crc32c=crc32c)
    assert decode_log(log, crc32c=crc32c, subject="log") == (records, len(log))
    cut = data.draw(st.integers(0, len(log)))
    found, whole_bytes = decode_log(log[:cut], crc32c=crc32c, is_live=True, subject="log")
    assert found == records[: len(found)]
    assert whole_bytes == len(encode_log(found, crc32c=crc32c)) <= cut
    assert len(found) == len(records) or len(encode_log(records[: len(found) + 1], crc32c=crc32c)) > cut
    assert measure_log(log[:cut]) == whole_bytes
    # Later, only what is new is decoded.
    block = whole_bytes // BLOCK_BYTES * BLOCK_BYTES
    rest = decode_log(log[block:], crc32c=crc32c, is_live=True, start=whole_bytes - block, subject="log")
    assert rest == (records[len(found) :], len(log) - block)
    # The file may be made longer before it is written.
    longer = log[:whole_bytes] + bytes(100)
    assert decode_log(longer, crc32c=crc32c, is_live=True, subject="log") == (found, whole_bytes)


def test_a_log_that_is_cut_and_not_live_is_refused() -> None:
    log = encode_log([b"one", b"two" * BLOCK_BYTES], crc32c=crc32c)
    for cut in (5, 12, BLOCK_BYTES, len(log) - 1):
        with pytest.raises(ManifestError, match="cut short"):
            decode_log(log[:cut], crc32c=crc32c, subject="log")


def test_records_of_a_recycled_log_end_where_those_of_another_log_begin() -> None:
    def recyclable(log_number: int, payload: bytes) -> bytes:
        typed = b"\x05" + log_number.to_bytes(4, "little") + payload
        plain = encode_log([b""], crc32c=lambda _: crc32c(typed))
        return plain[:4] + len(payload).to_bytes(2, "little") + typed

    log = recyclable(7, b"one") + recyclable(7, b"two") + recyclable(6, b"old")
    records, whole_bytes = decode_log(log, crc32c=crc32c, subject="log")
    assert (records, whole_bytes) == ([b"one", b"two"], 28)
    assert measure_log(log + b"what is left") == len(log) + 12
    # The first record may say how the others are compressed, and has no number.
    compressed = bytes(4) + b"\x04\x00\x09" + b"\x07\x00\x00\x00"
    assert measure_log(compressed + log + b"what is left") == len(compressed + log) + 12
    assert measure_log(compressed + encode_log([b"one"], crc32c=crc32c) + b"half") == len(compressed) + 10
    assert measure_log(compressed) == len(compressed)


@pytest.mark.parametrize(
    "edit, kind",
    [
        (VersionEdit(deleted=((0, 7),), added=((1, file(11)),)), "compaction"),
        (VersionEdit(next_file_number=12, last_sequence=5, ignored=((8198, b""),)), "compaction"),
        (VersionEdit(log_number=9, added=((0, file(11)),)), "flush"),
        (VersionEdit(log_number=9), "flush"),  # of nothing
        (VersionEdit(log_number_min=9), "flush"),
        (VersionEdit(log_number=9, added=((1, file(11)),)), ""),
        (VersionEdit(log_number=9, added=((0, file(11)),), deleted=((0, 7),)), ""),
        (VersionEdit(added=((0, file(11)),)), ""),  # a file that is ingested
        (VersionEdit(deleted=((0, 7),)), ""),  # a range of files that is deleted
        (VersionEdit(family=1, family_added=b"new", log_number=9), ""),
        (VersionEdit(family=1, is_family_dropped=True, log_number=9), ""),
    ],
)
def test_an_edit_of_a_compaction_or_a_flush_is_known(edit: VersionEdit, kind: str) -> None:
    assert (edit.is_compaction, edit.is_flush) == (kind == "compaction", kind == "flush")


@pytest.mark.parametrize(
    "data, tag",
    [
        (b"\x07", "tag 7, a file of LevelDB"),
        (b"\x64", "tag 100"),
        (b"\x90\x03\x01", "tag 400, a blob file"),
        (b"\x82\x40\x01", "tag 8194, a blob file"),
        (b"\x84\x40\x01", "tag 8196, a write-ahead log"),
        (b"\x37", "tag 55"),
        (b"\xff\x3f\x00", "tag 8191"),
        (b"\x80\x80\x01\x00", "tag 16384"),
        (b"\x67\x00\x01\x01" + 2 * (b"\x08" + bytes(8)) + b"\x00\x00\x41\x01\x00\x01", "the field 65"),
    ],
)
def test_what_must_not_be_passed_over_is_refused_by_its_number(data: bytes, tag: str) -> None:
    with pytest.raises(UnknownFormatError, match=tag):
        decode_edit(data, subject="MANIFEST")


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        b"\x01\xff\xff\xff\xff\x0f",  # a length of 4 GiB
        b"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01a",
        b"\x06\x41\x01",  # level 65
        b"\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x67\x00\x01\x01\x07" + bytes(30),  # a key that is shorter than its sequence number and kind
        b"\x67\x00\x01\x01" + 2 * (b"\x08" + bytes(8)) + b"\x00\x00\x0d\x01\x80\x01",
    ],
)
def test_what_is_not_an_edit_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_edit(data, subject="MANIFEST")


def test_edits_amount_to_the_files_that_are_left() -> None:
    state = apply(
        VersionEdit(family=3, family_added=b"other", comparator=BYTEWISE),
        VersionEdit(added=((0, file(8)), (0, file(9)), (2, file(4)))),
        VersionEdit(family=3, added=((0, file(10)),), log_number=5, family_id_max=4),
        VersionEdit(deleted=((0, 8), (0, 9)), added=((1, file(8)),), last_sequence=70),
        VersionEdit(group_left=1, added=((6, file(11)),)),
        VersionEdit(group_left=0, family=3, added=((6, file(12)),)),
        VersionEdit(group_left=1, added=((6, file(13)),)),
    )
    assert [(family.id, family.name, family.log_number) for family in state.families] == [
        (0, b"default", 0),
        (3, b"other", 5),
    ]
    placed = [[(level, each.number) for level, each in family.files] for family in state.families]
    assert placed == [[(1, 8), (2, 4), (6, 11)], [(0, 10), (6, 12)]]
    assert (state.last_sequence, state.next_file_number, state.family_id_max) == (70, 100, 4)


@pytest.mark.parametrize(
    "after, message",
    [
        ((VersionEdit(deleted=((0, 8),)),), "deletes file 8"),
        ((VersionEdit(added=((0, file(8)),)), VersionEdit(deleted=((1, 8),))), "from level 1"),
        ((VersionEdit(added=((0, file(8)), (1, file(8)))),), "adds file 8 twice"),
        ((VersionEdit(added=((0, file(100)),)),), "next one is 100"),
        ((VersionEdit(family=1),), "which is not there"),
        ((VersionEdit(family=1, family_added=b"x"),), "comparator of column family b'x'"),
        ((VersionEdit(family=1, family_added=b"default"),), "twice"),
        ((VersionEdit(is_family_dropped=True),), "drops the default"),
        ((VersionEdit(comparator=b"another"),), "changes the comparator"),
        ((VersionEdit(group_left=2), VersionEdit(group_left=0)), "atomic group"),
    ],
)
def test_edits_that_contradict_each_other_are_refused(after: tuple[VersionEdit, ...], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        apply(*after)


def test_a_store_without_its_numbers_is_refused() -> None:
    with pytest.raises(ManifestError, match="last sequence"):
        decode_manifest(b"", crc32c=crc32c, subject="MANIFEST")


def test_an_epoch_number_is_replaced() -> None:
    assert file(8).epoch is None
    assert file(8, epoch=300).epoch == 300
    assert file(8, epoch=300).with_epoch(2) == file(8, epoch=2)


@given(st.integers(0, len(GOLDEN) - 1), st.integers(1, 255))
def test_a_byte_that_is_changed_is_refused_or_changes_nothing(at: int, bits: int) -> None:
    changed = bytearray(GOLDEN)
    changed[at] ^= bits
    with contextlib.suppress(FormatError):
        assert decode_manifest(bytes(changed), crc32c=crc32c, subject="MANIFEST") == decode_manifest(
            GOLDEN, crc32c=crc32c, subject="MANIFEST"
        )


# Between two records a cut cannot be seen: that is what the store was before the records behind it.
@example(37916)
@given(st.integers(0, len(GOLDEN) - 1))
def test_a_cut_is_refused_unless_it_is_between_two_records(at: int) -> None:
    records, whole_bytes = decode_log(GOLDEN[:at], crc32c=crc32c, is_live=True, subject="MANIFEST")
    if any(GOLDEN[whole_bytes:at]) or not records:
        with pytest.raises(ManifestError):
            decode_manifest(GOLDEN[:at], crc32c=crc32c, subject="MANIFEST")
    else:
        edits = [decode_edit(record, subject="MANIFEST") for record in records]
        with contextlib.suppress(ManifestError):  # the edits before may be half of an atomic group
            assert decode_manifest(GOLDEN[:at], crc32c=crc32c, subject="MANIFEST") == apply_edits(
                edits, subject="MANIFEST"
            )


def test_edits_make_the_same_of_what_earlier_ones_have_made() -> None:
    records, _ = decode_log(GOLDEN, crc32c=crc32c, subject="MANIFEST")
    edits = [decode_edit(record, subject="MANIFEST") for record in records]
    whole = apply_edits(edits, subject="MANIFEST")
    assert len(edits) > 2
    for at in range(1, len(edits) + 1):
        with contextlib.suppress(ManifestError):  # the first ones do not make a store yet
            before = apply_edits(edits[:at], subject="MANIFEST")
            assert apply_edits(edits[at:], onto=before, subject="MANIFEST") == whole
    assert apply_edits([], onto=whole, subject="MANIFEST") == whole
