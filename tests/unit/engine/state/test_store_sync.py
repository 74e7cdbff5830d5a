"""The blocking twin."""

import threading
import time
from pathlib import Path

import pytest

from engine.errors import SnapshotUploadError, TargetBusyError, UsageError
from index.errors import VersionMissingError
from tests.unit.engine.state.state_store_kit import settings_of
from tidemark import SyncStateStore


def test_a_session_without_an_event_loop(tmp_path: Path) -> None:
    settings = settings_of(column_families=True, deltas_per_snapshot=2, background_uploads=True)
    with SyncStateStore.open(tmp_path / "state", tmp_path / "work", settings) as store:
        assert (store.version, store.last_load) == (None, None)
        store.load(0)
        assert store.add_family("lists")
        store.put(b"a", b"1")
        store.merge(b"l", b"x", "lists")
        store.merge(b"l", b"y", "lists")
        first = store.commit()
        assert (store.version, store.unique_id, store.num_keys) == (1, first.unique_id, 2)
        store.delete(b"a")
        assert store.drop_family("lists")
        store.put(b"b", b"2")
        second = store.commit()
        store.put(b"c", b"3")
        store.abort()
        store.load(2, second.unique_id)
        assert (store.families, dict(store.items())) == (("default",), {b"b": b"2"})
        store.load(1, first.unique_id, read_only=True)
        assert store.get(b"l", "lists") == b"xy"
        assert list(store.items(b"l", family="lists", start=b"l")) == [(b"l", b"xy")]
        with pytest.raises(VersionMissingError):
            store.load(3, second.unique_id)
        store.maintain()
        assert store.last_save.of is not None
        assert (store.lineage, store.num_internal_keys) == ((), -1)
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.get(b"a")
    with SyncStateStore.open(tmp_path / "state", tmp_path / "work", settings) as store:
        store.load(2, second.unique_id)
        assert dict(store.items()) == {b"b": b"2"}


def test_the_thread_ends_with_the_store_also_when_it_could_not_be_opened(tmp_path: Path) -> None:
    before = _threads()
    with SyncStateStore.open(tmp_path / "state", tmp_path / "work", settings_of()):
        assert _threads() > before
        with pytest.raises(TargetBusyError):
            SyncStateStore.open(tmp_path / "state", tmp_path / "work", settings_of())
    _wait_for_threads(before)


def test_an_upload_goes_on_while_the_caller_computes(tmp_path: Path) -> None:
    settings = settings_of(deltas_per_snapshot=1, background_uploads=True)
    with SyncStateStore.open(tmp_path / "state", tmp_path / "work", settings) as store:
        store.load(0)
        store.put(b"a", b"1")
        store.commit()
        deadline = time.monotonic() + 10
        while not list((tmp_path / "state").glob("1_*.zip")):
            store.put(b"b", b"2")
            assert time.monotonic() < deadline


def test_a_failed_upload_is_reported_at_the_end(tmp_path: Path) -> None:
    settings = settings_of(deltas_per_snapshot=1, background_uploads=True)
    before = _threads()
    state = tmp_path / "state"
    state.mkdir()
    (state / "SSTs").write_text("in the way")
    store = SyncStateStore.open(state, tmp_path / "work", settings)
    store.load(0)
    store.put(b"a", b"1")
    store.commit()
    with pytest.raises(SnapshotUploadError):
        store.close()
    _wait_for_threads(before)


def _threads() -> int:
    """Event loops of blocking stores; tests before this one may have left some of other kinds."""
    return sum(thread.name == "tidemark" for thread in threading.enumerate())


def _wait_for_threads(count: int) -> None:
    deadline = time.monotonic() + 10
    while _threads() > count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
