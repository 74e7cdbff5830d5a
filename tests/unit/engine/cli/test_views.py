import pytest

from engine.cli.cmd.show import view_store
from engine.text import table
from index.display import human_bytes, human_duration, iso_time, printable, shortened
from index.snapshot.model import (
    BlobKey,
    DirIndex,
    FileBlob,
    FileIndex,
    FileMetadata,
    IndexReference,
    LineageItem,
    Pack,
    SnapshotIndex,
    SnapshotMetadata,
    StoreReference,
    UniqueId,
)

PACK, LONE = BlobKey("blobs/00/j/pack"), BlobKey("blobs/00/j/lone")


@pytest.mark.parametrize(
    "size_bytes, text",
    [(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1_048_575, "1.0 MiB"),
     (67_108_864, "64.0 MiB"), (2**40, "1.0 TiB"), (2**63 - 1, "8.0 EiB")],
)  # fmt: skip
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert human_bytes(size_bytes) == text


@pytest.mark.parametrize(
    "duration_ms, text",
    [(0, "0 ms"), (999, "999 ms"), (1000, "1s"), (61_000, "1m 1s"), (3_600_000, "1h"), (5_400_000, "1h 30m"),
     (90_000_000, "1d 1h"), (86_400_000, "1d")],
)  # fmt: skip
def test_durations_for_people(duration_ms: int, text: str) -> None:
    assert human_duration(duration_ms) == text


def test_times_are_iso_and_utc_to_the_millisecond() -> None:
    assert iso_time(1_777_638_600_250) == "2026-05-01T12:30:00.250Z"
    assert iso_time(2**63 - 1) == f"{2**63 - 1} ms"


def test_stored_text_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[31mb\r\n\tc\u202ed") == "a\\x1b[31mb\\r\\n\\tc\\u202ed"
    assert printable("größe ß 東京") == "größe ß 東京"
    assert printable("\udc80") == "\\udc80"


def test_long_text_is_cut_with_a_sign() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abcde…"


def test_columns_are_aligned_and_lines_have_no_trailing_blanks() -> None:
    assert table(("name", "size"), [("a", "10"), ("long", "1")], right=("size",)) == [
        "name  size",
        "a       10",
        "long     1",
    ]
    assert table(("name", "note"), [("a", "")]) == ["name  note", "a"]


def _file(name: str, size_bytes: int, *blobs: FileBlob, inline: bytes | None = None) -> FileIndex:
    return FileIndex(name, FileMetadata(size_bytes, 0o644, 0), bytes(32), 0, blobs, inline)


def test_dead_bytes_are_what_no_present_file_uses() -> None:
    index = SnapshotIndex(
        metadata=SnapshotMetadata(
            job="j", task="0", store="s", version=2, unique_id=UniqueId("u2"), lineage=(LineageItem(1, UniqueId("u1")),)
        ),
        session="0" * 20,
        dir=DirIndex(
            "",
            (
                _file("a", 100, FileBlob(PACK, 0, 0, 100)),
                # The same bytes in the same place: counted once.
                _file("b", 100, FileBlob(PACK, 0, 0, 100)),
                _file("c", 50, FileBlob(PACK, 0, 200, 50)),
                _file("empty", 0),
                _file("inline", 3, inline=b"abc"),
                _file("lone", 1000, FileBlob(LONE, 0, 0, 600), FileBlob(LONE, 600, 600, 400)),
            ),
            # Removed entries keep nothing alive.
            files_removed=(_file("gone", 300, FileBlob(PACK, 0, 300, 300)),),
        ),
        packs=(Pack(PACK, 1000),),
    )
    reference = StoreReference(
        task="0",
        store="s",
        version=2,
        unique_id=UniqueId("u2"),
        index=IndexReference(key=BlobKey("indexes/00/j/i"), sha256=bytes(32), size_bytes=77),
        number=4,
        files_count=6,
        size_bytes=1253,
    )
    view = view_store(reference, index, files=True)
    assert [(p.size_bytes, p.live_bytes, p.dead_bytes) for p in view.packs] == [(1000, 150, 850)]
    assert (view.dead_bytes, view.blobs_count, view.blobs_bytes) == (850, 2, 1150)
    assert (view.files_count, view.size_bytes, view.inline_count, view.inline_bytes) == (6, 1253, 1, 3)
    assert {f.path: f.stored for f in view.files} == {
        "a": "pack",
        "b": "pack",
        "c": "pack",
        "empty": "empty",
        "inline": "inline",
        "lone": "blob",
    }
    assert [(item.version, item.unique_id) for item in view.lineage] == [(1, "u1")]
    assert view_store(reference, index).files == ()
