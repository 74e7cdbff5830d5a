"""Design 0006, P7: of each kind of key, what leads to it and what a collection would do; the collection agrees."""

import pytest

from blobstore.base import BytesBody, list_blobs
from engine.errors import UnsafeStoreError
from engine.inspect.explain import PATHS_LISTED_MAX, Explanation, Fate, KeyKind, RootKind, kind_of
from engine.repository.repository import Repository
from index.plan.collect import DeleteReason
from index.plan.commits import KeepReason, Retention, RetentionPolicy, RetentionRule
from index.snapshot.keys import BLOBS, audit_key, boundary_key, commit_key, run_key, upload_key
from index.snapshot.model import BlobKey, Scope
from tests.unit.engine.conftest import JOB, TTL_MS, World

OTHER = Scope("other")
KEEP_TWO = Retention(keep_last=2)


async def history(world: World, repository: Repository, *texts: str) -> dict[str, tuple[BlobKey, ...]]:
    """Commits of some texts; what was uploaded for each."""
    uploads = {}
    for text in texts:
        result = await world.backup(repository, text)
        await repository.commit(JOB, [result])
        uploads[text] = tuple(result.new_keys)
        world.clock.advance(1000)
    return uploads


def blob_of(keys: tuple[BlobKey, ...]) -> BlobKey:
    return next(key for key in keys if key.startswith(BLOBS))


def index_of(keys: tuple[BlobKey, ...]) -> BlobKey:
    return next(key for key in keys if not key.startswith(BLOBS))


async def test_a_blob_that_is_kept_is_reported_with_its_file_and_all_that_leads_to_it(world: World) -> None:
    repository = await world.process()
    uploads = await history(world, repository, "one", "two")
    await repository.name(await repository.find(JOB), "kept")
    await repository.fork(await repository.find(JOB), OTHER)
    key = blob_of(uploads["two"])
    explained = await repository.explain(key, KEEP_TWO)
    assert (explained.kind, explained.fate, explained.reason) == (KeyKind.BLOB, Fate.KEPT, None)
    assert {(p.root, str(p.scope), p.number, p.name, p.kept) for p in explained.paths} == {
        (RootKind.COMMIT, "job", 2, "", KeepReason.NEWEST),
        (RootKind.COMMIT, "other", 1, "", KeepReason.NEWEST),
        (RootKind.NAME, "job", 2, "kept", None),
    }
    assert all(path.indexes == (index_of(uploads["two"]),) and path.files for path in explained.paths)
    assert explained.size_bytes is not None
    assert explained.expires_at_ms is None


async def test_a_blob_of_a_commit_that_the_retention_closes_goes(world: World) -> None:
    repository = await world.process()
    uploads = await history(world, repository, "one", "two", "three")
    key = index_of(uploads["one"])
    explained = await repository.explain(key, KEEP_TWO)
    assert (explained.fate, explained.reason, explained.collectable_at_ms) == (
        Fate.WAITING,
        None,
        (explained.created_at_ms or 0) + TTL_MS,
    )
    world.clock.advance(TTL_MS)
    explained = await repository.explain(key, KEEP_TWO)
    assert (explained.fate, explained.reason) == (Fate.DELETED, DeleteReason.UNREACHABLE_UPLOAD)
    assert [(p.number, p.kept, p.keeps) for p in explained.paths] == [(1, None, False)]
    kept = await repository.explain(key, Retention(keep_last=3))
    assert (kept.fate, kept.paths[0].kept) == (Fate.KEPT, KeepReason.LAST)
    nobodys = RetentionPolicy(rules=(RetentionRule(pattern="x*", retention=KEEP_TWO),))
    assert (await repository.explain(key, nobodys)).paths[0].kept is KeepReason.UNRULED


async def test_an_upload_without_a_commit_waits_for_its_ttl_and_goes(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one")
    key = (await world.backup(repository, "abandoned")).new_keys[0]
    explained = await repository.explain(key, KEEP_TWO)
    assert (explained.fate, explained.paths, explained.expires_at_ms) == (Fate.WAITING, (), world.clock.now_ms + TTL_MS)
    world.clock.advance(TTL_MS)
    explained = await repository.explain(key, KEEP_TWO)
    assert (explained.fate, explained.reason) == (Fate.DELETED, DeleteReason.UNREACHABLE_UPLOAD)


async def test_a_pin_is_a_root(world: World) -> None:
    repository = await world.process()
    uploads = await history(world, repository, "one")
    async with repository.pinned(await repository.find(JOB)):
        explained = await repository.explain(blob_of(uploads["one"]), KEEP_TWO)
        assert {path.root for path in explained.paths} == {RootKind.COMMIT, RootKind.PIN}


async def test_what_is_missing_and_needed_is_reported(world: World) -> None:
    repository = await world.process()
    uploads = await history(world, repository, "one")
    key = blob_of(uploads["one"])
    await world.store.inner.delete([key])
    explained = await repository.explain(key, KEEP_TWO)
    assert (explained.fate, explained.size_bytes) == (Fate.ABSENT, None)
    assert explained.rule.startswith("MISSING")
    never = await repository.explain(upload_key(BLOBS, JOB, "0" * 20, 3), KEEP_TWO)
    assert (never.fate, never.paths, never.rule) == (Fate.ABSENT, (), "nothing that is kept leads to it")


async def test_indexes_that_cannot_be_read_are_reported(world: World) -> None:
    repository = await world.process()
    uploads = await history(world, repository, "one", "two")
    await world.store.inner.delete([index_of(uploads["two"])])
    explained = await repository.explain(blob_of(uploads["one"]), KEEP_TWO)
    assert explained.unreadable == (index_of(uploads["two"]),)


async def test_what_an_index_that_cannot_be_read_may_need_is_not_said_to_go(world: World) -> None:
    repository = await world.process()
    uploads = await history(world, repository, "one", "two")
    index = index_of(uploads["two"])
    await world.store.inner.delete([index])
    blobs = [key for key in uploads["two"] if key != index]
    for key in blobs:
        explained = await repository.explain(key, KEEP_TWO)
        assert (explained.fate, explained.reason, explained.unreadable) == (Fate.UNKNOWN, None, (index,))
    explained = await repository.explain(index, KEEP_TWO)
    assert (explained.fate, explained.rule[:7]) == (Fate.ABSENT, "MISSING")
    # An index that the retention gives up keeps nothing, whether it can be read or not.
    await history(world, repository, "three")
    world.clock.advance(TTL_MS)
    explained = await repository.explain(blobs[0], Retention(keep_last=1))
    assert explained.fate is Fate.DELETED


async def test_paths_are_bounded_and_those_that_keep_come_first(world: World) -> None:
    repository = await world.process()
    uploads = await history(world, repository, "one")
    for number in range(PATHS_LISTED_MAX + 5):
        await repository.commit(JOB, [], offsets=str(number))
    explained = await repository.explain(blob_of(uploads["one"]), Retention(keep_last=1))
    assert (explained.paths_count, len(explained.paths)) == (PATHS_LISTED_MAX + 6, PATHS_LISTED_MAX)
    assert [path.keeps for path in explained.paths] == [True] + [False] * (PATHS_LISTED_MAX - 1)


async def test_the_base_of_a_delta_is_reached_through_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.records.indexes.WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr("engine.records.indexes.DELTA_GAIN_MIN", 0)
    repository = await world.process()
    uploads = await history(world, repository, "one", "two", "three")
    explained = await repository.explain(index_of(uploads["one"]), Retention(keep_last=1))
    assert explained.fate is Fate.KEPT
    assert explained.paths[0].indexes == tuple(index_of(uploads[text]) for text in ("three", "two", "one"))


@pytest.mark.parametrize(
    "key, kind",
    [
        ("repository", KeyKind.REPOSITORY),
        (commit_key(JOB, 1), KeyKind.COMMIT),
        (boundary_key(JOB, 1), KeyKind.BOUNDARY),
        (upload_key(BLOBS, JOB, "a" * 20, 1), KeyKind.BLOB),
        (f"pins/{'a' * 20}", KeyKind.PIN),
        (f"names/job/kept/{'a' * 20}", KeyKind.NAME),
        (run_key(RUN := f"{1:020d}-{'a' * 20}", "run"), KeyKind.RUN),  # type: ignore[arg-type]
        (audit_key(RUN), KeyKind.AUDIT),  # type: ignore[arg-type]
        ("blobs/zz/foreign", KeyKind.FOREIGN),
        ("", KeyKind.FOREIGN),
        ("profile", KeyKind.FOREIGN),
    ],
)
def test_the_kind_of_a_key_follows_from_its_grammar(key: str, kind: KeyKind) -> None:
    assert kind_of(key) is kind


async def test_records_are_reported_by_why_they_stay_or_go(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
    await repository.collect(Retention(keep_last=2), delete_share_max=1)
    retention = Retention(keep_last=1)

    async def explained(key: str) -> Explanation:
        return await repository.explain(key, retention)

    assert (await explained(commit_key(JOB, 1))).fate is Fate.ABSENT
    closing = await explained(commit_key(JOB, 2))
    assert (closing.fate, closing.reason) == (Fate.DELETED, DeleteReason.CLOSED_COMMIT)
    newest = await explained(commit_key(JOB, 3))
    assert (newest.fate, newest.rule[:6]) == (Fate.KEPT, "newest")
    old_boundary = await explained(boundary_key(JOB, 1))
    assert (old_boundary.fate, old_boundary.reason) == (Fate.DELETED, DeleteReason.SUPERSEDED_BOUNDARY)
    assert (await explained("repository")).fate is Fate.KEPT
    await world.store.inner.put("blobs/zz/foreign", BytesBody(b"mine"))
    assert (await explained("blobs/zz/foreign")).fate is Fate.LEFT_ALONE


async def test_a_forgotten_boundary_stays(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one")
    report = await repository.forget(JOB)
    assert report.boundary is not None
    explained = await repository.explain(boundary_key(JOB, report.boundary.number), KEEP_TWO)
    assert explained.fate is Fate.KEPT
    assert (await repository.explain(commit_key(JOB, 1), KEEP_TWO)).fate is Fate.DELETED


async def test_a_log_with_a_hole_is_reported_by_its_scope(world: World) -> None:
    repository = await world.process()
    await history(world, repository, "one", "two", "three")
    key = commit_key(JOB, 2)
    await world.store.inner.delete([key])
    with pytest.raises(UnsafeStoreError, match="had holes") as caught:
        await repository.explain(key, KEEP_TWO)
    assert (caught.value.operation, caught.value.subject) == ("explain", f"log of {JOB}")


async def test_the_collection_does_what_was_explained(world: World) -> None:
    await check_explained(world)


async def test_the_collection_does_what_was_explained_where_lists_show_no_ttl(opaque_world: World) -> None:
    await check_explained(opaque_world)


async def check_explained(world: World) -> None:
    repository = await world.process()
    await world.backup(repository, "never committed")
    world.clock.advance(TTL_MS + 1)
    await history(world, repository, "one", "two", "three")
    await repository.name(await repository.find(JOB, version=1), "kept")
    await repository.fork(await repository.find(JOB, version=2), OTHER)
    await world.backup(repository, "young")
    keys = [blob.key async for blob in list_blobs(world.store.inner, "")]
    explained = {key: await repository.explain(key, KEEP_TWO) for key in keys}
    planned = await repository.collect(KEEP_TWO, dry_run=True)
    assert {d.key: d.reason for d in planned.deletes} == {
        key: e.reason for key, e in explained.items() if e.fate is Fate.DELETED
    }
    report = await repository.collect(KEEP_TWO, delete_share_max=1)
    there = {blob.key async for blob in list_blobs(world.store.inner, "")}
    assert {key for key in keys if key not in there} == {k for k, e in explained.items() if e.fate is Fate.DELETED}
    assert report.failed == ()
