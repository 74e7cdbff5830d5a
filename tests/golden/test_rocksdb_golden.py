"""MANIFESTs that RocksDB wrote are read as what they mean, and would be written byte for byte the same (0010, M1)."""

import json
import zipfile
from pathlib import Path

import pytest

from engine.local.checksums import crc32c
from index.rocksdb.manifest import (
    BYTEWISE,
    ManifestState,
    apply_edits,
    decode_edit,
    decode_log,
    decode_manifest,
    encode_edit,
    encode_log,
    encode_manifest,
)
from index.spark.metadata import decode_state_metadata

GOLDEN = Path(__file__).parent
ZIPS = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("spark/*/state/*/*/*.zip"))


def read_and_write(data: bytes) -> ManifestState:
    """Read a MANIFEST, and compare what would be written with it, and what the state would be written as."""
    records, whole_bytes = decode_log(data, crc32c=crc32c, subject="MANIFEST")
    assert whole_bytes == len(data)
    edits = [decode_edit(record, subject="MANIFEST") for record in records]
    assert [encode_edit(edit) for edit in edits] == records
    assert encode_log(records, crc32c=crc32c) == data
    state = apply_edits(edits, subject="MANIFEST")
    assert decode_manifest(encode_manifest(state, crc32c=crc32c), crc32c=crc32c, subject="written") == state
    return state


def test_a_manifest_of_rocksdict_is_what_rocksdb_says_is_live() -> None:
    data = (GOLDEN / "rocksdb" / "MANIFEST").read_bytes()
    assert len(data) > 32 * 1024, "has records in pieces"
    state = read_and_write(data)
    assert [(family.id, family.name, family.comparator) for family in state.families] == [
        (0, b"default", BYTEWISE),
        (1, b"kept", BYTEWISE),
    ]
    live = [
        {
            "number": file.number,
            "level": level,
            "size_bytes": file.size_bytes,
            "smallest": file.smallest_key.hex(),
            "largest": file.largest_key.hex(),
        }
        for family in state.families
        for level, file in family.files
    ]
    expected = json.loads((GOLDEN / "rocksdb" / "live.json").read_text())
    assert sorted(live, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("path", ZIPS)
def test_a_manifest_of_spark_has_the_files_of_its_snapshot(path: str) -> None:
    with zipfile.ZipFile(GOLDEN / path) as snapshot:
        (name,) = (name for name in snapshot.namelist() if name.startswith("MANIFEST"))
        state = read_and_write(snapshot.read(name))
        metadata = decode_state_metadata(snapshot.read("metadata"))
    (family,) = state.families
    assert {(f"{file.number:06d}.sst", file.size_bytes) for _, file in family.files} == {
        (file.local_name, file.size_bytes) for file in metadata.sst_files
    }
    assert all(file.epoch and file.largest_sequence <= state.last_sequence for _, file in family.files)
