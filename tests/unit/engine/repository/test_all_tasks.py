"""All tasks of a job at once: `backup_many` and `restore_all`."""

import asyncio
from pathlib import Path

import pytest
from typing_extensions import override

from engine.backup.backup import BackupSource, WholeDirectory
from engine.errors import IncompleteError, NotFoundError, TargetError, UnsafeSourceError
from engine.restore.restore import RestoreOptions
from engine.settings import TASKS_AT_ONCE
from index.snapshot.dir_diff import LocalDir
from index.snapshot.model import SnapshotIndex
from tests.unit.engine.conftest import JOB, World

TASKS = [str(number) for number in range(2 * TASKS_AT_ONCE)]


class Watched(WholeDirectory):
    """Notes how many are looked at at the same time, and waits until as many are as may be."""

    at_work = 0
    at_once_max = 0
    released = 0
    full = asyncio.Event()

    def __init__(self, directory: Path, failure: Exception | None = None) -> None:
        super().__init__(directory)
        self._failure = failure

    @override
    async def look(self, previous: SnapshotIndex | None, believed: LocalDir) -> LocalDir:
        Watched.at_work += 1
        Watched.at_once_max = max(Watched.at_once_max, Watched.at_work)
        try:
            if self._failure is not None:
                raise self._failure
            if Watched.at_work == TASKS_AT_ONCE:
                Watched.full.set()
            await asyncio.wait_for(Watched.full.wait(), 20)
        finally:
            Watched.at_work -= 1
        return await super().look(previous, believed)

    @override
    async def release(self) -> None:
        Watched.released += 1


@pytest.fixture(autouse=True)
def _begin() -> None:
    Watched.at_work = Watched.at_once_max = Watched.released = 0
    Watched.full = asyncio.Event()


def trees(world: World) -> dict[str, Path]:
    return {task: world.tree({"CURRENT": task.encode(), "data.sst": task.encode() * 5000}) for task in TASKS}


async def test_tasks_are_backed_up_at_once_within_a_bound_and_come_back(world: World) -> None:
    repository, directories = await world.process(), trees(world)
    sources: dict[str, str | Path | BackupSource] = {task: Watched(path) for task, path in directories.items()}
    sources["0"] = str(directories["0"])
    results = await repository.backup_many(JOB.job, sources, store="facts")
    assert [(one.reference.task, one.reference.store) for one in results] == [(task, "facts") for task in TASKS]
    assert (Watched.at_once_max, Watched.released) == (TASKS_AT_ONCE, len(TASKS) - 1)
    commit = await repository.commit(JOB, results)

    for of, name in ((commit, "of a commit"), (JOB.job, "of a job"), (JOB, "of a scope")):
        target = world.target().parent / name
        restored = await repository.restore_all(of, str(target))
        assert (restored.commit.pointer, restored.pinned) == (commit.pointer, True)
        assert [one.target for one in restored.stores] == [target / task / "facts" for task in TASKS]
        assert {one.target.parent.name: (one.target / "CURRENT").read_text() for one in restored.stores} == {
            task: task for task in TASKS
        }


async def test_they_share_the_memory_and_requests_of_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, shares = await world.process(), set()
    backup = type(repository).backup

    async def noting(*args: object, **kwargs: object) -> object:
        settings = kwargs["options"].settings  # type: ignore[attr-defined]
        shares.add((settings.in_flight_max, settings.memory_bytes_max))
        return await backup(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(type(repository), "backup", noting)
    await repository.backup_many(JOB, trees(world))
    whole = repository.settings
    assert shares == {(whole.in_flight_max // TASKS_AT_ONCE, whole.memory_bytes_max // TASKS_AT_ONCE)}


async def test_one_failure_cancels_the_others_and_nothing_is_visible(world: World) -> None:
    repository, directories = await world.process(), trees(world)
    failure = UnsafeSourceError("is in use", operation="backup", subject="1")
    sources: dict[str, BackupSource] = {task: Watched(path) for task, path in directories.items()}
    sources["1"] = Watched(directories["1"], failure)
    with pytest.raises(UnsafeSourceError, match="is in use"):
        await repository.backup_many(JOB, sources)
    assert (Watched.at_work, Watched.full.is_set()) == (0, False)
    assert 0 < Watched.released <= TASKS_AT_ONCE
    assert await repository.latest(JOB) is None


async def test_nothing_to_back_up_is_no_result(world: World) -> None:
    assert await (await world.process()).backup_many(JOB, {}) == ()


async def test_a_store_that_is_lost_keeps_no_other_from_coming_back(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, await repository.backup_many(JOB, trees(world)))
    await world.store.inner.delete([commit.record.stores[2].index.key])
    target = world.target()
    with pytest.raises(IncompleteError) as caught:
        await repository.restore_all(commit, target)
    assert f"{len(TASKS) - 1} of {len(TASKS)} stores were restored below {target}" in caught.value.__notes__
    assert sorted(path.parent.parent.name for path in target.rglob("CURRENT")) == [
        task for task in TASKS if task != "2"
    ]
    assert not (target / "2").exists()


async def test_what_brought_nothing_back_leaves_only_what_was_there(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, await repository.backup_many(JOB, trees(world)))
    for reference in commit.record.stores:
        await world.store.inner.delete([reference.index.key])
    target = world.target()
    with pytest.raises(IncompleteError):
        await repository.restore_all(commit, target)
    assert not target.exists()
    (target / "2").mkdir(parents=True)
    with pytest.raises(IncompleteError):
        await repository.restore_all(commit, target)
    assert [path.name for path in target.rglob("*")] == ["2"]


async def test_what_is_there_is_replaced_only_if_that_was_asked_for(world: World) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, await repository.backup_many(JOB, trees(world)))
    target = world.target()
    await repository.restore_all(JOB, target, number=commit.pointer.number)
    with pytest.raises(TargetError):
        await repository.restore_all(JOB, target)
    again = await repository.restore_all(JOB, target, options=RestoreOptions(replace=True))
    assert {one.result.files_fetched for one in again.stores if one.result is not None} == {0}
    with pytest.raises(NotFoundError):
        await repository.restore_all(JOB, target, number=99)
