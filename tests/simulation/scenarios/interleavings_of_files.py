"""Directed interleavings of packs, deltas and local files; see `interleavings.py`."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import msgspec

from blobstore.base import BytesBody, Created, Lost
from blobstore.errors import StoreError
from blobstore.local.store import LocalStore
from engine.errors import EngineError, SourceChangedError
from engine.local.digests import Digest, hash_bytes
from engine.local.scan import local_file
from engine.restore.restore import RestoreOptions
from engine.spark.claims import StoreClaims, StoreState
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import UniqueId
from tests.simulation.scenarios.interleavings import HOUR_S, JOB, Scene, interleaving
from tests.simulation.scenarios.small_trees import read_tree, tree, write_tree

LONG_AFTER_NS = 4_000_000_000_000_000_000


@interleaving()
async def a_pack_that_is_mostly_dead_is_packed_again(scene: Scene) -> None:
    writer = await scene.actor("writer")
    for text in ("one", "two", "three"):
        await writer.push(text)
    await asyncio.sleep(2 * HOUR_S)
    for _ in range(2):
        await writer.collect()
    await scene.check({"a": "three"})
    stored = sum(len(o.data) for name, o in scene.server.objects.items() if "/blobs/" in name)
    live = sum(map(len, tree("three").values()))
    assert stored < 1.1 * live, f"{stored} bytes are kept for {live}"


@interleaving()
async def what_an_index_is_read_from_stays(scene: Scene) -> None:
    writer = await scene.actor("writer")
    for number in range(3):
        root = scene.directory / "many"
        write_tree(root, {f"file-{n}": f"{n}".encode() * 30 for n in range(60)} | {"new": b"%d" % number})
        result = await writer.process.run(writer.repository.backup(JOB, root))
        await writer.commit(result)
    assert len([n for n in scene.server.objects if "/indexes/" in n]) == 3
    await asyncio.sleep(2 * HOUR_S)
    await writer.collect()
    target = scene.new_directory()
    somebody = await scene.actor("somebody")
    await somebody.process.run(somebody.repository.find_and_restore(JOB, target))
    assert (target / "new").read_bytes() == b"2"
    await scene.check_all_goes()


@interleaving()
async def files_of_one_name_and_size_are_not_taken_for_equal(scene: Scene) -> None:
    writer = await scene.actor("writer")
    root = scene.directory / "equal"
    for content in (b"0123456789" * 1000, b"9876543210" * 1000):
        write_tree(root, {"000008.sst": content, "log": content})
        await writer.commit(await writer.process.run(writer.repository.backup(JOB, root)))
    target = scene.new_directory()
    await writer.process.run(writer.repository.find_and_restore(JOB, target))
    assert read_tree(target) == read_tree(root), "other bytes were restored than backed up"


@interleaving()
async def ssts_of_another_session_are_not_taken_for_equal(scene: Scene) -> None:
    writer = await scene.actor("writer")
    source = scene.directory / "session"
    for session in ("first", "other"):
        shutil.rmtree(source, ignore_errors=True)
        make_sst(scene.directory / f"db-{session}", source, session)
        await writer.commit(await writer.process.run(writer.repository.backup(JOB, source)))
    target = scene.new_directory()
    await writer.process.run(writer.repository.find_and_restore(JOB, target))
    assert read_tree(target) == read_tree(source), "other bytes were restored than backed up"


def make_sst(database: Path, source: Path, text: str) -> None:
    """A real SST whose number and size do not depend on the text, which has five characters."""
    from rocksdict import Options, Rdict  # noqa: PLC0415 - what most interleavings have no need of

    options = Options(raw_mode=True)
    db = Rdict(str(database), options)
    for number in range(100):
        db[b"%05d" % number] = text.encode() * 10
    db.flush()
    db.close()
    source.mkdir(parents=True)
    (sst,) = sorted(database.glob("*.sst"))
    shutil.copy(sst, source / sst.name)


@interleaving()
async def a_local_file_is_reused_for_its_bytes_alone(scene: Scene) -> None:
    writer, reader = await scene.actor("writer"), await scene.actor("reader")
    # One that would be copied, and one that would be linked.
    root = write_tree(scene.directory / "whole", {"log": b"bytes" * 1000, "000008.sst": b"bytes" * 1000})
    commit = await writer.commit(await writer.process.run(writer.repository.backup(JOB, root)))
    target = scene.new_directory()
    await reader.process.run(reader.repository.restore(commit, target))
    for name in ("log", "000008.sst"):
        damaged = target / name
        status = damaged.stat()
        damaged.write_bytes(b"B" + damaged.read_bytes()[1:])
        os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    await reader.process.run(reader.repository.restore(commit, target, options=RestoreOptions(replace=True)))
    assert read_tree(target) == read_tree(root), "other bytes were restored than backed up"


@interleaving()
async def rot_that_moves_no_stat_is_not_restored(scene: Scene) -> None:
    writer, reader = await scene.actor("writer"), await scene.actor("reader")
    root = write_tree(scene.directory / "sound", {"000008.sst": b"bytes" * 1000})
    commit = await writer.commit(await writer.process.run(writer.repository.backup(JOB, root)))
    target = scene.new_directory()
    await reader.process.run(reader.repository.restore(commit, target))
    async with reader.repository.opened.digests.of(target) as cache:
        file, digest = change_behind_its_stat(target / "000008.sst")
        cache.record_restored(file, digest)
    await reader.process.run(reader.repository.restore(commit, target, options=RestoreOptions(replace=True)))
    assert read_tree(target) == read_tree(root), "other bytes were restored than backed up"


@interleaving()
async def bytes_that_come_through_a_mapping_are_backed_up(scene: Scene) -> None:
    writer = await scene.actor("writer")
    root = write_tree(scene.directory / "mapped", {"lmdb": b"bytes" * 1000})
    await writer.commit(await writer.process.run(writer.repository.backup(JOB, root)))
    async with writer.repository.opened.digests.of(root) as cache:
        file, digest = change_behind_its_stat(root / "lmdb")
        known = msgspec.structs.replace(file, blake3=digest.blake3, crc32=digest.crc32)
        cache.record(known, looked_at_ns=LONG_AFTER_NS)
    await writer.commit(await writer.process.run(writer.repository.backup(JOB, root)))
    target = scene.new_directory()
    await writer.process.run(writer.repository.find_and_restore(JOB, target))
    assert read_tree(target) == read_tree(root), "other bytes were restored than backed up"


def change_behind_its_stat(path: Path) -> tuple[LocalFile, Digest]:
    """Change a byte of a file; return the file, and the hashes that somebody knows who trusts its stat."""
    data, status = path.read_bytes(), path.stat()
    path.write_bytes(b"B" + data[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return local_file(path.name, path.stat()), hash_bytes(data)


@interleaving()
async def a_directory_that_changes_meanwhile_is_not_backed_up(scene: Scene) -> None:
    writer = await scene.actor("writer")
    root = scene.directory / "changing"
    old, new = (dict.fromkeys(("x", "y", "z"), text * 9000) for text in (b"o", b"n"))
    write_tree(root, old)
    calls = 0

    def change(phase: str, _name: str) -> None:
        nonlocal calls
        calls += phase == "after"
        if phase == "after" and calls == 2 + scene.seed % 12:
            write_tree(root, new)

    writer.process.on_blocking = change
    backed_up = False
    with contextlib.suppress(SourceChangedError, EngineError):
        result = await writer.process.run(writer.repository.backup(JOB, root))
        backed_up = True
    writer.process.on_blocking = None
    if backed_up:
        await writer.commit(result)
        target = scene.new_directory()
        await writer.process.run(writer.repository.find_and_restore(JOB, target))
        assert read_tree(target) in (old, new), "half of it is old and half is new"


@interleaving()
async def a_local_directory_belongs_to_one_attempt(scene: Scene) -> None:
    claims = StoreClaims(scene.directory, repository_id="r", scope=JOB, task="0", store="a")
    state = StoreState(3, UniqueId("first"))
    with claims.begin() as maker:
        write_tree(maker.directory, {"CURRENT": b"version 3"})
        maker.finish(state, "0" * 20)
    with claims.begin() as one, claims.begin() as two:
        found = [attempt for attempt in (one, two) if attempt.claim(state) is not None]
        assert len(found) == 1, "both attempts have the directory"
        (found[0].directory / "CURRENT").write_bytes(b"version 4, half done")
        assert claims.ready() == (), "its name still promises what it is not any more"


@interleaving()
async def of_two_creates_in_a_directory_one_wins(scene: Scene) -> None:
    store = LocalStore(scene.directory / "store")
    outcomes = await asyncio.gather(*(store.put_if_absent("log/x", BytesBody(text)) for text in (b"one", b"two")))
    shown = sorted(type(outcome).__name__ for outcome in outcomes)
    assert shown == [Created.__name__, Lost.__name__], f"both got {shown}"


@interleaving()
async def what_lies_behind_a_link_stays(scene: Scene) -> None:
    root, theirs = scene.directory / "store", scene.directory / "theirs"
    store = LocalStore(root)
    await store.put_if_absent("log/x", BytesBody(b"one"))
    (root / ".tmp").rename(scene.directory / "moved")
    kept = read_tree(write_tree(theirs, {"0" * 32: b"a name as the store makes them"}))
    (root / ".tmp").symlink_to(theirs)
    with contextlib.suppress(StoreError):
        await store.abort_unfinished(await store.list_unfinished(""))
    with contextlib.suppress(StoreError):
        await store.put_if_absent("log/y", BytesBody(b"two"))
    assert read_tree(theirs) == kept, "the store deleted or wrote behind a link"


@interleaving()
async def only_names_that_a_store_makes_are_left_over(scene: Scene) -> None:
    root = scene.directory / "store"
    store = LocalStore(root)
    await store.put_if_absent("log/x", BytesBody(b"one"))
    write_tree(root / ".tmp", {"report.txt": b"somebody else's", "0" * 32: b"of a writer that was killed"})
    await store.abort_unfinished(await store.list_unfinished(""))
    assert set(read_tree(root / ".tmp")) == {"report.txt"}, "a name of nobody's stays, or a file goes"
