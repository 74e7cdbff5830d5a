"""An index is read while its commit is pinned, and counts only once the pin holds (design 0002, D5)."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.repository.repository import Repository
from engine.restore.restore import RestoreOptions
from index.plan.commits import Retention
from index.snapshot.keys import INDEXES, PINS
from tests.doubles import Gate
from tests.unit.engine.conftest import JOB, World


async def restore_found(repository: Repository, target: Path) -> None:
    await repository.find_and_restore(JOB, target)


async def restore_given(repository: Repository, target: Path) -> None:
    await repository.restore(await repository.find(JOB), target)


@pytest.mark.parametrize("restore", [restore_found, restore_given])
async def test_an_index_is_read_while_its_commit_is_pinned(
    world: World, restore: Callable[[Repository, Path], Coroutine[Any, Any, None]]
) -> None:
    repository, pinning = await world.process(), Gate()
    await world.history(repository, "one")
    world.store.before("put", PINS, pinning.wait)
    world.store.after("get", INDEXES, pinning.open)
    target = world.target()
    await restore(repository, target)
    assert (target / "CURRENT").read_text() == "one"
    assert [key.startswith(INDEXES) for o, key in world.store.requests if o == "get"].count(True) == 1


async def test_an_index_of_a_commit_that_is_collected_before_its_pin_is_there_is_thrown_away(world: World) -> None:
    repository, other = await world.process(), await world.process()
    (first,) = await world.old_history(repository, "one")
    index = first.record.stores[0].index.key

    async def collect() -> None:
        await world.history(other, "two")
        await other.collect(Retention(keep_last=1), delete_share_max=1)

    world.store.requests.clear()
    world.store.before("put", PINS, collect)
    assert await world.restored_text(repository) == "two"
    assert ("get", index) in world.store.requests
    assert index not in await world.keys(INDEXES)


async def test_what_is_found_missing_before_the_pin_counts_only_if_the_pin_holds(world: World) -> None:
    repository, other, gate = await world.process(), await world.process(), Gate()
    await world.old_history(repository, "one")

    async def collect() -> None:
        await world.history(other, "two")
        await other.collect(Retention(keep_last=1), delete_share_max=1)
        await gate.open()

    world.store.before("get", INDEXES, gate.wait)
    world.store.before("put", PINS, collect)
    assert await world.restored_text(repository) == "two"
    assert repository.missing_blobs.keys == frozenset()


async def test_deleted_indexes_are_not_read_early(world: World) -> None:
    repository = await world.process()
    (commit,) = await world.history(repository, "one")
    world.store.requests.clear()
    await repository.restore(commit, world.target(), options=RestoreOptions(deleted=True))
    asked = [key.split("/")[0] for _, key in world.store.requests]
    assert asked.index("pins") < asked.index("log") < asked.index("indexes")
