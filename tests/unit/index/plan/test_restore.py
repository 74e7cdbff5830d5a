"""From where a restore takes each file, and how the files of a pack become ranges, as tables of offsets."""

import msgspec
import pytest

from index.errors import UnsafeNameError
from index.plan.restore import (
    GAP_BYTES_FIRST,
    GAP_BYTES_MAX,
    GAP_BYTES_MIN,
    GAP_BYTES_TINY,
    choose_gap_bytes,
    plan_restore,
)
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import DirIndex, FileBlob, FileIndex, Pack, SnapshotIndex, SnapshotMetadata, UniqueId
from tests.unit.index.builders import blob_key, file_index, local_file

METADATA = SnapshotMetadata(job="job", task="0", store="s", version=1, unique_id=UniqueId("u"))
KEY = blob_key(1)
GAP, TINY = GAP_BYTES_FIRST, GAP_BYTES_TINY


def in_pack(name: str, offset: int, size: int) -> FileIndex:
    entry = file_index(name, b"x")
    metadata = msgspec.structs.replace(entry.metadata, size_bytes=size)
    return FileIndex(name, metadata, entry.blake3, entry.crc32, (FileBlob(KEY, 0, offset, size),))


def snapshot(*files: FileIndex, pack_bytes: int = 0) -> SnapshotIndex:
    packs = (Pack(KEY, pack_bytes),) if pack_bytes else ()
    return SnapshotIndex(metadata=METADATA, session="0" * 20, dir=DirIndex("", files), packs=packs)


@pytest.mark.parametrize(
    "places, range_bytes, ranges",
    [
        ([(0, 10)], 100, ["0+10: a"]),
        ([(5, 10)], 100, ["5+10: a"]),
        ([(0, 10), (10, 10), (20, 10)], 100, ["0+30: a b c"]),
        ([(20, 10), (0, 10), (10, 10)], 100, ["0+30: b c a"]),
        ([(0, 10), (10, 10), (20, 10)], 30, ["0+30: a b c"]),
        ([(0, 10), (10, 10), (20, 10)], 29, ["0+20: a b", "20+10: c"]),
        ([(0, 10), (10 + TINY, 10)], 1 << 30, [f"0+{TINY + 20}: a b"]),
        ([(0, 10), (11 + TINY, 10)], 1 << 30, ["0+10: a", f"{TINY + 11}+10: b"]),
        ([(0, 10), (10 + GAP, GAP)], 1 << 30, [f"0+{2 * GAP + 10}: a b"]),
        ([(0, 10), (11 + GAP, GAP)], 1 << 30, ["0+10: a", f"{GAP + 11}+{GAP}: b"]),
        ([(0, 10), (15, 10)], 20, ["0+10: a", "15+10: b"]),
        ([(0, 10), (0, 10)], 100, ["0+10: a", "0+10: b"]),
        ([(0, 30), (10, 5), (25, 10)], 100, ["0+30: a", "10+25: b c"]),
    ],
)
def test_neighbours_in_a_pack_are_one_request(
    places: list[tuple[int, int]], range_bytes: int, ranges: list[str]
) -> None:
    files = [in_pack("abc"[i], offset, size) for i, (offset, size) in enumerate(places)]
    plan = plan_restore(snapshot(*files, pack_bytes=1 << 30), {}, range_bytes=range_bytes, owners_count=False)
    shown = [f"{run.start}+{run.size_bytes}: {' '.join(file.entry.name for file in run.files)}" for run in plan.runs]
    assert shown == ranges
    assert plan.fetch_requests == len(ranges)
    assert plan.fetch_bytes == sum(int(text.split("+")[1].split(":")[0]) for text in ranges)


@pytest.mark.parametrize(
    "wait_s, bytes_per_s, gap_bytes",
    [
        (0.020 / 16, 200e6, 450_000),  # a region away: 20 ms, sixteen at once
        (0.002, 1e9, 3_000_000),
        (0.0001, 50e6, GAP_BYTES_MIN),
        (1.0, 1e9, GAP_BYTES_MAX),
        (0.0, 0.0, GAP_BYTES_MIN),
    ],
)
def test_a_gap_is_what_comes_in_the_time_of_a_request(wait_s: float, bytes_per_s: float, gap_bytes: int) -> None:
    assert choose_gap_bytes(wait_s, bytes_per_s) == gap_bytes


@pytest.mark.parametrize("gap_bytes, requests", [(0, 3), (9, 3), (10, 2), (100, 1)])
def test_files_of_a_pack_are_asked_for_together_over_a_gap_of_that_size(gap_bytes: int, requests: int) -> None:
    files = [in_pack("a", 0, 10), in_pack("b", 20, 10), in_pack("c", 130, 10)]
    index = snapshot(*files, pack_bytes=1 << 20)
    plan = plan_restore(index, {}, range_bytes=1 << 20, owners_count=False, gap_bytes=gap_bytes)
    assert plan.fetch_requests == requests


@pytest.mark.parametrize("size_bytes, requests", [(4096, 9), (64 * 1024, 1)])
def test_a_large_gap_is_not_bridged_for_a_tiny_file(size_bytes: int, requests: int) -> None:
    files = [in_pack(str(n), n * 900 * 1024, size_bytes) for n in range(9)]
    index = snapshot(*files, pack_bytes=1 << 30)
    plan = plan_restore(index, {}, range_bytes=1 << 30, owners_count=False)
    assert plan.fetch_requests == requests


def test_packed_file_larger_than_a_range_is_streamed() -> None:
    plan = plan_restore(snapshot(in_pack("a", 7, 101), pack_bytes=200), {}, range_bytes=100, owners_count=False)
    assert plan.runs == ()
    assert [file.entry.name for file in plan.streams] == ["a"]


def test_every_form_has_its_way() -> None:
    blobs = (FileBlob(blob_key(2), 0, 0, 4, b"h" * 32), FileBlob(blob_key(3), 4, 0, 4, b"h" * 32))
    whole = file_index("cut", b"12345678")
    cut = FileIndex("cut", whole.metadata, whole.blake3, whole.crc32, blobs)
    tiny = file_index("inline", b"i")
    inline = FileIndex("inline", tiny.metadata, tiny.blake3, tiny.crc32, (), b"i")
    index = msgspec.structs.replace(
        snapshot(
            in_pack("a", 0, 10), cut, file_index("empty"), inline, file_index("one", b"one", counter=8), pack_bytes=10
        ),
        dir=DirIndex(
            "",
            (in_pack("a", 0, 10), cut, file_index("empty"), inline, file_index("one", b"one", counter=8)),
            (DirIndex("d", (), (DirIndex("e", (file_index("f", b"f", counter=9),)),), mode=0o750), DirIndex("g")),
            mode=0o500,
        ),
    )
    plan = plan_restore(index, {}, range_bytes=100, owners_count=False)
    assert plan.dirs == (("d",), ("d", "e"), ("g",))
    assert plan.modes == {(): 0o500, ("d",): 0o750}
    assert [file.path for file in plan.empty] == [("empty",)]
    assert [file.path for file in plan.inline] == [("inline",)]
    assert [file.path for run in plan.runs for file in run.files] == [("a",)]
    assert [file.path for file in plan.streams] == [("cut",), ("one",), ("d", "e", "f")]
    assert plan.fetch_requests == 1 + 2 + 1 + 1
    assert (plan.files_count, plan.size_bytes) == (6, 10 + 8 + 0 + 1 + 3 + 1)


@pytest.mark.parametrize(
    "name, changed, owners_count, link",
    [
        ("1.sst", {}, False, True),
        ("1.sst", {}, True, True),
        ("1.sst", {"mode": 0o600}, False, False),
        ("1.sst", {"modified_at_ns": 5}, False, False),
        ("1.sst", {"owner": "other"}, False, True),
        ("1.sst", {"owner": "other"}, True, False),
        ("1.sst", {"group": "other"}, True, False),
        ("CURRENT", {}, False, False),
        ("1.sst.bak", {}, False, False),
    ],
)
def test_only_an_sst_with_equal_metadata_gets_a_second_name(
    name: str, changed: dict[str, int | str], owners_count: bool, link: bool
) -> None:
    local = local_file(name, b"data", **changed)  # type: ignore[arg-type]
    index = snapshot(file_index(name, b"data"))
    plan = plan_restore(index, {(name,): local}, range_bytes=100, owners_count=owners_count)
    assert (len(plan.links), len(plan.copies)) == ((1, 0) if link else (0, 1))
    assert plan.fetch_requests == 0
    assert plan.files_count == 1


@pytest.mark.parametrize("name", ["..", "a/b", "", "\0"])
def test_name_that_is_no_path_component_is_refused(name: str) -> None:
    present: dict[tuple[str, ...], LocalFile] = {}
    with pytest.raises(UnsafeNameError):
        plan_restore(snapshot(file_index(name, b"x")), present, range_bytes=100, owners_count=False)
    index = msgspec.structs.replace(snapshot(), dir=DirIndex("", (), (DirIndex(name),)))
    with pytest.raises(UnsafeNameError):
        plan_restore(index, present, range_bytes=100, owners_count=False)
