"""What is reported of a repository: commits, what is at risk, orphans, collections."""

import time

import pytest

from blobstore.base import BytesBody
from blobstore.errors import AccessDeniedError
from engine.errors import TooMuchToDeleteError
from engine.metrics.names import labels_of
from engine.metrics.results import gather_status, state_samples
from engine.repository.repository import Repository
from engine.state.commit import SaveMetrics
from engine.state.load import LoadMetrics
from index.plan.commits import Retention
from index.snapshot.model import Scope
from index.spark.names import StateVersion
from tests.unit.engine.conftest import TTL_MS, World


async def status_values(world: World, repository: Repository | None = None, **arguments: object) -> dict[str, float]:
    """By name, with the values of the labels behind it."""
    repository = repository or await world.process()
    samples = await gather_status(repository, monotonic_s=time.monotonic, **arguments)  # type: ignore[arg-type]
    return {
        " ".join((sample.name.removeprefix("tidemark_"), *filter(None, labels_of(sample).values()))): sample.value
        for sample in samples
    }


async def test_commits_of_each_job_are_reported_by_the_clock_of_the_store(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two")
    await world.history(repository, "other", scope=Scope("other"))
    world.clock.advance(5000)
    values = await status_values(world)
    assert values["last_commit_number job"] == values["commits job"] == 2
    assert values["last_commit_version job"] == commits[1].record.version
    assert values["last_commit_timestamp_seconds job"] == commits[1].committed_at_ms / 1000
    assert values["last_commit_age_seconds job"] == pytest.approx(7.0)
    assert values["last_commit_age_seconds other"] == pytest.approx(6.0)
    assert (values["last_commit_files job"], values["last_commit_stores job"]) == (4, 1)
    assert values["last_commit_bytes job"] == commits[1].record.stores[0].size_bytes
    assert values["repository_up"] == 1
    assert values["repository_ttl_seconds"] == TTL_MS / 1000
    only = await status_values(world, jobs=["another"], commits_only=True)
    assert not any(name.startswith(("last_commit", "orphan", "blobs_at_risk")) for name in only)


async def test_what_nothing_needs_is_reported_by_whether_it_may_go(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    whole = await status_values(world)
    assert (whole["orphan_bytes waiting"], whole["orphan_bytes expired"]) == (0, 0)
    assert whole["repository_bytes"] == whole["repository_live_bytes"]
    left = await world.backup(repository, "never committed")
    waiting = await status_values(world)
    assert waiting["orphan_bytes waiting"] == left.stats.bytes_uploaded + left.stats.index_bytes
    assert waiting["orphan_bytes expired"] == 0
    world.clock.advance(TTL_MS + 1)
    expired = await status_values(world)
    assert (expired["orphan_bytes waiting"], expired["orphan_bytes expired"]) == (0, waiting["orphan_bytes waiting"])
    assert expired["orphan_objects expired"] == left.stats.blobs + 1
    assert expired["repository_live_bytes"] == whole["repository_live_bytes"]


async def test_a_blob_that_is_gone_and_a_ttl_that_is_left_are_reported(world: World) -> None:
    repository = await world.process()
    commit = (await world.history(repository, "one"))[0]
    assert (await status_values(world))["blobs_at_risk damaged"] == 0
    blob = min(await world.keys("blobs/"))
    data = BytesBody(b"x" * 10_000_000)
    await world.store.inner.put(blob, data, ttl_ms=TTL_MS)
    at_risk = await status_values(world)
    assert (at_risk["blobs_at_risk ttl"], at_risk["blobs_at_risk damaged"]) == (1, 0)
    await world.store.inner.delete([blob])
    gone = await status_values(world)
    assert (gone["blobs_at_risk damaged"], gone["verification_failures blob_missing"]) == (1, 1)
    assert gone["orphan_bytes expired"] == 0
    # Without the index nobody knows what the rest is for.
    await world.store.inner.delete([commit.record.stores[0].index.key])
    lost = await status_values(world)
    assert lost["verification_failures index_damaged"] == 1
    assert not any(name.startswith("orphan") for name in lost)


async def test_a_newest_record_that_cannot_be_read_is_reported(world: World) -> None:
    """What is restored then is refused, though nothing that the commits before it need is missing."""
    repository = await world.process()
    await world.history(repository, "one", "two")
    assert (await status_values(world))["verification_failures unreadable"] == 0
    await world.store.inner.put(max(await world.keys("log/")), BytesBody(b"{"))
    values = await status_values(world)
    assert (values["last_commit_number job"], values["verification_failures unreadable"]) == (1, 1)
    assert values["blobs_at_risk damaged"] == 0


async def test_collections_are_reported_by_their_audit_records(world: World) -> None:
    repository = await world.process()
    await world.old_history(repository, "one", "two")
    assert (await status_values(world))["last_collection_timestamp_seconds"] == 0
    began_ms = await world.store.now_ms()
    await repository.collect(Retention(keep_last=1), delete_share_max=1)
    world.clock.advance(1000)
    values = await status_values(world)
    assert values["last_collection_timestamp_seconds"] == began_ms / 1000
    assert values["last_collection_deleted_bytes"] > 0
    assert values["collections_failed"] == 0
    # One that is refused is counted until one goes well. What somebody else has put there is nothing.
    await world.history(repository, "three")
    await world.store.inner.put("audit/not-ours", BytesBody(b"{"))
    with pytest.raises(TooMuchToDeleteError):
        await repository.collect(Retention(keep_last=1), delete_share_max=0)
    after = await status_values(world)
    assert (after["collections_failed"], after["last_collection_timestamp_seconds"]) == (1, began_ms / 1000)


async def test_who_may_not_read_audit_records_sees_the_rest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    list_page = type(world.store).list_page

    async def denied(self: object, prefix: str, **arguments: object) -> object:
        if prefix.startswith("audit/"):
            raise AccessDeniedError("no", operation="list_page", key=prefix)
        return await list_page(self, prefix, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(world.store), "list_page", denied)
    values = await status_values(world)
    assert "last_collection_timestamp_seconds" not in values
    assert not any(name.startswith("orphan") for name in values)
    assert values["blobs_at_risk ttl"] == 0


async def test_nothing_is_written(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    before = await world.keys()
    await status_values(world)
    assert await world.keys() == before


def test_a_state_stores_last_load_and_save_are_reported() -> None:
    load = LoadMetrics(of=StateVersion(3), changelogs=2, total_s=1.5, files_fetched=4)
    save = SaveMetrics(of=StateVersion(4), bytes_copied=100, uploaded=StateVersion(2), uploads_failed=1)
    values = {s.name: s.value for s in state_samples(load, save, query="flights", partition=7)}
    assert values["tidemark_state_load_changelogs_replayed"] == 2
    assert values["tidemark_state_load_seconds"] == 1.5
    assert values["tidemark_state_save_copied_bytes"] == 100
    assert values["tidemark_state_snapshot_uploaded_version"] == 2
    (sample, *_) = state_samples(load, None, query="flights", partition=7)
    assert labels_of(sample) == {"query": "flights", "operator": "0", "partition": "7", "store": "default"}
    assert len(tuple(state_samples(None, SaveMetrics()))) > 0
