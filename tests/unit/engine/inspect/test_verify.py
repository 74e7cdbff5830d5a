import pytest

from blobstore.base import BytesBody, list_blobs, read_blob
from engine.backup.backup import BackupResult
from engine.inspect.verify import Level, ProblemKind
from engine.repository.repository import Repository
from index.plan.commits import Retention
from tests.unit.engine.conftest import JOB, TTL_MS, World


async def big_blob(world: World) -> str:
    return max([b async for b in list_blobs(world.store.inner, "blobs/")], key=lambda b: b.size_bytes).key


async def leave_unsettled(world: World, repository: Repository, result: BackupResult) -> None:
    """Commit, and then break down before the first TTL is removed; the index is the last of the new keys."""
    for key in result.new_keys[:-1]:
        world.store.fail("remove_ttl", key)
    assert not (await repository.commit(JOB, [result])).settled


async def test_a_whole_repository_has_no_problems(world: World) -> None:
    repository = await world.process()
    for text in ("one", "two"):
        await repository.commit(JOB, [await world.backup(repository, text)])
    report = await repository.verify(level=Level.CONTENT)
    assert report.problems == ()
    assert (report.commits_count, report.indexes_count) == (2, 2)
    assert report.files_read == 7  # 4 + 3: the file that is the same in both is read once
    assert not report.damaged


async def test_a_missing_blob_is_found_with_its_file(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one")])
    await world.store.inner.delete([await big_blob(world)])
    (problem,) = (await repository.verify()).problems
    assert problem.kind is ProblemKind.BLOB_MISSING
    assert problem.path == "archive/000009.log"


async def test_a_short_blob_is_found_without_reading_it(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one")])
    await world.store.inner.put(await big_blob(world), BytesBody(b"short"))
    assert [p.kind for p in (await repository.verify()).problems] == [ProblemKind.BLOB_SHORT]


@pytest.mark.parametrize("level, found", [(Level.EXISTENCE, []), (Level.CONTENT, [ProblemKind.CONTENT_WRONG])])
async def test_a_flipped_byte_is_found_by_reading(world: World, level: Level, found: list[ProblemKind]) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one")])
    key = await big_blob(world)
    data = bytearray(await read_blob(world.store.inner, key, size_bytes_max=1 << 30))
    data[1234] ^= 1
    await world.store.inner.put(key, BytesBody(bytes(data)))
    report = await repository.verify(level=level)
    assert [p.kind for p in report.problems] == found
    assert report.damaged == bool(found)


async def test_an_altered_file_is_reported_for_each_job_with_the_newest_commit_that_has_it(world: World) -> None:
    repository = await world.process()
    commits = [await repository.commit(JOB, [await world.backup(repository, "one")]) for _ in range(3)]
    forks = [await repository.fork(commits[of], f"fork{of}") for of in (0, -1)]
    key = await big_blob(world)
    size_bytes = len(await read_blob(world.store.inner, key, size_bytes_max=1 << 30))
    await world.store.inner.put(key, BytesBody(bytes(size_bytes)))
    report = await repository.verify(level=Level.CONTENT)
    newest = {(str(of.scope), of.pointer.number) for of in (commits[-1], *forks)}
    assert {(problem.scope, problem.number) for problem in report.problems} == newest
    assert {problem.kind for problem in report.problems} == {ProblemKind.CONTENT_WRONG}


async def test_a_damaged_index_is_reported_and_the_rest_still_checked(world: World) -> None:
    repository = await world.process()
    results = [await world.backup(repository, "a", task="a"), await world.backup(repository, "b", task="b")]
    commit = await repository.commit(JOB, results)
    await world.store.inner.put(commit.record.stores[0].index.key, BytesBody(b"x"))
    report = await repository.verify()
    assert [(p.kind, p.task) for p in report.problems] == [(ProblemKind.INDEX_DAMAGED, "a")]
    assert report.blobs_count > 0


async def test_ttls_that_are_still_set_are_reported_and_healed(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    world.store.fail("remove_ttl", result.new_keys[0])
    await repository.commit(JOB, [result])
    report = await repository.verify()
    assert {p.kind for p in report.problems} == {ProblemKind.AT_RISK}
    assert not report.damaged
    healed = await repository.verify(heal=True)
    assert all(p.healed for p in healed.problems)
    assert (await repository.verify()).problems == ()


async def test_a_sample_reads_some_of_the_files_and_another_seed_others(world: World) -> None:
    repository = await world.process()
    for text in "abcdefgh":
        await repository.commit(JOB, [await world.backup(repository, text)])
    reports = [await repository.verify(level=Level.CONTENT, sample=0.5, seed=seed) for seed in range(8)]
    assert all(0 <= r.files_read <= 25 for r in reports)
    assert len({r.files_read for r in reports}) > 1


async def test_the_smallest_sample_reads_a_file_of_each_index(world: World) -> None:
    repository = await world.process()
    for text in "ab":
        await repository.commit(JOB, [await world.backup(repository, text)])
    reports = [await repository.verify(level=Level.CONTENT, sample=1e-9, seed=seed) for seed in range(8)]
    assert all(1 <= r.files_read <= r.indexes_count for r in reports)


async def test_what_a_collection_takes_during_a_verification_is_no_damage(world: World) -> None:
    repository, other = await world.process(), await world.process()
    for text in ("one", "two"):
        await repository.commit(JOB, [await world.backup(repository, text)])

    world.clock.advance(TTL_MS)

    async def collect_now() -> None:
        await other.collect(Retention(keep_last=1), delete_share_max=1)

    world.store.before("list_page", "blobs/", collect_now)
    report = await repository.verify(level=Level.CONTENT)
    assert report.problems == ()
    assert report.commits_count == 1


async def test_healing_that_a_collection_overtakes_finds_no_damage(world: World) -> None:
    repository, other = await world.process(), await world.process()
    await repository.commit(JOB, [await world.backup(repository, "zero")])
    result = await world.backup(repository, "one")
    await leave_unsettled(world, repository, result)

    async def overtake() -> None:
        world.clock.advance(TTL_MS)
        await other.commit(JOB, [await world.backup(other, "two")])
        await other.collect(Retention(keep_last=1), delete_share_max=1)

    world.store.before("remove_ttl", "", overtake)
    report = await (await world.process()).verify(heal=True)
    assert not report.damaged
    assert report.commits_count == 0


async def test_what_is_lost_before_it_is_healed_is_missing(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    await leave_unsettled(world, repository, result)

    async def lose() -> None:
        await world.store.inner.delete(result.new_keys)

    world.store.before("remove_ttl", "", lose)
    report = await (await world.process()).verify(heal=True)
    assert {p.kind for p in report.problems} == {ProblemKind.INDEX_DAMAGED, ProblemKind.BLOB_MISSING}
    assert {p.key for p in report.problems} == set(result.new_keys)
    assert not any(p.healed for p in report.problems)


async def test_what_only_a_name_holds_is_checked_too(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one")])
    named = await repository.name(await repository.find(JOB), "golden")
    await repository.commit(JOB, [await world.backup(repository, "two")])
    await repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1)
    assert [c.name for c in await repository.commits(JOB, with_named=True)] == [None, "golden"]
    assert (await repository.verify()).commits_count == 2
    await world.store.inner.delete([named.stores[0].index.key])
    (problem,) = (await repository.verify()).problems
    assert (problem.kind, problem.number) == (ProblemKind.INDEX_DAMAGED, 1)
