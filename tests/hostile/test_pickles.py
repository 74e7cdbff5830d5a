"""A store is data and never code: what rocksdict would unpickle outside raw mode stays bytes (architecture, H8).

The payload is a pickle that makes a file when somebody loads it. It is in keys and values, behind the byte by which
rocksdict's own encoding says "pickled", and the directory says in rocksdict's own file that it is not in raw mode.
"""

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import rocksdict

from blobstore.local.store import LocalStore
from engine.errors import DamagedError
from engine.repository.repository import Repository
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from index.snapshot.model import Scope
from tests.hostile.forger import Forger
from tests.hostile.payloads import Canary, payloads
from tests.unit.engine.checkpoint.written_query import WrittenQuery, rows_of
from tests.unit.engine.state.state_store_kit import Bench

ROWS: Final = 30


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Where the file would be; at the end of each test it is not there."""
    path = tmp_path / "the-payload-was-run"
    yield path
    assert not path.exists(), "restored data was run"


def fill(directory: Path, canary: Path) -> dict[bytes, bytes]:
    """A RocksDB whose keys and values are payloads, and that says it was written by rocksdict outside raw mode."""
    rows = {b"%03d" % number + data: data for number, data in enumerate(payloads(canary))}
    rows |= {data: data for data in payloads(canary)}
    with StoreWriter.open(directory) as store:
        store.write_batch(rows)
        store.flush()
    turn_on_unpickling(directory)
    return rows


def turn_on_unpickling(directory: Path) -> None:
    """Say in rocksdict's own file that values are to be unpickled."""
    path = directory / "rocksdict-config.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, "raw_mode": False}))


def turn_on_everywhere(root: Path) -> None:
    for config in root.rglob("rocksdict-config.json"):
        turn_on_unpickling(config.parent)


def read_all(directory: Path) -> dict[bytes, bytes]:
    with StoreReader.open(directory) as store:
        rows = dict(store.items())
        chunks = [row for chunk in store.chunks(rows_max=10, bytes_max=1000) for row in chunk]
        assert dict(chunks) == rows
        assert store.get_many(list(rows)) == list(rows.values())
        assert all(store.get(key) == value for key, value in rows.items())
        assert sum(store.count().values()) == len(rows)
    return rows


def test_the_payload_runs_where_rocksdict_is_let_to_unpickle_it(tmp_path: Path) -> None:
    """Whether the canary sings at all: rocksdict's own way to open, in a process of its own."""
    canary = tmp_path / "sings"
    directory = tmp_path / "db"
    db = rocksdict.Rdict(str(directory))
    db["k"] = Canary(canary)
    db.close()
    code = "import rocksdict, sys; rocksdict.Rdict(sys.argv[1])['k']"
    subprocess.run([sys.executable, "-c", code, str(directory)], check=False, capture_output=True, timeout=60)
    assert canary.exists()


def test_a_directory_that_rocksdict_made_in_its_own_mode_is_refused_unread(tmp_path: Path, canary: Path) -> None:
    """Its comparator is rocksdict's, which the MANIFEST says: no Spark and no job of ours writes such a store."""
    directory = tmp_path / "db"
    db = rocksdict.Rdict(str(directory))
    db["k"] = Canary(canary)
    db.close()
    for way in (StoreReader, StoreWriter):
        with pytest.raises(DamagedError, match="comparator") as refused:
            way.open(directory)
        assert "open it with that program" in refused.value.hint


@pytest.mark.parametrize("delimiter", [None, b",", b""])
def test_no_way_to_read_or_write_a_store_unpickles(tmp_path: Path, canary: Path, delimiter: bytes | None) -> None:
    directory = tmp_path / "db"
    rows = fill(directory, canary)
    assert read_all(directory) == rows
    turn_on_unpickling(directory)
    settings = RocksDbSettings(merge_delimiter=delimiter)
    with StoreWriter.open(directory, settings) as store:
        key = next(iter(rows))
        store.put(key, rows[key])
        if delimiter is not None:
            store.merge(key, rows[key])
        store.write_batch({key: rows[key]})
        store.delete(b"none")
        store.delete_range(b"\xfe", b"\xff")
        store.compact()
        store.checkpoint(tmp_path / "checkpoint")
        assert dict(store.items()) == rows
    turn_on_unpickling(tmp_path / "checkpoint")
    assert read_all(tmp_path / "checkpoint") == rows


@pytest.mark.parametrize("config", [b"", b"{}", b"null", b"[" * 100_000, b'{"raw_mode": 7}', b"\xff\xfe", None])
def test_whatever_stands_in_rocksdicts_own_file_decides_nothing(
    tmp_path: Path, canary: Path, config: bytes | None
) -> None:
    directory = tmp_path / "db"
    rows = fill(directory, canary)
    path = directory / "rocksdict-config.json"
    path.unlink()
    if config is not None:
        path.write_bytes(config)
    assert read_all(directory) == rows


def test_a_restored_store_is_bytes(forger: Forger, canary: Path) -> None:
    """Backed up as an attacker has made it, with rocksdict's file, restored, also as a drill, and verified."""
    source = forger.shell.directory / "source"
    rows = fill(source, canary)
    forger.shell.run("backup", "source")
    forger.shell.run("verify", "--level", "content")
    forger.shell.run("restore", "target")
    assert (forger.target / "rocksdict-config.json").exists()
    assert read_all(forger.target) == rows
    (forger.shell.directory / "drill").mkdir()
    forger.shell.run("bench", "restore", "--to", str(forger.shell.directory / "drill"))


async def test_a_state_store_of_payloads_is_loaded_replayed_and_compacted_as_bytes(
    tmp_path: Path, canary: Path
) -> None:
    """Snapshots with rocksdict's file are refused, and payloads in changelogs and SSTs stay rows."""
    bench = Bench(tmp_path)
    rows = {b"k%d" % number + data: data for number, data in enumerate(payloads(canary)[:ROWS])}
    for version in (0, 1):
        async with bench.store(format_version=1, changelogs=True, deltas_per_snapshot=1) as store:
            await store.load(version, None)
            for key, value in rows.items():
                store.put(key, value)
            await store.commit()
            await store.maintain()
    async with bench.store(format_version=1) as store:
        await store.load(2, None)
        assert dict(store.items()) == rows


async def test_a_checkpoint_of_payloads_is_backed_up_restored_and_checked_as_bytes(
    tmp_path: Path, canary: Path
) -> None:
    planted = {b"k%d" % number + data: data for number, data in enumerate(payloads(canary)[:ROWS])}
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", planted=planted).begin()
    await query.run(3)
    before = await rows_of(tmp_path / "query", tmp_path / "before")
    await asyncio.to_thread(turn_on_everywhere, tmp_path)
    assert await rows_of(tmp_path / "query", tmp_path / "after") == before
    assert all(len(rows) >= ROWS for rows in before.values())


async def test_a_repository_of_states_restores_bytes(tmp_path: Path, canary: Path) -> None:
    """`Repository.restore`, which a job of ours opens afterwards."""
    rows = fill(tmp_path / "source", canary)
    repository = await Repository.init(LocalStore(tmp_path / "store"))
    result = await repository.backup(Scope("j"), tmp_path / "source", task="0", store="s")
    commit = await repository.commit(Scope("j"), [result])
    await repository.restore(commit, tmp_path / "target", task="0", store="s")
    assert await asyncio.to_thread(read_all, tmp_path / "target") == rows


def test_nothing_of_ours_can_load_a_pickle_or_run_a_text() -> None:
    """PySpark pickles tasks and closures, which come from the driver; we name nothing that loads what a store holds."""
    root = Path(__file__).parents[2]
    forbidden = {
        "pickle",
        "cloudpickle",
        "marshal",
        "shelve",
        "dill",
        "joblib",
        "eval",
        "exec",
        "compile",
        "__import__",
    }
    for package in ("index", "blobstore", "engine", "tidemark"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
                if isinstance(node, ast.ImportFrom):
                    names = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    names = {node.func.id}
                assert not names & forbidden, path
