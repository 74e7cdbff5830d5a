"""A restore brings a snapshot back whole, or leaves the target as it was."""

import asyncio
import hashlib
import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rocksdict

import engine.staging
from blobstore import local_files
from blobstore.base import BytesBody, list_blobs
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreUnavailableError
from engine import identify, index_io, local_stat
from engine.errors import DamagedError, EngineError, TargetBusyError, TargetError
from engine.index_io import IndexCache, read_index
from engine.restore import OwnerPolicy
from engine.staging import Staging
from index.envelope import KIND_INDEX, seal
from index.errors import FormatError
from index.keys import INDEXES, upload_key
from index.model import DirIndex, IndexReference, SnapshotIndex, SstIdentity, StoreReference
from index.reachable import files_of
from tests.unit.engine.workbench import SCOPE, Tree, Workbench, open_descriptors, read_tree, stamps

FORMS: Tree = {
    "empty": b"",
    "inline": b"16 bytes, inline",
    "packed-1": os.urandom(1500),
    "sub/packed-2": os.urandom(2048),
    "sub/deep/packed-3": os.urandom(17),
    "000007.sst": os.urandom(5_000),
    "cut": os.urandom(20_000),
    "sub/übersicht \U0001f600": b"more than sixteen bytes",
}


@pytest.fixture
async def bench(tmp_path: Path) -> Workbench:
    """With one snapshot of every form of file, odd modes and old times."""
    bench = Workbench(tmp_path)
    bench.write(FORMS)
    (bench.directory / "empty-dir" / "below").mkdir(parents=True)
    (bench.directory / "sub" / "packed-2").chmod(0o640)
    (bench.directory / "cut").chmod(0o400)
    for at, path in enumerate(sorted(bench.directory.rglob("*"))):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + at))
    await bench.backup()
    return bench


def restored_whole(bench: Workbench, target: Path | None = None) -> bool:
    target = target or bench.target
    assert read_tree(target) == read_tree(bench.directory)
    assert stamps(target) == stamps(bench.directory)
    assert bench.beside_target() == []
    return True


async def blob_of(bench: Workbench, path: str, position: int = 0) -> str:
    assert bench.newest is not None
    index = await read_index(bench.inner, bench.newest.index)
    (file,) = (file for parts, file in files_of(index.dir) if "/".join(parts) == path)
    return file.blobs[position].key


class TestTarget:
    async def test_absent_target_is_made_with_its_parents(self, bench: Workbench) -> None:
        result = await bench.restore(target=bench.target / "deeper" / "still")
        assert read_tree(bench.target / "deeper" / "still") == read_tree(bench.directory)
        assert stamps(bench.target / "deeper" / "still") == stamps(bench.directory)
        assert sorted(path.name for path in (bench.target / "deeper").iterdir()) == ["still"]
        assert result.files_total == 8
        assert result.bytes_total == sum(map(len, FORMS.values()))

    async def test_relative_target_is_meant_from_here(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(bench.root)
        await bench.restore(target=Path("target"))
        assert restored_whole(bench)

    @pytest.mark.parametrize("replace", [False, True])
    async def test_empty_directory_is_replaced_and_lends_its_mode(self, bench: Workbench, replace: bool) -> None:
        bench.target.mkdir()
        bench.target.chmod(0o710)
        await bench.restore(replace=replace)
        assert restored_whole(bench)
        assert bench.target.stat().st_mode & 0o7777 == 0o710

    async def test_permissions_of_directories_follow_the_umask(self, bench: Workbench) -> None:
        before = os.umask(0o027)
        try:
            await bench.restore()
        finally:
            os.umask(before)
        assert bench.target.stat().st_mode & 0o777 == 0o750
        assert (bench.target / "sub").stat().st_mode & 0o777 == 0o750

    @pytest.mark.parametrize("content", ["file", "empty directory", "hidden file", "dangling link"])
    async def test_directory_with_content_is_refused_untouched(self, bench: Workbench, content: str) -> None:
        bench.target.mkdir()
        match content:
            case "file":
                (bench.target / "f").write_bytes(b"precious")
            case "empty directory":
                (bench.target / "d").mkdir()
            case "hidden file":
                (bench.target / ".f").touch()
            case "dangling link":
                (bench.target / "l").symlink_to("nowhere")
        before = sorted(bench.target.iterdir())
        bench.store.requests.clear()
        with pytest.raises(TargetError, match="with content"):
            await bench.restore()
        assert sorted(bench.target.iterdir()) == before
        assert bench.beside_target() == []
        assert bench.store.requests == []

    @pytest.mark.parametrize("replace", [False, True])
    @pytest.mark.parametrize("kind", ["link to a directory", "dangling link", "file"])
    async def test_target_that_is_no_directory_is_refused(self, bench: Workbench, kind: str, replace: bool) -> None:
        (bench.root / "elsewhere").mkdir()
        match kind:
            case "link to a directory":
                bench.target.symlink_to("elsewhere")
            case "dangling link":
                bench.target.symlink_to("nowhere")
            case "file":
                bench.target.write_bytes(b"precious")
        with pytest.raises(TargetError, match=r"symbolic link|not a directory"):
            await bench.restore(replace=replace)
        assert not (bench.root / "nowhere").exists()
        assert list((bench.root / "elsewhere").iterdir()) == []
        assert bench.target.is_symlink() or bench.target.read_bytes() == b"precious"

    @pytest.mark.parametrize("name", ["/", "..", "x" * 300, "f/below"])
    async def test_target_that_cannot_be_is_refused(self, bench: Workbench, name: str) -> None:
        (bench.root / "f").touch()
        with pytest.raises(TargetError):
            await bench.restore(target=bench.root / name)

    async def test_two_restores_to_one_target_do_not_mix(self, bench: Workbench) -> None:
        reached, go = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            reached.set()
            await go.wait()

        bench.store.before("get", "blobs/", wait)
        first = asyncio.create_task(bench.restore())
        await reached.wait()
        with pytest.raises(TargetBusyError, match="another restore is at work"):
            await bench.restore()
        go.set()
        await first
        assert restored_whole(bench)

    async def test_target_that_gets_content_meanwhile_is_left_alone(self, bench: Workbench) -> None:
        async def meddle() -> None:
            bench.target.mkdir()
            (bench.target / "precious").write_bytes(b"!")

        with pytest.raises(TargetError, match="somebody else writes there"):
            await bench.restore(unless=meddle)
        assert read_tree(bench.target) == {"precious": b"!"}
        assert bench.beside_target() == []

    async def test_target_that_is_exchanged_meanwhile_is_left_alone(self, bench: Workbench) -> None:
        bench.write({"old": b"old"}, below=bench.target)

        async def meddle() -> None:
            bench.target.rename(bench.root / "moved")
            bench.write({"precious": b"!"}, below=bench.target)

        with pytest.raises(TargetError, match="has changed since"):
            await bench.restore(replace=True, unless=meddle)
        assert read_tree(bench.target) == {"precious": b"!"}
        assert read_tree(bench.root / "moved") == {"old": b"old"}
        assert bench.beside_target() == ["moved"]

    async def test_whoever_calls_it_off_is_heard_last(self, bench: Workbench) -> None:
        async def refuse() -> None:
            assert not bench.target.exists()
            raise EngineError("the pin is lost", operation="restore")

        with pytest.raises(EngineError, match="the pin is lost"):
            await bench.restore(unless=refuse)
        assert not bench.target.exists()
        assert bench.beside_target() == []


class TestReuse:
    """I2: what is there already and right is not fetched again."""

    @pytest.fixture
    async def restored(self, bench: Workbench) -> Workbench:
        await bench.restore()
        bench.meter.reset()
        return bench

    async def test_restored_directory_is_believed_by_its_stat(
        self, restored: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(identify, "_read_one", None)
        result = await restored.restore(replace=True)
        assert restored_whole(restored)
        assert restored.meter.requests == {"get": 1}
        assert (result.files_fetched, result.files_reused, result.files_inline, result.requests) == (0, 6, 2, 1)
        # And once more: the new stat of the hard-linked SST is remembered as well.
        result = await restored.restore(replace=True)
        assert result.files_reused == 6

    async def test_directory_of_somebody_else_is_read_and_reused_where_it_is_right(self, bench: Workbench) -> None:
        bench.target.mkdir()
        bench.write({name: data for name, data in FORMS.items() if name != "cut"}, below=bench.target)
        bench.meter.reset()
        result = await bench.restore(replace=True)
        assert restored_whole(bench)
        assert bench.meter.requests == {"get": 4}
        assert (result.files_fetched, result.bytes_fetched) == (1, 20_000)

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
            await restored.restore(replace=True, unless=refuse)
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
            await bench.restore(replace=True, unless=meddle)
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
            await bench.restore(replace=True, unless=meddle)
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
        monkeypatch.setattr(identify, "parse_sst_tail", lambda tail, size: SstIdentity("S" * 20, 7))
        await bench.backup(base=None)
        bench.target.mkdir()
        rotten = bytearray(FORMS["000007.sst"])
        rotten[100] ^= 1
        (bench.target / "000007.sst").write_bytes(rotten)
        await bench.restore(replace=True)
        assert restored_whole(bench)


class TestDamage:
    @pytest.mark.parametrize("replace", [False, True])
    @pytest.mark.parametrize("path", ["packed-1", "sub/packed-2", "000007.sst", "cut"])
    async def test_flipped_byte_is_fetched_again_and_then_named(
        self, bench: Workbench, path: str, replace: bool
    ) -> None:
        if replace:
            bench.target.mkdir()
            (bench.target / "old").write_bytes(b"old")
        key = await blob_of(bench, path, -1)
        data = bytearray(b"".join([chunk async for chunk in bench.inner.get(key)]))
        at = data.find(FORMS[path][-100:])
        data[at] ^= 1
        await bench.inner.put(key, BytesBody(bytes(data)))
        bench.store.requests.clear()
        with pytest.raises(DamagedError, match=path) as raised:
            await bench.restore(replace=replace)
        assert raised.value.subject == key
        assert bench.store.requests.count(("get", key)) == 2
        assert read_tree(bench.target) == ({"old": b"old"} if replace else {})
        assert bench.beside_target() == []

    @pytest.mark.parametrize("path", ["packed-1", "000007.sst", "cut"])
    async def test_fault_on_the_way_is_healed_by_the_second_fetch(self, bench: Workbench, path: str) -> None:
        key = await blob_of(bench, path)
        whole = b"".join([chunk async for chunk in bench.inner.get(key)])

        async def flip() -> None:
            await bench.inner.put(key, BytesBody(bytes([whole[0] ^ 1]) + whole[1:]))

        async def heal() -> None:
            await bench.inner.put(key, BytesBody(whole))

        bench.store.before("get", key, flip)
        bench.store.after("get", key, heal)
        result = await bench.restore()
        assert restored_whole(bench)
        assert result.requests == 1 + 1 + 1 + 3 + 1

    @pytest.mark.parametrize("path", ["packed-1", "000007.sst", "cut"])
    @pytest.mark.parametrize("kept_bytes", [0, 1, -1])
    async def test_blob_that_is_cut_short_is_damage(self, bench: Workbench, path: str, kept_bytes: int) -> None:
        key = await blob_of(bench, path)
        whole = b"".join([chunk async for chunk in bench.inner.get(key)])
        await bench.inner.put(key, BytesBody(whole[:kept_bytes]))
        with pytest.raises(DamagedError) as raised:
            await bench.restore()
        assert raised.value.subject == key
        assert not bench.target.exists()
        assert bench.beside_target() == []

    @pytest.mark.parametrize("path", ["packed-1", "000007.sst", "cut"])
    async def test_missing_blob_is_damage_with_its_cause(self, bench: Workbench, path: str) -> None:
        key = await blob_of(bench, path)
        await bench.inner.delete([key])
        with pytest.raises(DamagedError, match=path if path != "packed-1" else "packed-") as raised:
            await bench.restore()
        assert raised.value.subject == key
        assert isinstance(raised.value.__cause__, BlobNotFoundError)
        assert bench.beside_target() == []

    @pytest.mark.parametrize("error", [StoreUnavailableError, AccessDeniedError])
    async def test_what_the_store_says_of_itself_is_raised_as_it_is(
        self, bench: Workbench, error: type[StoreUnavailableError | AccessDeniedError]
    ) -> None:
        bench.store.fail("get", "blobs/", error("no", operation="get", key="k"))
        before = open_descriptors()
        with pytest.raises(error):
            await bench.restore()
        assert not bench.target.exists()
        assert bench.beside_target() == []
        assert open_descriptors() == before

    async def test_index_of_another_snapshot_is_damage(self, bench: Workbench) -> None:
        assert bench.newest is not None
        with pytest.raises(DamagedError, match="not of"):
            await bench.restore(reference=msgspec.structs.replace(bench.newest, unique_id="other"))

    @pytest.mark.parametrize("replace", [False, True])
    async def test_cancelled_restore_leaves_the_target_as_it_was(self, bench: Workbench, replace: bool) -> None:
        if replace:
            bench.target.mkdir()
            (bench.target / "old").write_bytes(b"old")
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.sleep(3600)

        bench.store.after("get", await blob_of(bench, "cut", 1), hang)
        before = open_descriptors()
        task = asyncio.create_task(bench.restore(replace=replace))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert read_tree(bench.target) == ({"old": b"old"} if replace else {})
        assert bench.beside_target() == []
        assert open_descriptors() == before


class TestHostileIndex:
    """Bytes that hash to what the reference says, written by somebody with intent."""

    async def forge(self, bench: Workbench, change: Callable[[SnapshotIndex], SnapshotIndex]) -> StoreReference:
        """Store an altered index past every check that a writer makes."""
        assert bench.newest is not None
        index = change(await read_index(bench.inner, bench.newest.index))
        data = seal(KIND_INDEX, msgspec.msgpack.encode(index), bytes_max=1 << 30, raw_bytes_max=1 << 30)
        key = upload_key(INDEXES, SCOPE, "f" * 20, 0)
        await bench.inner.put(key, BytesBody(data))
        reference = IndexReference(key=key, sha256=hashlib.sha256(data).digest(), size_bytes=len(data))
        return msgspec.structs.replace(bench.newest, index=reference)

    @pytest.mark.parametrize(
        "name", ["../escaped", "/etc/cron.d/x", "..", ".", "", "a/b", "a\\b", "nul\0", "x" * 256, "sub/../../escaped"]
    )
    @pytest.mark.parametrize("kind", ["file", "directory"])
    async def test_name_that_is_not_one_path_component_writes_nothing(
        self, bench: Workbench, name: str, kind: str
    ) -> None:
        def rename(index: SnapshotIndex) -> SnapshotIndex:
            (file, *_) = index.dir.files_present
            if kind == "directory":
                return msgspec.structs.replace(index, dir=DirIndex("", (), (DirIndex(name),)), packs=())
            return msgspec.structs.replace(
                index, dir=DirIndex("", (msgspec.structs.replace(file, name=name),)), packs=()
            )

        reference = await self.forge(bench, rename)
        before = read_tree(bench.root)
        with pytest.raises(FormatError):
            await bench.restore(reference=reference)
        assert read_tree(bench.root) == before

    async def test_file_and_directory_of_one_name_write_nothing(self, bench: Workbench) -> None:
        def both(index: SnapshotIndex) -> SnapshotIndex:
            directory = msgspec.structs.replace(index.dir, sub_dirs_present=(DirIndex("cut"),))
            return msgspec.structs.replace(index, dir=directory)

        with pytest.raises(FormatError):
            await bench.restore(reference=await self.forge(bench, both))
        assert bench.beside_target() == []

    async def test_restored_file_never_runs_with_its_owners_rights(self, bench: Workbench) -> None:
        (bench.directory / "cut").chmod(0o6755)
        await bench.backup()
        await bench.restore()
        assert (bench.target / "cut").stat().st_mode & 0o7777 == 0o755

    async def test_sst_that_runs_with_its_owners_rights_is_not_linked(self, bench: Workbench) -> None:
        (bench.directory / "000007.sst").chmod(0o6755)
        await bench.backup()
        await bench.restore()
        (bench.target / "000007.sst").chmod(0o6755)
        result = await bench.restore(replace=True)
        assert (bench.target / "000007.sst").stat().st_mode & 0o7777 == 0o755
        assert result.files_fetched == 0


class TestLeftovers:
    """A restore that died left these; the next one to the same target cleans up."""

    SESSION = "0123456789abcdef0123"

    def staging(self, bench: Workbench) -> Path:
        left = bench.root / f".target.tidemark-{self.SESSION}" / "new"
        left.mkdir(parents=True)
        (left / "half").write_bytes(b"half")
        (bench.root / ".target.tidemark-lock").touch()
        return left

    async def test_staging_directory_of_a_dead_restore_is_removed(self, bench: Workbench) -> None:
        self.staging(bench)
        await bench.restore()
        assert restored_whole(bench)

    @pytest.mark.parametrize(
        "name", [".target.tidemark-notes", ".target2.tidemark-" + SESSION, ".target.tidemark-old-x"]
    )
    async def test_what_only_looks_like_it_stays(self, bench: Workbench, name: str) -> None:
        (bench.root / name).mkdir()
        await bench.restore()
        assert bench.beside_target() == [name]

    async def test_what_a_dead_restore_had_moved_aside_is_reused(self, bench: Workbench) -> None:
        await bench.restore()
        bench.target.rename(bench.root / f".target.tidemark-old-{self.SESSION}")
        self.staging(bench)
        bench.meter.reset()
        result = await bench.restore(replace=True)
        assert restored_whole(bench)
        assert result.files_fetched == 0

    @pytest.mark.parametrize("target_is_empty", [False, True])
    async def test_what_a_dead_restore_had_moved_aside_goes_only_once_there_is_something_at_the_target(
        self, bench: Workbench, target_is_empty: bool
    ) -> None:
        old = bench.root / f".target.tidemark-old-{self.SESSION}"
        old.mkdir()
        (old / "old").write_bytes(b"old")
        if target_is_empty:
            bench.target.mkdir()

        async def refuse() -> None:
            raise EngineError("no", operation="restore")

        with pytest.raises(EngineError):
            await bench.restore(unless=refuse)
        assert read_tree(old) == {"old": b"old"}
        await bench.restore()
        assert restored_whole(bench)

    @pytest.mark.parametrize("target_stays", [False, True])
    async def test_half_removed_old_directory_never_becomes_the_target(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch, target_stays: bool
    ) -> None:
        bench.target.mkdir()
        bench.write({"old-1": b"1", "old-2": b"2"}, below=bench.target)

        class Killed(BaseException):
            """What stands for a kill -9 in the middle of a removal."""

        real = shutil.rmtree

        def die_half_way(path: Any, **kwargs: Any) -> None:
            if (bench.root / path / "old-1").exists():
                (bench.root / path / "old-1").unlink()
                raise Killed
            real(path, **kwargs)

        async def refuse() -> None:
            raise EngineError("no", operation="restore")

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", die_half_way)
            staging = Staging(bench.target, self.SESSION, replace=True)
            staging.open()
            staging.publish(())
            with pytest.raises(Killed):
                staging.close()
        os.close(staging._lock)  # as the system does for the dead
        assert bench.target.exists()
        if not target_stays:
            bench.target.rmdir()
        with pytest.raises(EngineError):
            await bench.restore(replace=True, unless=refuse)
        assert bench.target.exists() == target_stays
        assert bench.beside_target() == []

    async def test_old_directory_of_a_restore_that_died_after_the_swap_is_removed(self, bench: Workbench) -> None:
        old = bench.root / f".target.tidemark-old-{self.SESSION}"
        old.mkdir()
        (old / "old").write_bytes(b"old")
        bench.target.mkdir()
        (bench.target / "newer").write_bytes(b"newer")
        await bench.restore(replace=True)
        assert restored_whole(bench)

    async def test_staging_directory_of_a_living_restore_is_left_alone(self, bench: Workbench) -> None:
        reached, go = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            reached.set()
            await go.wait()

        bench.store.before("get", "blobs/", wait)
        living = asyncio.create_task(bench.restore())
        await reached.wait()
        before = bench.beside_target()
        assert len(before) == 2
        with pytest.raises(TargetError):
            await bench.restore(replace=True)
        assert bench.beside_target() == before
        go.set()
        await living
        assert restored_whole(bench)

    async def test_failed_swap_brings_the_old_directory_back(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.target.mkdir()
        (bench.target / "old").write_bytes(b"old")
        real = os.rename

        def refuse(source: Any, target: Any, **kwargs: Any) -> None:
            if source == "new":
                raise OSError(5, "Input/output error")
            real(source, target, **kwargs)

        monkeypatch.setattr(os, "rename", refuse)
        with pytest.raises(TargetError, match="Input/output"):
            await bench.restore(replace=True)
        assert read_tree(bench.target) == {"old": b"old"}
        assert bench.beside_target() == []

    async def test_swap_that_cannot_be_made_durable_is_undone(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.target.mkdir()
        (bench.target / "old").write_bytes(b"old")
        real = local_files.sync_dir

        def fail_last(directory: Any) -> None:
            if (bench.target / "cut").exists():
                raise OSError(5, "Input/output error")
            real(directory)

        monkeypatch.setattr(engine.staging, "sync_dir", fail_last)
        with pytest.raises(TargetError, match="Input/output"):
            await bench.restore(replace=True)
        assert read_tree(bench.target) == {"old": b"old"}
        assert bench.beside_target() == []

    async def test_old_directory_that_cannot_be_removed_is_reported(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.target.mkdir()
        (bench.target / "old").write_bytes(b"old")
        real = shutil.rmtree

        def refuse(path: Any, **kwargs: Any) -> None:
            if "trash" in str(path):
                raise PermissionError(13, "Permission denied")
            real(path, **kwargs)

        monkeypatch.setattr(shutil, "rmtree", refuse)
        result = await bench.restore(replace=True)
        assert read_tree(bench.target) == read_tree(bench.directory)
        assert [str(bench.root / name) for name in bench.beside_target()] == list(result.leftovers)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
class TestOwners:
    NOBODY = pwd.getpwnam("nobody")

    def owners(self, bench: Workbench) -> set[int]:
        return {(bench.target / name).stat().st_uid for name in ("packed-1", "empty")}

    async def test_owners_are_ignored_unless_asked_for(self, bench: Workbench) -> None:
        os.chown(bench.directory / "packed-1", self.NOBODY.pw_uid, -1)
        await bench.backup(base=None)
        await bench.restore()
        assert self.owners(bench) == {0}

    @pytest.mark.parametrize("policy", [OwnerPolicy.RESTORE, OwnerPolicy.REQUIRE])
    async def test_owners_are_restored(self, bench: Workbench, policy: OwnerPolicy) -> None:
        for name in ("packed-1", "empty"):
            os.chown(bench.directory / name, self.NOBODY.pw_uid, self.NOBODY.pw_gid)
        await bench.backup(base=None)
        await bench.restore(owners=policy)
        assert self.owners(bench) == {self.NOBODY.pw_uid}
        assert stamps(bench.target) == stamps(bench.directory)

    @pytest.mark.parametrize("policy, refused", [(OwnerPolicy.RESTORE, False), (OwnerPolicy.REQUIRE, True)])
    async def test_owner_that_does_not_exist_here(self, bench: Workbench, policy: OwnerPolicy, refused: bool) -> None:
        local_stat._user_name.cache_clear()
        bench.write({"f": b"x" * 100})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_stat, "_user_name", lambda uid: "somebody-from-elsewhere")
            await bench.backup(base=None)
        if refused:
            with pytest.raises(TargetError, match="somebody-from-elsewhere"):
                await bench.restore(owners=policy)
            assert not bench.target.exists()
        else:
            await bench.restore(owners=policy)
            assert read_tree(bench.target) == read_tree(bench.directory)


class TestRequests:
    async def test_one_get_for_the_index_and_one_per_blob_or_range(self, bench: Workbench) -> None:
        bench.meter.reset()
        result = await bench.restore()
        assert bench.meter.requests == {"get": 1 + 1 + 1 + 3}
        assert result.requests == 6
        assert result.bytes_fetched == sum(len(d) for n, d in FORMS.items() if n not in {"inline", "empty"})

    async def test_known_index_costs_no_request(self, bench: Workbench) -> None:
        indexes = IndexCache()
        await bench.backup(indexes=indexes)
        bench.meter.reset()
        result = await bench.restore(indexes=indexes)
        assert result.requests == 5
        assert bench.meter.requests == {"get": 5}

    async def test_index_told_by_deltas_costs_one_more_each(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(index_io, "WHOLE_BYTES_MAX", 1000)
        bench = Workbench(tmp_path)
        tree = {f"{i:03d}": os.urandom(100) for i in range(200)}
        for round_ in range(3):
            bench.write(tree | {"000": bytes([round_]) * 100})
            await bench.backup()
        bench.meter.reset()
        await bench.restore()
        assert restored_whole(bench)
        assert bench.meter.requests["get"] == 3 + 3 + 1
        gets = [blob.key async for blob in list_blobs(bench.inner, "indexes/")]
        assert len(gets) == 3
