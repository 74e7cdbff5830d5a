import functools
import tracemalloc
from pathlib import Path

import pytest

from engine.errors import DamagedError, UsageError
from engine.state.changelogs import ChangelogReader, ChangelogWriter, open_changelog
from engine.state.compression import CODECS, Codec, Compressor, decompress_chunks
from index.errors import DamagedChangelogError, LineageError, UnknownFormatError, UnsupportedRecordError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import (
    DELETE,
    DELETE_RANGE,
    MERGE,
    PUT,
    ChangelogVersion,
    Record,
    encode_end,
    encode_header,
    encode_record,
)
from index.spark.names import StateVersion

LINEAGE = (LineageItem(3, UniqueId("3f2a")), LineageItem(4, UniqueId("77b0")))
VERSIONS: tuple[ChangelogVersion, ...] = (1, 2, 3, 4)


def lineage_of(version: ChangelogVersion) -> tuple[LineageItem, ...]:
    return LINEAGE if version >= 3 else ()


def records_of(reader: ChangelogReader) -> list[Record]:
    return [record for batch in reader for record in batch]


def compressed_file(path: Path, codec: Codec, data: bytes) -> Path:
    compressor = Compressor(codec)
    path.write_bytes(compressor.write(data) + compressor.finish())
    return path


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_written_is_read_back_in_order(tmp_path: Path, codec: Codec, version: ChangelogVersion) -> None:
    path = tmp_path / "5.changelog"
    expected: list[Record] = []
    with ChangelogWriter(path, codec, version, lineage_of(version)) as writer:
        for n in range(3000):
            key, value = b"key-%06d" % (n * 7919 % 3000), b"v" * (n % 200)
            writer.write((PUT, key, value))
            expected.append((PUT, key, value))
        writer.write((DELETE, b"key-000007", b""))
        writer.write((PUT, b"", b""))
        expected += [(DELETE, b"key-000007", b""), (PUT, b"", b"")]
        if version in (2, 4):
            writer.write((MERGE, b"list", b"item"))
            writer.write((DELETE_RANGE, b"a", b"b"))
            expected += [(MERGE, b"list", b"item"), (DELETE_RANGE, b"a", b"b")]
        assert writer.records == len(expected)
        writer.finish()
    with open_changelog(path, codec) as reader:
        assert reader.header.version == version
        assert reader.header.lineage == lineage_of(version)
        assert records_of(reader) == expected


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_without_changes_has_a_changelog_too(tmp_path: Path, codec: Codec, version: ChangelogVersion) -> None:
    writer = ChangelogWriter(tmp_path / "1.changelog", codec, version, lineage_of(version))
    writer.finish()
    with open_changelog(writer.path, codec) as reader:
        assert reader.header.lineage == lineage_of(version)
        assert records_of(reader) == []


def test_the_decompressed_bytes_are_the_header_the_records_and_the_end(tmp_path: Path) -> None:
    writer = ChangelogWriter(tmp_path / "5.changelog", "lz4", 3, LINEAGE)
    writer.write((PUT, b"k", b"v"))
    writer.finish()
    plain = b"".join(decompress_chunks("lz4", [writer.path.read_bytes()]))
    assert plain == encode_header(3, LINEAGE) + encode_record(3, (PUT, b"k", b"v")) + encode_end(3)


@pytest.mark.parametrize("codec", CODECS)
def test_a_record_that_is_larger_than_every_buffer_comes_back(tmp_path: Path, codec: Codec) -> None:
    value = bytes(range(256)) * (2000 if codec == "lzf" else 20_000)
    writer = ChangelogWriter(tmp_path / "5.changelog", codec, 4, LINEAGE)
    writer.write((PUT, b"before", b""))
    writer.write((PUT, b"large", value))
    writer.write((PUT, b"after", b""))
    writer.finish()
    with open_changelog(writer.path, codec) as reader:
        assert records_of(reader) == [(PUT, b"before", b""), (PUT, b"large", value), (PUT, b"after", b"")]


def test_a_lineage_that_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    lineage = [LineageItem(n, UniqueId("0" * 36)) for n in range(1, 1000)]
    with pytest.raises(LineageError):
        ChangelogWriter(tmp_path / "1000_u.changelog", "lz4", 3, lineage)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [1, 3])
def test_what_the_version_cannot_hold_is_refused_and_the_rest_still_written(
    tmp_path: Path, version: ChangelogVersion
) -> None:
    with ChangelogWriter(tmp_path / "5.changelog", "lz4", version, lineage_of(version)) as writer:
        writer.write((PUT, b"k", b"v"))
        with pytest.raises(UnsupportedRecordError):
            writer.write((MERGE, b"k", b"v"))
        with pytest.raises(UnsupportedRecordError):
            writer.write((DELETE_RANGE, b"k", b"l"))
        writer.finish()
    with open_changelog(writer.path, "lz4") as reader:
        assert records_of(reader) == [(PUT, b"k", b"v")]


def test_cancelling_removes_the_file_and_finishing_keeps_it(tmp_path: Path) -> None:
    cancelled = ChangelogWriter(tmp_path / "a", "lz4", 1)
    cancelled.write((PUT, b"k", b"v" * 1_000_000))
    cancelled.cancel()
    cancelled.cancel()
    finished = ChangelogWriter(tmp_path / "b", "lz4", 1)
    finished.finish()
    finished.cancel()
    with pytest.raises(RuntimeError), ChangelogWriter(tmp_path / "c", "lz4", 1):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_nothing_can_be_written_after_the_end(tmp_path: Path) -> None:
    writer = ChangelogWriter(tmp_path / "5.changelog", "lz4", 1)
    writer.finish()
    size_bytes = writer.path.stat().st_size
    for work in (functools.partial(writer.write, (PUT, b"k", b"v")), writer.finish):
        with pytest.raises(UsageError, match="finished or cancelled"):
            work()
    assert writer.path.stat().st_size == size_bytes


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_that_is_cut_short_gives_an_error_that_names_it(tmp_path: Path, codec: Codec) -> None:
    writer = ChangelogWriter(tmp_path / "5_77b0.changelog", codec, 4, LINEAGE)
    for n in range(20_000):
        writer.write((PUT, b"key-%06d" % n, b"%d" % (n * 7919)))
    writer.finish()
    whole = writer.path.read_bytes()
    for cut in (0, 1, 10, 100, len(whole) // 2, len(whole) - 1):
        writer.path.write_bytes(whole[:cut])
        with (
            pytest.raises((DamagedError, DamagedChangelogError)) as raised,
            open_changelog(writer.path, codec) as reader,
        ):
            records_of(reader)
        assert isinstance(raised.value, DamagedError | DamagedChangelogError)
        assert raised.value.subject == "5_77b0.changelog"
        assert raised.value.hint


@pytest.mark.parametrize("codec", CODECS)
def test_a_stream_that_is_whole_without_the_end_mark_is_damaged(tmp_path: Path, codec: Codec) -> None:
    data = encode_header(2) + encode_record(2, (PUT, b"k", b"v"))
    path = compressed_file(tmp_path / "5.changelog", codec, data)
    with open_changelog(path, codec) as reader, pytest.raises(DamagedChangelogError, match="end mark"):
        records_of(reader)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_after_the_end_mark_are_damage(tmp_path: Path, codec: Codec) -> None:
    data = encode_record(1, (PUT, b"k", b"v")) + encode_end(1) + b"\x00"
    path = compressed_file(tmp_path / "5.changelog", codec, data)
    with pytest.raises(DamagedChangelogError), open_changelog(path, codec) as reader:
        records_of(reader)


def test_a_newer_version_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = compressed_file(tmp_path / "5.changelog", "lz4", b"\x00\x02v5" + b"\x00\x02[]" + b"\x00")
    with pytest.raises(UnknownFormatError) as raised, open_changelog(path, "lz4"):
        pass
    assert raised.value.subject == "5.changelog"


def test_another_codec_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    writer = ChangelogWriter(tmp_path / "5.changelog", "zstd", 1)
    writer.write((PUT, b"k", b"v"))
    writer.finish()
    with pytest.raises(DamagedError, match=r"5\.changelog"), open_changelog(writer.path, "lz4"):
        pass


def test_an_empty_file_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    (tmp_path / "5.changelog").touch()
    for codec in CODECS:
        with pytest.raises((DamagedError, DamagedChangelogError)), open_changelog(tmp_path / "5.changelog", codec):
            pass
    with pytest.raises(FileNotFoundError), open_changelog(tmp_path / "6.changelog", "lz4"):
        pass


def test_reading_holds_a_bounded_part_of_a_file(tmp_path: Path) -> None:
    writer = ChangelogWriter(tmp_path / "5.changelog", "lz4", 4, LINEAGE)
    for n in range(8_000):
        writer.write((PUT, b"key-%012d" % n, b"value" * 200))
    writer.finish()
    tracemalloc.start()
    try:
        with open_changelog(writer.path, "lz4") as reader:
            assert sum(map(len, reader)) == 8_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * 1024 * 1024


def test_writing_holds_a_bounded_part_of_a_file(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        writer = ChangelogWriter(tmp_path / "5.changelog", "lz4", 4, LINEAGE)
        for n in range(50_000):
            writer.write((PUT, b"key-%012d" % n, b"value" * 20))
        _, peak_bytes = tracemalloc.get_traced_memory()
        writer.finish()
        assert writer.path.stat().st_size > 100_000
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * 1024 * 1024


def test_records_after_the_first_read_are_not_given_twice(tmp_path: Path) -> None:
    writer = ChangelogWriter(tmp_path / "5.changelog", "lz4", 1)
    writer.write((PUT, b"k", b"v"))
    writer.finish()
    with open_changelog(writer.path, "lz4") as reader:
        assert records_of(reader) == [(PUT, b"k", b"v")]
        assert records_of(reader) == []


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_the_content_of_a_changelog_goes_with_its_name(tmp_path: Path, version: ChangelogVersion) -> None:
    with ChangelogWriter(tmp_path / "fetched", "lz4", version) as writer:
        writer.finish()
    fitting, other = StateVersion(7), StateVersion(7, UniqueId("id"))
    if version > 2:
        fitting, other = other, fitting
    with open_changelog(writer.path, "lz4", fitting) as reader:
        assert reader.header.version == version
    with (
        pytest.raises(DamagedChangelogError, match=rf"^{other}\.changelog: has .* in its name"),
        open_changelog(writer.path, "lz4", other),
    ):
        pass
