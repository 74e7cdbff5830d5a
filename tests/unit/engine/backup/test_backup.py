"""A backup uploads what changed and writes an index of everything; a source that moves is refused (design 0002, I3)."""

import asyncio
import mmap
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import rocksdict
from typing_extensions import override

from blobstore.base import BytesBody, list_blobs
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreUnavailableError
from engine.backup import upload
from engine.backup.backup import BackupOptions, WholeDirectory, plan_backup_source
from engine.errors import DamagedError, UnsafeSourceError, UsageError
from engine.local import digests
from engine.local.digests import DigestCache, FileHasher, hash_bytes
from engine.records.indexes import IndexCache, read_index
from engine.runtime import Runtime
from index.snapshot.contents import blob_keys, files_of, new_blob_keys
from index.snapshot.model import FileIndex, LineageItem, SstIdentity, StoreReference, UniqueId
from tests.contract.store_calls import get_bytes
from tests.unit.engine.workbench import REPOSITORY, SCOPE, Tree, Workbench, open_descriptors, read_tree

CUT = os.urandom(20_000)
ALONE = os.urandom(5_000)
# One file of each form.
FORMS: Tree = {
    "empty": b"",
    "inline": b"16 bytes, inline",
    "packed-1": os.urandom(1500),
    "sub/packed-2": os.urandom(2048),
    "sub/deep/packed-3": os.urandom(17),
    "alone": ALONE,
    "cut": CUT,
    "sub/übersicht": b"seventeen bytes!!",
}


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


async def stored_files(bench: Workbench, reference: StoreReference | None = None) -> dict[str, FileIndex]:
    reference = reference or bench.newest
    assert reference is not None
    index = await read_index(bench.inner, reference.index)
    return {"/".join(path): file for path, file in files_of(index.dir)}


async def stored_tree(bench: Workbench, reference: StoreReference | None = None) -> Tree:
    """The bytes that an index leads to, read without the engine's restore."""
    tree: Tree = {}
    for path, file in (await stored_files(bench, reference)).items():
        data = file.inline or b""
        for blob in file.blobs:
            run = await get_bytes(bench.inner, blob.key, start=blob.blob_offset_bytes, size_bytes=blob.size_bytes)
            assert blob.blake3 in {b"", hash_bytes(run).blake3}
            data += run
        assert (file.blake3, file.crc32) == hash_bytes(data)
        tree[path] = data
    return tree


async def keys(bench: Workbench) -> set[str]:
    return {blob.key async for blob in list_blobs(bench.inner, "")}


class TestFirst:
    async def test_every_form_of_file_is_stored_and_read_back(self, bench: Workbench) -> None:
        bench.write(FORMS)
        result = await bench.backup()
        assert await stored_tree(bench) == FORMS
        files = await stored_files(bench)
        assert files["inline"].inline == FORMS["inline"]
        assert [blob.size_bytes for blob in files["cut"].blobs] == [8192, 8192, 3616]
        packs = {files[name].blobs[0].key for name in FORMS if "packed" in name or "sicht" in name}
        assert len(packs) == 1
        stats = result.stats
        assert (stats.files_added, stats.files_inline, stats.packs, stats.blobs) == (8, 1, 1, 5)
        assert stats.requests == 6
        assert bench.meter.requests == {"put_if_absent": 6}

    async def test_result_names_everything_new_and_the_oldest_birth(self, bench: Workbench) -> None:
        bench.write(FORMS)
        result = await bench.backup(unique_id=UniqueId("mine"), version=7)
        assert set(result.new_keys) == await keys(bench)
        assert result.new_keys[-1] == result.reference.index.key
        creations = [blob.created_at_ms async for blob in list_blobs(bench.inner, "")]
        assert result.oldest_birth_ms == min(creations)
        expiry = [blob.expires_at_ms async for blob in list_blobs(bench.inner, "")]
        assert expiry == [birth + REPOSITORY.ttl_ms for birth in creations]
        reference = result.reference
        assert (reference.task, reference.store, reference.version, reference.unique_id) == ("0", "default", 7, "mine")
        assert (reference.number, reference.files_count, reference.size_bytes) == (0, 8, sum(map(len, FORMS.values())))
        assert (result.scope, result.base) == (SCOPE, None)
        index = await read_index(bench.inner, reference.index)
        assert new_blob_keys(index) == set(result.new_keys[:-1])
        assert (index.metadata.base, index.metadata.lineage) == (None, ())

    @pytest.mark.parametrize("tree", [{}, {"empty": b""}], ids=["no files", "one empty file"])
    async def test_next_to_nothing_is_an_index_and_no_blob(self, bench: Workbench, tree: Tree) -> None:
        bench.write(tree)
        (bench.directory / "empty-dir" / "below").mkdir(parents=True)
        result = await bench.backup()
        assert len(result.new_keys) == 1
        assert await stored_tree(bench) == tree
        index = await read_index(bench.inner, result.reference.index)
        assert [sub.name for sub in index.dir.sub_dirs_present[0].sub_dirs_present] == ["below"]

    async def test_result_can_be_sent_to_another_process(self, bench: Workbench) -> None:
        bench.write(FORMS)
        result = await bench.backup()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=type(result)) == result

    async def test_progress_is_reported_for_every_file_and_byte_once(self, bench: Workbench) -> None:
        shown: Counter[str] = Counter()

        class Listening:
            def total(self, *, files: int, bytes_: int) -> None:
                shown.update(files_total=files, bytes_total=bytes_)

            def add(self, *, files: int = 0, bytes_: int = 0) -> None:
                shown.update(files=files, bytes=bytes_)

        bench.write(FORMS)
        await bench.backup(progress=Listening())
        size = sum(map(len, FORMS.values()))
        assert shown == {"files_total": 8, "files": 8, "bytes_total": size, "bytes": size}


class TestNext:
    async def test_unchanged_directory_is_one_get_and_one_put(self, bench: Workbench) -> None:
        bench.write(FORMS)
        first = await bench.backup()
        bench.meter.reset()
        second = await bench.backup()
        assert bench.meter.requests == {"get": 1, "put_if_absent": 1}
        assert second.stats.requests == 2
        assert second.new_keys == (second.reference.index.key,)
        assert second.base == first.reference.index
        assert await stored_files(bench, second.reference) == await stored_files(bench, first.reference)

    async def test_known_base_costs_no_request(self, bench: Workbench) -> None:
        bench.write(FORMS)
        indexes = IndexCache()
        await bench.backup(indexes=indexes)
        bench.meter.reset()
        result = await bench.backup(indexes=indexes)
        assert bench.meter.requests == {"put_if_absent": 1}
        assert result.stats.requests == 1

    async def test_one_percent_changed_uploads_those_files_and_the_index_and_nothing_else(
        self, bench: Workbench
    ) -> None:
        tree = {f"{i:04d}": os.urandom(1024) for i in range(300)} | {f"m{i:03d}": os.urandom(4096) for i in range(100)}
        bench.write(tree)
        await bench.backup()
        changed = {name: os.urandom(len(tree[name])) for name in ("0007", "0150", "0299", "m042")}
        bench.write(tree | changed)
        before = await keys(bench)
        bench.meter.reset()
        result = await bench.backup()
        assert bench.meter.requests == {"get": 1, "put_if_absent": 3}
        blobs = [key for key in await keys(bench) - before if key.startswith("blobs/")]
        sizes = [info.size_bytes for key in blobs if (info := await bench.inner.stat(key)) is not None]
        assert sorted(sizes) == [3 * 1024, 4096]
        assert (result.stats.files_added, result.stats.bytes_uploaded) == (4, 3 * 1024 + 4096)
        assert await stored_tree(bench) == tree | changed

    async def test_random_changes_add_up(self, bench: Workbench) -> None:
        tree = dict(FORMS)
        changes: list[Tree] = [
            {"cut": CUT[:-1] + bytes([CUT[-1] ^ 1])},
            {"alone": b"small now", "inline": b"another inline!!"},
            {"empty": b"not any more", "new/file": b"n" * 3000},
            {"packed-1": os.urandom(1500)},
        ]
        for change in changes:
            tree |= change
            bench.write(tree)
            await bench.backup()
            assert await stored_tree(bench) == tree
        for gone in ("sub/deep/packed-3", "cut", "new/file"):
            del tree[gone]
            bench.write(tree)
            result = await bench.backup()
            assert result.stats.files_removed == 1
            assert await stored_tree(bench) == tree

    async def test_file_that_became_a_directory_and_back(self, bench: Workbench) -> None:
        for tree in ({"x": b"file" * 9}, {"x/y": b"below" * 9}, {"x": b"file again" * 9}):
            bench.write(tree)
            await bench.backup()
            assert await stored_tree(bench) == tree

    async def test_lineage_grows_by_the_base_and_keeps_a_hundred(self, bench: Workbench) -> None:
        bench.write({"f": b"x"})
        ids = [(await bench.backup(unique_id=UniqueId(f"u{n}"))).reference.unique_id for n in range(103)]
        assert bench.newest is not None
        metadata = (await read_index(bench.inner, bench.newest.index)).metadata
        items = tuple(LineageItem(n + 1, UniqueId(f"u{n}")) for n in range(102))
        assert metadata.lineage == items[-100:]
        assert metadata.base == items[-1]
        assert ids[-1] == metadata.unique_id

    async def test_given_lineage_is_kept_as_it_is_and_the_next_one_grows_from_it(self, bench: Workbench) -> None:
        spark = tuple(LineageItem(version, UniqueId(f"s{version}")) for version in range(3, 6))
        bench.write({"f": b"x"})
        # Version 1 was backed up, 2 to 5 were not.
        first = (await bench.backup(version=1, unique_id=UniqueId("s1"))).reference
        given = (await bench.backup(version=6, unique_id=UniqueId("s6"), lineage=spark)).reference
        metadata = (await read_index(bench.inner, given.index)).metadata
        assert (metadata.base, metadata.lineage) == (LineageItem(1, first.unique_id), spark)
        grown = (await bench.backup(version=9)).reference
        assert (await read_index(bench.inner, grown.index)).metadata.lineage == (
            *spark,
            LineageItem(6, given.unique_id),
        )

    async def test_directory_of_a_state_store_gets_no_lineage_but_the_one_that_is_given(self, bench: Workbench) -> None:
        # What was backed up before it need not be what it grew from: an attempt that lost, a version taken back.
        bench.write({"5_lost.changelog": b"x"})
        await bench.backup(version=5, unique_id=UniqueId("lost"))
        bench.write({"5_lost.changelog": b"x", "6_kept.changelog": b"y"})
        grown = (await bench.backup(version=6, unique_id=UniqueId("kept"))).reference
        metadata = (await read_index(bench.inner, grown.index)).metadata
        assert (metadata.base, metadata.lineage) == (LineageItem(5, UniqueId("lost")), ())
        given = [LineageItem(6, UniqueId("kept"))]
        later = (await bench.backup(version=7, lineage=given)).reference
        assert (await read_index(bench.inner, later.index)).metadata.lineage == tuple(given)

    async def test_version_below_its_base_needs_a_lineage_of_its_own(self, bench: Workbench) -> None:
        bench.write({"f": b"x"})
        newest = (await bench.backup(version=14)).reference
        with pytest.raises(UsageError, match="M13"):
            await bench.backup(version=7)
        # The query was taken back to version 6.
        result = await bench.backup(version=7, lineage=[LineageItem(6, UniqueId("s6"))])
        assert result.stats.files_retained == 1
        metadata = (await read_index(bench.inner, result.reference.index)).metadata
        assert (metadata.base, metadata.lineage) == (
            LineageItem(14, newest.unique_id),
            (LineageItem(6, UniqueId("s6")),),
        )
        with pytest.raises(UsageError, match="M13"):
            await bench.backup(version=9, lineage=[LineageItem(9, UniqueId("s9"))])
        assert (await bench.backup(version=8, base=None, lineage=())).base is None

    async def test_changed_mode_alone_uploads_nothing(self, bench: Workbench) -> None:
        bench.write({"f": b"x" * 3000})
        await bench.backup()
        (bench.directory / "f").chmod(0o640)
        result = await bench.backup()
        assert result.stats.blobs == 0
        assert (await stored_files(bench))["f"].metadata.mode == 0o640

    async def test_copy_with_other_times_uploads_nothing(self, bench: Workbench) -> None:
        bench.write(FORMS)
        await bench.backup()
        elsewhere = bench.root / "copy"
        elsewhere.mkdir()
        bench.write(FORMS, below=elsewhere)
        assert (await bench.backup(directory=elsewhere)).stats.blobs == 0

    async def test_file_that_changes_back_and_forth_is_seen_each_time(self, bench: Workbench) -> None:
        """Equal sizes, and times that were set back: only the ctime shows it (I1)."""
        path = bench.directory / "f"
        for round_ in range(6):
            data = bytes([round_ % 2]) * 3000
            with path.open("r+b" if path.exists() else "wb") as file:
                file.write(data)
            os.utime(path, ns=(1, 1))
            await bench.backup()
            assert await stored_tree(bench) == {"f": data}

    async def test_file_changed_just_now_is_never_believed_by_its_stat(self, bench: Workbench) -> None:
        """By the clock of its file system: one that is ahead of it, as a client's may be, makes no file old."""
        bench.runtime = _AheadRuntime()
        bench.write(FORMS)
        await bench.backup()
        assert len(bench.cache) == 0
        await bench.backup()
        assert len(bench.cache) == 0

    @pytest.mark.parametrize("trust_stat", [False, True])
    async def test_bytes_that_come_through_a_mapping_are_seen(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch, trust_stat: bool
    ) -> None:
        """A page that is dirty takes more writes without moving a stat (I1)."""
        # As if every file had been quiet for long.
        monkeypatch.setattr("engine.local.digests.SETTLING_TIME_NS", -(10**9))
        bench.cache = DigestCache(trust_stat=trust_stat)
        bench.write({"lmdb": bytes(5000)})
        path = bench.directory / "lmdb"
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 5000) as mapped:
            mapped[:5] = b"FIRST"
            await bench.backup()
            before = path.stat()
            mapped[:5] = b"LATER"
            await bench.backup()
            if path.stat().st_ctime_ns != before.st_ctime_ns:
                pytest.skip("this file system has written the page meanwhile")
        stored = await stored_tree(bench)
        assert stored["lmdb"][:5] == (b"FIRST" if trust_stat else b"LATER")


class _AheadRuntime(Runtime):
    """A wall clock ten seconds ahead of the file system's."""

    @override
    def local_now_ms(self) -> int:
        return super().local_now_ms() + 10_000


@pytest.mark.parametrize("broken", ["what is sent", "what is hashed as a whole"])
async def test_file_of_several_blobs_that_is_not_read_alike_twice_is_refused(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The whole hash and the blobs come of two readings: a bit that flips in one of them shows (I3)."""
    bench.write({"big": os.urandom(20_000)})
    real = upload._read_hashed

    def flip(source: int, at: int, size_bytes: int, hasher: FileHasher) -> bytes:
        in_whole = at == hasher.size_bytes > 0 and at >= 8192
        in_run = at == 8192 and hasher.size_bytes == 0
        if not (in_whole if broken == "what is hashed as a whole" else in_run):
            return real(source, at, size_bytes, hasher)
        chunk = bytearray(os.pread(source, size_bytes, at))
        chunk[0] ^= 1
        hasher.update(chunk)
        return bytes(chunk)

    monkeypatch.setattr(upload, "_read_hashed", flip)
    with pytest.raises(UnsafeSourceError, match="read twice"):
        await bench.backup()
    monkeypatch.undo()
    await bench.backup()
    await bench.restore()
    assert read_tree(bench.target) == read_tree(bench.directory)


async def test_file_of_several_blobs_whose_second_reading_said_nothing_of_them_is_refused(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write({"big": os.urandom(20_000)})
    monkeypatch.setattr("engine.backup.upload._RunHasher.update", lambda *_: None)
    with pytest.raises(UnsafeSourceError, match="read twice"):
        await bench.backup()


class TestPacks:
    """P1: a pack of which less than half is live is packed again from the local files."""

    @pytest.mark.parametrize(
        "changed, packed_again",
        [(0, 0), (4, 0), (5, 3), (7, 1), (8, 0)],
        ids=["untouched", "half", "just less than half", "one left", "none left"],
    )
    async def test_share_that_is_live_decides(self, bench: Workbench, changed: int, packed_again: int) -> None:
        tree = {f"p{i}": os.urandom(1024) for i in range(8)}
        bench.write(tree)
        await bench.backup()
        old = {file.blobs[0].key for file in (await stored_files(bench)).values()}
        tree |= {f"p{i}": os.urandom(1024) for i in range(changed)}
        bench.write(tree)
        result = await bench.backup()
        assert result.stats.files_repacked == packed_again
        assert result.stats.files_added == changed
        assert await stored_tree(bench) == tree
        still_used = {file.blobs[0].key for file in (await stored_files(bench)).values()} & old
        assert bool(still_used) == (packed_again == 0 and changed < 8)
        assert bench.newest is not None
        index = await read_index(bench.inner, bench.newest.index)
        assert {pack.key for pack in index.packs} <= blob_keys(index)

    async def test_file_packed_again_keeps_its_entry_but_for_its_place(self, bench: Workbench) -> None:
        tree = {f"p{i}": os.urandom(1024) for i in range(8)}
        bench.write(tree)
        await bench.backup()
        before = (await stored_files(bench))["p7"]
        bench.write(tree | {f"p{i}": os.urandom(1024) for i in range(6)})
        await bench.backup()
        after = (await stored_files(bench))["p7"]
        assert after.blobs != before.blobs
        assert (after.blake3, after.crc32, after.metadata) == (before.blake3, before.crc32, before.metadata)

    async def test_file_that_lies_about_what_it_is_cannot_be_packed_again(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By its session id it is the SST that the snapshot holds; its bytes have rotted since."""
        tree = {f"{i}.sst": os.urandom(1024) for i in range(8)}
        bench.write(tree)
        monkeypatch.setattr(digests, "parse_sst_tail", lambda tail, size: SstIdentity("S" * 20, tail[-1]))
        await bench.backup()
        for i in range(6):
            tree[f"{i}.sst"] = os.urandom(1023) + bytes([tree[f"{i}.sst"][-1] ^ 1])
        rotten = tree["7.sst"]
        tree["7.sst"] = bytes([rotten[0] ^ 1]) + rotten[1:]
        bench.write(tree)
        with pytest.raises(UnsafeSourceError, match="does not have the bytes") as raised:
            await bench.backup()
        assert raised.value.subject == str(bench.directory / "7.sst")


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES: dict[str, Callable[[Path], object]] = {
    "appended": _append,
    "rewritten": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "cut": lambda path: os.truncate(path, 3),
    "touched": os.utime,
    "gone": lambda path: path.unlink(),
    "appeared": lambda path: (path.parent / "appeared").touch(),
    "directory appeared": lambda path: (path.parent / "appeared").mkdir(),
}


class TestSourceThatMoves:
    """I3: whatever changes between the scan and the last upload fails the backup, and names the file."""

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("name", ["inline", "packed-1", "alone", "cut", "sub/packed-2"])
    async def test_change_during_the_uploads_is_refused(self, bench: Workbench, name: str, change: str) -> None:
        bench.write(FORMS)
        path = bench.directory / name

        async def meddle() -> None:
            CHANGES[change](path)

        bench.store.before("put_if_absent", "blobs/", meddle)
        before = open_descriptors()
        with pytest.raises(UnsafeSourceError) as raised:
            await bench.backup()
        expected = path.parent / "appeared" if "appeared" in change else path
        assert raised.value.subject == str(expected)
        assert not any(key.startswith("indexes/") for key in await keys(bench))
        assert open_descriptors() == before

    async def test_change_of_a_file_that_is_not_uploaded_is_refused_too(self, bench: Workbench) -> None:
        bench.write(FORMS)
        await bench.backup()
        bench.write(FORMS | {"new": b"n" * 100})

        async def meddle() -> None:
            _append(bench.directory / "cut")

        bench.store.before("put_if_absent", "blobs/", meddle)
        with pytest.raises(UnsafeSourceError) as raised:
            await bench.backup()
        assert raised.value.subject == str(bench.directory / "cut")

    async def test_open_rocksdb_is_refused_before_anything_is_sent(self, bench: Workbench) -> None:
        db = rocksdict.Rdict(str(bench.directory / "store"), rocksdict.Options(raw_mode=True))
        db[b"k"] = b"v"
        for directory in (bench.directory, bench.directory / "store"):
            with pytest.raises(UnsafeSourceError, match="RocksDB"):
                await bench.backup(directory=directory)
        assert bench.store.requests == []
        db.close()
        await bench.backup()

    async def test_link_in_the_source_is_refused(self, bench: Workbench) -> None:
        bench.write(FORMS)
        (bench.directory / "sub" / "link").symlink_to("/etc/passwd")
        with pytest.raises(UnsafeSourceError, match="symbolic link"):
            await bench.backup()
        assert bench.store.requests == []


class TestStoreThatFails:
    @pytest.mark.parametrize("prefix", ["blobs/", "indexes/"])
    @pytest.mark.parametrize("in_flight_max", [1, 16])
    async def test_first_failure_is_raised_as_it_is_and_no_index_is_written(
        self, bench: Workbench, prefix: str, in_flight_max: int
    ) -> None:
        bench.write(FORMS)
        bench.settings = msgspec.structs.replace(bench.settings, in_flight_max=in_flight_max)
        error = AccessDeniedError("no", operation="put_if_absent", key="k")
        bench.store.fail("put_if_absent", prefix, error)
        before = open_descriptors()
        with pytest.raises(AccessDeniedError) as raised:
            await bench.backup()
        assert raised.value is error
        assert not any(key.startswith("indexes/") for key in await keys(bench))
        assert open_descriptors() == before

    async def test_lost_answer_is_unavailable_and_the_next_backup_uses_other_keys(self, bench: Workbench) -> None:
        bench.write(FORMS)
        bench.store.lose_answer("put_if_absent", "blobs/")
        with pytest.raises(StoreUnavailableError):
            await bench.backup()
        left = await keys(bench)
        result = await bench.backup()
        assert not left & set(result.new_keys)
        assert await stored_tree(bench) == FORMS

    async def test_cancelled_backup_leaves_no_index_and_no_descriptor(self, bench: Workbench) -> None:
        bench.write(FORMS)
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.sleep(3600)

        bench.store.before("put_if_absent", "blobs/", hang)
        before = open_descriptors()
        task = asyncio.create_task(bench.backup())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert open_descriptors() == before
        assert not any(key.startswith("indexes/") for key in await keys(bench))

    async def test_missing_base_is_damage_and_nothing_is_sent(self, bench: Workbench) -> None:
        bench.write(FORMS)
        first = await bench.backup()
        await bench.inner.delete([first.reference.index.key])
        bench.meter.reset()
        with pytest.raises(DamagedError) as raised:
            await bench.backup()
        assert isinstance(raised.value.__cause__, BlobNotFoundError)
        assert bench.meter.requests == {"get": 1}

    async def test_base_that_is_another_snapshot_is_damage(self, bench: Workbench) -> None:
        bench.write(FORMS)
        first = await bench.backup()
        with pytest.raises(DamagedError, match="not of"):
            await bench.backup(base=msgspec.structs.replace(first.reference, unique_id=UniqueId("other")))

    @pytest.mark.parametrize(
        "wrong", [{"version": 1}, {"version": -1}, {"task": ""}, {"store": ""}, {"store": "s" * 5000}], ids=str
    )
    async def test_what_could_not_be_written_down_is_refused_before_anything_is_sent(
        self, bench: Workbench, wrong: dict[str, object]
    ) -> None:
        bench.write(FORMS)
        await bench.backup(version=1)
        bench.write(FORMS | {"new": b"new"})
        bench.meter.reset()
        with pytest.raises(UsageError):
            await bench.backup(**wrong)
        assert bench.meter.requests == {"get": 1}

    async def test_key_that_is_taken_is_damage(self, bench: Workbench) -> None:
        bench.write({"alone": ALONE})

        async def usurp() -> None:
            key = bench.store.requests[-1][1]
            await bench.inner.put_if_absent(key, BytesBody(b"foreign"), ttl_ms=1)

        bench.store.before("put_if_absent", "blobs/", usurp)
        with pytest.raises(DamagedError, match="7 bytes"):
            await bench.backup()

    async def test_request_sent_twice_is_one_upload(self, bench: Workbench) -> None:
        """The client under a store may send a PUT again by itself: the second answer is Lost (K2)."""
        bench.write({"alone": ALONE})

        async def land_first() -> None:
            key = bench.store.requests[-1][1]
            await bench.inner.put_if_absent(key, BytesBody(ALONE), ttl_ms=REPOSITORY.ttl_ms)

        bench.store.before("put_if_absent", "blobs/", land_first)
        result = await bench.backup()
        assert await stored_tree(bench) == {"alone": ALONE}
        creations = [blob.created_at_ms async for blob in list_blobs(bench.inner, "")]
        assert result.oldest_birth_ms == min(creations)


class TestDryRun:
    async def test_plan_is_what_a_backup_then_does_and_nothing_is_sent(self, bench: Workbench) -> None:
        bench.write(FORMS)
        plan = await plan_backup_source(bench.opened(), WholeDirectory(bench.directory), None, BackupOptions())
        assert bench.store.requests == []
        result = await bench.backup()
        assert (plan.uploads_count, plan.upload_bytes) == (result.stats.blobs, result.stats.bytes_uploaded)
        assert plan.changes.files_added == result.stats.files_added


async def test_no_more_than_the_limit_is_in_flight(tmp_path: Path) -> None:
    bench = Workbench(tmp_path)
    bench.write({f"m{i:02d}": os.urandom(3000) for i in range(40)})
    now = most = 0
    real = bench.metered.put_if_absent

    async def counted(*args: object, **kwargs: object) -> object:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            await asyncio.sleep(0.001)
            return await real(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            now -= 1

    bench.metered.put_if_absent = counted  # type: ignore[method-assign,assignment]
    await bench.backup()
    assert most == bench.settings.in_flight_max
