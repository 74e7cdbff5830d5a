"""Changelogs and zips that Spark wrote, whole and with each byte altered (design 0005, K4)."""

import struct
from pathlib import Path
from typing import cast

import pytest

from engine.checkpoint.file_check import check_changelog_file, check_zip_file
from engine.errors import DamagedError
from engine.state.compression import Codec
from index.errors import DamagedChangelogError, FileChecksumError, FormatError
from index.spark.names import StateVersion, parse_state_name

GOLDEN = Path(__file__).parents[3] / "golden" / "spark"
CODECS = ("lz4", "zstd", "snappy", "lzf")
LOST = GOLDEN / "lost-attempts/state/0/0"
ZIP = min(LOST.glob("4_*.zip"))
CHANGELOG = min(LOST.glob("6_*.changelog"))


def of(path: Path) -> StateVersion:
    parsed = parse_state_name(path.name)
    assert parsed is not None
    return parsed.of


def checksum_of(path: Path) -> bytes:
    return path.with_name(path.name + ".crc").read_bytes()


def flips(data: bytes) -> list[tuple[int, bytes]]:
    return [(at, data[:at] + bytes([byte ^ 1 << at % 8]) + data[at + 1 :]) for at, byte in enumerate(data)]


def is_found(path: Path, codec: Codec, version: StateVersion, checksum: bytes | None) -> bool:
    try:
        check_changelog_file(path, codec, version, checksum=checksum)
    except (DamagedError, FormatError):
        return True
    return False


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_changelogs_of_spark_are_read_to_their_end(codec: str, version: int) -> None:
    for path in (GOLDEN / f"changelog-v{version}-{codec}/state/0/0").glob("*.changelog"):
        report = check_changelog_file(path, cast("Codec", codec), of(path), checksum=None)
        assert report.header.version == version
        assert report.records > 0
        assert (report.lineage_bytes > 0) == (version > 2)


def test_each_byte_of_a_changelog_is_covered(tmp_path: Path) -> None:
    path = tmp_path / CHANGELOG.name
    unseen = 0
    for _, altered in flips(CHANGELOG.read_bytes()):
        path.write_bytes(altered)
        assert is_found(path, "lz4", of(CHANGELOG), checksum_of(CHANGELOG))
        unseen += not is_found(path, "lz4", of(CHANGELOG), None)
    # lz4's own checksums are of what is in a block: another way to write the same is not damage.
    assert unseen < 10


def test_a_changelog_under_another_kind_of_name_is_refused() -> None:
    with pytest.raises(DamagedChangelogError, match="another kind of name"):
        check_changelog_file(CHANGELOG, "lz4", StateVersion(6), checksum=None)


def test_errors_name_the_file_and_its_checksum() -> None:
    with pytest.raises(FileChecksumError) as raised:
        check_changelog_file(CHANGELOG, "lz4", of(CHANGELOG), checksum=checksum_of(ZIP))
    assert raised.value.subject == str(CHANGELOG)
    with pytest.raises(FileChecksumError) as raised:
        check_zip_file(ZIP, checksum=b"{}")
    assert raised.value.subject == f"{ZIP}.crc"
    with pytest.raises(DamagedError) as missing:
        check_changelog_file(Path("nowhere/5.changelog"), "lz4", StateVersion(5), checksum=None)
    assert isinstance(missing.value.__cause__, FileNotFoundError)


def test_a_zip_of_sparks_is_whole() -> None:
    state = check_zip_file(ZIP, checksum=checksum_of(ZIP))
    assert check_zip_file(ZIP.read_bytes(), checksum=None) == state
    assert "CURRENT" in state.files


def test_each_byte_of_a_zip_is_covered() -> None:
    data = ZIP.read_bytes()
    unread = times_and_attributes(data)
    unseen = []
    for at, altered in flips(data):
        with pytest.raises(FileChecksumError):
            check_zip_file(altered, checksum=checksum_of(ZIP))
        try:
            state = check_zip_file(altered, checksum=None)
        except (DamagedError, FormatError):
            continue
        # What is unpacked is the same in any case.
        assert state == check_zip_file(ZIP, checksum=None)
        if at not in unread:
            unseen.append(at)
    # Of deflate, bits behind the end of a stream, and of codes that stand for nothing.
    assert len(unseen) < 20


def times_and_attributes(data: bytes) -> set[int]:
    """Where a zip has what neither Spark nor we read."""
    (list_at,) = struct.unpack_from("<L", data, data.rindex(b"PK\x05\x06") + 16)
    places: set[int] = set()
    at = list_at
    while data[at : at + 4] == b"PK\x01\x02":
        name, extra, remark = struct.unpack_from("<3H", data, at + 28)
        (entry,) = struct.unpack_from("<L", data, at + 42)
        places |= {*range(at + 4, at + 6), *range(at + 12, at + 16), *range(at + 34, at + 42)}
        places |= set(range(entry + 10, entry + 14))
        at += 46 + name + extra + remark
    return places


@pytest.mark.parametrize(
    "altered",
    [
        lambda data: b"\0" + data,
        lambda data: data + b"\0",
        lambda data: data[:-1],
        lambda data: data[:1000],
        lambda data: data.replace(b"CURRENT", b"CURRENX", 1),
        lambda data: data.replace(b"PK\x07\x08", b"PK\x07\x09", 1),
        lambda data: b"",
    ],
)
def test_what_is_read_otherwise_from_the_front_than_from_the_end_is_damage(altered: object) -> None:
    assert callable(altered)
    with pytest.raises(DamagedError):
        check_zip_file(altered(ZIP.read_bytes()), checksum=None)
