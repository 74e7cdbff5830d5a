"""Numbers of keys where a snapshot says a wrong one, and merges that wait until somebody looks."""

import io
import zipfile
from pathlib import Path

import pytest

from engine.rocksdb.store import RocksDbSettings, StoreWriter
from engine.state import loaded as merging
from engine.state.changelogs import KeyCounts
from engine.state.loaded import PendingOperands, RunningCounts
from tests.unit.engine.state.state_store_kit import Bench, rows, write


def _say(path: Path, before: bytes, after: bytes) -> None:
    """Change what a snapshot says of itself."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            assert name != "metadata" or before in content
            target.writestr(name, content.replace(before, after) if name == "metadata" else content)
    path.write_bytes(out.getvalue())


@pytest.mark.parametrize(
    "said, counts, goes_on",
    [
        pytest.param(b"0", [0, -1, -1], [3, 2], id="too few: no number is better than a wrong one"),
        pytest.param(b"-1", [2, 1, 3], [3, 2], id="nobody counted"),
        # Spark 4.0 takes one off for a removal of what is not there.
        pytest.param(b"-3", [2, 1, 3], [3, 2], id="below nothing"),
    ],
)
async def test_a_wrong_number_of_keys_is_found_out(
    bench: Bench, said: bytes, counts: list[int], goes_on: list[int]
) -> None:
    async with bench.store(column_families=True) as store:
        first = await write(store, 0, None, {b"a": b"1", b"b": b"1"})
    _say(bench.file(1, "zip"), b'"numKeys":2', b'"numKeys":' + said)
    async with bench.store(column_families=True, file_checksums=False) as store:
        await store.load(1, first.unique_id)
        found = [store.num_keys]
        store.delete(b"a")
        found.append(store.num_keys)
        store.put(b"c", b"1")
        store.put(b"d", b"1")
        found.append(store.num_keys)
        assert found == counts
        second = await store.commit(snapshot=True)
        assert second.num_keys == counts[-1]
    async with bench.store(column_families=True) as store:
        await store.load(2, second.unique_id)
        found = [store.num_keys]
        store.delete(b"c")
        assert [*found, store.num_keys] == goes_on


async def test_a_wrong_number_of_internal_keys_is_counted_again(bench: Bench) -> None:
    async with bench.store(column_families=True) as store:
        await store.load(0)
        store.add_family("$timers", internal=True)
        store.put(b"t", b"1", "$timers")
        first = await store.commit()
    _say(bench.file(1, "zip"), b'"numInternalKeys":1', b'"numInternalKeys":-5')
    async with bench.store(column_families=True, file_checksums=False) as store:
        await store.load(1, first.unique_id)
        assert (store.num_keys, store.num_internal_keys) == (0, 1)


async def test_a_replay_that_goes_below_nothing_has_no_number(bench: Bench) -> None:
    async with bench.store(file_checksums=False) as store:
        await store.load(0)
        for key in (b"a", b"b"):
            store.put(key, b"1")
        await store.commit(snapshot=True)
        for key in (b"a", b"b"):
            store.delete(key)
        second = await store.commit()
    _say(bench.file(1, "zip"), b'"numKeys":2', b'"numKeys":0')
    async with bench.store(file_checksums=False) as store:
        await store.load(2, second.unique_id)
        assert (store.num_keys, store.num_internal_keys) == (-1, -1)
        third = await store.commit(snapshot=True)  # of which -2 cannot be a part
    async with bench.store() as store:
        await store.load(3, third.unique_id)
        assert store.num_keys == 0


def test_one_number_below_nothing_ends_both() -> None:
    counts = RunningCounts(KeyCounts(5, 0))
    counts.add(-1, is_internal=True)
    assert (counts.is_on, counts.keys, counts.internal_keys) == (False, -1, -1)


# --- merges


async def test_what_was_merged_is_read_scanned_counted_and_committed(bench: Bench) -> None:
    async with bench.store(column_families=True, merge_operator_version=1) as store:
        await write(store, 0, None, {b"a": b"1"})
        store.add_family("more")
        for number in range(3):
            store.merge(b"a", b"%d" % number)
            store.merge(b"b", b"%d" % number)
            store.merge(b"x", b"%d" % number, "more")
        assert store.num_keys == 3
        assert store.get(b"a") == b"1,0,1,2"
        store.merge(b"a", b"3")
        scan = store.items()
        store.merge(b"a", b"not in this backup")
        assert dict(scan) == {b"a": b"1,0,1,2,3", b"b": b"0,1,2"}
        store.put(b"a", b"2")
        store.merge(b"b", b"lost")
        store.delete(b"b")
        store.merge(b"b", b"again")
        second = await store.commit(snapshot=True)
        assert (second.num_keys, rows(store, "more")) == (3, {b"x": b"0,1,2"})
        store.merge(b"x", b"lost", "more")
        assert store.drop_family("more")
        assert store.num_keys == 2
        store.merge(b"a", b"3")
        third = await store.commit()
    # From the changelogs, and from the snapshots alone.
    for forgets in (False, True):
        async with bench.store(column_families=True, merge_operator_version=1) as store:
            await store.load(2, second.unique_id, read_only=True)
            assert rows(store) == {b"a": b"2", b"b": b"again"}
            assert rows(store, "more") == {b"x": b"0,1,2"}
            await store.load(3, third.unique_id, read_only=True)
            assert rows(store) == {b"a": b"2,3", b"b": b"again"}
        if not forgets:
            for version in bench.changelogs():
                bench.file(version, "changelog").unlink()


def test_operands_wait_in_bounded_memory_and_each_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "OPERANDS_BYTES_MAX", 100_000)
    with StoreWriter.open(tmp_path / "db", RocksDbSettings(merge_delimiter=b",")) as db:
        written: list[int] = []
        putting = db.put

        def put(key: bytes, value: bytes) -> None:
            written.append(len(value))
            putting(key, value)

        monkeypatch.setattr(db, "put", put)
        pending = PendingOperands(db)
        for _ in range(2000):
            pending.add(b"k", b"x" * 100)
        pending.write()
        # One by one they would have been 200 MB.
        assert sum(written) < 3_000_000
        assert max(after - before for before, after in zip([0, *written], written, strict=False)) <= 100_000
        assert db.get(b"k") == b",".join([b"x" * 100] * 2000)
