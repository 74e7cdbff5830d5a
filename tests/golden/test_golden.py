"""Old bytes stay readable for ever, and mean what they meant (design 0001, F6)."""

import hashlib
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from index.errors import IndexInvariantError
from index.snapshot.codec import (
    decode_boundary,
    decode_commit,
    decode_index,
    decode_name,
    decode_pin,
    decode_repository,
    encode_index,
    encode_record,
)
from index.snapshot.delta import apply_delta, resolve_deltas
from index.snapshot.model import FileIndex, StoredIndex, StoredRecord
from tests.golden.make_golden import DELTA, INDEXES, MODES, MODES_DELTA, RECORDS, SNAPSHOT, main

V1 = Path(__file__).parent / "v1"
DESIGN = Path(__file__).parents[2] / "design" / "0001-snapshot-format.md"

# The files themselves never change.
SHA256 = {
    "boundary": "530d278e5b9f549d37eca0c3c10a5c4ebe252717853444bf103ce9e631b88a04",
    "commit": "fa819c9b9292d0a278607095322d8b0affcece353918ea088ead02eade890721",
    "delta": "89469336b032bca9ab676c0f673daa55cc4f56aadf38eedad3d4f8d397ea1c20",
    "fork": "7f11a61ff47e24a0b1e4328c1864f4bed8d8aca5a29393e545453628f3a637cb",
    "modes": "70b6442642899ce98304576b11eff8ade16bb9e4867221578a6ed774e7ef4d2c",
    "modes-delta": "acad900546149a13e32faa83cbf7420d15a08b918e599a4fc05111fc9a272886",
    "name": "8f17f3d32dbfc0e7c7817615f8acfbfd3de56c99e392e6c9d1cd2b0fcd6aa6a5",
    "pin": "93fc066cffab9e560782455b596810e695ced86ff590160cabac1cd20e68af78",
    "repository": "4a8a7a1d327c033e1de0b655f9d11db962d8f1ac489821476f2fe517049346cc",
    "rewind": "8a4aa133637d2809f586ea84669458ac0bd2c6687dc94f9493d8325f51900706",
    "snapshot": "b692e785644c64c4b6129b3d5cf15fc79d8cb14b0964d2f687d2c73129d6c8ba",
    "state": "73f00e207fece926bd5ce9d85b29bd4e8a2acba9b8d009cd0bcd0b476e5404c3",
}

DECODERS: dict[str, Callable[..., StoredRecord]] = {
    "boundary": decode_boundary,
    "commit": decode_commit,
    "fork": decode_commit,
    "name": decode_name,
    "pin": decode_pin,
    "repository": decode_repository,
    "rewind": decode_commit,
}


def test_golden_files_are_the_ones_that_were_made() -> None:
    assert {file.stem: hashlib.sha256(file.read_bytes()).hexdigest() for file in V1.iterdir()} == SHA256


@pytest.mark.parametrize("name", INDEXES)
def test_old_index_decodes_to_what_it_meant(name: str) -> None:
    expected: StoredIndex = INDEXES[name]
    assert decode_index((V1 / f"{name}.bin").read_bytes(), subject=name) == expected


@pytest.mark.parametrize("name", RECORDS)
def test_old_record_decodes_to_what_it_meant(name: str) -> None:
    assert DECODERS[name]((V1 / f"{name}.bin").read_bytes(), subject=name) == RECORDS[name]


@pytest.mark.parametrize("name", [*INDEXES, *RECORDS])
def test_old_value_is_still_written_in_a_form_that_reads_back(name: str) -> None:
    if name in INDEXES:
        assert decode_index(encode_index(INDEXES[name]), subject=name) == INDEXES[name]
    else:
        assert DECODERS[name](encode_record(RECORDS[name]), subject=name) == RECORDS[name]


def test_old_delta_still_applies() -> None:
    index = apply_delta(SNAPSHOT, DELTA)
    assert [file.name for file in index.dir.files_present] == ["000013.sst", "CURRENT", "empty.log"]
    assert [sub.name for sub in index.dir.sub_dirs_present] == ["archive", "new"]
    assert [file.name for file in index.dir.files_removed] == ["000012.sst", "CURRENT", "OPTIONS-000007"]
    assert index.packs == DELTA.packs_set


def test_modes_of_directories_are_right_through_deltas() -> None:
    root = resolve_deltas(MODES, [MODES_DELTA]).dir
    archive, new, unknown = root.sub_dirs_present
    assert (root.mode, archive.mode, new.mode, unknown.mode) == (0o700, 0o750, 0o7777, None)
    assert archive.sub_dirs_present[0].mode == 0o500


class OldDirDelta(msgspec.Struct, array_like=True):
    """What releases that know no modes of directories read."""

    name: str
    files_set: tuple[FileIndex, ...] = ()
    files_dropped: tuple[str, ...] = ()
    sub_dirs_set: tuple["OldDirDelta", ...] = ()
    sub_dirs_dropped: tuple[str, ...] = ()


def test_modes_of_directories_stand_last_where_older_readers_ignore_them() -> None:
    raw = read_as_an_outsider((V1 / "modes-delta.bin").read_bytes())["dir"]
    assert raw == ["", [], [], [["archive", [], [], [], [], 0o750], ["new", [], [], [], [], 0o7777]], [], 0o700]
    assert msgspec.convert(raw, OldDirDelta) == OldDirDelta("", (), (), (OldDirDelta("archive"), OldDirDelta("new")))


def test_a_lineage_of_sparks_need_not_end_with_the_base() -> None:
    metadata = read_as_an_outsider((V1 / "state.bin").read_bytes())["metadata"]
    assert metadata["base"][0] == 14
    assert [version for version, _ in metadata["lineage"]] == [5, 6]


def test_golden_file_is_never_written_again(tmp_path: Path) -> None:
    main(tmp_path)
    with pytest.raises(FileExistsError):
        main(tmp_path)


def test_new_golden_files_hold_the_same_values(tmp_path: Path) -> None:
    """Compressed bytes may differ with another zlib; values may not."""
    main(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in V1.iterdir()}
    for name in INDEXES:
        old, new = (decode_index((d / f"{name}.bin").read_bytes(), subject=name) for d in (V1, tmp_path))
        assert old == new


def test_golden_delta_is_sound_and_its_result_is_not_a_whole_index() -> None:
    """Its pack is listed for the sake of the form and holds no file: only the end of a chain is checked (M9)."""
    with pytest.raises(IndexInvariantError, match="M9"):
        encode_index(apply_delta(SNAPSHOT, DELTA))


def read_as_an_outsider(data: bytes) -> Any:
    """Design 0001, F1 to F7, without a line of `index`."""
    magic, _, version, compression, reserved, raw_bytes = struct.unpack_from("<8scBBBQ", data)
    assert (magic, version, reserved) == (b"TIDEMARK", 1, 0)
    assert hashlib.sha256(data[:20] + data[52:]).digest() == data[20:52]
    payload = zlib.decompress(data[52:]) if compression else data[52:]
    assert len(payload) == raw_bytes
    return msgspec.msgpack.decode(payload)


def test_outsider_reads_a_snapshot_by_the_design_alone() -> None:
    index = read_as_an_outsider((V1 / "snapshot.bin").read_bytes())
    assert index["kind"] == "snapshot"
    assert index["metadata"]["version"] == 42
    name, files, sub_dirs, files_removed, sub_dirs_removed = index["dir"]
    assert name == ""
    assert [file[0] for file in files] == ["000012.sst", "000013.sst", "CURRENT", "OPTIONS-000007", "empty.log"]
    assert [sub[0] for sub in sub_dirs] == ["archive", "emptydir"]
    assert [file[0] for file in files_removed] == ["CURRENT"]
    assert [sub[0] for sub in sub_dirs_removed] == ["old"]
    _, metadata, blake3, crc32, blobs, inline, sst = files[0]
    assert metadata == [100_000, 0o644, 1_795_239_632_681_000_123, 1_795_239_632_679, "spark", "hadoop"]
    assert (blake3, crc32, inline, sst) == (bytes(range(32)), 22_023_663, None, ["RCQT39JY6E1U4N923P4Y", 12])
    ((key, file_offset, blob_offset, size, run_hash),) = blobs
    assert (file_offset, blob_offset, size, run_hash) == (0, 0, 100_000, b"")
    shard, tail = key.split("/")[1], key.split("/")[3]
    assert shard == f"{zlib.crc32(tail.encode()) & 0xFF:02x}"


def test_outsider_reads_a_commit_by_the_design_alone() -> None:
    commit = read_as_an_outsider((V1 / "commit.bin").read_bytes())
    assert "kind" not in commit
    assert commit["predecessor"] == {"number": 15, "write_id": "aaaa"}
    assert commit["stores"][0]["index"]["size_bytes"] == 1234


def test_object_that_the_design_prints_is_the_golden_one() -> None:
    (printed,) = re.findall(r"```\n(54494445.*?)```", DESIGN.read_text(encoding="utf-8"), re.DOTALL)
    pieces = [
        line.split("  ")[0] if n == 0 else re.split(r"  +[a-z_]+: ", line)[0]
        for n, line in enumerate(printed.splitlines())
    ]
    assert bytes.fromhex("".join(pieces)) == (V1 / "repository.bin").read_bytes()
