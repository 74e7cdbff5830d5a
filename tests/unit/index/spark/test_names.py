"""Names in the directory of a state store, and names that try to lead out of it."""

import pytest

from index.errors import UnsafeNameError
from index.snapshot.model import UniqueId
from index.spark.names import (
    STATE_VERSION_MAX,
    StateFileName,
    StateVersion,
    changelog_name,
    check_local_name,
    check_stored_name,
    check_unique_id,
    check_zip_entry,
    checksum_name,
    parse_state_name,
    snapshot_name,
    state_name,
    stored_name,
)

UID = UniqueId("f10aed9c-63f0-487b-b598-8011971eae1b")
V1 = StateVersion(7)
V2 = StateVersion(7, UID)


@pytest.mark.spark_case(34)
@pytest.mark.parametrize(
    "name,parsed",
    [
        ("7.zip", StateFileName("snapshot", V1)),
        (f"7_{UID}.zip", StateFileName("snapshot", V2)),
        ("7.changelog", StateFileName("changelog", V1)),
        (f"7_{UID}.changelog", StateFileName("changelog", V2)),
        ("7.snapshot", StateFileName("snapshot", StateVersion(7, is_hdfs=True))),
        ("7.delta", StateFileName("changelog", StateVersion(7, is_hdfs=True))),
        ("7.delta.crc", StateFileName("changelog", StateVersion(7, is_hdfs=True), checksum=True)),
        ("7.zip.crc", StateFileName("snapshot", V1, checksum=True)),
        (f"7_{UID}.changelog.crc", StateFileName("changelog", V2, checksum=True)),
        (f"{STATE_VERSION_MAX}.zip", StateFileName("snapshot", StateVersion(STATE_VERSION_MAX))),
    ],
)
def test_every_form_of_spark_is_parsed_and_written(name: str, parsed: StateFileName) -> None:
    assert parse_state_name(name) == parsed
    written = state_name(parsed.kind, parsed.of)
    assert (checksum_name(written) if parsed.checksum else written) == name
    assert written == (snapshot_name if parsed.kind == "snapshot" else changelog_name)(parsed.of)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".zip",
        "zip",
        "07.zip",
        "+7.zip",
        "-7.zip",
        " 7.zip",
        "7 .zip",
        "7.zip ",
        "7.zip\n",
        "\u0667.zip",
        "7_.zip",
        "_a.zip",
        "7_a_b.zip",
        "7_a/b.zip",
        "7_a\0.zip",
        "7_\udcff.zip",
        "7.ZIP",
        "7_a.delta",
        "7_a.snapshot",
        "07.delta",
        "7.deltas",
        "7.zip.crc.crc",
        "7.crc",
        ".7.zip.crc",
        ".7.zip.3f0c.TID12.tmp",
        "7.0.zip",
        "SSTs",
        "logs",
        "_metadata",
        "000008.sst",
        f"{STATE_VERSION_MAX + 1}.zip",
        "9" * 400 + ".zip",
    ],
)
def test_what_does_not_parse_is_foreign(name: str) -> None:
    assert parse_state_name(name) is None


def test_versions_sort_by_number_and_then_by_id_and_none_comes_first() -> None:
    a, b = StateVersion(3, UniqueId("a")), StateVersion(3, UniqueId("b"))
    ordered = [StateVersion(2, UniqueId("z")), StateVersion(3), a, b, StateVersion(20)]
    shuffled = ordered[::-1]
    assert sorted(shuffled) == ordered
    assert max(ordered) == StateVersion(20)
    assert [str(of) for of in ordered] == ["2_z", "3", "3_a", "3_b", "20"]


def test_a_stored_file_keeps_stem_and_extension_around_the_id_of_its_upload() -> None:
    assert stored_name("000008.sst", UID) == f"000008-{UID}.sst"
    assert stored_name("00001.log", UID) == f"00001-{UID}.log"


@pytest.mark.parametrize(
    "unique_id", ["", "a_b", "a/b", "../a", "a\0", "\ud800", "x" * 400, "a\\b", "na\u00efve", "a b"]
)
def test_an_id_that_cannot_stand_in_a_file_name_is_refused(unique_id: str) -> None:
    with pytest.raises(UnsafeNameError) as error:
        check_unique_id(unique_id)
    assert error.value.hint


@pytest.mark.parametrize("unique_id", ["i3", UID, "a.zip", "a,b=c+d%e~f@g"])
def test_an_id_that_passes_makes_a_name_that_parses_back_to_it(unique_id: str) -> None:
    of = StateVersion(7, check_unique_id(unique_id))
    assert parse_state_name(snapshot_name(of)) == StateFileName("snapshot", of)


BAD_COMPONENTS = ["", ".", "..", "../000008.sst", "a/000008.sst", "a\\000008.sst", "000008.sst\0", "/000008.sst"]


@pytest.mark.parametrize(
    "name",
    [*BAD_COMPONENTS, "a.sst", "8.log", "8.sst.crc", "-8.sst", "8.SST", "\u0668.sst", "8.sst\n", "9" * 300 + ".sst"],
)
def test_a_local_sst_is_digits_and_nothing_else(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        check_local_name(name, ".sst")


@pytest.mark.parametrize("name", [*BAD_COMPONENTS, "a.log", "8.sst", "LOG", "8.log/"])
def test_a_local_wal_is_digits_and_nothing_else(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        check_local_name(name, ".log")


@pytest.mark.parametrize(
    "name",
    [
        *BAD_COMPONENTS,
        f"000008-{UID}.log",
        f"000008-{UID}.sst/x",
        "x" * 252 + ".sst",
        "8-a b.sst",
        "8-\u00e9.sst",
        ".8-a.sst",
    ],
)
def test_a_stored_name_is_one_component_with_its_extension(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        check_stored_name(name, ".sst")


NEVER_ZIPPED = ["LOG", "LOG.old.123", "LOCK", "IDENTITY", "rocksdict-config.json", "archive", ".hidden", ".a\nb"]


@pytest.mark.parametrize("name", [*BAD_COMPONENTS, *NEVER_ZIPPED, "000008.sst", "archive/000003.log"])
def test_an_entry_of_a_snapshot_is_one_component_and_belongs_there(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        check_zip_entry(name)


def test_names_that_spark_writes_pass() -> None:
    assert check_local_name("000008.sst", ".sst") == "000008.sst"
    assert check_local_name("00001.log", ".log") == "00001.log"
    assert check_stored_name(f"000008-{UID}.sst", ".sst") == f"000008-{UID}.sst"
    for entry in ("MANIFEST-000005", "CURRENT", "000004.log", "OPTIONS-000007", "metadata"):
        assert check_zip_entry(entry) == entry
