"""The cache of digests: what a backup may believe, what a restore may, and what damage does (design 0002, I1, I2)."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.local import digests
from engine.local.digests import Digest, DigestCache
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FileMetadata, SstIdentity

SECOND_NS = 1_000_000_000
CHANGED_NS = 1_700_000_000 * SECOND_NS
QUIET_NS = CHANGED_NS + 2 * SECOND_NS
DIGEST = Digest(b"d" * 32, 7)


def a_file(
    *,
    size: int = 5,
    mtime: int = CHANGED_NS,
    ctime: int = CHANGED_NS,
    inode: int = 9,
    device: int = 1,
    name: str = "000009.sst",
) -> LocalFile:
    return LocalFile(
        name=name,
        metadata=FileMetadata(size, 0o644, mtime),
        device=device,
        inode=inode,
        changed_at_ns=ctime,
        blake3=DIGEST.blake3,
        crc32=DIGEST.crc32,
    )


@pytest.mark.parametrize(
    "changed",
    [{"size": 6}, {"mtime": CHANGED_NS + 1}, {"ctime": CHANGED_NS + 1}, {"inode": 10}, {"device": 2}],
    ids=str,
)
def test_any_other_stat_is_another_file(changed: dict[str, Any]) -> None:
    cache = DigestCache()
    cache.record(a_file(), looked_at_ns=QUIET_NS)
    found = cache.find(a_file())
    assert found is not None
    assert (found.blake3, found.crc32) == DIGEST
    assert cache.find(a_file(**changed)) is None


@pytest.mark.parametrize(
    "looked_at_ns, mtime, ctime, believed",
    [
        (CHANGED_NS + 2 * SECOND_NS - 1, CHANGED_NS, CHANGED_NS, False),
        (CHANGED_NS + 2 * SECOND_NS, CHANGED_NS, CHANGED_NS, True),
        (CHANGED_NS + 2 * SECOND_NS, CHANGED_NS, CHANGED_NS + 1, False),
        (CHANGED_NS + 2 * SECOND_NS, CHANGED_NS + 1, CHANGED_NS, False),
        (CHANGED_NS + 2 * SECOND_NS, CHANGED_NS - 9 * SECOND_NS, CHANGED_NS, True),
        (CHANGED_NS - 9 * SECOND_NS, CHANGED_NS, CHANGED_NS, False),
    ],
)
def test_file_that_changed_within_two_seconds_before_is_not_believed(
    looked_at_ns: int, mtime: int, ctime: int, believed: bool
) -> None:
    cache = DigestCache()
    file = a_file(mtime=mtime, ctime=ctime)
    cache.record(file, looked_at_ns=looked_at_ns)
    assert (cache.find(file) is not None) == believed


@pytest.mark.parametrize("trust_stat", [False, True])
@pytest.mark.parametrize(
    "name, is_written_once",
    [
        ("000009.sst", True),
        ("000009.blob", True),
        ("OPTIONS-000007", True),
        ("12_5f0c0ffe-ab12-4c4d-8e8e-0123456789ab.changelog", True),
        ("12.zip", True),
        ("MANIFEST-000005", False),
        ("CURRENT", False),
        ("IDENTITY", False),
        ("000008.log", False),
        ("stranger", False),
        ("blob", False),
        ("archive.zip", False),
    ],
)
def test_backup_believes_only_names_whose_files_are_written_once(
    name: str, is_written_once: bool, trust_stat: bool
) -> None:
    """Bytes that come through a shared mapping move no stat."""
    cache = DigestCache(trust_stat=trust_stat)
    cache.record(a_file(name=name), looked_at_ns=QUIET_NS)
    assert (cache.find(a_file(name=name)) is not None) == (is_written_once or trust_stat)


def test_restore_believes_nothing_unless_a_stat_is_trusted(tmp_path: Path) -> None:
    """Rot moves no stat: not of this process's files, and not of those that another one has written."""
    cache = DigestCache()
    cache.record_restored(a_file(), DIGEST)
    assert cache.find_restored(a_file()) is None
    cache.save(tmp_path, tmp_path / "state")
    assert DigestCache.load(tmp_path, tmp_path / "state").find_restored(a_file()) is None
    assert DigestCache.load(tmp_path, tmp_path / "state", trust_stat=True).find_restored(a_file()) is not None


def test_restore_believes_only_what_a_restore_recorded() -> None:
    cache = DigestCache(trust_stat=True)
    cache.record(a_file(), looked_at_ns=QUIET_NS)
    assert cache.find_restored(a_file()) is None
    cache.record_restored(a_file(), DIGEST)
    assert cache.find_restored(a_file()) is not None
    assert cache.find(a_file()) is None, "a backup does not believe what changed just now"


def test_backup_of_a_restored_file_leaves_it_to_be_believed_by_both() -> None:
    cache = DigestCache(trust_stat=True)
    cache.record_restored(a_file(), DIGEST)
    cache.record(a_file(), looked_at_ns=QUIET_NS)
    assert cache.find(a_file()) is not None
    assert cache.find_restored(a_file()) is not None


def test_restored_file_that_reads_differently_with_the_same_stat_has_to_be_read_by_a_restore() -> None:
    cache = DigestCache(trust_stat=True)
    cache.record_restored(a_file(), DIGEST)
    cache.record(msgspec.structs.replace(a_file(), blake3=b"x" * 32), looked_at_ns=QUIET_NS)
    assert cache.find_restored(a_file()) is None


def test_facts_about_one_stat_add_up() -> None:
    cache = DigestCache()
    sst = SstIdentity("SESSION", 3)
    cache.record(
        msgspec.structs.replace(a_file(), blake3=None, crc32=None, sst=sst), looked_at_ns=QUIET_NS, sst_read=True
    )
    cache.record(a_file(), looked_at_ns=QUIET_NS)
    found = cache.find(a_file())
    assert found is not None
    assert (found.sst_read, found.sst, found.blake3) == (True, sst, DIGEST.blake3)


def test_new_stat_replaces_the_old_one_and_the_oldest_entries_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "ENTRIES_MAX", 3)
    cache = DigestCache()
    for change in range(5):
        cache.record(a_file(ctime=CHANGED_NS + change), looked_at_ns=QUIET_NS + 10 * SECOND_NS)
    assert len(cache) == 1
    for inode in range(5):
        cache.record(a_file(inode=inode), looked_at_ns=QUIET_NS)
    assert len(cache) == 3
    assert [inode for inode in range(5) if cache.find(a_file(inode=inode))] == [2, 3, 4]


def test_files_that_are_gone_are_forgotten_once_they_are_the_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "EXTRA_ENTRIES", 0)
    cache = DigestCache()
    for inode in range(10):
        cache.record(a_file(inode=inode), looked_at_ns=QUIET_NS)
    cache.trim([a_file(inode=inode) for inode in range(5)])
    assert len(cache) == 10
    cache.trim([a_file(inode=inode) for inode in range(4)])
    assert len(cache) == 4
    assert cache.find(a_file(inode=3)) is not None


class TestOnDisk:
    @pytest.fixture
    def cache(self) -> DigestCache:
        cache = DigestCache(trust_stat=True)
        cache.record(a_file(), looked_at_ns=QUIET_NS)
        cache.record_restored(a_file(inode=10), DIGEST)
        return cache

    def test_load_gives_what_save_was_given(self, cache: DigestCache, tmp_path: Path) -> None:
        cache.save(tmp_path / "cache", tmp_path / "state")
        cache.save(tmp_path / "cache", tmp_path / "state")
        loaded = DigestCache.load(tmp_path / "cache", tmp_path / "state", trust_stat=True)
        assert loaded.find(a_file()) == cache.find(a_file())
        assert loaded.find_restored(a_file(inode=10)) == cache.find_restored(a_file(inode=10))
        assert len(list((tmp_path / "cache").iterdir())) == 1
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700

    def test_each_directory_has_its_own_file(self, cache: DigestCache, tmp_path: Path) -> None:
        cache.save(tmp_path, tmp_path / "a")
        assert len(DigestCache.load(tmp_path, tmp_path / "b")) == 0
        assert len(DigestCache.load(tmp_path / "nowhere", tmp_path / "a")) == 0

    def test_a_directory_may_have_a_name_that_is_not_utf8(self, cache: DigestCache, tmp_path: Path) -> None:
        cache.save(tmp_path, tmp_path / "caf\udce9")
        assert len(DigestCache.load(tmp_path, tmp_path / "caf\udce9")) == 2

    def test_any_damage_makes_it_empty(self, cache: DigestCache, tmp_path: Path) -> None:
        cache.save(tmp_path, tmp_path / "a")
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            assert len(DigestCache.load(tmp_path, tmp_path / "a")) == 0
        for size in (0, 7, 8, 40, len(whole) - 1):
            path.write_bytes(whole[:size])
            assert len(DigestCache.load(tmp_path, tmp_path / "a")) == 0
        path.write_bytes(whole + b"x")
        assert len(DigestCache.load(tmp_path, tmp_path / "a")) == 0

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_file_that_others_can_write_is_not_believed(self, cache: DigestCache, tmp_path: Path, mode: int) -> None:
        cache.save(tmp_path, tmp_path / "a")
        (path,) = tmp_path.iterdir()
        path.chmod(mode)
        assert len(DigestCache.load(tmp_path, tmp_path / "a")) == 0

    def test_link_in_its_place_is_not_followed(self, cache: DigestCache, tmp_path: Path) -> None:
        cache.save(tmp_path, tmp_path / "a")
        (path,) = tmp_path.iterdir()
        path.rename(tmp_path / "elsewhere")
        path.symlink_to("elsewhere")
        assert len(DigestCache.load(tmp_path, tmp_path / "a")) == 0

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_file_of_another_user_is_not_believed(self, cache: DigestCache, tmp_path: Path) -> None:
        cache.save(tmp_path, tmp_path / "a")
        (path,) = tmp_path.iterdir()
        os.chown(path, 12345, -1)
        assert len(DigestCache.load(tmp_path, tmp_path / "a")) == 0

    def test_oversized_file_is_not_read(
        self, cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache.save(tmp_path, tmp_path / "a")
        monkeypatch.setattr(digests, "CACHE_BYTES_MAX", 10)
        assert len(DigestCache.load(tmp_path, tmp_path / "a")) == 0

    def test_failed_save_leaves_the_old_file_and_nothing_else(
        self, cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache.save(tmp_path, tmp_path / "a")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", refuse)
        cache.record(a_file(inode=77), looked_at_ns=QUIET_NS)
        with pytest.raises(OSError, match="No space"):
            cache.save(tmp_path, tmp_path / "a")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
