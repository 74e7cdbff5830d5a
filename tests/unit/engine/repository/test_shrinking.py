"""A backup of what looks like an unmounted disk (design 0006, P8)."""

import pytest

from engine.backup.backup import BackupOptions
from engine.errors import ShrunkError
from tests.unit.engine.conftest import JOB, World

HALF = BackupOptions(shrink_max=0.5)


async def test_a_store_that_would_lose_more_than_it_may_is_refused_before_an_upload(world: World) -> None:
    repository = await world.process()
    state = world.tree({"a": b"a" * 60_000, "b": b"b" * 40_000})
    await repository.commit(JOB, [await repository.backup(JOB, state, options=HALF)])
    there = await world.keys()
    with pytest.raises(ShrunkError, match=r"from 97\.7 KiB to 39\.1 KiB, by more than 50%"):
        await repository.backup(JOB, world.tree({"b": b"b" * 40_000}), options=HALF)
    with pytest.raises(ShrunkError):
        await repository.plan_backup(JOB, world.tree({}), options=HALF)
    assert await world.keys() == there


@pytest.mark.parametrize("options", [BackupOptions(), BackupOptions(shrink_max=1.0)])
async def test_it_is_allowed_on_demand_and_where_nobody_set_a_share(world: World, options: BackupOptions) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one")])
    result = await repository.backup(JOB, world.tree({}), options=options)
    assert result.stats.bytes_total == 0


async def test_exactly_half_may_go_and_a_first_backup_may_be_empty(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await repository.backup(JOB, world.tree({}), options=HALF)])
    both = world.tree({"a": b"a" * 50_000, "b": b"b" * 50_000})
    await repository.commit(JOB, [await repository.backup(JOB, both, options=HALF)])
    assert (await repository.backup(JOB, world.tree({"a": b"a" * 50_000}), options=HALF)).stats.files_total == 1
