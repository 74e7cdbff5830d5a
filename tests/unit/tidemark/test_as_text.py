"""A job as its name and a path as text, wherever a repository takes them."""

import inspect
from pathlib import Path
from typing import Final

import pytest

from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from tidemark import Commit, LiveRocksDb, Repository, RestoreOptions, Retention, Scope, SyncRepository

ROOT: Final = Path(__file__).parents[3]
WHAT_PEOPLE_NAME: Final = ("scope", "source", "target", "directory", "cache_dir")


@pytest.mark.parametrize("name", [name for name in vars(Repository) if not name.startswith("_")])
def test_every_method_takes_text(name: str) -> None:
    method = getattr(Repository, name)
    for parameter in inspect.signature(method).parameters.values() if callable(method) else ():
        if parameter.name in WHAT_PEOPLE_NAME and parameter.annotation is not Commit:
            assert "str | " in str(parameter.annotation), f"{name}({parameter})"


def test_a_repository_is_used_with_text_alone(tmp_path: Path) -> None:
    state, target = tmp_path / "state", tmp_path / "target"
    state.mkdir()
    (state / "file").write_bytes(b"x" * 5000)
    with SyncRepository.init(f"file://{tmp_path}/repository", cache_dir=str(tmp_path / "cache")) as repository:
        assert repository.plan_backup("flights", str(state)).changes.files_added == 1
        commit = repository.commit("flights", [repository.backup("flights", str(state))], offsets="2013-01")
        assert commit.scope == Scope("flights")
        assert repository.scopes() == (Scope("flights"),)
        for found in (
            repository.latest("flights"),
            repository.find("flights", version=commit.record.version),
            repository.commits("flights")[0],
            repository.log("flights").newest,
        ):
            assert found is not None
            assert found.pointer == commit.pointer
        with repository.find_pinned("flights", purpose="test") as (pinned, _):
            assert pinned.pointer == commit.pointer
        assert len(repository.history("flights").entries) == 1
        repository.name(commit, "golden")
        assert [name.name for name in repository.names("flights")] == ["golden"]
        repository.release_name("flights", "golden")
        assert repository.choose_complete("flights") == {}
        repository.restore(commit, str(target / "a"))
        repository.find_and_restore("flights", str(target / "b"))
        reference = commit.record.stores[0]
        repository.restore_reference(reference, str(target / "c"))
        replace = RestoreOptions(replace=True)
        assert repository.plan_restore(reference, str(target / "c"), options=replace).fetch_requests == 0
        assert repository.follow("flights", str(target / "d")).commit.pointer == commit.pointer
        assert repository.follow_status("flights", str(target / "d")).lag_commits == 0
        repository.promote("flights", str(target / "d"))
        assert repository.fork(commit, "planes").scope == Scope("planes")
        assert not repository.verify(scope="planes").damaged
        assert repository.forget("planes").scope == Scope("planes")
        repository.collect(Retention(keep_last=1), dry_run=True)
    assert sorted(path.read_bytes() for path in target.rglob("file")) == [b"x" * 5000] * 4
    assert list((tmp_path / "cache").iterdir())


def test_a_rocksdb_in_use_is_named_by_text(tmp_path: Path) -> None:
    with (
        SyncRepository.init("memory://text") as repository,
        StoreWriter.open(tmp_path / "db", RocksDbSettings()) as writer,
        LiveRocksDb(str(tmp_path / "db"), scratch=str(tmp_path)) as source,
    ):
        writer.write_batch({b"key": b"value"})
        writer.flush()
        commit = repository.commit("flights", [repository.backup("flights", source)])
        repository.restore(commit, str(tmp_path / "target"))
    with StoreReader.open(tmp_path / "target") as reader:
        assert dict(reader.items()) == {b"key": b"value"}
