"""Taking over a snapshot of Samza: equal byte for byte, or it is said what is damaged (design/samza.md, S1 to S4)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.base import BytesBody
from blobstore.memory import MemoryStore
from engine.errors import DamagedError, TargetError
from engine.repository.repository import Repository
from engine.repository.samza import SamzaChoice, export_to_samza, import_samza
from index.errors import FormatError, SamzaFormatError, UnsafeNameError
from index.snapshot.model import Scope


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a").write_bytes(b"a" * 100_000)
    (root / "sub" / "b").write_bytes(b"bytes")
    (root / "nothing").write_bytes(b"")
    (root / "a").chmod(0o640)
    return root


def content(root: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns // 1_000_000)
        for path in root.rglob("*")
        if path.is_file()
    }


class Samza:
    """A repository with one snapshot, and that in Samza's form."""

    def __init__(self, store: MemoryStore, index_json: bytes) -> None:
        self.store = store
        self.index_json = index_json

    def altered(self, alter: Callable[[dict[str, Any]], None]) -> bytes:
        """Its index, with something of the root directory changed."""
        index = json.loads(self.index_json)
        alter(index["dir-index"])
        return json.dumps(index).encode()


@pytest.fixture
async def samza(tree: Path) -> Samza:
    store = MemoryStore()
    repository = await Repository.init(store)
    commit = await repository.commit(Scope("orders"), [await repository.backup(Scope("orders"), tree)])
    made = await export_to_samza(repository, commit, unpack=True)
    return Samza(store, made.index_json)


async def test_there_and_back(samza: Samza, tree: Path, tmp_path: Path) -> None:
    repository = await Repository.init(MemoryStore())
    done = await import_samza(repository, samza.index_json, samza.store)
    assert (done.job, done.task, done.store) == ("orders.samza", "0", "default")
    assert (done.files_count, done.size_bytes) == (3, 100_005)
    assert done.commit is not None
    await repository.restore(done.commit, tmp_path / "restored")
    assert content(tmp_path / "restored") == content(tree)
    assert (tmp_path / "restored/sub/empty").is_dir()
    origin = json.loads(done.commit.record.offsets)
    assert list(origin) == ["kind", "jobId", "checkpointId", "creationTimeMillis"]
    assert (origin["kind"], origin["checkpointId"]) == ("samza", done.checkpoint_id)
    # And in Samza's form once more: the same but for ids, owners and times of creation.
    again = await export_to_samza(repository, done.commit, unpack=True)
    assert comparable(again.index_json) == comparable(samza.index_json)


def comparable(index_json: bytes) -> list[tuple[object, ...]]:
    def files(directory: dict[str, Any]) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = [
            (f["file-name"], f["checksum"], *(f["file-metadata"][k] for k in ("size", "permissions")), len(f["blobs"]))
            for f in directory["files-present"]
        ]
        for sub in directory["sub-dirs-present"]:
            found += [(sub["dir-name"],), *files(sub)]
        return found

    return files(json.loads(index_json)["dir-index"])


async def test_a_second_import_does_nothing_and_a_dry_run_too(samza: Samza) -> None:
    repository = await Repository.init(MemoryStore())
    plan = await import_samza(repository, samza.index_json, samza.store, SamzaChoice(dry_run=True, job="other"))
    assert (plan.commit, plan.is_new, plan.job) == (None, True, "other")
    assert await repository.latest(Scope("other")) is None
    first = await import_samza(repository, samza.index_json, samza.store)
    second = await import_samza(repository, samza.index_json, samza.store)
    assert (first.is_new, second.is_new) == (True, False)
    assert first.commit is not None
    assert second.commit is not None
    assert first.commit.pointer == second.commit.pointer
    renamed = SamzaChoice(job="orders", task="7", store="totals")
    third = await import_samza(repository, samza.index_json, samza.store, renamed)
    assert third.commit is not None
    assert third.commit.store("7", "totals") is not None


async def test_stores_of_one_checkpoint_are_each_taken_over(samza: Samza, tree: Path, tmp_path: Path) -> None:
    repository = await Repository.init(MemoryStore())
    for _ in range(2):
        for store in ("a", "b"):
            assert (await import_samza(repository, samza.index_json, samza.store, SamzaChoice(store=store))).is_new
        # A later checkpoint of both, of the same millisecond.
        (tree / "a").write_bytes(b"later")
        inner = await Repository.open(samza.store)
        commit = await inner.commit(Scope("orders"), [await inner.backup(Scope("orders"), tree)])
        samza.index_json = (await export_to_samza(inner, commit, unpack=True)).index_json
    newest = await repository.latest(Scope("orders.samza"))
    assert newest is not None
    assert len({reference.unique_id for reference in newest.record.stores}) == 1


async def test_names_too_long_for_this_machine_are_a_typed_error(samza: Samza) -> None:
    def nest(root: dict[str, Any]) -> None:
        empty: dict[str, Any] = {"dir-name": "d" * 250, **{key: [] for key in root if key != "dir-name"}}
        below = empty
        for _ in range(20):
            below["sub-dirs-present"] = [json.loads(json.dumps(empty | {"sub-dirs-present": []}))]
            below = below["sub-dirs-present"][0]
        root["sub-dirs-present"] = [empty]

    repository = await Repository.init(MemoryStore())
    with pytest.raises((TargetError, SamzaFormatError)):
        await import_samza(repository, samza.altered(nest), samza.store)


@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "altered"])
async def test_a_damaged_blob_is_named_and_nothing_is_committed(samza: Samza, damage: str) -> None:
    files = json.loads(samza.index_json)["dir-index"]["files-present"]
    (key,) = (file["blobs"][0]["blob-id"] for file in files if file["file-name"] == "a")
    await samza.store.delete([key])
    if damage != "missing":
        size = {"cut": 99_999, "longer": 100_001, "altered": 100_000}[damage]
        await samza.store.put(key, BytesBody(b"#" * size))
    repository = await Repository.init(MemoryStore())
    with pytest.raises(DamagedError, match="import a: "):
        await import_samza(repository, samza.index_json, samza.store)
    assert await repository.latest(Scope("orders.samza")) is None


def rename(name: str) -> Callable[[dict[str, Any]], None]:
    def alter(root: dict[str, Any]) -> None:
        root["files-present"][0]["file-name"] = name

    return alter


def set_blob_id(root: dict[str, Any]) -> None:
    next(file for file in root["files-present"] if file["blobs"])["blobs"][0]["blob-id"] = "../../secret"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "a\0b", ""])
async def test_a_hostile_name_is_refused(samza: Samza, name: str) -> None:
    repository = await Repository.init(MemoryStore())
    with pytest.raises((UnsafeNameError, SamzaFormatError)):
        await import_samza(repository, samza.altered(rename(name)), samza.store)


async def test_a_blob_id_that_leads_out_of_the_store_is_refused(samza: Samza) -> None:
    repository = await Repository.init(MemoryStore())
    with pytest.raises(SamzaFormatError, match="secret"):
        await import_samza(repository, samza.altered(set_blob_id), samza.store)


async def test_what_is_not_an_index_is_refused(samza: Samza) -> None:
    repository = await Repository.init(MemoryStore())
    for data in (b"", b"{}", b"[1]", samza.index_json[:-1]):
        with pytest.raises(FormatError):
            await import_samza(repository, data, samza.store)


async def test_a_file_of_several_blobs_is_put_together(samza: Samza, tmp_path: Path) -> None:
    whole = b"a" * 100_000
    for number, part in enumerate((whole[:60_000], whole[60_000:])):
        await samza.store.put(f"part-{number}", BytesBody(part))

    def divide(root: dict[str, Any]) -> None:
        for file in root["files-present"]:
            if file["file-name"] == "a":
                file["blobs"] = [{"blob-id": "part-1", "offset": 60_000}, {"blob-id": "part-0", "offset": 0}]

    repository = await Repository.init(MemoryStore())
    done = await import_samza(repository, samza.altered(divide), samza.store)
    assert done.commit is not None
    await repository.restore(done.commit, tmp_path / "restored")
    assert (tmp_path / "restored/a").read_bytes() == whole
