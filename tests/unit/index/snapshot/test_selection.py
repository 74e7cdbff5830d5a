"""A part of a snapshot as an index of its own, and the part that a version of a state store is made of."""

import pytest

from index.errors import StateMetadataError, VersionMissingError
from index.snapshot.contents import files_of, select_files
from index.snapshot.invariants import check_snapshot_index
from index.snapshot.model import FileIndex, UniqueId
from index.spark.lineage import Resolution
from index.spark.metadata import StateMetadata, StoredFile
from index.spark.names import StateVersion
from index.spark.retention import select_state_files
from tests.unit.index.builders import Tree, backup, dir_modes, read_back

TREE: dict[str, bytes | Tree] = {
    "3.zip": b"zip of three",
    "3.zip.crc": b"sum",
    "4.changelog": b"four",
    "4.changelog.crc": b"sum of four",
    "5.changelog": b"five",
    "5_u.changelog": b"another five",
    "_metadata": {"schema": b"v2", "other": b"x"},
    "SSTs": {"000008-a.sst": b"12345678", "000009-b.sst": b"x"},
    "logs": {"000007-a.log": b"log"},
    "empty": {},
}


def test_a_part_holds_its_files_their_directories_and_the_packs_that_they_stand_in() -> None:
    store: dict[str, bytes] = {}
    older = backup(TREE | {"gone": b"gone", "dir": {"gone": b"too"}}, store=store)
    index = backup(TREE, version=2, base=older, store=store, modes={"": 0o750, "SSTs": 0o500})
    assert index.packs
    assert index.dir.files_removed
    everything = dict(files_of(index.dir))
    for size in range(len(everything) + 1):
        chosen = dict(list(everything.items())[-size:] if size else [])
        part = select_files(index, reversed(chosen.items()))
        check_snapshot_index(part)
        assert dict(files_of(part.dir)) == chosen
        assert (part.metadata, part.session, part.dir.files_removed) == (index.metadata, index.session, ())
    nested = select_files(index, [(("SSTs", "000008-a.sst"), everything["SSTs", "000008-a.sst"])])
    assert read_back(nested.dir, store) == {"SSTs": {"000008-a.sst": b"12345678"}}
    assert dir_modes(nested.dir) == {(): 0o750, ("SSTs",): 0o500}
    assert select_files(index, []).packs == ()


# ---------------------------------------------------------------------- a state store


PRESENT: dict[tuple[str, ...], FileIndex] = dict(files_of(backup(TREE).dir))
SST = StoredFile(local_name="000008.sst", stored_name="000008-a.sst", size_bytes=8)
LOG = StoredFile(local_name="000007.log", stored_name="000007-a.log", size_bytes=3)
THREE, FOUR, FIVE = (StateVersion(version) for version in (3, 4, 5))


def metadata_of(*ssts: StoredFile, logs: tuple[StoredFile, ...] = ()) -> StateMetadata:
    return StateMetadata(sst_files=ssts, log_files=logs, num_keys=1)


SELECTIONS = [
    ("version 0: the schema alone", Resolution(StateVersion(0), None), None, []),
    (
        "a snapshot, with its checksum",
        Resolution(THREE, THREE),
        metadata_of(SST),
        ["3.zip", "3.zip.crc", "SSTs/000008-a.sst"],
    ),
    (
        "archived logs too",
        Resolution(THREE, THREE),
        metadata_of(logs=(LOG,)),
        ["3.zip", "3.zip.crc", "logs/000007-a.log"],
    ),
    (
        "changelogs on top; one has no checksum",
        Resolution(FIVE, THREE, (FOUR, FIVE)),
        metadata_of(SST),
        ["3.zip", "3.zip.crc", "4.changelog", "4.changelog.crc", "5.changelog", "SSTs/000008-a.sst"],
    ),
    (
        "over the seam of two formats",
        Resolution(StateVersion(5, UniqueId("u")), THREE, (FOUR, StateVersion(5, UniqueId("u")))),
        metadata_of(),
        ["3.zip", "3.zip.crc", "4.changelog", "4.changelog.crc", "5_u.changelog"],
    ),
]


@pytest.mark.parametrize("_says, resolution, metadata, names", SELECTIONS, ids=[row[0] for row in SELECTIONS])
def test_a_version_takes_its_own_files_and_the_schema(
    _says: str, resolution: Resolution, metadata: StateMetadata | None, names: list[str]
) -> None:
    chosen = select_state_files(resolution, metadata, PRESENT)
    assert sorted("/".join(path) for path in chosen) == sorted([*names, "_metadata/schema"])
    assert all(PRESENT[path] == entry for path, entry in chosen.items())


def test_a_directory_without_a_schema_has_none_to_give() -> None:
    present = {path: entry for path, entry in PRESENT.items() if path[0] != "_metadata"}
    assert select_state_files(Resolution(StateVersion(0), None), None, present) == {}


@pytest.mark.parametrize("missing", ["3.zip", "4.changelog", "SSTs/000008-a.sst", "logs/000007-a.log"])
def test_a_file_that_is_missing_is_named(missing: str) -> None:
    present = {path: entry for path, entry in PRESENT.items() if "/".join(path) != missing}
    with pytest.raises(VersionMissingError, match=missing):
        select_state_files(Resolution(FOUR, THREE, (FOUR,)), metadata_of(SST, logs=(LOG,)), present)


def test_a_file_of_another_size_is_not_the_one_that_the_snapshot_means() -> None:
    wrong = StoredFile(local_name="000008.sst", stored_name="000008-a.sst", size_bytes=9)
    with pytest.raises(StateMetadataError, match="has 9 bytes, and it has 8"):
        select_state_files(Resolution(THREE, THREE), metadata_of(wrong), PRESENT)
