"""Something of a commit is missing: the next backup heals it, a restore names one that is whole (0006, M1 and M2)."""

import os

import pytest

from blobstore.base import BytesBody, read_blob
from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from engine.backup.backup import BackupOptions, BackupResult
from engine.commit import writer as commit
from engine.errors import DamagedError, IncompleteError, NotFoundError, UnsafeSourceError
from engine.inspect.verify import Level, ProblemKind, verify
from engine.local import digests
from engine.records import find as finding
from engine.records import indexes as index_io
from engine.records.find import MissingBlobs, find_complete
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.plan.commits import Commit, Retention
from index.snapshot.contents import blob_keys, files_of
from index.snapshot.model import IndexDelta, Scope, SstIdentity
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.unit.engine.workbench import SETTINGS, Tree, read_tree

# One file of each form, by the sizes of `SETTINGS`.
FORMS: Tree = {
    "inline": b"in the index",
    "packed-1": os.urandom(1500),
    "sub/packed-2": os.urandom(2000),
    "alone": os.urandom(5_000),
    "cut": os.urandom(20_000),
}


class Job:
    """A directory that is backed up again and again by one process, and what it should restore to."""

    def __init__(self, world: World, repository: Repository) -> None:
        self.world, self.repository = world, repository
        self.tree = dict(FORMS)
        self.directory = world.tree(self.tree)

    def change(self, **files: bytes) -> None:
        for name, data in files.items():
            self.tree[name] = data
            (self.directory / name).write_bytes(data)

    async def backup(self, **how: bool) -> BackupResult:
        return await self.repository.backup(JOB, self.directory, options=BackupOptions(**how))  # type: ignore[arg-type]

    async def commit(self, **how: bool) -> Commit:
        return await self.repository.commit(JOB, [await self.backup(**how)])

    async def blobs_of(self, *names: str) -> list[str]:
        """The keys of the blobs that hold files, in the newest commit."""
        newest = await self.repository.latest(JOB)
        assert newest is not None
        index = await self.repository.read_index(newest.record.stores[0].index)
        files = {"/".join(path): file for path, file in files_of(index.dir)}
        return [blob.key for name in names for blob in files[name].blobs]

    async def lose(self, *keys: str) -> None:
        await self.world.store.inner.delete(keys)

    async def another_process(self) -> None:
        self.repository = await process(self.world)

    async def check(self, commit: Commit) -> None:
        """It is whole, it restores, and nothing of it can expire."""
        target = self.world.target()
        await self.repository.restore(commit, target)
        assert read_tree(target) == self.tree
        report = await self.repository.verify([commit], level=Level.CONTENT)
        assert report.problems == ()


async def process(world: World, settings: TransferSettings = SETTINGS) -> Repository:
    return await Repository.open(world.store, settings=settings)


@pytest.fixture
async def job(world: World) -> Job:
    return Job(world, await process(world))


class TestBackup:
    @pytest.mark.parametrize("names", [["packed-1"], ["alone"], ["cut"], ["alone", "packed-1", "cut"]], ids=" ".join)
    async def test_with_check_retained_it_sends_again_what_has_bytes_in_a_missing_blob(
        self, job: Job, names: list[str]
    ) -> None:
        await job.commit()
        gone = await job.blobs_of(*names)
        await job.lose(*gone[:1] if names == ["cut"] else gone)
        await job.another_process()
        job.change(new=b"n" * 3000)
        result = await job.backup(check_retained=True)
        # What shares a pack with it is lost too.
        lost = {*names, "sub/packed-2"} if "packed-1" in names else {*names}
        assert result.stats.files_healed == len(lost)
        assert result.stats.bytes_healed == sum(len(FORMS[name]) for name in lost)
        assert result.stats.files_retained == len(FORMS)
        assert set(result.missing_keys) <= set(gone)
        await job.check(await job.repository.commit(JOB, [result]))

    async def test_it_asks_once_for_each_blob_that_is_retained_and_for_nothing_by_default(self, job: Job) -> None:
        await job.commit()
        held = sorted(set(await job.blobs_of(*FORMS)))
        await job.another_process()
        for shown, asked in ((False, []), (True, held)):
            job.world.store.requests.clear()
            result = await job.backup(check_retained=shown)
            requests = [(what, key) for what, key in job.world.store.requests if key.startswith(("blobs/", "indexes/"))]
            assert sorted(key for what, key in requests if what == "stat") == asked
            assert (result.stats.requests, result.stats.files_healed, result.missing_keys) == (len(requests), 0, ())

    async def test_a_blob_that_is_too_short_is_sent_again(self, job: Job) -> None:
        await job.commit()
        [key] = await job.blobs_of("alone")
        await job.lose(key)
        await job.world.store.inner.put_if_absent(key, BytesBody(FORMS["alone"][:-1]))
        assert (await job.backup()).stats.files_healed == 0
        await job.check(await job.commit(check_retained=True))

    async def test_what_a_restore_has_missed_the_next_backup_sends_again(self, job: Job) -> None:
        first = await job.commit()
        await job.lose(*await job.blobs_of("alone"))
        with pytest.raises(IncompleteError):
            await job.repository.restore(first, job.world.target())
        await job.check(await job.commit())

    @pytest.mark.parametrize("level", Level)
    async def test_what_a_verification_has_missed_the_next_backup_sends_again(self, job: Job, level: Level) -> None:
        await job.commit()
        await job.lose(*await job.blobs_of("alone", "packed-1"))
        assert (await job.repository.verify(level=level)).damaged
        await job.check(await job.commit())

    async def test_bytes_that_a_verification_found_altered_are_sent_again(self, job: Job) -> None:
        await job.commit()
        [key] = await job.blobs_of("alone")
        await job.lose(key)
        await job.world.store.inner.put_if_absent(key, BytesBody(bytes(len(FORMS["alone"]))))
        report = await job.repository.verify(level=Level.CONTENT)
        assert [problem.kind for problem in report.problems] == [ProblemKind.CONTENT_WRONG]
        await job.check(await job.commit())

    async def test_what_settling_has_missed_the_next_backup_sends_again(self, job: Job) -> None:
        """The writer dies before it removes a TTL, the blob goes, and the next writer may not build on the commit."""
        first = await job.backup()
        job.world.store.fail("remove_ttl", "blobs/")
        await job.repository.commit(JOB, [first])
        await job.lose(*await job.blobs_of("alone", "packed-1", "cut"))
        await job.another_process()
        unaware = await job.backup()
        with pytest.raises(DamagedError, match="gone before its TTL") as refused:
            await job.repository.commit(JOB, [unaware])
        assert "--check-retained" in refused.value.hint
        await job.check(await job.commit())
        left = await job.repository.verify()
        assert {problem.kind for problem in left.problems} == {ProblemKind.BLOB_MISSING}
        assert {problem.number for problem in left.problems} == {1}

    async def test_the_rest_of_a_parent_is_settled_even_though_something_of_it_is_gone(self, job: Job) -> None:
        job.world.store.fail("remove_ttl", "blobs/")
        await job.commit()
        await job.lose(*await job.blobs_of("alone"))
        await job.another_process()
        second = await job.commit(check_retained=True)
        job.world.clock.advance(3 * TTL_MS)
        for _ in range(2):
            await job.repository.collect(Retention(keep_last=1), delete_share_max=1)
        await job.check(second)

    async def test_a_store_that_is_carried_over_still_needs_what_it_has(self, job: Job) -> None:
        both = [await job.repository.backup(JOB, job.directory, task=task) for task in ("0", "1")]
        job.world.store.fail("remove_ttl", "blobs/")
        await job.repository.commit(JOB, both)
        await job.lose(both[1].new_keys[0])
        await job.another_process()
        healed = await job.repository.backup(JOB, job.directory, task="0", options=BackupOptions(check_retained=True))
        with pytest.raises(DamagedError, match="gone before its TTL"):
            await job.repository.commit(JOB, [healed])
        # Now it is known, and the other store's next backup brings it back.
        other = await job.repository.backup(JOB, job.directory, task="1")
        assert other.stats.files_healed
        await job.repository.commit(JOB, [healed, other])

    async def test_a_local_file_with_other_bytes_is_refused(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """By its identity it is the SST that is missing; by its bytes it is not, and nothing can bring that back."""
        monkeypatch.setattr(digests, "parse_sst_tail", lambda _, size: SstIdentity("S" * 20, 7))
        job.tree = {"7.sst": os.urandom(4000)}
        job.directory = job.world.tree(job.tree)
        await job.commit()
        await job.lose(*await job.blobs_of("7.sst"))
        job.directory = job.world.tree({"7.sst": os.urandom(4000)})
        await job.another_process()
        with pytest.raises(UnsafeSourceError, match="does not have the bytes"):
            await job.backup(check_retained=True)
        job.directory = job.world.tree(job.tree)
        result = await job.backup(check_retained=True)
        commit = await job.repository.commit(JOB, [result])
        await job.check(commit)
        index = await job.repository.read_index(commit.record.stores[0].index)
        assert [file.sst for _, file in files_of(index.dir)] == [SstIdentity("S" * 20, 7)]

    async def test_a_dry_run_says_what_would_be_sent_again(self, job: Job) -> None:
        await job.commit()
        await job.lose(*await job.blobs_of("alone"))
        plan = await job.repository.plan_backup(JOB, job.directory, options=BackupOptions(check_retained=True))
        assert (plan.files_healed, plan.bytes_healed) == (1, 5000)
        assert (await job.repository.plan_backup(JOB, job.directory)).files_healed == 0

    async def test_of_a_result_another_process_learns_what_is_gone(self, job: Job) -> None:
        """Tasks back up, the driver commits and settles: it has met nothing itself."""
        job.world.store.fail("remove_ttl", "blobs/")
        await job.commit()
        await job.lose(*await job.blobs_of("alone"))
        await job.another_process()
        result = await job.backup(check_retained=True)
        await job.another_process()
        await job.check(await job.repository.commit(JOB, [result]))


class TestIndex:
    async def test_an_index_that_is_gone_is_no_reason_to_stop(self, job: Job) -> None:
        first = await job.commit()
        await job.lose(first.record.stores[0].index.key)
        await job.another_process()
        result = await job.backup()
        assert (result.stats.files_healed, result.stats.files_added) == (len(FORMS), len(FORMS))
        assert result.base == first.record.stores[0].index
        await job.check(await job.repository.commit(JOB, [result]))

    async def test_also_if_it_is_given_as_the_base(self, job: Job) -> None:
        first = await job.commit()
        await job.lose(first.record.stores[0].index.key)
        await job.another_process()
        result = await job.repository.backup(JOB, job.directory, options=BackupOptions(base=first.record.stores[0]))
        await job.check(await job.repository.commit(JOB, [result], parent=first.pointer))

    async def test_also_if_its_blobs_were_not_settled(self, job: Job) -> None:
        job.world.store.fail("remove_ttl", "blobs/")
        first = await job.commit()
        await job.lose(first.record.stores[0].index.key)
        await job.another_process()
        second = await job.commit()
        job.world.clock.advance(2 * TTL_MS)
        await job.check(second)

    async def test_also_if_this_process_remembers_it(self, job: Job) -> None:
        """Nothing else would ever notice: a delta on it could not be read by anybody."""
        first = await job.commit()
        await job.lose(first.record.stores[0].index.key)
        result = await job.backup(check_retained=True)
        assert result.stats.files_healed == len(FORMS)
        await job.check(await job.repository.commit(JOB, [result]))

    @pytest.mark.parametrize("lost", [0, 1, 2])
    @pytest.mark.parametrize("remembered", [False, True])
    async def test_wherever_in_a_chain_of_deltas_it_is_missing(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, lost: int, remembered: bool
    ) -> None:
        monkeypatch.setattr(index_io, "delta_pays", lambda whole_bytes, delta_bytes: True)
        monkeypatch.setattr(index_io, "WHOLE_BYTES_MAX", 0)
        references = []
        for number in range(3):
            job.change(new=bytes([number]) * 3000)
            references.append((await job.commit()).record.stores[0].index)
        stored = await index_io.read_stored_snapshot(job.world.store, references[2])
        assert len(stored.chain) == 3
        await job.lose(references[lost].key)
        if not remembered:
            await job.another_process()
        fourth = await job.commit(check_retained=remembered)
        # Whole: what is not there is the base of nothing.
        assert not isinstance(await index_io._read_stored(job.world.store, fourth.record.stores[0].index), IndexDelta)
        await job.check(fourth)

    async def test_an_index_that_is_altered_is_one_that_is_missing(self, job: Job) -> None:
        first = await job.commit()
        index = first.record.stores[0].index
        await job.lose(index.key)
        await job.world.store.inner.put_if_absent(index.key, BytesBody(bytes(index.size_bytes)))
        await job.another_process()
        result = await job.backup()
        assert result.stats.files_healed == result.stats.files_total
        assert index.key in result.missing_keys


async def test_verify_names_the_index_that_is_broken_and_not_the_delta_on_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_io, "delta_pays", lambda whole_bytes, delta_bytes: True)
    monkeypatch.setattr(index_io, "WHOLE_BYTES_MAX", 0)
    await job.commit()
    job.change(new=b"n" * 3000)
    newest = await job.commit()
    chain = (await index_io.read_stored_snapshot(job.world.store, newest.record.stores[0].index)).chain
    base = chain[-1]
    assert base != newest.record.stores[0].index
    await job.lose(base.key)
    await job.world.store.inner.put_if_absent(base.key, BytesBody(bytes(base.size_bytes)))
    report = await verify(job.world.store, [newest])
    assert {problem.key for problem in report.problems} == {base.key}


class TestRewind:
    async def test_a_rewind_leads_away_from_a_commit_that_cannot_be_settled(self, job: Job) -> None:
        first = await job.commit()
        job.change(alone=os.urandom(6000))
        second = await job.backup()
        job.world.store.fail("remove_ttl", "blobs/")
        await job.repository.commit(JOB, [second])
        await job.lose(second.new_keys[0])
        await job.another_process()
        rewound = await job.repository.rewind(first)
        job.tree = dict(FORMS)
        await job.check(rewound)


async def refuse(*_: object, **__: object) -> None:
    raise StoreUnavailableError("nothing is settled", operation="remove_ttl")


class TestRisk:
    async def test_whatever_can_still_expire_is_reported_and_nothing_else(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blobs of each form, packs, and the index; not those that the commit before has made permanent."""
        await job.commit()
        job.change(new=b"n" * 3000, other=b"o" * 9000)
        second = await job.backup()
        monkeypatch.setattr(commit, "settle_keys", refuse)
        await job.repository.commit(JOB, [second])
        report = await job.repository.verify()
        assert {problem.kind for problem in report.problems} == {ProblemKind.AT_RISK}
        assert {problem.key for problem in report.problems} == set(second.new_keys)
        assert not report.damaged
        await job.repository.verify(heal=True)
        assert (await job.repository.verify()).problems == ()

    async def test_so_is_an_index_that_others_are_deltas_on(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(index_io, "delta_pays", lambda whole_bytes, delta_bytes: True)
        monkeypatch.setattr(index_io, "WHOLE_BYTES_MAX", 0)
        first = await job.backup()
        await job.repository.commit(JOB, [first])
        job.change(new=b"n" * 3000)
        second = await job.commit()
        base = first.reference.index
        data = await read_blob(job.world.store.inner, base.key, size_bytes_max=base.size_bytes)
        await job.lose(base.key)
        # No writer leaves it so (T2): somebody has brought it back from a copy.
        await job.world.store.inner.put_if_absent(base.key, BytesBody(data), ttl_ms=TTL_MS)
        report = await job.repository.verify([second])
        assert [(problem.kind, problem.key) for problem in report.problems] == [(ProblemKind.AT_RISK, base.key)]


async def three_commits(job: Job) -> list[Commit]:
    """Each with a new blob of its own."""
    commits = []
    for number in range(3):
        job.change(new=bytes([number]) * 3000)
        commits.append(await job.commit())
    return commits


class TestRestore:
    @pytest.mark.parametrize("what", ["blob", "index"])
    async def test_it_names_the_newest_commit_that_is_whole_and_leaves_the_target_alone(
        self, job: Job, what: str
    ) -> None:
        commits = await three_commits(job)
        await job.lose(commits[2].record.stores[0].index.key if what == "index" else (await job.blobs_of("new"))[0])
        target = job.world.target()
        for restore in (
            lambda: job.repository.find_and_restore(JOB, target),
            lambda: job.repository.restore(commits[2], target),
        ):
            with pytest.raises(IncompleteError) as refused:
                await restore()
            assert refused.value.complete is not None
            assert refused.value.complete.pointer == commits[1].pointer
            assert "commit 2 (version 2) is the newest of which everything is there" in refused.value.hint
            assert isinstance(refused.value.__cause__, BlobNotFoundError)
            assert not target.exists()

    async def test_it_takes_that_one_if_it_was_asked_to(self, job: Job) -> None:
        commits = await three_commits(job)
        await job.lose(*await job.blobs_of("new"))
        target = job.world.target()
        restored = await job.repository.find_and_restore(JOB, target, or_newest_complete=True)
        assert restored.commit.pointer == commits[1].pointer
        assert "its blob is missing" in restored.instead_because
        assert read_tree(target) == job.tree | {"new": bytes([1]) * 3000}

    async def test_a_commit_that_is_whole_is_restored_and_nothing_is_looked_up(self, job: Job) -> None:
        commits = await three_commits(job)
        job.world.store.requests.clear()
        restored = await job.repository.find_and_restore(JOB, job.world.target(), or_newest_complete=True)
        assert (restored.commit.pointer, restored.instead_because) == (commits[2].pointer, "")
        assert not any(operation == "stat" for operation, _ in job.world.store.requests)

    async def test_where_an_older_one_was_asked_for_the_newest_may_be_the_one(self, job: Job) -> None:
        commits = await three_commits(job)
        keys = blob_keys(await job.repository.read_index(commits[0].record.stores[0].index))
        await job.lose(*(keys - set(await job.blobs_of(*FORMS))))
        with pytest.raises(IncompleteError, match="missing") as refused:
            await job.repository.find_and_restore(JOB, job.world.target(), number=1)
        assert refused.value.complete is not None
        assert refused.value.complete.pointer.number == 3

    async def test_where_no_commit_is_whole_it_says_so(self, job: Job) -> None:
        await three_commits(job)
        await job.lose(*await job.blobs_of("alone"))
        with pytest.raises(IncompleteError) as refused:
            await job.repository.find_and_restore(JOB, job.world.target(), or_newest_complete=True)
        assert refused.value.complete is None
        assert "no commit of the job is whole" in refused.value.hint

    async def test_whole_is_a_commit_all_stores_of_which_are(self, job: Job) -> None:
        async def commit(text: bytes) -> tuple[Commit, list[BackupResult]]:
            job.change(new=text)
            made = [await job.repository.backup(JOB, job.directory, task=task) for task in ("0", "1")]
            return await job.repository.commit(JOB, made), made

        first, _ = await commit(b"1" * 3000)
        _, second = await commit(b"2" * 3000)
        _, third = await commit(b"3" * 3000)
        await job.lose(second[1].new_keys[0], third[0].new_keys[0])
        with pytest.raises(IncompleteError) as refused:
            await job.repository.find_and_restore(JOB, job.world.target(), task="0")
        assert refused.value.complete is not None
        assert refused.value.complete.pointer == first.pointer

    async def test_of_altered_bytes_too_the_newest_commit_is_taken_that_can_be_read(self, job: Job) -> None:
        await three_commits(job)
        [key] = await job.blobs_of("new")
        await job.lose(key)
        await job.world.store.inner.put_if_absent(key, BytesBody(bytes(3000)))
        with pytest.raises(IncompleteError) as refused:
            await job.repository.find_and_restore(JOB, job.world.target())
        assert refused.value.complete is not None
        restored = await job.repository.find_and_restore(JOB, job.world.target(), or_newest_complete=True)
        assert restored.commit.pointer == refused.value.complete.pointer
        assert "not the ones that were backed up" in restored.instead_because

    async def test_an_error_on_the_way_to_the_name_hides_nothing(self, job: Job) -> None:
        await three_commits(job)
        await job.lose(*await job.blobs_of("new"))
        job.world.store.fail("stat", "blobs/")
        with pytest.raises(IncompleteError, match="its blob is missing") as refused:
            await job.repository.find_and_restore(JOB, job.world.target())
        assert refused.value.complete is None
        assert "could not be found out" in refused.value.__notes__[0]


class TestChoice:
    async def test_of_a_whole_commit_the_choice_stays(self, job: Job) -> None:
        await three_commits(job)
        assert await job.repository.choose_complete(JOB) == {}
        assert await job.repository.choose_complete(JOB, version=2) == {"version": 2}

    async def test_else_it_is_the_newest_that_is_whole(self, job: Job) -> None:
        await three_commits(job)
        await job.lose(*await job.blobs_of("new"))
        assert await job.repository.choose_complete(JOB) == {"number": 2}

    async def test_if_none_is_it_says_so(self, job: Job) -> None:
        await three_commits(job)
        await job.lose(*await job.blobs_of("alone"))
        with pytest.raises(IncompleteError, match="every other"):
            await job.repository.choose_complete(JOB)
        with pytest.raises(NotFoundError):
            await job.repository.choose_complete(Scope("nobody"))

    async def test_what_commits_share_is_asked_for_once(self, job: Job) -> None:
        commits = await three_commits(job)
        await job.lose(*await job.blobs_of("new"))
        job.world.store.requests.clear()
        assert await find_complete(job.world.store, commits[::-1]) is not None
        stats = [key for operation, key in job.world.store.requests if operation == "stat"]
        assert len(stats) == len(set(stats))
        shared = await job.blobs_of(*FORMS)
        assert len(stats) == len(set(shared)) + 2


def test_gaps_are_of_uploads_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "MISSING_BLOBS_MAX", 3)
    missing_blobs = MissingBlobs()
    missing_blobs.note(["log/x", "/a/file", *(f"blobs/{n}" for n in range(4)), "indexes/1"])
    assert missing_blobs.keys == {"blobs/2", "blobs/3", "indexes/1"}
