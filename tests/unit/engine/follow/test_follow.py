"""A directory follows a job, and is claimed once (design 0011)."""

import asyncio
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import engine.follow.follow
from blobstore.errors import StoreUnavailableError
from blobstore.local.store import LocalStore
from engine.errors import DamagedError, NotFoundError, PromotedError, TargetBusyError, TargetError
from engine.follow.follow import Standby
from engine.local import digests
from engine.repository.repository import Repository, SyncRepository
from engine.restore.staging import Staging
from engine.rocksdb.store import StoreReader, StoreWriter
from index.plan.commits import Commit, Retention
from index.snapshot.model import Scope
from tests.doubles import Gate
from tests.unit.engine.conftest import JOB, World, text_tree
from tests.unit.engine.workbench import read_tree

ONE: dict[str, Any] = {"task": "0", "store": "default"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "standby"


def inode(directory: Path) -> int:
    return directory.stat().st_ino


def take(directory: Path) -> None:
    directory.rename(directory.with_name("taken"))


def is_there(directory: Path) -> bool:
    return directory.exists()


def beside(directory: Path) -> set[str]:
    return {path.name for path in directory.parent.iterdir() if path.name.startswith(f".{directory.name}.")}


async def unreachable(_: Standby) -> None:
    raise StoreUnavailableError("does not answer", operation="list", key="commits/")


FILES = {".standby.tidemark-follow", ".standby.tidemark-follow-lock"}


class TestFollowing:
    async def test_each_step_brings_the_newest_commit_and_fetches_only_what_is_new(
        self, world: World, directory: Path
    ) -> None:
        """F1, F2."""
        writer, follower = await world.process(), await world.process()
        await world.history(writer, "one")
        first = await follower.follow(JOB, directory, **ONE)
        assert read_tree(directory) == text_tree("one")
        # Two commits at once are one step; `always` is the same in all of them.
        commit = (await world.history(writer, "two", "six"))[-1]
        second = await follower.follow(JOB, directory, **ONE)
        assert second.commit.pointer == commit.pointer
        assert read_tree(directory) == text_tree("six")
        assert first.result is not None
        assert second.result is not None
        assert second.result.files_reused == 1
        assert second.result.bytes_fetched < first.result.bytes_fetched
        assert beside(directory) == FILES

    async def test_nothing_new_costs_a_list_and_a_get_and_no_pin_is_left(self, world: World, directory: Path) -> None:
        """F1."""
        follower = await world.process()
        await world.history(follower, "one")
        await follower.follow(JOB, directory, **ONE)
        world.store.requests.clear()
        assert (await follower.follow(JOB, directory, **ONE)).result is None
        assert [operation for operation, _ in world.store.requests] == ["list_page", "get"]
        assert len(await world.keys("pins/")) == 1  # that of the first step, released

    async def test_a_process_hashes_what_another_has_left_and_trusts_its_own_stats(
        self, world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F2."""
        hashed = []
        is_equal = digests._is_equal

        def counted(source: Any, stop: Any, item: Any) -> bool:
            hashed.append(item.path)
            return is_equal(source, stop, item)

        monkeypatch.setattr(digests, "_is_equal", counted)
        follower, other = await world.process(), await world.process()
        await world.history(follower, "one")
        await follower.follow(JOB, directory, **ONE)
        await world.history(follower, "two")
        await follower.follow(JOB, directory, **ONE)
        assert hashed == []
        await world.history(follower, "six")
        await other.follow(JOB, directory, **ONE)
        assert ("always",) in hashed

    async def test_all_stores_of_a_job_are_one_directory_of_one_commit(self, world: World, directory: Path) -> None:
        """F3."""
        writer = await world.process()
        results = [
            await writer.backup(JOB, world.tree({"CURRENT": name.encode()}), task=task, store=name)
            for task, name in (("0", "facts"), ("1", "facts"), ("1", ".sums/x"))
        ]
        await writer.commit(JOB, results)
        await writer.follow(JOB, directory)
        assert read_tree(directory) == {
            "0/facts/CURRENT": b"facts",
            "1/facts/CURRENT": b"facts",
            "1/~2Esums~2Fx/CURRENT": b".sums/x",
        }
        facts = directory.with_name("facts")
        await writer.follow(JOB, facts, store="facts")
        assert set(read_tree(facts)) == {"0/facts/CURRENT", "1/facts/CURRENT"}
        with pytest.raises(NotFoundError, match="no store 7/\\*") as refused:
            await writer.follow(JOB, directory.with_name("none"), task="7")
        assert "tidemark show" in refused.value.hint

    async def test_a_commit_that_changes_nothing_of_it_moves_no_file(self, world: World, directory: Path) -> None:
        writer = await world.process()
        await writer.commit(JOB, [await world.backup(writer, "one")])
        await writer.follow(JOB, directory, **ONE)
        before = inode(directory)
        other = await writer.backup(JOB, world.tree({"CURRENT": b"x"}), task="1")
        commit = await writer.commit(JOB, [other])
        step = await writer.follow(JOB, directory, **ONE)
        assert (step.commit.pointer, step.result) == (commit.pointer, None)
        assert inode(directory) == before
        status = await writer.follow_status(JOB, directory, **ONE)
        assert (status.commit_number, status.lag_commits) == (2, 0)

    async def test_a_rewind_is_followed_as_any_commit(self, world: World, directory: Path) -> None:
        writer = await world.process()
        first, _ = await world.history(writer, "one", "two")
        await writer.follow(JOB, directory, **ONE)
        await writer.rewind(first)
        assert (await writer.follow(JOB, directory, **ONE)).commit.pointer.number == 3
        assert read_tree(directory) == text_tree("one")

    async def test_there_is_a_whole_directory_at_every_moment(
        self, world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F4: looked at before and after every rename, sync and removal of a step."""
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        await world.history(writer, "two")
        seen = []

        def looking(name: str) -> None:
            original = getattr(os, name)

            def call(*args: Any, **options: Any) -> Any:
                seen.append(read_tree(directory)["CURRENT"])
                try:
                    return original(*args, **options)
                finally:
                    seen.append(read_tree(directory)["CURRENT"])
                    assert read_tree(directory) == text_tree(seen[-1].decode())

            monkeypatch.setattr(os, name, call)

        for name in ("rename", "fsync", "unlink", "rmdir", "fchmod"):
            looking(name)
        await writer.follow(JOB, directory, **ONE)
        assert seen.index(b"two") == seen.count(b"one")
        assert set(seen) == {b"one", b"two"}

    async def test_a_file_system_that_exchanges_no_names_is_followed_into_too(
        self, world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F4: by two renames; tests/simulation/faults has a death between them."""
        renames: list[str] = []
        rename = os.rename

        def noted(old: str, new: str, **names: Any) -> None:
            renames.append(new)
            rename(old, new, **names)

        monkeypatch.setattr(os, "rename", noted)
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        await world.history(writer, "two")
        renames.clear()
        monkeypatch.setattr(Staging, "_exchange", lambda _: False)
        await writer.follow(JOB, directory, **ONE)
        assert read_tree(directory) == text_tree("two")
        assert [name.startswith(".standby.tidemark-old-") for name in renames[:2]] == [True, False]
        assert beside(directory) == FILES

    async def test_a_collection_before_the_pin_is_noticed_and_the_next_commit_taken(
        self, world: World, directory: Path
    ) -> None:
        """F12."""
        writer, follower = await world.process(), await world.process()
        await world.old_history(writer, "one")

        async def overtake() -> None:
            await world.old_history(writer, "two")
            await writer.collect(Retention(keep_last=1), delete_share_max=1)

        world.store.before("put", "pins/", overtake)
        assert (await follower.follow(JOB, directory, **ONE)).commit.pointer.number == 2
        assert read_tree(directory) == text_tree("two")

    async def test_a_collection_takes_nothing_from_under_a_step(self, world: World, directory: Path) -> None:
        """F12: the pin is there, so that the step goes on with what it has begun."""
        writer, follower = await world.process(), await world.process()
        await world.old_history(writer, "one")

        async def overtake() -> None:
            await world.old_history(writer, "two")
            await writer.collect(Retention(keep_last=1), delete_share_max=1)

        world.store.before("get", "blobs/", overtake)
        assert (await follower.follow(JOB, directory, **ONE)).commit.pointer.number == 1
        assert read_tree(directory) == text_tree("one")

    async def test_damage_leaves_the_directory_what_it_was(self, world: World, directory: Path) -> None:
        """F12."""
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        before = await world.keys("blobs/")
        await world.history(writer, "two")
        for key in await world.keys("blobs/") - before:
            await world.store.inner.delete([key])
        with pytest.raises(DamagedError):
            await (await world.process()).follow(JOB, directory, **ONE)
        assert read_tree(directory) == text_tree("one")
        assert beside(directory) == FILES
        assert (await writer.follow_status(JOB, directory, **ONE)).lag_commits == 1


class TestRefusals:
    """F8: what somebody else wrote is not touched."""

    async def test_a_directory_of_somebody_else_is_refused(self, world: World, directory: Path) -> None:
        writer = await world.process()
        await world.history(writer, "one")
        shutil.copytree(world.tree({"mine": b""}), directory)
        for refused in (writer.follow, writer.promote):
            with pytest.raises(TargetError, match="no follower has put there"):
                await refused(JOB, directory, **ONE)
        assert read_tree(directory) == {"mine": b""}

    @pytest.mark.parametrize("change", ["added", "removed", "written"])
    async def test_a_directory_that_was_changed_is_refused(self, world: World, directory: Path, change: str) -> None:
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        if change == "added":
            (directory / "000099.sst").touch()
        elif change == "removed":
            (directory / "always").unlink()
        else:
            (directory / "CURRENT").write_bytes(b"ONE")
        changed = read_tree(directory)
        await world.history(writer, "two")
        for refused in (writer.follow, writer.promote):
            with pytest.raises(TargetError, match="no follower has put there"):
                await refused(JOB, directory, **ONE)
        assert read_tree(directory) == changed

    async def test_one_directory_follows_one_thing(self, world: World, directory: Path) -> None:
        writer = await world.process()
        await world.history(writer, "one")
        await world.history(writer, "other", scope=Scope("other"))
        await writer.follow(JOB, directory, **ONE)
        with pytest.raises(TargetError, match="something else of job"):
            await writer.follow(Scope("other"), directory, **ONE)
        with pytest.raises(TargetError, match="something else of job"):
            await writer.follow(JOB, directory)
        assert read_tree(directory) == text_tree("one")

    @pytest.mark.parametrize("text", [b"{", b'{"schema": 2}', b"\xff"])
    async def test_a_file_that_cannot_be_read_stops_the_follower(
        self, world: World, directory: Path, text: bytes
    ) -> None:
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        directory.with_name(".standby.tidemark-follow").write_bytes(text)
        await world.history(writer, "two")
        with pytest.raises(TargetError, match=r"tidemark-follow: cannot be read"):
            await writer.follow(JOB, directory, **ONE)
        assert read_tree(directory) == text_tree("one")

    async def test_two_followers_of_one_directory_take_turns(self, world: World, directory: Path) -> None:
        one, other = await world.process(), await world.process()
        await world.history(one, "one")
        gate = Gate()
        world.store.before("get", "blobs/", gate.wait)
        step = asyncio.create_task(one.follow(JOB, directory, **ONE))
        await gate.reached.wait()
        with pytest.raises(TargetBusyError):
            await other.follow(JOB, directory, **ONE)
        await gate.open()
        await step
        assert (await other.follow(JOB, directory, **ONE)).result is None

    async def test_a_slow_follower_does_not_go_back_behind_a_quick_one(self, world: World, directory: Path) -> None:
        slow, quick = await world.process(), await world.process()
        await world.history(quick, "one")

        async def overtake() -> None:
            await world.history(quick, "two")
            await quick.follow(JOB, directory, **ONE)

        # Once the slow one has found its commit, and before it has claimed the directory.
        world.store.before("put", "pins/", overtake)
        assert (await slow.follow(JOB, directory, **ONE)).commit.pointer.number == 2
        assert read_tree(directory) == text_tree("two")
        assert (await slow.follow_status(JOB, directory, **ONE)).lag_commits == 0


class TestPromotion:
    async def test_a_promotion_catches_up_and_names_the_commit(self, world: World, directory: Path) -> None:
        """F6, F9."""
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        newest = (await world.history(writer, "two"))[-1]
        status = await (await world.process()).promote(JOB, directory, **ONE)
        assert status.commit is not None
        assert status.commit.pointer == newest.pointer
        assert status.commit.record.offsets == "two"
        assert (status.promoted, status.lag_commits) == (True, 0)
        assert read_tree(directory) == text_tree("two")

    async def test_without_catching_up_it_says_the_lag(self, world: World, directory: Path) -> None:
        """F9, F11: two commits behind, of which the oldest came 90 s ago."""
        writer = await world.process()
        (first,) = await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        await world.history(writer, "two", "three")
        world.clock.advance(88_000)
        status = await writer.promote(JOB, directory, **ONE, catch_up=False)
        assert status.commit is not None
        assert status.commit.pointer == first.pointer
        assert (status.lag_commits, status.lag_seconds, status.newest_number) == (2, 90.0, 3)
        # All but CURRENT, which is in the index, and `always`, which is there.
        changed = ("MANIFEST-000005", "archive/000009.log")
        assert status.lag_bytes == sum(len(text_tree("three")[name]) for name in changed)
        assert read_tree(directory) == text_tree("one")

    async def test_from_then_on_nobody_touches_it(self, world: World, directory: Path) -> None:
        """F6: neither a follower nor another promotion, also once it is gone; and its status says so."""
        writer, follower = await world.process(), await world.process()
        await world.history(writer, "one")
        await follower.follow(JOB, directory, **ONE)
        await writer.promote(JOB, directory, **ONE)
        (directory / "CURRENT").write_bytes(b"of the writer")
        await world.history(writer, "two")
        for refused in (follower.follow, follower.promote):
            with pytest.raises(PromotedError, match="at commit 1") as error:
                await refused(JOB, directory, **ONE)
            assert ".standby.tidemark-follow" in error.value.hint
        assert (directory / "CURRENT").read_bytes() == b"of the writer"
        status = await follower.follow_status(JOB, directory, **ONE)
        assert (status.promoted, status.commit_number, status.newest_number) == (True, 1, 2)
        take(directory)
        with pytest.raises(PromotedError):
            await follower.follow(JOB, directory, **ONE)
        assert not is_there(directory)

    async def test_a_step_that_is_downloading_does_not_replace_what_was_claimed(
        self, world: World, directory: Path
    ) -> None:
        """F7: the claim does not wait for the download, and the download ends without an exchange."""
        writer, follower = await world.process(), await world.process()
        await world.history(writer, "one")
        await follower.follow(JOB, directory, **ONE)
        await world.history(writer, "two")
        gate = Gate()
        world.store.before("get", "blobs/", gate.wait)
        step = asyncio.create_task(follower.follow(JOB, directory, **ONE))
        await gate.reached.wait()
        status = await writer.promote(JOB, directory, **ONE, catch_up=False)
        assert status.commit_number == 1
        await gate.open()
        with pytest.raises(PromotedError):
            await step
        assert read_tree(directory) == text_tree("one")
        assert beside(directory) == FILES

    async def test_catching_up_waits_for_a_step_of_another_process(
        self, world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F9."""
        writer, follower = await world.process(), await world.process()
        await world.history(writer, "one")
        gate = Gate()
        world.store.before("get", "blobs/", gate.wait)
        step = asyncio.create_task(follower.follow(JOB, directory, **ONE))
        await gate.reached.wait()
        monkeypatch.setattr(engine.follow.follow, "STEP_LOOK_S", 0.01)
        promotion = asyncio.create_task(writer.promote(JOB, directory, **ONE))
        await asyncio.sleep(0.05)
        assert not promotion.done()
        await gate.open()
        await step
        assert (await promotion).commit_number == 1

    async def test_a_damaged_commit_does_not_keep_anybody_from_the_one_that_is_there(
        self, world: World, directory: Path
    ) -> None:
        """F9, F11."""
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        newest = (await world.history(writer, "two"))[-1]
        await world.store.inner.delete([newest.record.stores[0].index.key])
        taker = await world.process()
        with pytest.raises(DamagedError):
            await taker.promote(JOB, directory, **ONE)
        status = await taker.promote(JOB, directory, **ONE, catch_up=False)
        assert (status.commit_number, status.lag_commits, status.lag_bytes) == (1, 1, newest.record.state_bytes)
        assert read_tree(directory) == text_tree("one")

    async def test_without_catching_up_nothing_is_asked_of_the_store_before_the_claim(
        self, world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F9: the store may be what is lost."""
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        monkeypatch.setattr(Standby, "_newest", unreachable)
        status = await writer.promote(JOB, directory, **ONE, catch_up=False)
        assert (status.promoted, status.commit_number, status.newest_number, status.lag) == (True, 1, None, "not known")
        with pytest.raises(PromotedError):
            await writer.follow(JOB, directory, **ONE)

    async def test_a_status_makes_no_file(self, world: World, directory: Path) -> None:
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        (directory.parent / ".standby.tidemark-follow-lock").unlink()
        assert (await writer.follow_status(JOB, directory, **ONE)).lag_commits == 0
        assert beside(directory) == {".standby.tidemark-follow"}

    async def test_of_two_promotions_one_wins(self, world: World, directory: Path) -> None:
        """F6."""
        one, other = await world.process(), await world.process()
        await world.history(one, "one")
        await one.follow(JOB, directory, **ONE)
        ended = await asyncio.gather(
            *(process.promote(JOB, directory, **ONE) for process in (one, other)), return_exceptions=True
        )
        assert sorted(type(end).__name__ for end in ended) == ["FollowStatus", "PromotedError"]

    async def test_an_exchange_under_way_is_waited_for_within_a_bound(
        self, world: World, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F7."""
        writer = await world.process()
        await world.history(writer, "one")
        await writer.follow(JOB, directory, **ONE)
        monkeypatch.setattr(engine.follow.follow, "LOCK_LOOKS_MAX", 3)
        with directory.with_name(".standby.tidemark-follow-lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(TargetBusyError, match="holds its lock"):
                await writer.promote(JOB, directory, **ONE, catch_up=False)
        assert (await writer.promote(JOB, directory, **ONE, catch_up=False)).promoted

    async def test_nothing_is_promoted_where_nothing_is(self, world: World, directory: Path) -> None:
        writer = await world.process()
        await world.history(writer, "one")
        with pytest.raises(NotFoundError, match="there is nothing"):
            await writer.promote(JOB, directory, **ONE, catch_up=False)
        assert (await writer.promote(JOB, directory, **ONE)).commit_number == 1
        assert read_tree(directory) == text_tree("one")


class TestStatus:
    async def test_before_the_first_step_everything_is_behind_and_nothing_is_made(
        self, world: World, directory: Path
    ) -> None:
        """F11."""
        writer = await world.process()
        with pytest.raises(NotFoundError):
            await writer.follow_status(JOB, directory, **ONE)
        await world.history(writer, "one", "two")
        status = await writer.follow_status(JOB, directory, **ONE)
        assert (status.commit, status.lag_commits) == (None, 2)
        assert status.lag_bytes == sum(map(len, text_tree("two").values())) - len("two")
        assert beside(directory) == set()


# ---------------------------------------------------------------------- a real RocksDB, a real directory


def put(store: StoreWriter, version: int) -> None:
    store.write_batch(
        {b"%06d" % n: b"of %d" % version + b"x" * 500 for n in range(version * 1000, version * 1000 + 800)}
    )
    store.put(b"version", b"%d" % version)
    store.flush()


async def test_a_rocksdb_is_opened_where_it_was_followed_and_the_writer_shares_no_file_with_anybody(
    tmp_path: Path,
) -> None:
    """F5, F10: readers before the promotion do no harm, and who was promoted goes on from the exact commit."""
    repository = await Repository.init(LocalStore(tmp_path / "repository"))
    standby = tmp_path / "standby"
    files_reused = 0
    with StoreWriter.open(tmp_path / "db") as db:
        for version in (1, 2, 3):
            put(db, version)
            db.checkpoint(tmp_path / f"checkpoint-{version}")
            result = await repository.backup(JOB, tmp_path / f"checkpoint-{version}")
            await repository.commit(JOB, [result], version=version)
            step = await repository.follow(JOB, standby, **ONE)
            assert step.result is not None
            files_reused = step.result.files_reused
            with StoreReader.open(standby) as reader:
                assert reader.get(b"version") == b"%d" % version
    assert files_reused > 0
    status = await repository.promote(JOB, standby, **ONE)
    assert status.commit is not None
    assert status.commit.record.version == 3
    assert {path.stat().st_nlink for path in standby.iterdir()} == {1}
    with StoreWriter.open(standby) as writer:
        assert len(dict(writer.items())) == 3 * 800 + 1
        put(writer, 4)
        with pytest.raises(PromotedError):
            await repository.follow(JOB, standby, **ONE)
        writer.checkpoint(tmp_path / "checkpoint-4")
    going_on = await repository.backup(JOB, tmp_path / "checkpoint-4")
    assert going_on.stats.files_retained > 0
    assert (await repository.commit(JOB, [going_on], version=4, parent=status.commit.pointer)).pointer.number == 4


async def test_a_directory_that_a_rocksdb_has_open_for_writing_is_left_alone(tmp_path: Path) -> None:
    """F8: nobody has promoted it."""
    repository = await Repository.init(LocalStore(tmp_path / "repository"))
    standby = tmp_path / "standby"
    with StoreWriter.open(tmp_path / "db") as db:
        put(db, 1)
        db.checkpoint(tmp_path / "checkpoint")
    await repository.commit(JOB, [await repository.backup(JOB, tmp_path / "checkpoint")])
    await repository.follow(JOB, standby, **ONE)
    with StoreWriter.open(standby):
        for refused in (repository.follow, repository.promote):
            with pytest.raises(TargetError, match="a RocksDB has it open"):
                await refused(JOB, standby, **ONE)
    # It was written to: its files are not those of the commit any more.
    with pytest.raises(TargetError, match="no follower has put there"):
        await repository.follow(JOB, standby, **ONE)


def test_the_blocking_repository_follows_too(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "CURRENT").write_bytes(b"one")
    with SyncRepository.init(f"file://{tmp_path}/repository") as repository:
        commit: Commit = repository.commit(JOB, [repository.backup(JOB, tree)])
        assert repository.follow(JOB, tmp_path / "standby").commit.pointer == commit.pointer
        assert repository.follow_status(JOB, tmp_path / "standby").lag_commits == 0
        assert repository.promote(JOB, tmp_path / "standby").promoted
    assert (tmp_path / "standby/0/default/CURRENT").read_bytes() == b"one"
