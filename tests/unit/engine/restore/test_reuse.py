"""A restore takes what the old directory has already, and nothing that only looks like it."""

import math
import os
from pathlib import Path

import msgspec
import pytest
import rocksdict

from engine.errors import EngineError, TargetError
from engine.local import digests
from engine.local.digests import hash_bytes
from engine.local.scan import local_file
from engine.settings import KIB, TransferSettings
from index.snapshot.model import SstIdentity
from tests.unit.engine.restore.restore_kit import FORMS, backed_up, restored_whole
from tests.unit.engine.workbench import Workbench, read_tree


@pytest.fixture
async def bench(tmp_path: Path) -> Workbench:
    return await backed_up(tmp_path)


class TestReuse:
    """I2: what is there already and right is not fetched again."""

    @pytest.fixture
    async def restored(self, bench: Workbench) -> Workbench:
        await bench.restore()
        bench.meter.reset()
        return bench

    async def test_restored_directory_is_believed_by_its_stat_where_that_is_trusted(
        self, restored: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        restored.cache._trust_stat = True
        monkeypatch.setattr(digests, "_is_equal", None)
        result = await restored.restore(replace=True)
        assert restored_whole(restored)
        assert restored.meter.requests == {"get": 1}
        assert (result.files_fetched, result.files_reused, result.files_inline, result.requests) == (0, 6, 2, 1)
        # And once more: the new stat of the hard-linked SST is remembered as well.
        result = await restored.restore(replace=True)
        assert result.files_reused == 6

    @pytest.mark.parametrize("trust_stat", [False, True])
    @pytest.mark.parametrize("name", ["packed-1", "000007.sst", "cut"])
    async def test_rot_that_moves_no_stat_is_fetched_again(
        self, restored: Workbench, name: str, trust_stat: bool
    ) -> None:
        path = restored.target / name
        whole, status = path.read_bytes(), path.stat()
        path.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        # The stat that the cache has is that of the rotten file, as if rot had moved none.
        restored.cache.record_restored(local_file(name, path.stat()), hash_bytes(whole))
        restored.cache._trust_stat = trust_stat
        result = await restored.restore(replace=True)
        # A stat is trusted where the file gets a second name; a file that is copied is hashed on the way.
        is_kept = trust_stat and name == "000007.sst"
        assert (read_tree(restored.target) == read_tree(restored.directory)) != is_kept
        assert result.files_fetched == (0 if is_kept else 1)

    async def test_directory_of_somebody_else_is_read_and_reused_where_it_is_right(self, bench: Workbench) -> None:
        bench.target.mkdir()
        bench.write({name: data for name, data in FORMS.items() if name != "cut"}, below=bench.target)
        bench.meter.reset()
        result = await bench.restore(replace=True)
        assert restored_whole(bench)
        assert bench.meter.requests == {"get": 4}
        assert (result.files_fetched, result.bytes_fetched) == (1, 20_000)

    async def test_gaps_between_missing_files_are_fetched_along_where_a_request_costs_more(
        self, tmp_path: Path
    ) -> None:
        bench = Workbench(tmp_path)
        bench.settings = TransferSettings()
        bench.write({f"{i:02d}": os.urandom(90 * KIB) for i in range(100)})
        await bench.backup()
        await bench.restore()
        # Of 9 MB a rate is known; it may be that of a disk, on which a gap of ten files is nothing.
        assert bench.pace.answer_s < math.inf
        assert bench.pace.bytes_per_s > 0
        requests = {}
        for name, answer_s, bytes_per_s in (("slow", 0.001, 1e8), ("fast", 0.1, 1e9)):
            for i in range(0, 100, 10):
                (bench.target / f"{i:02d}").unlink()
            bench.pace.answer_s, bench.pace.bytes_per_s = answer_s, bytes_per_s
            result = await bench.restore(replace=True)
            assert read_tree(bench.target) == read_tree(bench.directory)
            assert result.files_fetched == 10
            requests[name] = result.requests
        # One for the index; the ten files are in one pack.
        assert requests == {"slow": 11, "fast": 2}

    async def test_ninety_percent_present_fetches_the_rest(self, tmp_path: Path) -> None:
        bench = Workbench(tmp_path)
        bench.write({f"{i:02d}.sst": os.urandom(3000) for i in range(50)})
        await bench.backup()
        await bench.restore()
        for i in range(5):
            (bench.target / f"{i * 10:02d}.sst").unlink()
        bench.meter.reset()
        result = await bench.restore(replace=True)
        assert restored_whole(bench)
        assert (result.files_reused, result.files_fetched, result.bytes_fetched) == (45, 5, 15_000)
        assert bench.meter.requests == {"get": 6}

    @pytest.mark.parametrize("name", ["packed-1", "000007.sst", "cut", "sub/deep/packed-3"])
    @pytest.mark.parametrize("times_are_set_back", [False, True])
    async def test_altered_file_is_fetched_again(
        self, restored: Workbench, name: str, times_are_set_back: bool
    ) -> None:
        path = restored.target / name
        status = path.stat()
        path.chmod(0o600)
        *kept, last = path.read_bytes()
        path.write_bytes(bytes([*kept, last ^ 1]))
        path.chmod(status.st_mode)
        if times_are_set_back:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        result = await restored.restore(replace=True)
        assert restored_whole(restored)
        assert result.files_fetched == 1

    async def test_sst_gets_a_second_name_and_everything_else_is_copied(self, restored: Workbench) -> None:
        before = {
            str(p.relative_to(restored.target)): p.stat().st_ino for p in restored.target.rglob("*") if p.is_file()
        }
        await restored.restore(replace=True)
        after = {
            str(p.relative_to(restored.target)): p.stat().st_ino for p in restored.target.rglob("*") if p.is_file()
        }
        assert {name for name in before if before[name] == after[name]} == {"000007.sst"}
        assert (restored.target / "000007.sst").stat().st_nlink == 1

    async def test_sst_whose_metadata_differ_is_copied_so_that_the_old_one_stays_as_it_was(
        self, restored: Workbench
    ) -> None:
        path = restored.target / "000007.sst"
        path.chmod(0o600)
        os.utime(path, ns=(1, 1))
        inode, reader = path.stat().st_ino, path.open("rb")

        async def refuse() -> None:
            assert os.fstat(reader.fileno()).st_mtime_ns == 1
            raise EngineError("no", operation="restore")

        with pytest.raises(EngineError):
            await restored.restore(replace=True, meanwhile=refuse)
        assert (path.stat().st_mode & 0o777, path.stat().st_mtime_ns) == (0o600, 1)
        await restored.restore(replace=True)
        assert restored_whole(restored)
        assert path.stat().st_ino != inode
        reader.close()

    async def test_what_is_not_in_the_snapshot_goes(self, restored: Workbench) -> None:
        (restored.target / "stray").write_bytes(b"x")
        (restored.target / "stray-dir" / "below").mkdir(parents=True)
        (restored.target / "stray-link").symlink_to("/etc/passwd")
        await restored.restore(replace=True)
        assert restored_whole(restored)
        assert not (restored.target / "stray-link").is_symlink()

    async def test_file_in_place_of_a_directory_and_the_reverse(self, restored: Workbench) -> None:
        (restored.target / "cut").unlink()
        (restored.target / "cut").mkdir()
        for path in sorted((restored.target / "sub").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (restored.target / "sub").rmdir()
        (restored.target / "sub").write_bytes(b"a file")
        await restored.restore(replace=True)
        assert restored_whole(restored)

    async def test_target_of_an_open_rocksdb_is_refused(self, bench: Workbench) -> None:
        db = rocksdict.Rdict(str(bench.target), rocksdict.Options(raw_mode=True))
        db[b"k"] = b"v"
        with pytest.raises(TargetError, match="RocksDB"):
            await bench.restore(replace=True)
        assert db[b"k"] == b"v"
        db.close()
        await bench.restore(replace=True)
        assert restored_whole(bench)

    @pytest.mark.parametrize("scan_fails", [False, True])
    async def test_rocksdb_open_below_the_target_is_seen(self, bench: Workbench, scan_fails: bool) -> None:
        (bench.target / "a").mkdir(parents=True)
        if scan_fails:
            (bench.target / "link").symlink_to("nowhere")
        db = rocksdict.Rdict(str(bench.target / "a" / "b"), rocksdict.Options(raw_mode=True))
        with pytest.raises(TargetError, match="RocksDB"):
            await bench.restore(replace=True)
        db[b"k"] = b"v"
        db.close()
        await bench.restore(replace=True)
        assert restored_whole(bench)

    async def test_rocksdb_that_opens_below_the_target_meanwhile_is_left_alone(self, bench: Workbench) -> None:
        bench.target.mkdir()
        (bench.target / "old").touch()
        opened: list[rocksdict.Rdict] = []

        async def meddle() -> None:
            opened.append(rocksdict.Rdict(str(bench.target / "db"), rocksdict.Options(raw_mode=True)))

        with pytest.raises(TargetError, match="RocksDB"):
            await bench.restore(replace=True, meanwhile=meddle)
        opened[0].close()
        assert (bench.target / "db" / "CURRENT").exists()
        assert bench.beside_target() == []

    async def test_rocksdb_that_a_link_in_the_target_points_at_is_none_of_its_business(self, bench: Workbench) -> None:
        bench.target.mkdir()
        (bench.target / "link").symlink_to(bench.root / "db")
        db = rocksdict.Rdict(str(bench.root / "db"), rocksdict.Options(raw_mode=True))
        await bench.restore(replace=True)
        db.close()
        assert read_tree(bench.target) == read_tree(bench.directory)
        assert bench.beside_target() == ["db"]

    async def test_rocksdb_that_opens_the_target_meanwhile_is_left_alone(self, bench: Workbench) -> None:
        rocksdict.Rdict(str(bench.target), rocksdict.Options(raw_mode=True)).close()
        opened: list[rocksdict.Rdict] = []

        async def meddle() -> None:
            opened.append(rocksdict.Rdict(str(bench.target), rocksdict.Options(raw_mode=True)))

        with pytest.raises(TargetError, match="RocksDB"):
            await bench.restore(replace=True, meanwhile=meddle)
        opened[0][b"k"] = b"v"
        opened[0].close()
        assert bench.beside_target() == []

    @pytest.mark.parametrize("name", ["packed-1", "000007.sst", "cut"])
    @pytest.mark.parametrize("change", ["gone", "altered"])
    async def test_file_that_changes_after_it_was_looked_at_is_fetched(
        self, restored: Workbench, name: str, change: str
    ) -> None:
        async def meddle() -> None:
            path = restored.target / name
            if change == "altered":
                status = path.stat()
                path.chmod(0o600)
                path.write_bytes(bytes(status.st_size))
                path.chmod(status.st_mode)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            else:
                path.unlink()

        # The one file that is missing is fetched first, and meanwhile another one changes.
        (restored.target / "sub/deep/packed-3").unlink()
        restored.settings = msgspec.structs.replace(restored.settings, in_flight_max=1)
        restored.store.before("get", "blobs/", meddle)
        result = await restored.restore(replace=True)
        assert restored_whole(restored)
        assert result.files_fetched == 2

    async def test_session_id_is_no_proof(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(digests, "parse_sst_tail", lambda tail, size: SstIdentity("S" * 20, 7))
        await bench.backup(base=None)
        bench.target.mkdir()
        rotten = bytearray(FORMS["000007.sst"])
        rotten[100] ^= 1
        (bench.target / "000007.sst").write_bytes(rotten)
        await bench.restore(replace=True)
        assert restored_whole(bench)
