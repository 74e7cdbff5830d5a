"""A restore cleans up what others left, and nothing else."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import engine.restore.staging
from blobstore.local import files as local_files
from engine.errors import EngineError, TargetError
from engine.records.indexes import read_index
from engine.restore.download import download_index
from engine.restore.staging import Staging
from tests.unit.engine.restore.restore_kit import backed_up, restored_whole
from tests.unit.engine.workbench import Workbench, read_tree


@pytest.fixture
async def bench(tmp_path: Path) -> Workbench:
    return await backed_up(tmp_path)


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

    @pytest.mark.parametrize("there", ["nothing", "empty directory", "what a job has begun since"])
    async def test_what_a_dead_restore_had_moved_aside_goes_only_once_all_is_at_the_target(
        self, bench: Workbench, there: str
    ) -> None:
        old = bench.root / f".target.tidemark-old-{self.SESSION}"
        old.mkdir()
        (old / "old").write_bytes(b"old")
        replace = there == "what a job has begun since"
        if there != "nothing":
            bench.target.mkdir()
        if replace:
            (bench.target / "LOG").touch()

        async def refuse() -> None:
            raise EngineError("no", operation="restore")

        with pytest.raises(EngineError):
            await bench.restore(replace=replace, meanwhile=refuse)
        assert read_tree(old) == {"old": b"old"}
        await bench.restore(replace=replace)
        assert restored_whole(bench)

    async def test_what_was_moved_aside_before_is_named_where_there_is_no_space(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = bench.root / f".target.tidemark-old-{self.SESSION}"
        for directory in (old, bench.target):
            directory.mkdir()
            (directory / "old").touch()
        monkeypatch.setattr("engine.restore.staging.find_lack_of_space", lambda *_: "needs 2 bytes and 1 are free")
        with pytest.raises(TargetError, match="no space: needs 2 bytes and 1 are free, beside") as full:
            await bench.restore(replace=True)
        assert f"beside {old}, moved aside before" in str(full.value)

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
            staging.publish((), {})
            with pytest.raises(Killed):
                staging.close()
        os.close(staging._lock)  # as the system does for the dead
        assert bench.target.exists()
        if not target_stays:
            bench.target.rmdir()
        with pytest.raises(EngineError):
            await bench.restore(replace=True, meanwhile=refuse)
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

    @pytest.mark.parametrize("exchange", [False, True])
    async def test_swap_that_cannot_be_made_durable_is_undone(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch, exchange: bool
    ) -> None:
        bench.target.mkdir()
        (bench.target / "old").write_bytes(b"old")
        real = local_files.sync_dir

        def fail_last(directory: Any) -> None:
            if (bench.target / "cut").exists():
                raise OSError(5, "Input/output error")
            real(directory)

        monkeypatch.setattr(engine.restore.staging, "sync_dir", fail_last)
        with pytest.raises(TargetError, match="Input/output"):
            await bench.restore(replace=True, exchange=exchange)
        assert read_tree(bench.target) == {"old": b"old"}
        assert bench.beside_target() == []

    async def test_what_cannot_be_put_back_after_an_exchange_is_kept(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.target.mkdir()
        (bench.target / "old").write_bytes(b"old")
        answers = iter([True, False])
        real = Staging._exchange

        def exchange_once(staging: Staging) -> bool:
            return next(answers) and real(staging)

        def fail_last(_: Any) -> None:
            if (bench.target / "cut").exists():
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(Staging, "_exchange", exchange_once)
        monkeypatch.setattr(engine.restore.staging, "sync_dir", fail_last)
        with pytest.raises(TargetError):
            await bench.restore(replace=True, exchange=True)
        (kept,) = bench.root.glob(".target.tidemark-old-*")
        assert read_tree(kept) == {"old": b"old"}

    async def test_what_cannot_be_put_back_is_kept_and_the_error_says_where(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.target.mkdir()
        (bench.target / "old").write_bytes(b"old")
        real = os.rename

        def begin_again(source: Any, target: Any, **kwargs: Any) -> None:
            if source == "new":
                bench.target.mkdir()
                (bench.target / "LOG").touch()
            real(source, target, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", begin_again)
            with pytest.raises(TargetError) as refused:
                await bench.restore(replace=True)
        (kept,) = bench.root.glob(".target.tidemark-old-*")
        assert str(kept) in str(refused.value)
        assert read_tree(kept) == {"old": b"old"}
        assert read_tree(bench.target) == {"LOG": b""}

    async def test_what_was_there_is_kept_where_the_new_one_is_not_durable_and_cannot_be_taken_away(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.target.mkdir()
        (bench.target / "old").write_bytes(b"old")
        real = os.rename

        def fail(source: Any, target: Any, **kwargs: Any) -> None:
            if target == "new":
                raise OSError(5, "Input/output error")
            real(source, target, **kwargs)

        def fail_last(_: Any) -> None:
            if (bench.target / "cut").exists():
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "rename", fail)
        monkeypatch.setattr(engine.restore.staging, "sync_dir", fail_last)
        with pytest.raises(TargetError) as refused:
            await bench.restore(replace=True)
        (kept,) = bench.root.glob(".target.tidemark-old-*")
        assert str(kept) in str(refused.value)
        assert read_tree(kept) == {"old": b"old"}
        assert read_tree(bench.target) == read_tree(bench.directory)

    def test_nothing_is_published_where_the_directory_above_was_moved_to(self, tmp_path: Path) -> None:
        parent = tmp_path / "gathered"
        staging = Staging(parent / "store", "0" * 20, replace=True)
        staging.open()
        parent.rename(tmp_path / "published")
        (tmp_path / "published" / "store").mkdir()
        (tmp_path / "published" / "store" / "committed").touch()
        parent.mkdir()
        with pytest.raises(TargetError, match="was moved meanwhile"):
            staging.publish([], {})
        staging.close()
        assert [path.name for path in (tmp_path / "published").rglob("*")] == ["store", "committed"]

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

    @pytest.mark.parametrize("walk", ["os.walk", "shutil.rmtree"])
    async def test_a_tree_that_nests_too_deep_is_refused_or_stays_beside(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch, walk: str
    ) -> None:
        """Which of the two goes deeper is up to the release of Python."""
        await bench.restore()
        before = read_tree(bench.target)

        def refuse(*_: Any, **__: Any) -> None:
            raise RecursionError

        monkeypatch.setattr(walk, refuse)
        if walk == "os.walk":
            with pytest.raises(TargetError, match="nests too deep"):
                await bench.restore(replace=True)
            assert bench.beside_target() == []
        else:
            assert (await bench.restore(replace=True)).leftovers
        assert read_tree(bench.target) == before


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_descriptor_is_left_open_by_a_download_that_is_cancelled(bench: Workbench, tmp_path: Path) -> None:
    index = await read_index(bench.store, (await bench.backup()).reference.index)
    before = count_descriptors()
    for turns in range(6):
        (directory := tmp_path / f"new-{turns}").mkdir()
        task = asyncio.ensure_future(download_index(bench.store, index, directory, bench.settings))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert count_descriptors() == before
