"""A snapshot's identity is its index reference; a unique id is the caller's label (design 0002, C2 and C3)."""

from pathlib import Path

import pytest

from blobstore.base import list_blobs
from engine.backup.backup import BackupOptions, BackupResult
from engine.errors import CommitUnknownError, StaleResultError
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.model import UniqueId
from tests.unit.engine.conftest import JOB, World, text_tree


async def labelled(world: World, repository: Repository, text: str, label: str) -> BackupResult:
    tree: Path = world.tree(text_tree(text))
    return await repository.backup(JOB, tree, options=BackupOptions(unique_id=UniqueId(label)))


@pytest.mark.parametrize("is_collected", [False, True])
async def test_a_result_made_on_another_snapshot_of_the_same_unique_id_is_stale(
    world: World, is_collected: bool
) -> None:
    writer, slow = await world.process(), await world.process()
    first = await writer.commit(JOB, [await labelled(world, writer, "one", "v1")])
    await writer.commit(JOB, [await labelled(world, writer, "first", "v2")])
    result = await labelled(world, slow, "third", "v3")
    await writer.rewind(first)
    await writer.commit(JOB, [await labelled(world, writer, "second", "v2")])
    if is_collected:
        await writer.collect(Retention(keep_last=1), delete_share_max=1)
    with pytest.raises(StaleResultError):
        await (await world.process()).commit(JOB, [result])
    assert await world.restored_text(await world.process()) == "second"


async def test_another_result_of_the_same_unique_id_is_not_answered_with_the_first_ones_record(world: World) -> None:
    writer = await world.process()
    await world.history(writer, "zero")
    lost = await labelled(world, writer, "one", "v2")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await writer.commit(JOB, [lost], offsets="42")
    again = await labelled(world, writer, "two", "v2")
    commit = await writer.commit(JOB, [again], offsets="42")
    assert commit.record.stores[0].index == again.reference.index
    assert await world.restored_text(await world.process()) == "two"


async def test_only_what_the_standing_record_names_as_new_loses_its_ttl(world: World) -> None:
    writer = await world.process()
    lost = await labelled(world, writer, "one", "v1")
    world.store.lose_answer("put_if_absent", "log/")
    with pytest.raises(CommitUnknownError):
        await writer.commit(JOB, [lost])
    again = await writer.backup(
        JOB, world.tree(text_tree("two")), options=BackupOptions(unique_id=UniqueId("v1"), base=None)
    )
    with pytest.raises(StaleResultError):
        await writer.commit(JOB, [again])
    assert (await writer.commit(JOB, [lost])).settled
    left = {blob.key async for blob in list_blobs(world.store.inner, "") if blob.expires_at_ms is not None}
    assert left == set(again.new_keys)
