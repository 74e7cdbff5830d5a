"""Names and records of the HDFS-backed provider (design 0004, P1, P2 and P4)."""

import pytest

from engine.local.checksums import crc32c
from index.errors import DamagedChangelogError, RowChecksumError, VersionMissingError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import DELETE, PUT, ChangelogHeader, check_header
from index.spark.checksums import frame_hdfs_record, split_values, unframe_hdfs_value
from index.spark.lineage import Present, Resolution, resolve
from index.spark.names import StateVersion, changelog_name, parse_any_name, parse_state_name, snapshot_name


def hdfs(version: int) -> StateVersion:
    return StateVersion(version, hdfs_backed=True)


@pytest.mark.parametrize("of", [hdfs(0), hdfs(7), hdfs(2**63 - 1)])
def test_names_are_parsed_as_they_are_made(of: StateVersion) -> None:
    assert (snapshot_name(of), changelog_name(of)) == (f"{of.version}.snapshot", f"{of.version}.delta")
    for name, kind in ((snapshot_name(of), "snapshot"), (changelog_name(of), "changelog")):
        for suffix in ("", ".crc"):
            found = parse_state_name(name + suffix, hdfs_backed=True)
            assert found is not None
            assert (found.of, found.kind, found.checksum) == (of, kind, suffix != "")
            assert parse_any_name(name + suffix) == found
        assert parse_state_name(name) is None, "to RocksDB's provider it is foreign"


@pytest.mark.parametrize(
    "name", ["1_id.delta", "01.delta", "-1.delta", ".1.delta.crc", "1.zip", "1.deltas", f"{2**63}.delta"]
)
def test_other_names_are_foreign(name: str) -> None:
    assert parse_state_name(name, hdfs_backed=True) is None


def test_a_version_is_the_newest_snapshot_and_what_comes_after() -> None:
    names = ["1.delta", "2.delta", "2.snapshot", "3.delta", "4.delta", "4.snapshot", "5.delta", "_metadata", "3.zip"]
    present = Present.of_names(names, hdfs_backed=True)
    assert resolve(5, None, present) == Resolution(hdfs(5), hdfs(4), (hdfs(5),))
    assert resolve(3, None, present) == Resolution(hdfs(3), hdfs(2), (hdfs(3),))
    assert resolve(1, None, present) == Resolution(hdfs(1), None, (hdfs(1),))
    with pytest.raises(VersionMissingError, match=r"6\.delta is not there"):
        resolve(6, None, present)
    gap = Present.of_names(["1.delta", "3.delta"], hdfs_backed=True)
    with pytest.raises(VersionMissingError, match=r"2\.delta is not there"):
        resolve(3, None, gap)


def test_where_nothing_pins_it_the_names_say_whose_it_is() -> None:
    assert Present.of_names(["1.delta", "x"], hdfs_backed=None).changelogs == {hdfs(1)}
    assert Present.of_names(["1.delta", "1.zip"], hdfs_backed=None).snapshots == {StateVersion(1)}
    assert not Present.of_names([], hdfs_backed=None).hdfs_backed


def test_a_changelog_of_rocksdbs_is_not_a_delta() -> None:
    check_header(ChangelogHeader(1), hdfs(1))
    for header in (ChangelogHeader(2), ChangelogHeader(3, (LineageItem(1, UniqueId("a")),))):
        with pytest.raises(DamagedChangelogError, match="which is RocksDB's"):
            check_header(header, hdfs(2))


def test_a_checksum_gets_the_length_that_rocksdbs_has() -> None:
    key, value = b"key", b"value"
    stored = crc32c(value, crc32c(key, 0)).to_bytes(4, "little") + value
    kind, framed_key, framed = frame_hdfs_record((PUT, key, stored))
    assert (kind, framed_key) == (PUT, key)
    assert split_values(key, framed, delimiter=b"", crc32c=crc32c) == [value]
    assert unframe_hdfs_value(framed) == stored
    assert frame_hdfs_record((DELETE, key, b"")) == (DELETE, key, b"")
    with pytest.raises(RowChecksumError, match="too short"):
        frame_hdfs_record((PUT, key, b"123"))
