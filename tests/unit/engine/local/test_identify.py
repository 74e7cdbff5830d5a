"""Identity facts: read for exactly the files that a decision needs them of (design 0002, I1 and I2)."""

import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from engine.errors import UnsafeSourceError
from engine.local import digests as module
from engine.local.digests import DigestCache, FactReader, StoppedError, hash_bytes
from engine.local.scan import SourceDir, scan_dir
from index.rocksdb.sst import MoreBytesNeeded
from index.snapshot.dir_diff import LocalDir
from index.snapshot.model import DirIndex, FileIndex, FileMetadata, SstIdentity
from tests.unit.engine.workbench import open_descriptors

LONG_AFTER_NS = 4_000_000_000_000_000_000
SST = SstIdentity("ABCDEFGHIJKLMNOPQRST", 7)


def entry(name: str, data: bytes, sst: SstIdentity | None = None) -> FileIndex:
    return FileIndex(name, FileMetadata(len(data), 0o644, 1), hash_bytes(data).blake3, hash_bytes(data).crc32, sst=sst)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Each read of a file: what kind of fact, how many bytes of the file there are."""
    seen: list[tuple[str, int, int]] = []
    real = module._opened_file

    def watched(source: SourceDir, item: module.Wanted) -> AbstractContextManager[int]:
        seen.append(("/".join(item.path), item.sst, item.digest))
        return real(source, item)

    monkeypatch.setattr(module, "_opened_file", watched)
    return seen


def reader(root: Path, cache: DigestCache | None = None, stop: threading.Event | None = None) -> FactReader:
    cache = cache if cache is not None else DigestCache()
    return FactReader(root, cache, stop=stop or threading.Event(), looked_at_ns=LONG_AFTER_NS)


def identified(root: Path, remote: DirIndex, cache: DigestCache | None = None) -> LocalDir:
    return reader(root, cache).identify(scan_dir(root), remote)


def facts(directory: LocalDir) -> dict[str, tuple[bytes | None, SstIdentity | None]]:
    return {file.name: (file.blake3, file.sst) for file in directory.files}


def test_only_files_of_equal_name_place_and_size_are_read(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("same", "other", "longer", "new", "empty", "sub/same", "sub/moved"):
        (tmp_path / name).write_bytes(b"" if name == "empty" else name.encode())
    remote = DirIndex(
        "",
        (
            entry("empty", b""),
            entry("longer", b"x"),
            entry("moved", b"sub/moved"),
            entry("other", b"OTHER"),
            entry("same", b"same"),
        ),
        (DirIndex("sub", (entry("same", b"sub/same"),)),),
    )
    result = identified(tmp_path, remote)
    assert sorted(path for path, _, _ in reads) == ["other", "same", "sub/same"]
    assert facts(result) == {
        "empty": (None, None),
        "longer": (None, None),
        "new": (None, None),
        "other": (hash_bytes(b"other").blake3, None),
        "same": (hash_bytes(b"same").blake3, None),
    }
    assert facts(result.sub_dirs[0])["same"] == (hash_bytes(b"sub/same").blake3, None)


def test_second_look_reads_nothing(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    (tmp_path / "OPTIONS-000007").write_bytes(b"data")
    cache = DigestCache()
    remote = DirIndex("", (entry("OPTIONS-000007", b"data"),))
    first = identified(tmp_path, remote, cache)
    assert identified(tmp_path, remote, cache) == first
    assert len(reads) == 1


def test_what_the_cache_believes_is_taken_over_by_the_next_look(
    tmp_path: Path, reads: list[tuple[str, int, int]]
) -> None:
    (tmp_path / "sub").mkdir()
    names = ("OPTIONS-000007", "CURRENT", "sub/000008.sst")
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    top = tuple(entry(name, name.encode()) for name in ("CURRENT", "OPTIONS-000007"))
    remote = DirIndex("", top, (DirIndex("sub", (entry("000008.sst", names[2].encode()),)),))
    cache = DigestCache()
    identified(tmp_path, remote, cache)
    assert not cache.believed.files, "what was read a moment ago is believed by the cache, from the next look on"
    second = identified(tmp_path, remote, cache)
    assert [file.name for file in cache.believed.files] == ["OPTIONS-000007"], "CURRENT is written again and again"
    reads.clear()
    third = reader(tmp_path, cache).identify(scan_dir(tmp_path, cache.believed), remote)
    assert third == second
    assert third.files[1] is second.files[1]
    assert third.sub_dirs[0].files[0] is second.sub_dirs[0].files[0]
    assert [path for path, _, _ in reads] == ["CURRENT"]


@pytest.mark.parametrize("looks", range(1, 4))
def test_a_file_that_changed_since_it_was_believed_is_read(
    tmp_path: Path, reads: list[tuple[str, int, int]], looks: int
) -> None:
    path = tmp_path / "OPTIONS-000007"
    path.write_bytes(b"data")
    cache = DigestCache()
    remote = DirIndex("", (entry("OPTIONS-000007", b"data"),))
    for _ in range(looks):
        reader(tmp_path, cache).identify(scan_dir(tmp_path, cache.believed), remote)
    status = path.stat()
    path.write_bytes(b"DATA")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    reads.clear()
    changed = reader(tmp_path, cache).identify(scan_dir(tmp_path, cache.believed), remote)
    assert facts(changed) == {"OPTIONS-000007": (hash_bytes(b"DATA").blake3, None)}
    assert len(reads) == 1


def test_a_file_that_may_still_change_within_a_tick_is_described_again(tmp_path: Path) -> None:
    (tmp_path / "OPTIONS-000007").write_bytes(b"data")
    cache = DigestCache()
    remote = DirIndex("", (entry("OPTIONS-000007", b"data"),))
    for _ in range(3):
        soon = FactReader(tmp_path, cache, stop=threading.Event(), looked_at_ns=time.time_ns())
        soon.identify(scan_dir(tmp_path, cache.believed), remote)
    assert not cache.believed.files


def test_sst_with_an_identity_is_not_hashed(
    tmp_path: Path, reads: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "000007.sst").write_bytes(b"anything")
    monkeypatch.setattr(module, "parse_sst_tail", lambda tail, size: SST)
    cache = DigestCache()
    remote = DirIndex("", (entry("000007.sst", b"anything", SST),))
    assert facts(identified(tmp_path, remote, cache)) == {"000007.sst": (None, SST)}
    assert facts(identified(tmp_path, remote, cache)) == {"000007.sst": (None, SST)}
    assert len(reads) == 1


def test_sst_without_an_identity_here_or_there_is_hashed(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    for name in ("1.sst", "2.sst"):
        (tmp_path / name).write_bytes(b"no table")
    remote = DirIndex("", (entry("1.sst", b"no table", SST), entry("2.sst", b"no table")))
    digest = hash_bytes(b"no table").blake3
    cache = DigestCache()
    for _ in range(2):
        assert facts(identified(tmp_path, remote, cache)) == {"1.sst": (digest, None), "2.sst": (digest, None)}
    assert reads == [("1.sst", True, True), ("2.sst", False, True)]


@pytest.mark.parametrize("asked, tries", [([100, 5000], 3), ([5000, 9000, 9500], 3)])
def test_sst_that_keeps_asking_for_more_has_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int], tries: int
) -> None:
    (tmp_path / "1.sst").write_bytes(os.urandom(10_000))
    answers = [*map(MoreBytesNeeded, asked), None, None]
    given: list[int] = []

    def parse(tail: bytes, size: int) -> object:
        given.append(len(tail))
        return answers.pop(0)

    monkeypatch.setattr(module, "parse_sst_tail", parse)
    scanned = scan_dir(tmp_path)
    files = [((file.name,), file) for file in scanned.files]
    assert reader(tmp_path).identify_ssts(files) == {}
    assert given == [4096, *asked][:tries]


@pytest.mark.parametrize("limits", [{"_GROUP_FILES_MAX": 3}, {"_GROUP_BYTES": 2500}, {}], ids=["files", "bytes", "one"])
def test_much_to_hash_is_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    for name, limit in ({"READ_ALONE_BYTES_MAX": 0} | limits).items():
        monkeypatch.setattr(module, name, limit)
    data = {f"{i:03d}": os.urandom(1000) for i in range(50)}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    result = identified(tmp_path, DirIndex("", tuple(entry(name, content) for name, content in data.items())))
    assert facts(result) == {name: (hash_bytes(content).blake3, None) for name, content in data.items()}


@pytest.mark.parametrize("alone_bytes_max", [0, 1 << 30])
@pytest.mark.parametrize("change", ["grown", "exchanged", "gone", "link"])
def test_file_that_changed_since_the_scan_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, alone_bytes_max: int
) -> None:
    monkeypatch.setattr(module, "READ_ALONE_BYTES_MAX", alone_bytes_max)
    root = tmp_path / "root"
    root.mkdir()
    (root / "f").write_bytes(b"data")
    scanned = scan_dir(root)
    if change == "grown":
        (root / "f").write_bytes(b"data and more")
    else:
        (root / "f").rename(tmp_path / "aside")
    if change == "exchanged":
        (root / "f").write_bytes(b"data")
    if change == "link":
        (root / "f").symlink_to(tmp_path / "aside")
    before = open_descriptors()
    with pytest.raises(UnsafeSourceError) as raised:
        reader(root).identify(scanned, DirIndex("", (entry("f", b"data"),)))
    assert raised.value.subject == str(root / "f")
    assert open_descriptors() == before


def test_reading_stops_when_nobody_wants_it(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        reader(tmp_path, stop=stop).identify(scan_dir(tmp_path), DirIndex("", (entry("f", b"data"),)))


class TestFindPresent:
    def found(self, root: Path, entries: dict[str, FileIndex], cache: DigestCache) -> set[str]:
        candidates = [((file.name,), file, entries[file.name]) for file in scan_dir(root).files]
        return {path[0] for path in reader(root, cache).find_present(candidates)}

    def test_content_decides(self, tmp_path: Path) -> None:
        for name in ("right", "wrong"):
            (tmp_path / name).write_bytes(name.encode())
        entries = {"right": entry("right", b"right"), "wrong": entry("wrong", b"WRONG")}
        assert self.found(tmp_path, entries, DigestCache()) == {"right"}

    def test_what_a_backup_knows_is_read_again_and_what_a_restore_wrote_is_not(
        self, tmp_path: Path, reads: list[tuple[str, int, int]]
    ) -> None:
        (tmp_path / "f").write_bytes(b"data")
        (file,) = scan_dir(tmp_path).files
        entries = {"f": entry("f", b"data")}
        cache = DigestCache(trust_stat=True)
        identified(tmp_path, DirIndex("", (entries["f"],)), cache)
        reads.clear()
        assert self.found(tmp_path, entries, cache) == {"f"}
        assert len(reads) == 1
        cache.record_restored(file, hash_bytes(b"data"))
        assert self.found(tmp_path, entries, cache) == {"f"}
        assert self.found(tmp_path, {"f": entry("f", b"DATA")}, cache) == set()
        assert len(reads) == 1

    def test_session_id_says_nothing_of_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "1.sst").write_bytes(b"damaged!")
        monkeypatch.setattr(module, "parse_sst_tail", lambda tail, size: SST)
        assert self.found(tmp_path, {"1.sst": entry("1.sst", b"as it was", SST)}, DigestCache()) == set()

    def test_file_that_cannot_be_had_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"data")
        (file,) = scan_dir(tmp_path).files
        (tmp_path / "f").unlink()
        assert reader(tmp_path).find_present([(("f",), file, entry("f", b"data"))]) == {}
