"""A restore brings a snapshot back whole, or leaves the target as it was."""

import asyncio
import hashlib
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from blobstore.base import BytesBody, list_blobs
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreUnavailableError
from engine.errors import DamagedError, EngineError, NotFoundError, TargetBusyError, TargetError, UsageError
from engine.local import scan
from engine.records import indexes as index_io
from engine.records.indexes import read_index
from engine.restore import staging
from engine.restore.restore import RestoreOptions, plan_restore_store
from engine.restore.write import OwnerPolicy
from index.errors import FormatError
from index.snapshot.codec import KIND_INDEX, seal
from index.snapshot.keys import INDEXES, upload_key
from index.snapshot.model import DirIndex, IndexReference, SnapshotIndex, StoreReference
from tests.contract.store_calls import get_bytes
from tests.unit.engine.restore.restore_kit import FORMS, backed_up, blob_of, restored_whole
from tests.unit.engine.workbench import SCOPE, Workbench, open_descriptors, read_tree, stamps


@pytest.fixture
async def bench(tmp_path: Path) -> Workbench:
    return await backed_up(tmp_path)


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

    @pytest.mark.parametrize("below", ["", "/a volume"])
    async def test_a_target_on_or_above_a_mount_is_refused_before_anything_is_asked(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch, below: str
    ) -> None:
        target = bench.root / "of a pod"
        bench.write({"a volume/precious": b"precious"}, below=target)
        mounts = bench.root / "mountinfo"
        mounted = f"{target}{below}".replace(" ", r"\040")
        mounts.write_text(f"22 1 0:21 /\r\v {target}s rw - tmpfs tmpfs rw\n22 1 0:21 / {mounted} rw - tmpfs tmpfs rw\n")
        monkeypatch.setattr(staging, "_MOUNTS", mounts)
        bench.store.requests.clear()
        assert bench.newest is not None
        with pytest.raises(TargetError, match=f"mounted on {target}{below}$"):
            await bench.restore(target=target, replace=True)
        with pytest.raises(TargetError, match="mounted on"):
            await plan_restore_store(bench.opened(), bench.newest, target, RestoreOptions(replace=True))
        assert read_tree(target) == {"a volume/precious": b"precious"}
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
            await bench.restore(meanwhile=meddle)
        assert read_tree(bench.target) == {"precious": b"!"}
        assert bench.beside_target() == []

    @pytest.mark.parametrize("exchange", [False, True])
    async def test_target_that_is_exchanged_meanwhile_is_left_alone(self, bench: Workbench, exchange: bool) -> None:
        bench.write({"old": b"old"}, below=bench.target)

        async def meddle() -> None:
            bench.target.rename(bench.root / "moved")
            bench.write({"precious": b"!"}, below=bench.target)

        with pytest.raises(TargetError, match="has changed since"):
            await bench.restore(replace=True, exchange=exchange, meanwhile=meddle)
        assert read_tree(bench.target) == {"precious": b"!"}
        assert read_tree(bench.root / "moved") == {"old": b"old"}
        assert bench.beside_target() == ["moved"]

    async def test_a_cancellation_is_heard_last(self, bench: Workbench) -> None:
        async def refuse() -> None:
            assert not bench.target.exists()
            raise EngineError("the pin is lost", operation="restore")

        with pytest.raises(EngineError, match="the pin is lost"):
            await bench.restore(meanwhile=refuse)
        assert not bench.target.exists()
        assert bench.beside_target() == []


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
        data = bytearray(await get_bytes(bench.inner, key))
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
        whole = await get_bytes(bench.inner, key)

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
        whole = await get_bytes(bench.inner, key)
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
        scan._name_of.cache_clear()
        bench.write({"f": b"x" * 100})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scan, "_name_of", lambda *_: "somebody-from-elsewhere")
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

    async def test_index_stored_as_deltas_costs_one_more_each(
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


class TestSomeFiles:
    async def test_only_what_matches_is_fetched_and_stands_as_in_a_whole_restore(self, bench: Workbench) -> None:
        result = await bench.restore(files=["*.sst", "sub/packed-*", "inline"])
        chosen = {"000007.sst", "sub/packed-2", "inline"}
        assert read_tree(bench.target) == {
            path: data for path, data in read_tree(bench.directory).items() if path in chosen
        }
        assert stamps(bench.target).items() <= stamps(bench.directory).items()
        assert (result.files_total, result.files_fetched, result.files_inline) == (3, 2, 1)
        assert result.bytes_total == sum(len(FORMS[path]) for path in chosen)
        assert bench.beside_target() == []

    async def test_a_pattern_that_matches_nothing_leaves_the_target_alone(self, bench: Workbench) -> None:
        with pytest.raises(NotFoundError, match=r"no file matches '\*\.log'"):
            await bench.restore(files=["*.sst", "*.log"])
        assert not bench.target.exists()
        assert bench.beside_target() == []

    @pytest.mark.parametrize("pattern", ["", ".", "./."])
    async def test_an_empty_pattern_is_refused_before_the_target_is_touched(
        self, bench: Workbench, pattern: str
    ) -> None:
        bench.store.requests.clear()
        with pytest.raises(UsageError, match="is an empty pattern"):
            await bench.restore(files=["*.sst", pattern])
        assert not bench.target.exists()
        assert bench.beside_target() == []
        assert not bench.store.requests

    async def test_a_few_files_never_take_the_place_of_a_directory(self, bench: Workbench) -> None:
        await bench.restore()
        bench.store.requests.clear()
        with pytest.raises(TargetError, match="the whole directory"):
            await bench.restore(files=["*.sst"], replace=True)
        assert restored_whole(bench)
        assert not bench.store.requests
