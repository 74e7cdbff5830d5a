"""Zips of snapshots: as Java's own writer has them, and refused whole where they are not what they should be."""

import io
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import DamagedError, UnsafeSourceError
from engine.state import zips as state_zip
from engine.state.zips import build_state_zip, read_state_zip
from index.errors import FormatError, UnknownFormatError, UnsafeNameError
from index.spark.metadata import STATE_METADATA_BYTES_MAX, StateMetadata, StoredFile, encode_state_metadata
from tests.unit.engine.state.state_bench import files, fill

METADATA = StateMetadata(
    sst_files=(StoredFile("000008.sst", "000008-id.sst", 1778),),
    num_keys=28,
    column_family_ids=(),
    column_family_internal=(),
    column_family_id_max=0,
)


def built(tmp_path: Path) -> bytes:
    return build_state_zip(fill(tmp_path / "checkpoint", files(s8=10, l3=5) | {"000004.log": b""}), METADATA)[0]


def zipped(*entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as out:
        for name, data in entries:
            out.writestr(name, data)
    return target.getvalue()


HOSTILE = b'v1\n{"sstFiles":[{"localFileName":"../x.sst","dfsSstFileName":"a.sst","sizeBytes":1}],"numKeys":1}'
LAST = ("metadata", encode_state_metadata(METADATA))


def test_a_zip_has_everything_but_ssts_and_archived_logs_and_metadata_last(tmp_path: Path) -> None:
    data = built(tmp_path)
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        assert source.namelist() == ["000004.log", "CURRENT", "MANIFEST-000005", "OPTIONS-000007", "metadata"]
        assert source.testzip() is None
        # What Java's ZipOutputStream writes, and its ZipInputStream needs: sizes are behind the data.
        for entry in source.infolist():
            assert entry.compress_type == zipfile.ZIP_DEFLATED
            assert entry.flag_bits & 0x8
            header = data[entry.header_offset : entry.header_offset + 30]
            assert struct.unpack("<4s5H3L2H", header)[6:9] == (0, 0, 0)
            end = entry.header_offset + 30 + len(entry.filename) + entry.compress_size
            assert struct.unpack("<4s3L", data[end : end + 16]) == (
                b"PK\7\x08",
                entry.CRC,
                entry.compress_size,
                entry.file_size,
            )


def test_a_zip_reads_back(tmp_path: Path) -> None:
    found = read_state_zip(built(tmp_path), subject="1.zip")
    assert found.metadata == METADATA
    assert found.files == files() | {"000004.log": b""}


def test_the_same_snapshot_makes_the_same_zip(tmp_path: Path) -> None:
    assert built(tmp_path) == built(tmp_path)


def test_the_bytes_of_a_zip_are_counted_before_they_are_compressed(tmp_path: Path) -> None:
    directory = fill(tmp_path, {"CURRENT": b"x" * 10_000})
    data, content_bytes = build_state_zip(directory, METADATA)
    assert content_bytes == 10_000 + len(LAST[1])
    assert len(data) < 2_000


def test_a_symbolic_link_in_a_rocksdb_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").symlink_to("/etc/passwd")
    with pytest.raises(UnsafeSourceError, match="CURRENT"):
        build_state_zip(tmp_path, METADATA)


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_zip, "CONTENT_BYTES_MAX", 10_000)
    with pytest.raises(UnsafeSourceError, match="beside its SSTs"):
        build_state_zip(fill(tmp_path, {"CURRENT": b"x" * 10_001}), METADATA)


# --- hostile ones ---


def link(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system = 3
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    "name",
    [
        *("../CURRENT", "/etc/passwd", "a/b", "archive/", "..", "a\\b", "x.sst"),
        # What would take the place of the archive, of what RocksDB makes itself, or of a file that is fetched (Z3).
        *("archive", "LOG", "LOCK", "IDENTITY", "rocksdict-config.json", ".hidden"),
    ],
)
def test_an_entry_that_does_not_belong_into_a_snapshot_is_refused(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        read_state_zip(zipped((name, b"x"), LAST), subject="1.zip")


def test_a_name_that_goes_on_behind_a_nul_is_refused() -> None:
    data = zipped(("CURRENTx", b"x"), LAST).replace(b"CURRENTx", b"CURRENT\0")
    with pytest.raises((UnsafeNameError, DamagedError)):
        read_state_zip(data, subject="1.zip")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice_is_refused() -> None:
    with pytest.raises(DamagedError, match="twice"):
        read_state_zip(zipped(("CURRENT", b"a"), ("CURRENT", b"b"), LAST), subject="1.zip")


def test_a_symbolic_link_is_refused() -> None:
    with pytest.raises(DamagedError, match="not a regular file"):
        read_state_zip(zipped((link("CURRENT"), b"/etc/passwd"), LAST), subject="1.zip")


def test_another_compression_is_refused() -> None:
    with pytest.raises(DamagedError, match="compression"):
        read_state_zip(zipped(("CURRENT", b"x"), LAST, method=zipfile.ZIP_LZMA), subject="1.zip")


def test_stored_entries_are_read() -> None:
    found = read_state_zip(zipped(("CURRENT", b"x"), LAST, method=zipfile.ZIP_STORED), subject="1.zip")
    assert found.files == {"CURRENT": b"x"}


def test_an_encrypted_entry_is_refused() -> None:
    data = bytearray(zipped(("CURRENT", b"x"), LAST))
    for magic, at in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        data[data.index(magic) + at] |= 1
    with pytest.raises(DamagedError, match="encrypted"):
        read_state_zip(bytes(data), subject="1.zip")


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_zip, "CONTENT_BYTES_MAX", 1_000_000)
    with pytest.raises(DamagedError, match="holds more than"):
        read_state_zip(zipped(("CURRENT", bytes(1_000_001)), LAST), subject="1.zip")


def test_an_entry_that_is_larger_than_it_says_is_refused() -> None:
    """The size in the directory at the end is what the cap goes by; the data are what they are."""
    data = bytearray(zipped(("CURRENT", bytes(100_000)), LAST))
    at = data.index(b"PK\1\2") + 24
    assert struct.unpack_from("<L", data, at) == (100_000,)
    struct.pack_into("<L", data, at, 10)
    with pytest.raises(DamagedError):
        read_state_zip(bytes(data), subject="1.zip")


def listed_only(count: int, *, comment: bytes = b"", said: int | None = None) -> bytes:
    """A zip that is all list: as many entries of one name, and nothing in them."""
    head = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, 0, 0, 0, 0x21, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    entries = (head + b"a") * count
    said = min(count, 0xFFFF) if said is None else said
    return entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, said, said, len(entries), 0, len(comment)) + comment


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(listed_only(200_000), id="200,000 entries"),
        pytest.param(listed_only(200_000, said=1), id="which say that they are one"),
        pytest.param(listed_only(200_000, comment=b"about them"), id="with a comment"),
        pytest.param(listed_only(2_000), id="few more than are read"),
    ],
)
def test_entries_are_counted_before_they_are_listed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_them(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(zipfile.ZipFile, "_RealGetContents", list_them)
    with pytest.raises(DamagedError, match="entries in a list of"):
        read_state_zip(data, subject="1.zip")


def test_a_zip64_is_refused() -> None:
    data = zipped(LAST)
    hidden = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    with pytest.raises(DamagedError, match="zip64"):
        read_state_zip(data[:-22] + hidden + data[-22:], subject="1.zip")


def test_metadata_that_nobody_wrote_is_refused_before_it_is_unpacked() -> None:
    item = b'{"localFileName":"0","dfsSstFileName":"0","sizeBytes":1},'
    bomb = b'v1\n{"sstFiles":[' + item * (STATE_METADATA_BYTES_MAX // len(item) + 1)
    with pytest.raises(DamagedError, match="of `metadata`"):
        read_state_zip(zipped(("metadata", bomb)), subject="1.zip")


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_zip, "ENTRIES_MAX", 3)
    entries = [(f"f{number}", b"") for number in range(3)]
    with pytest.raises(DamagedError, match="4 entries"):
        read_state_zip(zipped(*entries, LAST), subject="1.zip")


@pytest.mark.parametrize(
    "data,error",
    [
        (b"", DamagedError),
        (b"no zip", DamagedError),
        (zipped(("CURRENT", b"x")), DamagedError),
        (zipped(("CURRENT", b"x"), ("metadata", b"v2\n{}")), UnknownFormatError),
        (zipped(("CURRENT", b"x"), ("metadata", b"v1\n{")), FormatError),
        (zipped(("metadata", HOSTILE)), UnsafeNameError),
    ],
    ids=["empty", "text", "without metadata", "newer", "cut metadata", "hostile metadata"],
)
def test_what_is_no_snapshot_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_state_zip(data, subject="1.zip")


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: d[:-5], lambda d: d[10:]])
def test_a_zip_that_is_cut_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(DamagedError):
        read_state_zip(damage(built(tmp_path)), subject="1.zip")


def test_no_flipped_bit_in_the_data_of_a_zip_goes_unnoticed(tmp_path: Path) -> None:
    data = built(tmp_path)
    whole = read_state_zip(data, subject="1.zip")
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        end = max(entry.header_offset for entry in source.infolist())
    for at in range(30, end, 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        try:
            found = read_state_zip(bytes(damaged), subject="1.zip")
        except (DamagedError, FormatError):
            continue
        # A field that nobody reads: a time, or a copy of what is in the directory at the end.
        assert found == whole
